//! End-to-end: the programs as a user runs them, with stock kernels, natively or in the machine.
//!
//! All tests share a daemon in a home of their own below `target/e2e`, or two in two machines, and take turns: they kill it, and
//! look for what stayed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod colours;
mod crashes;
mod damage;
mod ends;
mod exec;
mod families;
mod forks;
mod harness;
mod integrity;
mod kernels;
mod lazy;
mod life;
mod networks;
mod pool;
mod ports;
mod rehearse;
mod stats;
mod store;
