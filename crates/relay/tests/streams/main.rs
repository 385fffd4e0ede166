//! Streams that are handed over: what passes, how they end, and what they leave.
//!
//! Each test is the daemon, the client and the agent at once. The process is a thread of the test,
//! or the program in its jail.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

mod common;
mod ends;
mod jail;
mod passing;
