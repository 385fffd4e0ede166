//! # e2e
//!
//! The demo (`dayfly-demo`) and the end-to-end tests. Both use the typed client and the programs as
//! a user does, natively or in the machine. `dayfly-witness` runs in the guests of
//! `dayfly-bench store`, `restore` and `io`; `dayfly-unfilter` removes the machine's packet filter
//! and `dayfly-liar` replaces a guest's agent, each for a test.
//!
//! Code that depends on the internals of another crate does not belong here.

pub mod guest;
pub mod lies;
pub mod setup;
pub mod traffic;
