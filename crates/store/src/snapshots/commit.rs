//! From what a VMM has saved to a snapshot: prepared, stored, published.
//!
//! Prepared, it is what it will be, but nobody finds it: clones of it can run, so that a rehearsal tells which pages are to lie together before any
//! is stored.

use super::open::{OpenDisk, OpenLayer, OpenSnapshot};
use super::ram::{self, Resident};
use super::writer::{CommitError, DiskSpec, Parts, SavedSnapshot, SnapshotSpec};
use super::{MEMORY, PagedSpec, STATE, WORKING_SET, flatten::Moves};
use crate::blob::{Dir, IfTaken, Stage};
use crate::digest::Digest;
use crate::errors::{Damage, IoError, IoResult};
use crate::layers::{ChainLayer, LayerRef, StagedLayer, VmLayer};
use crate::manifest::{DiskRef, FileRef, MAX_DISKS, MAX_LAYERS, SnapshotManifest};
use crate::pins::{Pin, Pinned};
use crate::publish::seal;
use crate::verify::{self, Kind};
use crate::{Inner, Store};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Who needs what a snapshot is made of, for errors.
const MAKING: &str = "a snapshot in the making";

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

/// What a VMM has saved, with all that its disks stand on: dropped, there is no snapshot, and what the VM froze stays in its folder.
#[derive(Debug)]
pub struct Prepared {
    inner: Arc<Inner>,
    stage: Stage,
    dir: Dir,
    /// What it will be; of its RAM only the length is known.
    manifest: SnapshotManifest,
    state: File,
    memory: File,
    free: Vec<Range<u32>>,
    staged: Staged,
    moves: Option<Moves>,
}

fn content(dir: &Dir, file: &File, name: &str, kind: Kind) -> IoResult<FileRef> {
    dir.finish(name, file)?;
    verify::digest(file, kind).map_err(IoError::new("reading", &dir.path().join(name)))
}

impl SavedSnapshot {
    /// Hashes and syncs the state and the layers. RAM that is in memory is sealed: `free` frames of it are given back, and read as zeroes.
    ///
    /// # Errors
    /// [`CommitError`]. The layers that the VM froze stay in its folder, and the next snapshot's `spec` names them again.
    pub fn prepare(self, spec: &SnapshotSpec, free: &[Range<u32>]) -> Result<Prepared, CommitError> {
        check(spec)?;
        let Self { parts, merge } = self;
        let Parts { inner, name, stage, state: state_file, memory: memory_file } = parts;
        let dir = stage.sub("snapshot")?;
        let state = content(&dir, &state_file, STATE, Kind::Plain)?;
        let mut staged = Staged::default();
        let mut disks =
            spec.disks.iter().map(|d| staged.disk(&inner, &stage, d)).collect::<Result<Vec<_>, _>>()?;
        let moves = merge.and_then(|merge| staged.flatten(&inner, &stage, &mut disks, merge));
        ram::seal(&memory_file, free)?;
        let manifest = SnapshotManifest {
            name,
            created_unix_ms: Store::now_unix_ms(),
            parent: spec.parent.clone(),
            kernel: spec.kernel.clone(),
            vcpus: spec.vcpus,
            nets: spec.nets,
            memory_bytes: spec.memory_bytes,
            agent_version: spec.agent_version.clone(),
            config: spec.config.clone(),
            labels: spec.labels.clone(),
            disks,
            memory: FileRef { digest: Digest::of(&[]), bytes: spec.memory_bytes, data_bytes: 0 },
            state,
        };
        let free = free.to_vec();
        Ok(Prepared {
            inner,
            stage,
            dir,
            manifest,
            state: state_file,
            memory: memory_file,
            free,
            staged,
            moves,
        })
    }

    /// Hashes, syncs and publishes everything, layers first. Layers that were `Frozen` are then `Stored`, alone or merged with others, as the manifest
    /// tells, and gone from the VM's folder.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn commit(self, spec: &SnapshotSpec) -> Result<Committed, CommitError> {
        self.prepare(spec, &[])?.commit_with(None)
    }

    /// As [`Self::commit`], with RAM as a table of pages in the tenant's namespace.
    ///
    /// # Errors
    /// As [`Self::prepare`]. Pages that were put already stay until [`Store::gc_pages`].
    pub fn commit_paged(self, spec: &SnapshotSpec, pages: &PagedSpec) -> Result<Committed, CommitError> {
        self.prepare(spec, pages.known.free)?.commit_paged(pages)
    }
}

impl Prepared {
    /// Opens it as it is: clones of it can run until it is committed or dropped, and after that. The digest of its RAM is not known yet.
    ///
    /// # Errors
    /// An image or a layer that it stands on is gone or damaged.
    pub fn open(&self) -> Result<OpenSnapshot, CommitError> {
        let opening = |e| IoError::new("opening", self.dir.path())(e);
        let disks = self.inner.open_disks(&self.manifest.disks, &self.staged.layers)?;
        let pin = self.inner.pins.pin(Pinned::of(&self.manifest, format!("a clone of {MAKING}")));
        let (state, memory) = (self.dir.open(STATE)?, ram::to_read(&self.memory).map_err(opening)?);
        Ok(OpenSnapshot::unpublished(self.manifest.clone(), state, memory, disks, pin))
    }

