//! Opens a snapshot to clone from: every file verified, open and pinned.

use super::files::{MAX_WORKING_SET_BYTES, MEMORY, STATE, TABLE, WORKING_SET};
use super::ram::Resident;
use crate::errors::{Damage, IoError};
use crate::inner::{Inner, Store};
use crate::integrity::verify::{Kind, Stamp};
use crate::memory::Table;
use crate::objects::images::DISK;
use crate::objects::layers::OpenLayer;
use crate::objects::manifest::{self, DiskRef, ImageRef, Listing, SnapshotManifest};
use crate::objects::tree::{FileTree, TREE};
use crate::objects::types::{DATA, MAP};
use crate::pages::Lease;
use crate::publish::{OpenError, RemoveError, folder, needed};
use crate::vms::pins::{Pin, Pinned};
use dayfly_units::{Digest, Name};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A verified, open snapshot. Every descriptor is read-only.
#[derive(Debug)]
pub struct OpenSnapshot {
    /// The snapshot's manifest.
    pub manifest: SnapshotManifest,
    /// The sealed state of vCPUs and devices.
    pub state: File,
    /// The file of RAM, sparse.
    pub memory: File,
    /// The sealed record of the pages that clones touch first, if the snapshot has one.
    pub working_set: Option<File>,
    /// The disks, in the order vda, vdb, ….
    pub disks: Vec<OpenDisk>,
    /// Digest of the identities and times of all files. It changes if a file is replaced or
    /// modified.
    pub fingerprint: Digest,
    /// Keeps the images and layers in the store. Each clone holds this pin or a copy of it until
    /// the clone is removed.
    pub pin: Pin,
    /// The verified files: paths and stamps.
    files: Vec<Seen>,
    /// Whether `memory` is a memfd or an unnamed file, so that its content cannot change under a
    /// path.
    own_memory: bool,
    is_proven: bool,
}

impl OpenSnapshot {
    /// A prepared snapshot, which is not in the store yet.
    pub(super) fn unpublished(
        manifest: SnapshotManifest,
        state: File,
        memory: File,
        disks: Vec<OpenDisk>,
        pin: Pin,
    ) -> Self {
        let (working_set, files) = (None, Vec::new());
        let fingerprint = fingerprint(&files);
        let (own_memory, is_proven) = (false, false);
        Self {
            manifest,
            state,
            memory,
            working_set,
            disks,
            fingerprint,
            pin,
            files,
            own_memory,
            is_proven,
        }
    }

    /// Whether each page of `memory` has the hash that the snapshot's table names: this process has
    /// hashed it, or the pager does. If not, another process has reported the hashes
    /// ([`crate::RamWork`]), and no other snapshot may take pages from `memory`.
    #[must_use]
    pub const fn is_proven(&self) -> bool {
        self.is_proven
    }

    /// The snapshot's RAM, for opening the snapshot again after another of its files changed.
    /// `None` if RAM is a named file.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn resident(&self) -> std::io::Result<Option<Resident>> {
        let resident = || {
            let (file, of) = (self.memory.try_clone()?, Box::new(self.manifest.clone()));
            Ok(Resident { file, of, is_proven: self.is_proven })
        };
        self.own_memory.then(resident).transpose()
    }

    /// Whether every verified file is still at its path, unchanged. If so, opening the snapshot
    /// again would give the same files.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.files.iter().all(Seen::is_unchanged)
    }
}

/// A path and the file that was there.
#[derive(Debug)]
struct Seen {
    path: PathBuf,
    /// The stamp of the file; `None` if there was no file.
    stamp: Option<Stamp>,
    /// Whether the file may have a second name, in the folder of the VM that froze it. The removal
    /// of that name changes the ctime.
    is_of_layer: bool,
}

impl Seen {
    fn is_unchanged(&self) -> bool {
        match (Stamp::at(&self.path), self.stamp) {
            (Ok(now), Some(seen)) => now == seen || self.is_of_layer && now.same_content(&seen),
            (Err(e), None) => e.kind() == ErrorKind::NotFound,
            _ => false,
        }
    }
}

