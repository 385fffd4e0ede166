//! Begins a snapshot: the files that a VMM saves into.

use super::error::CommitError;
use super::files::MEMORY;
use super::flatten::Merge;
use super::ram;
use crate::blob::Stage;
use crate::errors::IoError;
use crate::inner::{Inner, Store};
use crate::objects::manifest::{ImageRef, KernelRef};
use crate::objects::types::{ChainLayer, VmLayer};
use crate::vms::freezing::{Freeze, Freezing};
use dayfly_units::{CpuModel, Digest, Egress, ImageConfig, Name};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

/// The caller's description of a snapshot. The store computes sizes and digests itself.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// The snapshot that the VM was cloned from.
    pub parent: Option<Name>,
    /// As [`SnapshotManifest::ancestors`](crate::SnapshotManifest::ancestors).
    pub ancestors: Vec<Digest>,
    /// The kernel in the VM's memory.
    pub kernel: KernelRef,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// As [`SnapshotManifest::max_vcpus`](crate::SnapshotManifest::max_vcpus).
    pub max_vcpus: u8,
    /// The model of the vCPUs.
    pub cpu_model: CpuModel,
    /// Number of network devices.
    pub nets: u8,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// Version of the agent in the guest.
    pub agent_version: String,
    /// How to start the image's program.
    pub config: ImageConfig,
    /// Labels for people and programs.
    pub labels: BTreeMap<String, String>,
    /// The egress policy of clones that ask for none; `None` if the VM has none.
    pub egress: Option<Egress>,
    /// The disks, in the order vda, vdb, ….
    pub disks: Vec<DiskSpec>,
}

/// A disk of the saved VM.
#[derive(Debug, Clone)]
pub struct DiskSpec {
    /// The disk's image.
    pub image: ImageRef,
    /// Size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Whether the guest may write to it.
    pub writable: bool,
    /// Frozen layers, the lowest first; for a writable disk the last is [`Freeze::frozen`].
    pub layers: Vec<ChainLayer>,
}

/// The files that the VMM saves into.
///
/// Drop it only if the VMM did not save: the VMM said so, or was not asked. If the outcome is
/// unknown, call [`Self::saved`] and drop the result, so that no file that the VM may depend on is
/// removed.
#[derive(Debug)]
pub struct SnapshotWriter {
    parts: Parts,
    /// Removed on drop, unless `saved` is called.
    layers: Freezing,
}

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) inner: Arc<Inner>,
    pub(super) name: Name,
    pub(super) stage: Stage,
    pub(super) state: File,
    pub(super) memory: File,
}

/// A snapshot that the VMM has saved.
#[derive(Debug)]
pub struct SavedSnapshot {
    pub(super) parts: Parts,
    pub(super) merge: Option<Merge>,
}

impl Store {
    /// Begins the snapshot `name`, with RAM in a file that is published as it is. So the process
    /// that writes it must be trusted.
    ///
    /// # Errors
    /// A snapshot has that name, or the host cannot create the files.
    pub fn snapshot_writer(&self, name: &Name) -> Result<SnapshotWriter, CommitError> {
        self.writer(name, None)
    }

    /// As [`Self::snapshot_writer`], but RAM of `memory_bytes` is saved into a memfd: for
    /// [`SavedSnapshot::commit_paged`], which needs no file of RAM.
    ///
    /// # Errors
    /// As [`Self::snapshot_writer`].
    pub fn snapshot_writer_in_memory(
        &self,
        name: &Name,
        memory_bytes: u64,
    ) -> Result<SnapshotWriter, CommitError> {
        self.writer(name, Some(memory_bytes))
    }

    fn writer(&self, name: &Name, in_memory: Option<u64>) -> Result<SnapshotWriter, CommitError> {
        let inner = Arc::clone(&self.0);
        inner.writable()?;
        if inner.snapshots.has(name.as_str())? {
            return Err(CommitError::Exists { name: name.clone() });
        }
        let stage = inner.stage()?;
        let dir = stage.make("snapshot")?;
        let state = ram::create_state()?;
        let memory = match in_memory {
            Some(bytes) => ram::create(bytes)?,
            None => dir.create(MEMORY)?,
        };
        let layers = Freezing::new(&inner);
        Ok(SnapshotWriter {
            parts: Parts { inner, name: name.clone(), stage, state, memory },
            layers,
        })
    }
}

impl SnapshotWriter {
    /// The empty memfd for the state.
    #[must_use]
    pub const fn state(&self) -> &File {
        &self.parts.state
    }

    /// The file for RAM, without content.
    #[must_use]
    pub const fn memory(&self) -> &File {
        &self.parts.memory
    }

    /// Prepares to freeze the layer that a VM writes now. The map of an earlier save that failed is
    /// replaced.
    ///
    /// # Errors
    /// The layer does not exist, or the host cannot create the files.
    pub fn freeze(&mut self, writable: &VmLayer) -> Result<Freeze, IoError> {
        self.layers.freeze(writable)
    }

    /// Call it after the VMM answered `Ok` to `Save`: the layers are frozen, and the VM depends on
    /// them.
    #[must_use]
    pub fn saved(self) -> SavedSnapshot {
        self.layers.keep();
        SavedSnapshot { parts: self.parts, merge: None }
    }
}

impl SavedSnapshot {
    /// RAM as saved. The VMM may still write to it; if it is a memfd, its length is sealed.
    #[must_use]
    pub const fn memory(&self) -> &File {
        &self.parts.memory
    }

    /// The state as saved. The VMM may still write to it.
    #[must_use]
    pub const fn state(&self) -> &File {
        &self.parts.state
    }

    /// Merges layers of chains longer than [`MOST_LAYERS`](super::MOST_LAYERS) when the snapshot is
    /// committed. The manifest then has fewer layers than the spec, with the same content. A
    /// running VM keeps its old layers until its VMM gets the new ones.
    #[must_use]
    pub fn merging(self, merge: Merge) -> Self {
        Self { merge: Some(merge), ..self }
    }
}