    /// Keeps `record`, a sealed working set, with it; once.
    ///
    /// # Errors
    /// The host cannot write it.
    pub fn keep_working_set(&mut self, record: &[u8]) -> Result<(), CommitError> {
        Ok(self.dir.write(WORKING_SET, record)?)
    }

    /// Stores RAM as a table of pages, and publishes everything, as [`SavedSnapshot::commit_paged`]. What is free was told before.
    ///
    /// # Errors
    /// [`CommitError`].
    pub fn commit_paged(self, pages: &PagedSpec) -> Result<Committed, CommitError> {
        self.commit_with(Some(pages))
    }

    fn commit_with(self, pages: Option<&PagedSpec>) -> Result<Committed, CommitError> {
        let Self { inner, stage, dir, mut manifest, state, memory, free, mut staged, moves } = self;
        // The lease ends when the snapshot is there, or will not be.
        let (ram, _lease, resident) = match pages {
            None => (content(&dir, &memory, MEMORY, Kind::Sparse)?, None, None),
            Some(pages) => {
                let hints: Vec<_>;
                let mut pages = *pages;
                pages.known.free = &free;
                if let Some(moves) = &moves {
                    hints = pages.known.hints.iter().map(|hint| moves.hint(*hint)).collect();
                    pages.known.hints = &hints;
                }
                let disks = inner.open_disks(&manifest.disks, &staged.layers)?;
                let (ram, lease) = inner.stage_table(&dir, &memory, &pages, &disks)?;
                let resident = Resident::of(&memory, ram);
                (ram, Some(lease), resident.map_err(IoError::new("opening", dir.path()))?)
            }
        };
        manifest.memory = ram;
        seal(&dir, &manifest)?;
        // Before it is published: from then on it may be removed, and its layers collected.
        let pin = inner.pins.pin(Pinned::of(&manifest, format!("the VM of snapshot {}", manifest.name)));
        inner.publish_snapshot(&stage, &manifest, &mut staged)?;
        // From here on nothing may fail: the snapshot is there.
        for frozen in &staged.frozen {
            // It only has a second name by now; it goes with its VM if this fails.
            if let Err(error) = Store(Arc::clone(&inner)).remove_vm_layer(frozen) {
                tracing::warn!(%error, cause = %error.source, "leaving the VM's name of a stored layer");
            }
        }
        let folder = inner.snapshots.path().join(manifest.name.as_str());
        inner.verifier.remember(&folder.join(STATE), &state, manifest.state.digest);
        if pages.is_none() {
            inner.verifier.remember(&folder.join(MEMORY), &memory, ram.digest);
        }
        staged.layers.iter().for_each(|layer| inner.remember_layer(layer));
        Ok(Committed { manifest, pin, resident })
    }
}

/// The layers of a snapshot that are not stored yet.
#[derive(Debug, Default)]
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
                ChainLayer::Frozen(vm_layer) | ChainLayer::Borrowed(vm_layer) => {
                    let folder = self.folder();
                    let staged = inner.stage_layer(stage, folder, *vm_layer)?;
                    let stored = staged.layer;
                    // What is borrowed is not the VM's to let go.
                    self.frozen.extend(matches!(layer, ChainLayer::Frozen(_)).then_some(*vm_layer));
                    self.layers.push(staged);
                    stored
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
    /// The disks of a snapshot that is not committed yet, verified.
    fn open_disks(&self, disks: &[DiskRef], staged: &[StagedLayer]) -> Result<Vec<OpenDisk>, CommitError> {
        disks.iter().map(|disk| self.open_staged(disk, staged)).collect()
    }

    fn open_staged(&self, disk: &DiskRef, staged: &[StagedLayer]) -> Result<OpenDisk, CommitError> {
        let image = self.open_image(&disk.image.name, MAKING)?;
        if image.manifest.disk.digest != disk.image.digest {
            let file = self.image_path(&disk.image.name);
            let (expected, got) = (disk.image.digest.to_string(), image.manifest.disk.digest.to_string());
            return Err(
                Damage::Content { file, place: "digest of the image".to_owned(), expected, got }.into()
            );
        }
        let mut layers = Vec::with_capacity(disk.layers.len());
        for &layer in &disk.layers {
            let (data, map) = match staged.iter().find(|s| s.layer.id == layer.id) {
                Some(staged) => (staged.data()?, staged.map()?),
                None => self.open_layer(&layer, MAKING)?,
            };
            layers.push(OpenLayer { layer, data, map });
        }
        let DiskRef { image: of, size_bytes, writable, .. } = disk.clone();
        Ok(OpenDisk { image: of, base: image.disk, size_bytes, writable, layers })
    }

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

#[cfg(test)]
#[path = "commit_tests.rs"]
mod tests;
