//! Frozen guests for tests: stock Debian kernels under plain QEMU, with their own reports about
//! their memory just before.

#![allow(missing_docs, reason = "a test harness")]

pub mod class;
pub mod fixture;
pub mod kpageflags;
pub mod makedumpfile;
