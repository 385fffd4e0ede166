//! Making a snapshot: staged, then committed.

use super::ram::{self, Resident};
use super::{MEMORY, Merge, STATE};
use crate::blob::{IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use crate::layers::{ChainLayer, LayerRef, StagedLayer, VmLayer};
use crate::manifest::{
    DiskRef, FileRef, ImageConfig, ImageRef, KernelRef, MAX_DISKS, MAX_LAYERS, SnapshotManifest,
};
use crate::pins::{Pin, PinError, Pinned};
use crate::publish::seal;
use crate::verify::{self, Kind};
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
    /// Layers that exist only for this save: removed unless it is `saved`.
    undo: Vec<Undo>,
}

#[derive(Debug)]
struct Parts {
    inner: Arc<Inner>,
    name: Name,
    stage: Stage,
    state: File,
    memory: File,
}

#[derive(Debug)]
struct Undo {
    store: Store,
    frozen: VmLayer,
    next: VmLayer,
    armed: bool,
}

/// A writable disk of the VM that is saved.
#[derive(Debug)]
pub struct Freeze {
    /// The layer that the VM writes now; frozen once it is saved.
    pub frozen: ChainLayer,
    /// An empty file for the map of that layer.
    pub map: File,
    /// The layer that the VM writes afterwards.
    pub next: VmLayer,
    /// Its empty file.
    pub next_data: File,
}

/// A snapshot whose files the VMM has written.
#[derive(Debug)]
pub struct SavedSnapshot {
    parts: Parts,
    merge: Option<Merge>,
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
        Ok(SnapshotWriter {
            parts: Parts { inner, name: name.clone(), stage, state, memory },
            undo: Vec::new(),
        })
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
        let store = Store(Arc::clone(&self.parts.inner));
        let dir = self.parts.inner.vms.sub(&writable.vm.to_string())?;
        dir.open(&writable.data_name())?;
        dir.unlink(&writable.map_name())?;
        let (next, next_data) = store.create_vm_layer(writable.vm, writable.disk)?;
        self.undo.push(Undo { store, frozen: *writable, next, armed: true });
        let map = dir.create(&writable.map_name())?;
        Ok(Freeze { frozen: ChainLayer::Frozen(*writable), map, next, next_data })
    }

    /// The VMM has answered `Ok` to `Save`: the layers are frozen, and the VM stands on them.
    #[must_use]
    pub fn saved(mut self) -> SavedSnapshot {
        self.undo.iter_mut().for_each(|undo| undo.armed = false);
        SavedSnapshot { parts: self.parts, merge: None }
    }
}

impl Drop for Undo {
    /// The map and the next layer of a save that did not happen.
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        let dir = self.store.0.vms.sub(&self.frozen.vm.to_string());
        let map = dir.and_then(|d| d.unlink(&self.frozen.map_name()));
        if let Err(error) = map.and_then(|()| self.store.remove_vm_layer(&self.next)) {
            // It goes with its VM.
            tracing::warn!(%error, cause = %error.source, "leaving a layer of a save that failed");
        }
    }
}

/// A snapshot just made.
#[derive(Debug)]
pub struct Committed {
    /// What it is; its disks' layers are the chain that a VM which goes on stands on now.
    pub manifest: SnapshotManifest,
    /// Keeps its images and layers in the store: for a VM that goes on.
    pub pin: Pin,
    /// Its RAM, where that is in memory.
    pub resident: Option<Resident>,
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

    /// Hashes, syncs and publishes everything, layers first. Layers that were `Frozen` are then `Stored`, alone or merged with others, as the manifest
    /// tells, and gone from the VM's folder.
    ///
    /// # Errors
    /// [`CommitError`]. The layers that the VM froze stay in its folder, and the next snapshot's `spec` names them again.
    pub fn commit(self, spec: &SnapshotSpec) -> Result<Committed, CommitError> {
        self.commit_with(spec, None)
    }

