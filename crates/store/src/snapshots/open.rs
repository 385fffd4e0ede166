//! Opening a snapshot to clone from it: everything verified, everything open, everything pinned.

use super::ram::Resident;
use super::{MAX_WORKING_SET_BYTES, MEMORY, STATE, TABLE, WORKING_SET};
use crate::digest::Digest;
use crate::errors::{Damage, IoError};
use crate::layers::{LayerId, LayerRef};
use crate::manifest::{self, DiskRef, ImageRef, Listing, SnapshotManifest};
use crate::memory::Table;
use crate::pages::Lease;
use crate::pins::{Pin, Pinned};
use crate::publish::{OpenError, RemoveError, folder, needed};
use crate::verify::{Kind, Stamp};
use crate::{Inner, Store};
use dayfly_units::Name;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A snapshot, verified and open. Every descriptor is read-only.
#[derive(Debug)]
pub struct OpenSnapshot {
    /// What it is.
    pub manifest: SnapshotManifest,
    /// The sealed state.
    pub state: File,
    /// RAM, sparse.
    pub memory: File,
    /// The sealed record of the pages that clones touch first, if there is one.
    pub working_set: Option<File>,
    /// In order vda, vdb, ….
    pub disks: Vec<OpenDisk>,
    /// Of the identities and times of all its files: another one means that a file was replaced or changed since.
    pub fingerprint: Digest,
    /// Keeps its images and layers in the store; a clone holds it, or a clone of it, as long as it lives.
    pub pin: Pin,
    /// What was verified, and where.
    files: Vec<Seen>,
    /// Nobody else has `memory`: it is what it was verified to be as long as it is open.
    own_memory: bool,
}

impl OpenSnapshot {
    /// One that is not in the store yet.
    pub(super) fn unpublished(
        manifest: SnapshotManifest,
        state: File,
        memory: File,
        disks: Vec<OpenDisk>,
        pin: Pin,
    ) -> Self {
        let (working_set, files, own_memory) = (None, Vec::new(), false);
        let fingerprint = fingerprint(&files);
        Self { manifest, state, memory, working_set, disks, fingerprint, pin, files, own_memory }
    }

    /// Its RAM, to open the snapshot once more when another file of it has changed.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn resident(&self) -> std::io::Result<Option<Resident>> {
        let resident = || Ok(Resident { file: self.memory.try_clone()?, ram: self.manifest.memory });
        self.own_memory.then(resident).transpose()
    }

    /// Whether every file that was looked at is still where it was, and unchanged: what is open is then what would be opened now.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.files.iter().all(|(path, seen)| match Stamp::at(path) {
            Ok(now) => *seen == Some(now),
            Err(e) => e.kind() == ErrorKind::NotFound && seen.is_none(),
        })
    }
}

/// A path, and what was there, if anything was.
type Seen = (PathBuf, Option<Stamp>);

/// A disk of an open snapshot.
#[derive(Debug)]
pub struct OpenDisk {
    /// Of which image.
    pub image: ImageRef,
    /// The raw image.
    pub base: File,
    /// The size that the guest sees.
    pub size_bytes: u64,
    /// Whether a clone gets a writable layer for it.
    pub writable: bool,
    /// Frozen layers, the lowest first.
    pub layers: Vec<OpenLayer>,
}

/// A frozen layer of an open snapshot.
#[derive(Debug)]
pub struct OpenLayer {
    /// Which.
    pub layer: LayerRef,
    /// Its blocks, sparse.
    pub data: File,
    /// Its sealed map.
    pub map: File,
}

/// How much disk something takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sizes {
    /// The lengths of its files.
    pub apparent_bytes: u64,
    /// The blocks of its files.
    pub allocated_bytes: u64,
}

impl Store {
    /// Opens the snapshot `name`: its manifest's seal, the presence of its images and layers, the size and the content of every file are verified, the
    /// content once per process and change (`verify.rs`). Who opens it at once with others waits for one verification.
    ///
    /// # Errors
    /// [`OpenError`]: `Damage` names the file, the place, what was expected and what was got.
    pub fn open_snapshot(&self, name: &Name) -> Result<OpenSnapshot, OpenError> {
        self.0.open_snapshot(name, None)
    }

