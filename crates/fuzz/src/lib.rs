//! # fuzz
//!
//! Every decoder of untrusted bytes as a function of bytes ([`Target`]), with two users:
//!
//! - **`dayfly-fuzz`** runs libFuzzer, which looks for inputs that reach new code or break a
//!   property, on one target or on all of them ([`docs/fuzzing.md`]).
//! - **Tests** of this crate replay the corpora, and the seeds that corpora start with.
//!
//! A target checks more than the absence of a panic: what is decoded is encoded again and compared,
//! and the memory that an input takes has a limit ([`target::Heap`]).
//!
//! | module | concern |
//! |---|---|
//! | [`mod@target`] | what a target is; limits; planted faults |
//! | [`targets`] | the targets, a file for each crate |
//! | [`heap`] | the allocator that counts |
//! | [`events`] | an input as a sequence of events |
//! | [`scratch`] | temporary files |
//! | [`sealing`] | inputs in the sealed envelope |
//! | [`corpus`] | files of the repository |
//! | [`run`] | running libFuzzer, reading its output |
//! | [`cli`] | the commands |
//!
//! [`docs/fuzzing.md`]: ../../../docs/fuzzing.md

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a target reports")]

pub mod cli;
pub mod corpus;
pub mod events;
pub mod heap;
pub mod run;
pub mod scratch;
pub mod sealing;
pub mod target;
pub mod targets;

pub use target::{Heap, Outcome, Target, planted};

#[cfg(test)]
mod replay_tests;
