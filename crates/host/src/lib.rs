//! # host
//!
//! The room for what Linux gives: starting a process with exact descriptors in namespaces of its own ([`spawn`]), finding it
//! again, ending it and freeing its memory ([`process`]), what it weighs ([`memory`]), which pages of a file it holds ([`pagemap`]), its cgroup ([`cgroup`]), the mounts of a folder ([`mounts`]),
//! memory nodes ([`numa`]) and the threads that free their memory ([`reaper`]), the network that VMs have ([`net`]), and what a crash left behind ([`leaks`]).
//!
//! What may not enter: what a VM, an image or a snapshot is (identifiers aside), async, policy about who may do what.
//! Everything here blocks; an async caller uses a blocking thread.

pub mod cgroup;
pub mod leaks;
pub mod memory;
pub mod mounts;
pub mod net;
pub mod numa;
pub mod pagemap;
pub mod priority;
pub mod process;
pub mod reaper;
mod release;
pub mod spawn;
