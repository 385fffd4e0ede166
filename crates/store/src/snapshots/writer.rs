//! Making a snapshot: the files that a VMM saves into.

use super::{MEMORY, Merge, STATE, ram};
use crate::blob::Stage;
use crate::errors::{Damage, IoError};
use crate::freezing::{Freeze, Freezing};
use crate::layers::{ChainLayer, VmLayer};
use crate::manifest::{ImageConfig, ImageRef, KernelRef};
use crate::pins::PinError;
use crate::{Inner, Store};
use dayfly_units::Name;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

/// Why a snapshot was not made. There is none of that name from this attempt.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The name is taken.
    #[error("snapshot {name} exists")]
    Exists {
        /// The name.
        name: Name,
    },
    /// An image or a layer that it stands on is gone or damaged.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// A number out of bounds.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// Such as `disks`.
        place: String,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// The host could not write it.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl From<PinError> for CommitError {
    fn from(e: PinError) -> Self {
        match e {
            PinError::Damage(d) => Self::Damage(d),
            PinError::Io(e) => Self::Io(e),
        }
    }
}

/// What the VM's disks, kernel and maker say about a snapshot; sizes and digests are found, not told.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// The snapshot that its VM was cloned from.
    pub parent: Option<Name>,
    /// The kernel in its memory.
    pub kernel: KernelRef,
    /// vCPUs.
    pub vcpus: u8,
    /// Network devices.
    pub nets: u8,
    /// RAM.
    pub memory_bytes: u64,
    /// Version of the agent in it.
    pub agent_version: String,
    /// How its image wants to be started.
    pub config: ImageConfig,
    /// For people and programs.
    pub labels: BTreeMap<String, String>,
    /// In order vda, vdb, ….
    pub disks: Vec<DiskSpec>,
}

/// A disk of the VM that was saved.
#[derive(Debug, Clone)]
pub struct DiskSpec {
    /// Its image.
    pub image: ImageRef,
    /// The size that the guest sees.
    pub size_bytes: u64,
    /// Whether the guest may write to it.
    pub writable: bool,
    /// Its frozen layers, the lowest first; for a writable disk the last is [`Freeze::frozen`].
    pub layers: Vec<ChainLayer>,
}

/// Files for the VMM to save into.
///
/// Dropping it means: the VMM answered that it did not save, or was not asked. When it is not known whether it did, call
/// [`Self::saved`] and drop that: then nothing that the VM may stand on is removed.
#[derive(Debug)]
pub struct SnapshotWriter {
    parts: Parts,
    /// Removed unless it is `saved`.
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

/// A snapshot whose files the VMM has written.
#[derive(Debug)]
pub struct SavedSnapshot {
    pub(super) parts: Parts,
    pub(super) merge: Option<Merge>,
}

impl Store {
    /// Begins the snapshot `name`.
    ///
    /// # Errors
    /// The name is taken, or the host cannot make its files.
    pub fn snapshot_writer(&self, name: &Name) -> Result<SnapshotWriter, CommitError> {
        self.writer(name, None)
    }

    /// Begins the snapshot `name`, whose RAM of `memory_bytes` is saved into memory of the host's: for [`SavedSnapshot::commit_paged`], which
    /// needs no file of it.
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
        if inner.snapshots.has(name.as_str())? {
            return Err(CommitError::Exists { name: name.clone() });
        }
        let stage = inner.stage()?;
        let dir = stage.make("snapshot")?;
        let state = dir.create(STATE)?;
        let memory = match in_memory {
            Some(bytes) => ram::create(bytes)?,
            None => dir.create(MEMORY)?,
        };
        let layers = Freezing::new(&inner);
        Ok(SnapshotWriter { parts: Parts { inner, name: name.clone(), stage, state, memory }, layers })
    }
}

impl SnapshotWriter {
    /// The empty file for the state.
    #[must_use]
    pub const fn state(&self) -> &File {
        &self.parts.state
    }

    /// The file for RAM, without content.
    #[must_use]
    pub const fn memory(&self) -> &File {
        &self.parts.memory
    }

    /// Makes ready to freeze the layer that a VM writes now. A map left by a save that failed is replaced.
    ///
    /// # Errors
    /// The layer is not there, or the host cannot make the files.
    pub fn freeze(&mut self, writable: &VmLayer) -> Result<Freeze, IoError> {
        self.layers.freeze(writable)
    }

    /// The VMM has answered `Ok` to `Save`: the layers are frozen, and the VM stands on them.
    #[must_use]
    pub fn saved(self) -> SavedSnapshot {
        self.layers.keep();
        SavedSnapshot { parts: self.parts, merge: None }
    }
}

impl SavedSnapshot {
    /// RAM as it was saved. Whoever saved it may still write to it, but not change its length where it is in memory.
    #[must_use]
    pub const fn memory(&self) -> &File {
        &self.parts.memory
    }

    /// The state as it was saved.
    #[must_use]
    pub const fn state(&self) -> &File {
        &self.parts.state
    }

    /// Has chains of more than [`MOST_LAYERS`](super::MOST_LAYERS) flattened: what is committed has then fewer layers than its spec, which
    /// read the same. A VM that goes on stands on what it stood on, until its VMM is told of the others.
    #[must_use]
    pub fn merging(self, merge: Merge) -> Self {
        Self { merge: Some(merge), ..self }
    }
}
