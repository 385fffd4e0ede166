//! Turns the files that a VMM saved into a snapshot: prepared, stored, published.
//!
//! A prepared snapshot is complete, but not in the store. Clones of it can run, so that a recording
//! shows which pages belong together before any page is stored.

use super::error::CommitError;
use super::files::{MEMORY, STATE, WORKING_SET};
use super::flatten::Moves;
use super::open::{OpenDisk, OpenSnapshot};
use super::paged::PagedSpec;
use super::ram::{self, Resident};
use super::staged::Staged;
use super::writer::{DiskSpec, Parts, SavedSnapshot, SnapshotSpec};
use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::integrity::verify::{Hashed, Kind};
use crate::memory::RamWork;
use crate::objects::layers::StagedLayer;
use crate::objects::manifest::{DiskRef, MAX_DISKS, MAX_LAYERS, SnapshotManifest};
use crate::objects::types::{ChainLayer, FileRef, LayerRef, VmLayer};
use crate::publish::seal;
use crate::vms::pins::{Pin, Pinned};
use dayfly_units::Digest;
use dayfly_units::failpoint;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::sync::Arc;

/// The object named in errors as the one that needs a file.
const MAKING: &str = "a snapshot in the making";

/// The longest state that is stored; what a VMM writes takes less.
const MAX_STATE_BYTES: u64 = 32 << 20;

/// A snapshot just committed.
#[derive(Debug)]
pub struct Committed {
    /// The manifest. The layers of its disks are the chain that the running VM depends on now.
    pub manifest: SnapshotManifest,
    /// Keeps the images and layers in the store, for the running VM.
    pub pin: Pin,
    /// The VM's frozen layers that stored ones replace. The VM's folder still has their files:
    /// [`Store::remove_vm_layers`] removes them once the VM's record names the stored layers.
    pub replaced: Vec<VmLayer>,
    /// The snapshot's RAM, if it is in a memfd.
    pub resident: Option<Resident>,
}

/// A prepared snapshot. If it is dropped, there is no snapshot, and the layers that the VM froze
/// stay in the VM's folder.
#[derive(Debug)]
pub struct Prepared {
    inner: Arc<Inner>,
    stage: Stage,
    dir: Dir,
    /// The future manifest; the digest of RAM is not known yet, only the length.
    manifest: SnapshotManifest,
    memory: File,
    free: Vec<Range<u32>>,
    staged: Staged,
    moves: Option<Moves>,
}

fn content(dir: &Dir, file: File, name: &str, kind: Kind) -> IoResult<FileRef> {
    dir.finish(name, &file)?;
    let hashed = Hashed::of(file, kind, &mut |_, _| Ok(()));
    Ok(hashed.map_err(IoError::new("reading", &dir.path().join(name)))?.content)
}

/// Copies the state from the memfd into which a VMM wrote it. It is read once, because the VMM may
/// still write.
fn state(dir: &Dir, from: &File) -> Result<FileRef, CommitError> {
    let path = dir.path().join(STATE);
    let reading = |e| IoError::new("reading what becomes", &path)(e);
    let mut bytes = Vec::new();
    let mut from = from;
    from.rewind().map_err(reading)?;
    from.take(MAX_STATE_BYTES + 1).read_to_end(&mut bytes).map_err(reading)?;
    let got = bytes.len() as u64;
    if got > MAX_STATE_BYTES {
        return Err(CommitError::Invalid {
            place: "bytes of the state".to_owned(),
            expected: format!("at most {MAX_STATE_BYTES}"),
            got: format!("more, {} in all", from.metadata().map_err(reading)?.len()),
        });
    }
    dir.write(STATE, &bytes)?;
    dir.protect(STATE, &dir.open(STATE)?, got)?;
    Ok(FileRef { digest: Digest::of(&bytes), bytes: got, data_bytes: got })
}

impl SavedSnapshot {
    /// Hashes and syncs the state and the layers. RAM in a memfd is sealed; its `free` frames are
    /// freed and read as zeroes.
    ///
    /// # Errors
    /// [`CommitError`]. The layers that the VM froze stay in its folder, and the next snapshot's
    /// `spec` names them again.
    pub fn prepare(
        self,
        spec: &SnapshotSpec,
        free: &[Range<u32>],
    ) -> Result<Prepared, CommitError> {
        check(spec)?;
        let Self { parts, merge } = self;
        let Parts { inner, name, stage, state: state_file, memory: memory_file } = parts;
        let dir = stage.sub("snapshot")?;
        let state = state(&dir, &state_file)?;
        let mut staged = Staged::default();
        let mut disks = spec
            .disks
            .iter()
            .map(|d| staged.disk(&inner, &stage, d))
            .collect::<Result<Vec<_>, _>>()?;
        failpoint::reached("store.prepare.layers_staged");
        let moves = merge.and_then(|merge| staged.flatten(&inner, &stage, &mut disks, merge));
        ram::seal(&memory_file, free)?;
        failpoint::reached("store.prepare.done");
        let manifest = SnapshotManifest {
            name,
            created_unix_ms: Store::now_unix_ms(),
            parent: spec.parent.clone(),
            ancestors: spec.ancestors.clone(),
            kernel: spec.kernel.clone(),
            vcpus: spec.vcpus,
            max_vcpus: spec.max_vcpus,
            cpu_model: spec.cpu_model,
            nets: spec.nets,
            memory_bytes: spec.memory_bytes,
            agent_version: spec.agent_version.clone(),
            config: spec.config.clone(),
            labels: spec.labels.clone(),
            disks,
            memory: FileRef { digest: Digest::of(&[]), bytes: spec.memory_bytes, data_bytes: 0 },
            state,
            trees: BTreeMap::new(),
            egress: spec.egress.clone(),
        };
        let free = free.to_vec();
        Ok(Prepared { inner, stage, dir, manifest, memory: memory_file, free, staged, moves })
    }

