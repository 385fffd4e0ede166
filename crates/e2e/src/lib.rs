//! # e2e
//!
//! The room for what is shown from outside: the demo (`dayfly-demo`), the end-to-end tests, and the benchmarks that need stock Linux
//! guests (`dayfly-bench-linux`) or a machine of their own (`dayfly-bench-numa`, `dayfly-bench-store`, `dayfly-bench-restore`). All use the typed client and the
//! programs as a user does, natively or in the machine. `dayfly-witness` is what the last two have in their guests.
//!
//! What may not enter: anything that looks inside another room. These two alone read the store's tables and a copy of its packs, through crate `store`, and
//! `dayfly-bench-restore` has `pager` serve what it recorded.

pub mod bench;
pub mod guest;
pub mod inside;
pub mod setup;