/// A disk of an open snapshot.
#[derive(Debug)]
pub struct OpenDisk {
    /// The disk's image.
    pub image: ImageRef,
    /// The raw image, read-only.
    pub base: File,
    /// The image's hash tree; `None`: the image was verified whole.
    pub tree: Option<FileTree>,
    /// Size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Whether each clone gets a writable layer for this disk.
    pub writable: bool,
    /// Stored layers, the lowest first.
    pub layers: Vec<OpenLayer>,
}

/// Sizes of a set of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sizes {
    /// Sum of the files' lengths, in bytes.
    pub apparent_bytes: u64,
    /// Sum of the files' allocated blocks, in bytes.
    pub allocated_bytes: u64,
}

impl Store {
    /// Opens the snapshot `name`. It verifies the manifest's seal, the presence of images and
    /// layers, and size and content of every file. A disk file with a hash tree is not read: each
    /// reader of it checks what it reads ([`FileTree`]). Other content is hashed once per process
    /// and change (`integrity/verify.rs`); concurrent callers wait for one hash.
    ///
    /// # Errors
    /// [`OpenError`]: `Damage` names the file, the place, the expected value and the value found.
    pub fn open_snapshot(&self, name: &Name) -> Result<OpenSnapshot, OpenError> {
        self.0.open_snapshot(name, None)
    }

    /// As [`Self::open_snapshot`], but takes RAM from `resident` if it is of the same snapshot.
    /// Then only the small files are read.
    ///
    /// # Errors
    /// As [`Self::open_snapshot`].
    pub fn open_resident(
        &self,
        name: &Name,
        resident: Resident,
    ) -> Result<OpenSnapshot, OpenError> {
        self.0.open_snapshot(name, Some(resident))
    }

    /// Reads the manifest of the snapshot `name`; no other file is read.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn snapshot(&self, name: &Name) -> Result<SnapshotManifest, OpenError> {
        Ok(manifest::read(&folder(&self.0.snapshots, "snapshot", name)?)?)
    }

    /// Lists every snapshot.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn snapshots(&self) -> Result<Listing<SnapshotManifest>, IoError> {
        manifest::list(&self.0.snapshots)
    }

    /// Removes the snapshot `name`, which may be damaged. Its layers stay until [`Store::gc`]; its
    /// clones continue to run.
    ///
    /// # Errors
    /// [`RemoveError`].
    pub fn remove_snapshot(&self, name: &Name) -> Result<(), RemoveError> {
        let mut publishing = self.0.publishing();
        let retired = self.0.retire(&self.0.snapshots, name.as_str());
        // A removal that failed may have been undone.
        publishing.change(name.as_str());
        drop(publishing);
        match retired? {
            Some(_deleted) => Ok(()),
            None => Err(RemoveError::NotFound { kind: "snapshot", name: name.clone() }),
        }
    }

    /// Sizes of the snapshot `name` on disk: its own files, and the layers it depends on, which
    /// other snapshots may share.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn snapshot_sizes(&self, name: &Name) -> Result<(Sizes, Sizes), OpenError> {
        let _publishing = self.0.publishing();
        let dir = folder(&self.0.snapshots, "snapshot", name)?;
        let manifest: SnapshotManifest = manifest::read(&dir)?;
        let by = format!("snapshot {name}");
        let mut own = Sizes::default();
        let ram = if dir.has(TABLE)? { TABLE } else { MEMORY };
        for file in [manifest::FILE, STATE, ram] {
            own.add(&needed(&dir, file, &by)?)
                .map_err(IoError::new("looking at", &dir.path().join(file)))?;
        }
        let mut layers = Sizes::default();
        for layer in manifest.disks.iter().flat_map(|d| &d.layers) {
            let (dir, data, map) = self.0.open_layer_files(layer.id, &by)?;
            layers
                .add(&data)
                .and_then(|()| layers.add(&map))
                .map_err(IoError::new("looking at", dir.path()))?;
            if dir.has(TREE)? {
                let tree = needed(&dir, TREE, &by)?;
                layers.add(&tree).map_err(IoError::new("looking at", dir.path()))?;
            }
        }
        Ok((own, layers))
    }
}

fn fingerprint(files: &[Seen]) -> Digest {
    let stamps: Vec<String> = files.iter().map(|seen| format!("{:?}", seen.stamp)).collect();
    Digest::of(stamps.join("\n").as_bytes())
}

