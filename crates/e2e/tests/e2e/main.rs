//! End-to-end: the programs as a user runs them, with stock kernels, natively or in the machine.
//!
//! All tests share a daemon whose home is below `target/e2e`, or two daemons in two machines. Tests
//! of one daemon run one after the other, because they kill the daemon and look for leftovers.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod again;
mod balloon;
mod colours;
mod cpus;
mod crashes;
mod damage;
mod egress;
mod ends;
mod exec;
mod families;
mod forks;
mod harness;
mod hostile;
mod images;
mod integrity;
mod kernels;
mod lazy;
mod liar;
mod life;
mod lifetimes;
mod limits;
mod modules;
mod networks;
mod pool;
mod ports;
mod pull;
mod reach;
mod record;
mod space;
mod stats;
mod store;
mod tour;
mod uplink;
mod volumes;
mod zoo;
