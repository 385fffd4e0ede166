//! The targets, a file for each crate whose decoders they call.

pub mod agent;
pub mod archives;
pub mod balloon;
pub mod boot;
pub mod daemon;
pub mod devices;
pub mod dns;
pub mod introspect;
pub mod packer;
pub mod pager;
pub mod registry;
pub mod relay;
pub mod store;
pub mod tree;
pub mod units;
pub mod vmm;
pub mod volume;
pub mod vsock;

use crate::target::Target;

/// All targets.
pub fn all() -> impl Iterator<Item = &'static Target> {
    [
        units::TARGETS,
        store::TARGETS,
        tree::TARGETS,
        vmm::TARGETS,
        balloon::TARGETS,
        devices::TARGETS,
        volume::TARGETS,
        vsock::TARGETS,
        agent::TARGETS,
        archives::TARGETS,
        boot::TARGETS,
        dns::TARGETS,
        daemon::TARGETS,
        packer::TARGETS,
        pager::TARGETS,
        registry::TARGETS,
        relay::TARGETS,
        introspect::TARGETS,
    ]
    .into_iter()
    .flatten()
}

/// The target with this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static Target> {
    all().find(|target| target.name == name)
}
