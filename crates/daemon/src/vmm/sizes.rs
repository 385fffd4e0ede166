//! Sizes of VMs: how many vCPUs a source allows, and the key of the warm clones of one size.

use crate::base::error::{ApiError, Outcome};
use dayfly_api::agent::{CPUS_PROTOCOL, protocol_of};
use dayfly_store::{Digest, OpenSnapshot, SnapshotManifest};
use dayfly_units::Name;
use dayfly_vmm::config::{MAX_VCPUS, Shape};

/// The part of the command line for a guest that starts `vcpus` vCPUs by itself. Its firmware
/// announces [`MAX_VCPUS`], of which clones may have more.
///
/// `noreplace-smp`: a kernel that boots with one CPU otherwise takes the lock prefixes out of its
/// code, and writes all of them again when a clone starts a second CPU. The pages of its code would
/// be the clone's own.
pub(super) fn of_cpus(vcpus: u8) -> String {
    format!(" maxcpus={vcpus} noreplace-smp")
}

/// The vCPUs that a snapshot or a fork point allows its clones.
pub(crate) struct Allowed<'a> {
    /// The snapshot's name, if it has one.
    pub(crate) snapshot: Option<&'a Name>,
    /// The number in its state.
    pub(crate) saved: u8,
    /// The number that its guest knows of.
    pub(crate) known: u8,
    /// The version of the agent in its guest; empty if there is none.
    pub(crate) agent_version: &'a str,
}

impl Allowed<'_> {
    /// The number of vCPUs of a clone for which a client asks for `wanted`; `None`: as saved.
    ///
    /// # Errors
    /// The guest cannot have this number. Names what it can have, and the next step.
    pub(crate) fn chosen(&self, wanted: Option<u8>) -> Outcome<u8> {
        let Self { snapshot, saved, known, agent_version } = *self;
        let Some(wanted) = wanted.filter(|wanted| *wanted != saved) else { return Ok(saved) };
        let of = snapshot.map(|name| format!("snapshot {name}: ")).unwrap_or_default();
        let most = known.min(MAX_VCPUS);
        if !(saved..=most).contains(&wanted) {
            let next = match wanted {
                _ if wanted > MAX_VCPUS => "no VM has more",
                _ if wanted < saved => "its guest runs that many already; bake one with fewer",
                _ => "its guest knows of no more; bake it again with this version of dayfly",
            };
            return Err(ApiError::invalid(format_args!(
                "{of}vcpus: expected {saved} to {most}, got {wanted}: {next}"
            )));
        }
        // A guest without an agent starts its CPUs itself.
        if !agent_version.is_empty() && protocol_of(agent_version) < CPUS_PROTOCOL {
            return Err(ApiError::invalid(format_args!(
                "{of}vcpus: expected {saved}, got {wanted}: its agent {agent_version} does not \
                 start CPUs; store the kernel again, and bake it again"
            )));
        }
        Ok(wanted)
    }
}

/// Key of the warm clones of one snapshot with one number of vCPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Template {
    /// The snapshot's name.
    pub name: Name,
    /// Changes if the snapshot's files change, or if another snapshot gets the name.
    pub fingerprint: Digest,
    /// The shape of the warm VMMs that fit.
    pub shape: Shape,
}

impl Template {
    /// The key for an open snapshot.
    ///
    /// # Errors
    /// The snapshot has more disks than a VM may have.
    pub fn of(open: &OpenSnapshot) -> Outcome<Self> {
        let (manifest, shape) = (&open.manifest, shape_of(&open.manifest)?);
        Ok(Self { name: manifest.name.clone(), fingerprint: open.fingerprint, shape })
    }

    /// The key for clones with this number of vCPUs.
    #[must_use]
    pub fn sized(self, vcpus: u8) -> Self {
        Self { shape: Shape { vcpus, ..self.shape }, ..self }
    }
}

/// The shape of the warm VMMs that fit a snapshot.
///
/// # Errors
/// The snapshot has more disks than a VM may have.
pub fn shape_of(manifest: &SnapshotManifest) -> Outcome<Shape> {
    let &SnapshotManifest { memory_bytes, vcpus, max_vcpus, nets, cpu_model, .. } = manifest;
    let disks = disks(manifest.disks.len())?;
    Ok(Shape { memory_bytes, vcpus, max_vcpus, disks, nets, cpu_model })
}

fn disks(count: usize) -> Outcome<u8> {
    u8::try_from(count).map_err(|_| ApiError::internal("more disks than a byte counts"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::ErrorCode;

    #[test]
    fn a_clone_has_from_the_saved_vcpus_to_those_that_its_guest_knows_of() {
        let name: Name = "web".parse().unwrap();
        let allowed = |saved, known, agent_version| Allowed {
            snapshot: Some(&name),
            saved,
            known,
            agent_version,
        };
        for agent_version in ["", "0.1.0+4"] {
            for (saved, known) in [(1, 16), (4, 16), (16, 16), (1, 1)] {
                let allowed = allowed(saved, known, agent_version);
                assert_eq!(allowed.chosen(None).unwrap(), saved);
                for wanted in 0..=u8::MAX {
                    let fits = (saved..=known).contains(&wanted);
                    assert_eq!(allowed.chosen(Some(wanted)).ok(), Some(wanted).filter(|_| fits));
                }
            }
        }
        let refused = |allowed: Allowed<'_>, wanted| {
            let error = allowed.chosen(Some(wanted)).unwrap_err().0;
            assert_eq!(error.code, ErrorCode::Invalid);
            error.message
        };
        for (allowed, wanted, expected) in [
            (
                allowed(1, 1, "0.1.0+4"),
                2,
                "expected 1 to 1, got 2: its guest knows of no more; bake",
            ),
            (allowed(4, 16, ""), 3, "expected 4 to 16, got 3: its guest runs that many already"),
            (allowed(1, 16, ""), 17, "expected 1 to 16, got 17: no VM has more"),
            (allowed(1, 16, "0.1.0+3"), 2, "expected 1, got 2: its agent 0.1.0+3 does not start"),
        ] {
            let message = refused(allowed, wanted);
            assert!(message.starts_with(&format!("snapshot web: vcpus: {expected}")), "{message}");
        }
        // An agent of an earlier version serves a clone of the saved size.
        assert_eq!(allowed(1, 16, "0.1.0").chosen(Some(1)).unwrap(), 1);
    }
}
