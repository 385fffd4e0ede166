//! # e2e
//!
//! The room for what is shown from outside: the demo (`dayfly-demo`) and the end-to-end tests. Both use the typed client and the
//! programs as a user does, natively or in the machine.
//!
//! What may not enter: anything that looks inside another room.

pub mod guest;
pub mod setup;
