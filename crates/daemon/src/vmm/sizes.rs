//! Sizes of VMs: how many vCPUs a source allows, and the key of the warm clones of one size.

use crate::base::error::{ApiError, Outcome};
use crate::vmm::source::Opened;
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

impl Opened {
    /// The number of vCPUs of a VM for which a client asks for `wanted`; `None`: as in the source.
    ///
    /// # Errors
    /// The source's guest cannot have so many.
    pub(crate) fn vcpus(&self, wanted: Option<u8>) -> Outcome<u8> {
        let (name, own, known) = match self {
            Self::Boot { boot, .. } if wanted.is_none() => return Ok(boot.vcpus),
            Self::Boot { .. } => {
                let why = "vcpus: expected none with a cold boot, whose source has its own number";
                return Err(ApiError::invalid(why));
            }
            Self::Snapshot(open) => {
                let manifest = &open.manifest;
                (Some(&manifest.name), manifest.vcpus, manifest.known_vcpus())
            }
            Self::Fork(fork_point, _) => {
                let facts = &fork_point.facts;
                (facts.snapshot.as_ref(), facts.vcpus, facts.max_vcpus.max(facts.vcpus))
            }
        };
        let wanted = match wanted {
            None => return Ok(own),
            Some(wanted) if wanted == own => return Ok(own),
            Some(wanted) => wanted,
        };
        let of = name.map(|name| format!("snapshot {name}: ")).unwrap_or_default();
        let most = known.min(MAX_VCPUS);
        if !(own..=most).contains(&wanted) {
            let next = match wanted {
                _ if wanted > MAX_VCPUS => "no VM has more",
                _ if wanted < own => "its guest runs that many already; bake one with fewer",
                _ => "its guest knows of no more; bake it again with this version of dayfly",
            };
            return Err(ApiError::invalid(format_args!(
                "{of}vcpus: expected {own} to {most}, got {wanted}: {next}"
            )));
        }
        match self.agent_version() {
            Some(version) if !version.is_empty() && protocol_of(version) < CPUS_PROTOCOL => {
                Err(ApiError::invalid(format_args!(
                    "{of}vcpus: expected {own}, got {wanted}: its agent {version} does not start \
                     CPUs; store the kernel again, and bake it again"
                )))
            }
            _ => Ok(wanted),
        }
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
