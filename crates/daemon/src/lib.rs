//! # daemon
//!
//! The room for `dayflyd`: the HTTP API ([`routes`]), which VMs there are and what may happen to them ([`vm`]), baking ([`bake`]), snapshots of
//! running VMs ([`snapshot`]), upkeep of the store ([`upkeep`]), programs on upgraded connections ([`session`], [`relay`]), connections to guests' ports ([`ports`]), their network ([`net`]), and
//! what is found again after a restart ([`adopt`], [`sweep`]).
//!
//! What may not enter: KVM and devices (the `vmm`'s), formats on disk (the `store`'s), how an image is built (the `image`'s).
//!
//! The daemon is the only writer of the run folder and, through the store, of the state folder. It holds no VM: each is a process of its own, and
//! lives on when the daemon ends.

pub mod adopt;
pub mod bake;
mod colours;
pub mod config;
pub mod daemon;
pub mod depot;
mod door;
pub mod error;
#[cfg(test)]
pub(crate) mod fixture;
pub mod flatten;
pub mod fork;
pub mod forming;
pub mod heap;
pub mod kvm;
pub mod metrics;
pub mod ndjson;
pub mod net;
pub mod pagers;
pub mod ports;
mod rehearsal;
pub mod relay;
pub mod routes;
pub mod serve;
pub mod session;
pub mod snapshot;
pub mod sweep;
pub mod time;
pub mod upkeep;
pub mod upload;
pub mod vm;
