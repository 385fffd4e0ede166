//! # hostile
//!
//! Test support for attacks; no program for users depends on this crate.
//!
//! - [`archives`]: malicious archives of a guest for `dayfly cp`, and a folder in which a test runs
//!   and measures a copy ([`Scratch`]). In crate `cli` a daemon of the test sends the archives; in
//!   crate `e2e` a guest whose root has replaced the agent sends them.
//! - [`takeover`]: system calls of a VMM that its guest took over.

#![allow(clippy::unwrap_used, reason = "test support: an error here is the end of the test")]

pub mod archives;
mod scratch;
pub mod takeover;

pub use archives::{Make, Verdict};
pub use scratch::{MAX_PEAK_BYTES, Ran, Scratch, check};