    /// With `pages`, RAM goes there.
    pub(super) fn commit_with(
        self,
        spec: &SnapshotSpec,
        pages: Option<&super::PagedSpec>,
    ) -> Result<Committed, CommitError> {
        check(spec)?;
        let Self { parts, merge } = self;
        let Parts { inner, name, stage, state: state_file, memory: memory_file } = parts;
        let dir = stage.sub("snapshot")?;
        let content = |file: &File, name: &str, kind: Kind| -> IoResult<FileRef> {
            dir.finish(name, file)?;
            verify::digest(file, kind).map_err(IoError::new("reading", &dir.path().join(name)))
        };
        let state = content(&state_file, STATE, Kind::Plain)?;
        let mut staged = Staged::default();
        let mut disks =
            spec.disks.iter().map(|d| staged.disk(&inner, &stage, d)).collect::<Result<Vec<_>, _>>()?;
        let moves = merge.and_then(|merge| staged.flatten(&inner, &stage, &mut disks, merge));
        // The lease ends when the snapshot is there, or will not be.
        let (memory, _lease, resident) = match pages {
            None => (content(&memory_file, MEMORY, Kind::Sparse)?, None, None),
            Some(pages) => {
                let hints: Vec<_>;
                let mut pages = *pages;
                if let Some(moves) = &moves {
                    hints = pages.known.hints.iter().map(|hint| moves.hint(*hint)).collect();
                    pages.known.hints = &hints;
                }
                ram::seal(&memory_file, pages.known.free)?;
                let (ram, lease) = inner.stage_table(&dir, &memory_file, &pages, &disks, &staged.layers)?;
                let resident = Resident::of(&memory_file, ram);
                (ram, Some(lease), resident.map_err(IoError::new("opening", dir.path()))?)
            }
        };
        let manifest = SnapshotManifest {
            name: name.clone(),
            created_unix_ms: Store::now_unix_ms(),
            parent: spec.parent.clone(),
            kernel: spec.kernel.clone(),
            vcpus: spec.vcpus,
            memory_bytes: spec.memory_bytes,
            agent_version: spec.agent_version.clone(),
            config: spec.config.clone(),
            labels: spec.labels.clone(),
            disks,
            memory,
            state,
        };
        seal(&dir, &manifest)?;
        // Before it is published: from then on it may be removed, and its layers collected.
        let pin = inner.pins.pin(Pinned::of(&manifest, format!("the VM of snapshot {name}")));
        inner.publish_snapshot(&stage, &manifest, &mut staged)?;
        // From here on nothing may fail: the snapshot is there.
        for frozen in &staged.frozen {
            // It only has a second name by now; it goes with its VM if this fails.
            if let Err(error) = Store(Arc::clone(&inner)).remove_vm_layer(frozen) {
                tracing::warn!(%error, cause = %error.source, "leaving the VM's name of a stored layer");
            }
        }
        let folder = inner.snapshots.path().join(name.as_str());
        inner.verifier.remember(&folder.join(STATE), &state_file, state.digest);
        if pages.is_none() {
            inner.verifier.remember(&folder.join(MEMORY), &memory_file, memory.digest);
        }
        staged.layers.iter().for_each(|layer| inner.remember_layer(layer));
        Ok(Committed { manifest, pin, resident })
    }
}

/// The layers of a snapshot that are not stored yet.
#[derive(Default)]
pub(super) struct Staged {
    frozen: Vec<VmLayer>,
    pub(super) layers: Vec<StagedLayer>,
    folders: usize,
}

impl Staged {
    /// A name that no folder in the stage has yet.
    pub(super) fn folder(&mut self) -> String {
        let folder = format!("layer{}", self.folders);
        self.folders += 1;
        folder
    }

    fn disk(&mut self, inner: &Inner, stage: &Stage, disk: &DiskSpec) -> IoResult<DiskRef> {
        let mut layers: Vec<LayerRef> = Vec::with_capacity(disk.layers.len());
        for layer in &disk.layers {
            layers.push(match layer {
                ChainLayer::Stored(layer) => *layer,
                ChainLayer::Frozen(vm_layer) => {
                    let folder = self.folder();
                    let staged = inner.stage_layer(stage, folder, *vm_layer)?;
                    let layer = staged.layer;
                    self.frozen.push(*vm_layer);
                    self.layers.push(staged);
                    layer
                }
            });
        }
        let DiskSpec { image, size_bytes, writable, .. } = disk;
        Ok(DiskRef { image: image.clone(), size_bytes: *size_bytes, writable: *writable, layers })
    }
}

fn check(spec: &SnapshotSpec) -> Result<(), CommitError> {
    let within = |place: String, min: usize, max: usize, got: usize| {
        if (min..=max).contains(&got) {
            return Ok(());
        }
        Err(CommitError::Invalid { place, expected: format!("{min} to {max}"), got: got.to_string() })
    };
    within("disks".to_owned(), 1, MAX_DISKS, spec.disks.len())?;
    for (d, disk) in spec.disks.iter().enumerate() {
        within(format!("layers of disk {d}"), 0, MAX_LAYERS, disk.layers.len())?;
    }
    Ok(())
}

impl Inner {
    fn publish_snapshot(
        &self,
        stage: &Stage,
        manifest: &SnapshotManifest,
        staged: &mut Staged,
    ) -> Result<(), CommitError> {
        let by = format!("snapshot {}", manifest.name);
        let _publishing = self.publishing();
        if self.snapshots.has(manifest.name.as_str())? {
            return Err(CommitError::Exists { name: manifest.name.clone() });
        }
        for disk in &manifest.disks {
            self.image_is(&disk.image, &by)?;
        }
        let fresh = |layer: &LayerRef| staged.layers.iter().any(|s| s.layer.id == layer.id);
        for layer in manifest.disks.iter().flat_map(|d| &d.layers).filter(|l| !fresh(l)) {
            self.layer_is(layer.id, &by)?;
        }
        stage.sync()?;
        for layer in &mut staged.layers {
            self.publish_layer(stage, layer)?;
        }
        self.layers.sync()?;
        match stage.rename("snapshot", &self.snapshots, manifest.name.as_str(), IfTaken::Refuse) {
            Err(e) if e.source.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(CommitError::Exists { name: manifest.name.clone() });
            }
            other => other?,
        }
        if let Err(error) = self.snapshots.sync() {
            // Perhaps on disk, perhaps not: an error must mean that it is not there.
            let _best_effort =
                self.snapshots.rename(manifest.name.as_str(), stage, "snapshot", IfTaken::Refuse);
            return Err(error.into());
        }
        Ok(())
    }
}