    /// As [`Self::open_snapshot`], but its RAM is not read from the store where `resident` is the same: nothing then is read or written but
    /// the small files.
    ///
    /// # Errors
    /// As [`Self::open_snapshot`].
    pub fn open_resident(&self, name: &Name, resident: Resident) -> Result<OpenSnapshot, OpenError> {
        self.0.open_snapshot(name, Some(resident))
    }

    /// The manifest of the snapshot `name`, without a look at the other files.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn snapshot(&self, name: &Name) -> Result<SnapshotManifest, OpenError> {
        Ok(manifest::read(&folder(&self.0.snapshots, "snapshot", name)?)?)
    }

    /// Every snapshot.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn snapshots(&self) -> Result<Listing<SnapshotManifest>, IoError> {
        manifest::list(&self.0.snapshots)
    }

    /// Removes the snapshot `name`, which may be damaged. Its layers stay until [`Store::gc`]; clones of it run on.
    ///
    /// # Errors
    /// [`RemoveError`].
    pub fn remove_snapshot(&self, name: &Name) -> Result<(), RemoveError> {
        let _publishing = self.0.publishing();
        if self.0.retire(&self.0.snapshots, name.as_str())? {
            Ok(())
        } else {
            Err(RemoveError::NotFound { kind: "snapshot", name: name.clone() })
        }
    }

    /// What the snapshot `name` takes on disk: (its own files, the layers it stands on, which others may share).
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
            own.add(&needed(&dir, file, &by)?).map_err(IoError::new("looking at", &dir.path().join(file)))?;
        }
        let mut layers = Sizes::default();
        for layer in manifest.disks.iter().flat_map(|d| &d.layers) {
            let (dir, data, map) = self.0.open_layer_files(layer.id, &by)?;
            layers
                .add(&data)
                .and_then(|()| layers.add(&map))
                .map_err(IoError::new("looking at", dir.path()))?;
        }
        Ok((own, layers))
    }
}

fn fingerprint(files: &[Seen]) -> Digest {
    let stamps: Vec<String> = files.iter().map(|(_, stamp)| format!("{stamp:?}")).collect();
    Digest::of(stamps.join("\n").as_bytes())
}

/// The files that are open, and the manifests that say what they are, with their stamps.
struct Stamps(Vec<Seen>);

impl Stamps {
    fn add(&mut self, path: PathBuf, file: &File) -> Result<(), IoError> {
        let stamp = Stamp::of(file).map_err(IoError::new("looking at", &path))?;
        self.0.push((path, Some(stamp)));
        Ok(())
    }

    fn add_at(&mut self, path: PathBuf) -> Result<(), IoError> {
        let stamp = Stamp::at(&path).map_err(IoError::new("looking at", &path))?;
        self.0.push((path, Some(stamp)));
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

/// A disk whose files are open but not verified.
type RawDisk = (DiskRef, File, Vec<(crate::blob::Dir, OpenLayer)>);

/// A snapshot's RAM: a file, or a table and the lease of its pages.
pub(super) enum Ram {
    File(File),
    Table(Box<Table>, Lease),
}

/// A snapshot that is open but for its RAM, where that is in pages.
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
    /// The snapshot, with what RAM is in.
    pub(super) fn with(self, memory: File) -> OpenSnapshot {
        let Self { manifest, state, ram, working_set, disks, pin, files } = self;
        let (fingerprint, own_memory) = (fingerprint(&files), matches!(ram, Ram::Table(..)));
        OpenSnapshot { manifest, state, memory, working_set, disks, fingerprint, pin, files, own_memory }
    }
}

impl Inner {
    pub(crate) fn open_snapshot(
        self: &Arc<Self>,
        name: &Name,
        resident: Option<Resident>,
    ) -> Result<OpenSnapshot, OpenError> {
        let parts = self.open_snapshot_parts(name)?;
        let memory = match (&parts.ram, resident) {
            (Ram::File(memory), _) => {
                memory.try_clone().map_err(IoError::new("opening", Path::new(MEMORY)))?
            }
            (Ram::Table(table, _lease), Some(known)) if known.ram == table.ram => known.file,
            (Ram::Table(table, _lease), _) => self.materialised(table, &parts.disks)?,
        };
        Ok(parts.with(memory))
    }

