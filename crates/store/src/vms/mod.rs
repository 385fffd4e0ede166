//! The files of running VMs, and the references that keep what VMs depend on.

pub(crate) mod freezing;
pub(crate) mod identify;
pub(crate) mod immutable;
pub(crate) mod layers;
mod pinning;
pub(crate) mod pins;
mod prepare;
pub(crate) mod prepared;
pub(crate) mod shared;
pub(crate) mod unsynced;
pub(crate) mod used;
