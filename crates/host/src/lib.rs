//! # host
//!
//! Linux facilities that the other crates share: starting a process with exact descriptors and
//! namespaces ([`spawn`]); finding, ending and freeing a process ([`process`]); its memory use
//! ([`memory`]); the file pages that it maps ([`pagemap`]). Also control groups ([`groups`]),
//! mounts ([`mounts`]), disks ([`disks`]), CPUs ([`cpus`]), memory nodes ([`numa`]), processes that
//! the kernel killed for their memory ([`oom`]), threads that free memory on its node ([`reaper`])
//! and thread priorities ([`priority`]). Also the VMs' network ([`net`]), and what a crash leaves
//! behind ([`leaks`]).
//!
//! This crate does not know VMs, images or snapshots (identifiers aside), async code, or policy.
//! Every function blocks: an async caller uses a blocking thread.

pub mod cpu_time;
pub mod cpus;
pub mod disks;
pub mod groups;
pub mod leaks;
pub mod memory;
pub mod mounts;
pub mod net;
pub mod numa;
pub mod oom;
pub mod pagemap;
pub mod priority;
pub mod process;
pub mod reaper;
mod release;
pub mod spawn;