    pub(crate) fn open_snapshot_parts(self: &Arc<Self>, name: &Name) -> Result<Parts, OpenError> {
        let by = format!("snapshot {name}");
        // Under the lock everything is opened and pinned; the hashing, which takes long the first time, needs the descriptors only.
        let mut stamps = Stamps(Vec::new());
        let (dir, manifest, state, ram, working_set, disks, pin) = {
            let _publishing = self.publishing();
            let dir = folder(&self.snapshots, "snapshot", name)?;
            // Each before it is read: what is changed meanwhile then has another.
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
            let working_set = if dir.has(WORKING_SET)? { Some(dir.open(WORKING_SET)?) } else { None };
            for disk in &manifest.disks {
                // What is missing is told apart where it is opened.
                let path = self.images.path().join(disk.image.name.as_str()).join(manifest::FILE);
                let stamp = Stamp::at(&path).ok();
                stamps.0.push((path, stamp));
            }
            let disks =
                manifest.disks.iter().map(|d| self.open_disk(d, &by)).collect::<Result<Vec<_>, _>>()?;
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
            None => stamps.0.push((dir.path().join(WORKING_SET), None)),
        }
        let mut open = Vec::with_capacity(disks.len());
        for (disk, base, layers) in disks {
            for (dir, l) in &layers {
                for (file, open) in [(crate::layers::DATA, &l.data), (crate::layers::MAP, &l.map)] {
                    stamps.add(dir.path().join(file), open)?;
                }
                self.verify_layer(dir, &l.layer, &l.data, &l.map)?;
            }
            let image = self.images.path().join(disk.image.name.as_str());
            stamps.add(image.join("disk"), &base)?;
            self.verify_base(&disk, &base)?;
            let layers = layers.into_iter().map(|(_, l)| l).collect();
            let DiskRef { image, size_bytes, writable, .. } = disk;
            open.push(OpenDisk { image, base, size_bytes, writable, layers });
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
        let base = needed(&self.images.sub(disk.image.name.as_str())?, "disk", by)?;
        let mut layers = Vec::with_capacity(disk.layers.len());
        for &layer in &disk.layers {
            let (dir, data, map) = self.open_layer_files(layer.id, by)?;
            layers.push((dir, OpenLayer { layer, data, map }));
        }
        Ok((disk.clone(), base, layers))
    }

    /// The image's own manifest has its size; the snapshot's has its digest, and both digests were compared.
    fn verify_base(&self, disk: &DiskRef, base: &File) -> Result<(), OpenError> {
        let dir = self.images.sub(disk.image.name.as_str())?;
        let image: crate::ImageManifest = manifest::read(&dir)?;
        if image.disk.digest != disk.image.digest {
            let (expected, got) = (disk.image.digest.to_string(), image.disk.digest.to_string());
            let place = "digest of the disk in the manifest".to_owned();
            return Err(
                Damage::Content { file: self.image_path(&disk.image.name), place, expected, got }.into()
            );
        }
        Ok(self.verify(&dir, "disk", base, &image.disk, Kind::Sparse)?)
    }
}

impl SnapshotManifest {
    /// The images it stands on, once each.
    #[must_use]
    pub fn images(&self) -> Vec<ImageRef> {
        let by_name: BTreeMap<_, _> = self.disks.iter().map(|d| (&d.image.name, &d.image)).collect();
        by_name.into_values().cloned().collect()
    }

    /// The layers it stands on, disk by disk, the lowest first.
    #[must_use]
    pub fn layer_ids(&self) -> Vec<LayerId> {
        self.disks.iter().flat_map(|d| &d.layers).map(|l| l.id).collect()
    }
}