    /// Hashes, syncs and publishes everything, layers first. `Frozen` layers become `Stored`, alone
    /// or merged with others, as the manifest shows. Their files stay in the VM's folder too
    /// ([`Committed::replaced`]).
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn commit(self, spec: &SnapshotSpec) -> Result<Committed, CommitError> {
        self.prepare(spec, &[])?.commit_with(None, None)
    }

    /// As [`Self::commit`], with RAM as a table of pages in the tenant's namespace.
    ///
    /// # Errors
    /// As [`Self::prepare`]. Pages stored before the error stay until [`Store::gc_pages`].
    pub fn commit_paged(
        self,
        spec: &SnapshotSpec,
        pages: &PagedSpec,
    ) -> Result<Committed, CommitError> {
        self.prepare(spec, pages.known.free)?.commit_paged(pages)
    }
}

impl Prepared {
    /// Opens the prepared snapshot. Clones of it can run now, and continue after the commit or the
    /// drop. The digest of RAM is not known yet.
    ///
    /// # Errors
    /// An image or a layer that the snapshot depends on is missing or damaged.
    pub fn open(&self) -> Result<OpenSnapshot, CommitError> {
        let opening = |e| IoError::new("opening", self.dir.path())(e);
        let disks = self.inner.open_disks(&self.manifest.disks, &self.staged.layers)?;
        let pin = self.inner.pins.pin(Pinned::of(&self.manifest, format!("a clone of {MAKING}")));
        let (state, memory) = (self.dir.open(STATE)?, ram::to_read(&self.memory).map_err(opening)?);
        Ok(OpenSnapshot::unpublished(self.manifest.clone(), state, memory, disks, pin))
    }

    /// Adds `record`, a sealed working set, to the snapshot. Call it at most once.
    ///
    /// # Errors
    /// The host cannot write the file.
    pub fn keep_working_set(&mut self, record: &[u8]) -> Result<(), CommitError> {
        Ok(self.dir.write(WORKING_SET, record)?)
    }

    /// Stores RAM as a table of pages and publishes everything, as [`SavedSnapshot::commit_paged`].
    /// The free frames are those given to [`SavedSnapshot::prepare`].
    ///
    /// # Errors
    /// [`CommitError`].
    pub fn commit_paged(self, pages: &PagedSpec) -> Result<Committed, CommitError> {
        self.commit_with(Some(pages), None)
    }

    /// As [`Self::commit_paged`]; `work` reads RAM and writes the packs, and is ended.
    ///
    /// # Errors
    /// As [`Self::commit_paged`], or `Work`.
    pub fn commit_paged_by(
        self,
        pages: &PagedSpec,
        work: &mut dyn RamWork,
    ) -> Result<Committed, CommitError> {
        self.commit_with(Some(pages), Some(work))
    }

    fn commit_with(
        self,
        pages: Option<&PagedSpec>,
        work: Option<&mut dyn RamWork>,
    ) -> Result<Committed, CommitError> {
        let Self { inner, stage, dir, mut manifest, memory, free, mut staged, moves } = self;
        let is_proven = work.is_none();
        // The lease is held until the snapshot is published or has failed.
        let (ram, _lease, resident) = match pages {
            None => (content(&dir, memory, MEMORY, Kind::Sparse)?, None, None),
            Some(pages) => {
                let hints: Vec<_>;
                let mut pages = *pages;
                pages.known.free = &free;
                if let Some(moves) = &moves {
                    hints = pages.known.hints.iter().map(|hint| moves.hint(*hint)).collect();
                    pages.known.hints = &hints;
                }
                let disks = inner.open_disks(&manifest.disks, &staged.layers)?;
                let (ram, lease) = inner.stage_table(&dir, &memory, &pages, &disks, work)?;
                let resident = Resident::file(&memory);
                (ram, Some(lease), resident.map_err(IoError::new("opening", dir.path()))?)
            }
        };
        failpoint::reached("store.commit.memory_staged");
        manifest.memory = ram;
        manifest.trees = inner.roots(&manifest.disks, &staged.layers);
        seal(&dir, &manifest)?;
        failpoint::reached("store.commit.manifest_staged");
        // Pinned before it is published, because afterwards it may be removed and its layers
        // collected.
        let pin =
            inner.pins.pin(Pinned::of(&manifest, format!("the VM of snapshot {}", manifest.name)));
        inner.publish_snapshot(&stage, &manifest, &mut staged)?;
        // The snapshot is published: no step may fail from here on.
        failpoint::reached("store.commit.published");
        let of = |file| Resident { file, of: Box::new(manifest.clone()), is_proven };
        let resident = resident.map(of);
        Ok(Committed { manifest, pin, replaced: staged.frozen, resident })
    }
}