/// Paths and stamps of open files, and of the manifests that describe them.
struct Stamps(Vec<Seen>);

impl Stamps {
    fn add(&mut self, path: PathBuf, file: &File) -> Result<(), IoError> {
        let stamp = Stamp::of(file).map_err(IoError::new("looking at", &path))?;
        self.push(path, Some(stamp));
        Ok(())
    }

    fn add_of_layer(&mut self, path: PathBuf, file: &File) -> Result<(), IoError> {
        let stamp = Stamp::of(file).map_err(IoError::new("looking at", &path))?;
        self.0.push(Seen { path, stamp: Some(stamp), is_of_layer: true });
        Ok(())
    }

    fn push(&mut self, path: PathBuf, stamp: Option<Stamp>) {
        self.0.push(Seen { path, stamp, is_of_layer: false });
    }

    fn add_at(&mut self, path: PathBuf) -> Result<(), IoError> {
        let stamp = Stamp::at(&path).map_err(IoError::new("looking at", &path))?;
        self.push(path, Some(stamp));
        Ok(())
    }
}

impl Sizes {
    fn add(&mut self, file: &File) -> std::io::Result<()> {
        let meta = file.metadata()?;
        self.apparent_bytes += meta.len();
        self.allocated_bytes += meta.blocks() * 512;
        Ok(())
    }
}

/// A disk with open, unverified files.
type RawDisk = (DiskRef, File, Vec<(crate::blob::Dir, OpenLayer)>);

/// A snapshot's RAM: a file, or a table with the lease of its pages.
pub(super) enum Ram {
    File(File),
    Table(Box<Table>, Lease),
}

/// An open snapshot; RAM in pages is not materialised yet.
pub(crate) struct Parts {
    pub(super) manifest: SnapshotManifest,
    state: File,
    pub(super) ram: Ram,
    working_set: Option<File>,
    pub(super) disks: Vec<OpenDisk>,
    pub(super) pin: Pin,
    files: Vec<Seen>,
}

impl Parts {
    /// Completes the snapshot with its RAM file, which [is proven](OpenSnapshot::is_proven) or not.
    pub(super) fn with(self, memory: File, is_proven: bool) -> OpenSnapshot {
        let Self { manifest, state, ram, working_set, disks, pin, files } = self;
        let (fingerprint, own_memory) = (fingerprint(&files), matches!(ram, Ram::Table(..)));
        OpenSnapshot {
            manifest,
            state,
            memory,
            working_set,
            disks,
            fingerprint,
            pin,
            files,
            own_memory,
            is_proven,
        }
    }
}

impl Inner {
    pub(crate) fn open_snapshot(
        self: &Arc<Self>,
        name: &Name,
        resident: Option<Resident>,
    ) -> Result<OpenSnapshot, OpenError> {
        let parts = self.open_snapshot_parts(name)?;
        let (memory, is_proven) = match (&parts.ram, resident) {
            (Ram::File(memory), _) => {
                let memory = memory.try_clone();
                (memory.map_err(IoError::new("opening", Path::new(MEMORY)))?, true)
            }
            (Ram::Table(..), Some(known)) if *known.of == parts.manifest => {
                (known.file, known.is_proven)
            }
            (Ram::Table(table, _lease), _) => (self.materialised(table, &parts.disks)?, true),
        };
        Ok(parts.with(memory, is_proven))
    }

