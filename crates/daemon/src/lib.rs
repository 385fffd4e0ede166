//! # daemon
//!
//! The library of `dayflyd`. It drives VMM processes, keeps templates open, and serves the HTTP
//! API.
//!
//! ```text
//!  main, serve        start, end and options of the process; names of failpoints
//!    │
//!  http               routes, sessions, relays: requests and answers
//!    │
//!  ops                create, remove, fork, snapshot, bake, …: operations, which own no state
//!    │
//!  daemon             the container: a field for each service
//!    │
//!  vmm                drives VMM processes: zygotes, run directories, connections, the pool
//!    │
//!  vm                 a VM and the registry of all VMs
//!    │
//!  templates, net,    open snapshots and their pagers; addresses, taps, names;
//!  volumes            folders of the host, and the processes that serve their files
//!    │
//!  model              plain data, and decisions without I/O
//!    │
//!  base               configuration, errors, clocks
//! ```
//!
//! Imports point downwards only; `dayfly-tidy` checks that.
//!
//! Other crates contain KVM and devices (`dayfly-vmm`), formats on disk (`dayfly-store`) and the
//! builder of images (`dayfly-image`). The daemon is the only writer of the run folder and, through
//! the store, of the state folder. Each VM is a separate process and survives the end of the
//! daemon.

pub mod base;
pub mod daemon;
pub mod failpoints;
#[cfg(test)]
pub(crate) mod fixture;
pub mod http;
pub mod model;
pub mod net;
pub mod ops;
pub mod serve;
pub mod templates;
pub mod vm;
pub mod vmm;
pub mod volumes;