impl Staged {
    fn disk(&mut self, inner: &Inner, stage: &Stage, disk: &DiskSpec) -> IoResult<DiskRef> {
        let mut layers: Vec<LayerRef> = Vec::with_capacity(disk.layers.len());
        for layer in &disk.layers {
            layers.push(match layer {
                ChainLayer::Stored(layer) => *layer,
                ChainLayer::Frozen(vm_layer) | ChainLayer::Shared(vm_layer) => {
                    let folder = self.folder();
                    let staged = inner.stage_layer(stage, folder, *vm_layer)?;
                    let stored = staged.layer;
                    // The VM does not own a shared layer, so it does not release it.
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
        Err(CommitError::Invalid {
            place,
            expected: format!("{min} to {max}"),
            got: got.to_string(),
        })
    };
    within("disks".to_owned(), 1, MAX_DISKS, spec.disks.len())?;
    for (d, disk) in spec.disks.iter().enumerate() {
        within(format!("layers of disk {d}"), 0, MAX_LAYERS, disk.layers.len())?;
    }
    Ok(())
}

impl Inner {
    /// Opens and verifies the disks of a snapshot that is not committed yet.
    fn open_disks(
        &self,
        disks: &[DiskRef],
        staged: &[StagedLayer],
    ) -> Result<Vec<OpenDisk>, CommitError> {
        disks.iter().map(|disk| self.open_staged(disk, staged)).collect()
    }

    fn open_staged(&self, disk: &DiskRef, staged: &[StagedLayer]) -> Result<OpenDisk, CommitError> {
        let image = self.open_image(&disk.image.name, MAKING)?;
        if image.manifest.disk.digest != disk.image.digest {
            let file = self.image_path(&disk.image.name);
            let (expected, got) =
                (disk.image.digest.to_string(), image.manifest.disk.digest.to_string());
            return Err(Damage::Content {
                file,
                place: "digest of the image".to_owned(),
                expected,
                got,
            }
            .into());
        }
        let mut layers = Vec::with_capacity(disk.layers.len());
        for &layer in &disk.layers {
            layers.push(match staged.iter().find(|s| s.layer.id == layer.id) {
                Some(staged) => staged.open()?,
                None => self.open_layer(&layer, MAKING)?,
            });
        }
        let DiskRef { image: of, size_bytes, writable, .. } = disk.clone();
        let (base, tree) = (image.disk, image.tree);
        Ok(OpenDisk { image: of, base, tree, size_bytes, writable, layers })
    }

    /// Renames the staged layers into `layers/` and syncs the folder. If that fails, the renames
    /// are undone: the next attempt must not take a name for durable that it finds.
    fn publish_layers(&self, stage: &Stage, staged: &mut Staged) -> IoResult<()> {
        let publish = |layer: &mut StagedLayer| self.publish_layer(stage, layer);
        let published = staged.layers.iter_mut().try_for_each(publish);
        published.and_then(|()| self.layers.sync()).inspect_err(|_| {
            staged.layers.iter_mut().for_each(|layer| self.unpublish_layer(stage, layer));
        })
    }

    fn publish_snapshot(
        &self,
        stage: &Stage,
        manifest: &SnapshotManifest,
        staged: &mut Staged,
    ) -> Result<(), CommitError> {
        let by = format!("snapshot {}", manifest.name);
        // Layers that are stored already are verified here, so that they are not hashed while the
        // publish lock is held: creating VMs waits for it.
        for layer in &staged.layers {
            let _checked_below = self.open_whole_layer(&layer.layer, &by);
        }
        let mut publishing = self.publishing();
        publishing.change(manifest.name.as_str());
        self.writable()?;
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
        self.publish_layers(stage, staged)?;
        failpoint::reached("store.commit.layers_published");
        match stage.rename("snapshot", &self.snapshots, manifest.name.as_str(), IfTaken::Refuse) {
            Err(e) if e.source.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(CommitError::Exists { name: manifest.name.clone() });
            }
            other => other?,
        }
        failpoint::reached("store.commit.renamed");
        if let Err(error) = self.snapshots.sync() {
            // The rename may be durable or not. An error must mean that there is no snapshot, so
            // undo it. Its layers stay: they are durable, and a gc removes them.
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