    pub(crate) fn open_snapshot_parts(self: &Arc<Self>, name: &Name) -> Result<Parts, OpenError> {
        let by = format!("snapshot {name}");
        // Under the publish lock everything is opened and pinned. The hashing, which is slow the
        // first time, needs only the descriptors and runs without the lock.
        let mut stamps = Stamps(Vec::new());
        let (dir, manifest, state, ram, working_set, disks, pin) = {
            let _publishing = self.publishing();
            let dir = folder(&self.snapshots, "snapshot", name)?;
            // Each stamp is taken before its file is read, so that a change meanwhile gives a
            // different stamp.
            stamps.add_at(dir.path().join(manifest::FILE))?;
            let manifest: SnapshotManifest = manifest::read(&dir)?;
            let state = needed(&dir, STATE, &by)?;
            if dir.has(TABLE)? {
                stamps.add_at(dir.path().join(TABLE))?;
            }
            let ram = match self.leased_table(&dir, &manifest)? {
                Some((table, lease)) => Ram::Table(Box::new(table), lease),
                None => Ram::File(needed(&dir, MEMORY, &by)?),
            };
            let working_set =
                if dir.has(WORKING_SET)? { Some(dir.open(WORKING_SET)?) } else { None };
            for disk in &manifest.disks {
                // If the image is missing, `open_disk` reports it.
                let path = self.images.path().join(disk.image.name.as_str()).join(manifest::FILE);
                let stamp = Stamp::at(&path).ok();
                stamps.push(path, stamp);
            }
            let disks = manifest
                .disks
                .iter()
                .map(|d| self.open_disk(d, &by))
                .collect::<Result<Vec<_>, _>>()?;
            let pin = self.pins.pin(Pinned::of(&manifest, format!("a clone of {by}")));
            (dir, manifest, state, ram, working_set, disks, pin)
        };
        stamps.add(dir.path().join(STATE), &state)?;
        self.verify(&dir, STATE, &state, &manifest.state, Kind::Plain)?;
        match &working_set {
            Some(record) => {
                let path = dir.path().join(WORKING_SET);
                stamps.add(path.clone(), record)?;
                self.verifier.check_sealed(&path, record, MAX_WORKING_SET_BYTES)?;
            }
            None => stamps.push(dir.path().join(WORKING_SET), None),
        }
        let mut open = Vec::with_capacity(disks.len());
        let root = |digest: &Digest| manifest.trees.get(digest).copied();
        for (disk, base, mut layers) in disks {
            for (dir, l) in &mut layers {
                for (file, open) in [(DATA, &l.data), (MAP, &l.map)] {
                    stamps.add_of_layer(dir.path().join(file), open)?;
                }
                self.verify(dir, MAP, &l.map, &l.layer.map, Kind::Plain)?;
                let (of, root) = (&l.layer.data, root(&l.layer.data.digest));
                l.tree = self.verify_disk(dir, DATA, &l.data, of, root)?;
            }
            let image = self.images.path().join(disk.image.name.as_str());
            stamps.add(image.join(DISK), &base)?;
            let tree = self.verify_base(&disk, &base, root(&disk.image.digest))?;
            let layers = layers.into_iter().map(|(_, l)| l).collect();
            let DiskRef { image, size_bytes, writable, .. } = disk;
            open.push(OpenDisk { image, base, tree, size_bytes, writable, layers });
        }
        if let Ram::File(memory) = &ram {
            stamps.add(dir.path().join(MEMORY), memory)?;
            self.verify(&dir, MEMORY, memory, &manifest.memory, Kind::Sparse)?;
        }
        let (disks, files) = (open, stamps.0);
        Ok(Parts { manifest, state, ram, working_set, disks, pin, files })
    }

    fn open_disk(&self, disk: &DiskRef, by: &str) -> Result<RawDisk, OpenError> {
        self.image_is(&disk.image, by)?;
        let base = needed(&self.images.sub(disk.image.name.as_str())?, DISK, by)?;
        let mut layers = Vec::with_capacity(disk.layers.len());
        for &layer in &disk.layers {
            let (dir, data, map) = self.open_layer_files(layer.id, by)?;
            layers.push((dir, OpenLayer { layer, data, map, tree: None }));
        }
        Ok((disk.clone(), base, layers))
    }

    /// Verifies an image's disk, and returns its tree. The size comes from the image's manifest;
    /// its digest must equal the snapshot's.
    fn verify_base(
        &self,
        disk: &DiskRef,
        base: &File,
        root: Option<Digest>,
    ) -> Result<Option<FileTree>, OpenError> {
        let dir = self.images.sub(disk.image.name.as_str())?;
        let image: crate::ImageManifest = manifest::read(&dir)?;
        if image.disk.digest != disk.image.digest {
            let (expected, got) = (disk.image.digest.to_string(), image.disk.digest.to_string());
            let place = "digest of the disk in the manifest".to_owned();
            return Err(Damage::Content {
                file: self.image_path(&disk.image.name),
                place,
                expected,
                got,
            }
            .into());
        }
        Ok(self.verify_disk(&dir, DISK, base, &image.disk, root)?)
    }
}
