//! # e2e
//!
//! The room for what is shown from outside: the demo (`dayfly-demo`), the end-to-end tests, and the benchmarks that need stock Linux
//! guests (`dayfly-bench-linux`) or a machine of their own (`dayfly-bench-numa`). All use the typed client and the programs as a user does, natively or in the machine.
//!
//! What may not enter: anything that looks inside another room.

pub mod guest;
pub mod inside;
pub mod setup;
