//! Frozen guests for tests: stock Debian kernels under plain QEMU, with what they said of their own memory just before.

#![allow(missing_docs, reason = "a test harness")]

pub mod class;
pub mod cpio;
pub mod fixture;
pub mod kpageflags;
pub mod makedumpfile;
