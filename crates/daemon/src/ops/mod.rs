//! Operations on VMs, snapshots and the store. Operations own no state, and only here two services
//! meet.

pub mod admit;
pub mod adopt;
pub mod adopt_streams;
mod awake;
pub mod bake;
pub mod classify;
pub mod colours;
pub mod create;
pub mod egress;
pub mod exec;
pub mod expiry;
pub mod flatten;
pub mod footprint;
pub mod fork;
pub mod immutable;
pub mod inspect;
mod interrupted;
pub mod keeper;
pub mod liveness;
pub mod maintenance;
pub mod memory_time;
pub mod own_program;
pub mod packer;
pub mod pending;
pub mod power;
pub mod programs;
pub mod publish;
pub mod recording;
pub mod remove;
mod resources;
pub mod save;
mod section;
pub mod self_fork;
pub mod snapshot;
pub mod space;
#[cfg(test)]
pub(crate) mod standin;
pub mod stop;
pub mod sweep;
mod unadopted;
pub mod volumes;
