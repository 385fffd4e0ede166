//! The lowest level of the import order: it imports no other module of the daemon.

pub mod activation;
pub mod caller;
pub mod config;
pub mod cpu;
pub mod cpu_alloc;
pub mod cpus;
pub mod error;
pub mod group_limits;
pub mod group_rates;
pub mod groups;
pub mod hangup;
pub mod heap;
pub mod kvm;
pub mod log;
pub mod long_requests;
pub mod metrics;
pub mod pidfd;
pub mod prefix;
pub mod progress;
pub mod random;
pub mod time;
