//! Snapshots whose RAM is a table of pages (`table`) instead of a file (`memory`): committed,
//! opened, and read page by page.
//!
//! The manifest is the same. Its `memory` describes RAM; the table must describe the same RAM, and
//! refer to exactly the files of the manifest's disks. The table becomes visible with the one
//! rename of the snapshot's folder. Its pages are on disk before, and a lease keeps them until
//! then.

use super::error::CommitError;
use super::files::{MEMORY, TABLE};
use super::open::{OpenDisk, Ram};
use crate::blob::Dir;
use crate::errors::{Damage, IoError};
use crate::inner::{Inner, Store};
use crate::integrity::verify::VerifyError;
use crate::memory::table::MAX_BYTES;
use crate::memory::{DiskLayer, Kind, Known, Materialised, MemorySpec, RamWork, Table};
use crate::objects::manifest::{self, DiskRef, SnapshotManifest};
use crate::objects::tree::{CheckedFile, DiskFile, trouble};
use crate::objects::types::FileRef;
use crate::pages::{Lease, PagesError, Tenant};
use crate::publish::{OpenError, folder};
use crate::vms::pins::Pin;
use dayfly_units::sealed::HEADER_BYTES;
use dayfly_units::{Digest, Name, PAGE_SIZE};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

/// How RAM is committed as pages. The disks are those of the [`SnapshotSpec`](crate::SnapshotSpec).
#[derive(Debug, Clone, Copy)]
pub struct PagedSpec<'a> {
    /// The tenant whose namespace gets the pages.
    pub tenant: &'a Name,
    /// Optional knowledge about RAM.
    pub known: Known<'a>,
}

impl<'a> PagedSpec<'a> {
    /// A spec without knowledge about RAM.
    #[must_use]
    pub fn of(tenant: &'a Name) -> Self {
        Self { tenant, known: Known::default() }
    }
}

/// A snapshot's RAM, open for reading page by page.
#[derive(Debug)]
pub struct SnapshotPages {
    /// The snapshot's manifest.
    pub manifest: SnapshotManifest,
    /// The table of RAM.
    pub table: Table,
    /// The namespace of its pages.
    pub tenant: Tenant,
    /// Its disks, verified; the table's references lead to their files.
    pub disks: Vec<OpenDisk>,
    /// Keeps its images and layers in the store.
    pub pin: Pin,
    /// Keeps its pages in the store.
    pub lease: Lease,
}

impl SnapshotPages {
    /// Writes RAM to the empty file `to`; zero frames stay holes.
    ///
    /// # Errors
    /// As [`Tenant::materialise`].
    pub fn materialise(&self, to: &File) -> Result<Materialised, PagesError> {
        self.tenant.materialise(&self.table, &layers(&self.disks), to)
    }

    /// The 4096 bytes of one frame.
    ///
    /// # Errors
    /// `Invalid`: RAM has no such frame. Otherwise as [`Tenant::fetch`].
    pub fn frame(&self, frame: u32) -> Result<Vec<u8>, PagesError> {
        let invalid = |expected: String| PagesError::Invalid {
            place: "frame".to_owned(),
            expected,
            got: frame.to_string(),
        };
        let run = self
            .table
            .from_frame(frame)
            .ok_or_else(|| invalid(format!("below {}", self.table.frames())))?;
        match run.kind {
            Kind::Zero | Kind::Free => Ok(vec![0; 4096]),
            Kind::Page { hash } => self.tenant.fetch(&self.table.hashes()[hash as usize]),
            Kind::Disk { disk, layer, block } => {
                let open = self.disks.get(usize::from(disk)).and_then(|disk| disk.file(layer));
                let open = open.ok_or_else(|| invalid("of a disk of this snapshot".to_owned()))?;
                let path = self.tenant.space.dir.path();
                let failed = IoError::new("reading a disk for", path);
                let file = open.and_then(CheckedFile::new).map_err(failed)?;
                let mut bytes = vec![0; 4096];
                let read = file.read(u64::from(block) * PAGE_SIZE, &mut bytes);
                let name = format!("layer {layer} of disk {disk}");
                read.map_err(|error| trouble(path, &name, error))?;
                Ok(bytes)
            }
        }
    }
}

impl OpenDisk {
    /// Duplicates the descriptors of file `layer`, numbered as in tables. `None` if there is no
    /// such file.
    pub(super) fn file(&self, layer: u8) -> Option<std::io::Result<DiskFile>> {
        let (file, tree) = match usize::from(layer).checked_sub(1) {
            None => (&self.base, &self.tree),
            Some(n) => self.layers.get(n).map(|layer| (&layer.data, &layer.tree))?,
        };
        let open = || {
            let tree = tree.as_ref().map(|tree| tree.try_clone()).transpose()?;
            Ok(DiskFile { file: file.try_clone()?, tree })
        };
        Some(open())
    }
}

/// The files of open disks, numbered as in tables.
pub(super) fn layers(disks: &[OpenDisk]) -> Vec<Vec<DiskLayer<'_>>> {
    disks.iter().map(files_of).collect()
}

fn files_of(disk: &OpenDisk) -> Vec<DiskLayer<'_>> {
    let base = DiskLayer { file: &disk.base, digest: disk.image.digest };
    let frozen =
        disk.layers.iter().map(|l| DiskLayer { file: &l.data, digest: l.layer.data.digest });
    std::iter::once(base).chain(frozen).collect()
}

impl Store {
    /// Reads the manifest and the table of the snapshot `name` of `tenant`. Neither disks nor pages
    /// are read.
    ///
    /// # Errors
    /// As [`Self::open_snapshot_pages`].
    pub fn snapshot_table(
        &self,
        tenant: &Name,
        name: &Name,
    ) -> Result<(SnapshotManifest, Table), OpenError> {
        let _publishing = self.0.publishing();
        let dir = folder(&self.0.snapshots, "snapshot", name)?;
        let manifest: SnapshotManifest = manifest::read(&dir)?;
        match self.0.leased_table(&dir, &manifest)? {
            Some((table, _lease)) => Ok((manifest, owned(table, tenant, dir.path().join(TABLE))?)),
            None => Err(no_table(name, dir.path().join(TABLE)).into()),
        }
    }

    /// Opens the RAM of the snapshot `name` of `tenant`, pinned and leased. Table and disks are
    /// verified now, pages when they are read.
    ///
    /// # Errors
    /// [`OpenError`]: also `Damage` if the snapshot has no table, or the table is another tenant's.
    pub fn open_snapshot_pages(
        &self,
        tenant: &Name,
        name: &Name,
    ) -> Result<SnapshotPages, OpenError> {
        let opened = self.0.open_snapshot_parts(name)?;
        let path = self.0.snapshots.path().join(name.as_str()).join(TABLE);
        let Ram::Table(table, lease) = opened.ram else { return Err(no_table(name, path).into()) };
        let table = owned(*table, tenant, path)?;
        let tenant = Tenant { inner: Arc::clone(&self.0), space: self.0.space(tenant)? };
        let (manifest, disks, pin) = (opened.manifest, opened.disks, opened.pin);
        Ok(SnapshotPages { manifest, table, tenant, disks, pin, lease })
    }
}

fn no_table(name: &Name, file: PathBuf) -> Damage {
    let by = format!("snapshot {name}, read page by page,");
    Damage::Missing { file, what: "its table".to_owned(), by }
}

/// `table`, if it is of `tenant`; otherwise the damage.
fn owned(table: Table, tenant: &Name, file: PathBuf) -> Result<Table, Damage> {
    if table.tenant == *tenant {
        return Ok(table);
    }
    let (expected, got) = (tenant.to_string(), table.tenant.to_string());
    Err(Damage::Content { file, place: "tenant".to_owned(), expected, got })
}

impl Inner {
    /// Reads the table in a snapshot's folder; `None` if RAM is a file.
    pub(crate) fn table_in(&self, dir: &Dir) -> Result<Option<Table>, OpenError> {
        if !dir.has(TABLE)? {
            return Ok(None);
        }
        let path = dir.path().join(TABLE);
        let mut bytes = Vec::new();
        let file = dir.open(TABLE)?;
        let read = file.take(MAX_BYTES + HEADER_BYTES as u64 + 1).read_to_end(&mut bytes);
        read.map_err(IoError::new("reading", &path))?;
        Ok(Some(Table::decode(&path, &bytes)?))
    }

    /// The table of a snapshot, checked against its manifest, and a lease of its pages. The caller
    /// holds the publish lock, so the snapshot stays until the lease is taken.
    pub(super) fn leased_table(
        &self,
        dir: &Dir,
        manifest: &SnapshotManifest,
    ) -> Result<Option<(Table, Lease)>, OpenError> {
        let Some(table) = self.checked_table(dir, manifest)? else { return Ok(None) };
        let lease = self.space(&table.tenant)?.lease(table.hashes().iter());
        Ok(Some((table, lease)))
    }

    /// The table of a snapshot, which must have the same RAM and the same disks as its manifest;
    /// `None` if RAM is a file.
    pub(crate) fn checked_table(
        &self,
        dir: &Dir,
        manifest: &SnapshotManifest,
    ) -> Result<Option<Table>, OpenError> {
        let Some(table) = self.table_in(dir)? else { return Ok(None) };
        let wrong = |place: &str, expected: String, got: String| {
            let (file, place) = (dir.path().join(TABLE), place.to_owned());
            Damage::Content { file, place, expected, got }
        };
        if table.ram != manifest.memory {
            let (expected, got) = (format!("{:?}", manifest.memory), format!("{:?}", table.ram));
            return Err(wrong("RAM, as the manifest has it", expected, got).into());
        }
        let files = |disk: &DiskRef| {
            std::iter::once(disk.image.digest)
                .chain(disk.layers.iter().map(|l| l.data.digest))
                .collect()
        };
        let disks: Vec<Vec<Digest>> = manifest.disks.iter().map(files).collect();
        if table.disks != disks {
            let (expected, got) = (format!("{disks:?}"), format!("{:?}", table.disks));
            return Err(wrong("files of the disks, as the manifest has them", expected, got).into());
        }
        Ok(Some(table))
    }

    /// Writes RAM to an unnamed file.
    pub(super) fn materialised(
        self: &Arc<Self>,
        table: &Table,
        disks: &[OpenDisk],
    ) -> Result<File, OpenError> {
        let stage = self.stage()?;
        let file = stage.create(MEMORY)?;
        let tenant = Tenant { inner: Arc::clone(self), space: self.space(&table.tenant)? };
        match tenant.materialise(table, &layers(disks), &file) {
            // A second, read-only descriptor, like those of the other files.
            Ok(_) => Ok(stage.open(MEMORY)?),
            Err(PagesError::Io(e)) => Err(e.into()),
            Err(PagesError::Damage(d)) => Err(d.into()),
            Err(PagesError::Invalid { place, expected, got }) => {
                let file = self.space(&table.tenant)?.dir.path().to_owned();
                Err(Damage::Content { file, place, expected, got }.into())
            }
            // Only a put has another process.
            Err(PagesError::Work(e)) => {
                let path = self.space(&table.tenant)?.dir.path().to_owned();
                Err(IoError::new("reading pages of", &path)(std::io::Error::other(e)).into())
            }
        }
    }

    /// Puts the pages of saved RAM, by `work` if there is one, and writes the table into the staged
    /// folder in place of `memory`.
    pub(super) fn stage_table(
        self: &Arc<Self>,
        dir: &Dir,
        memory: &File,
        pages: &PagedSpec,
        disks: &[OpenDisk],
        work: Option<&mut dyn RamWork>,
    ) -> Result<(FileRef, Lease), CommitError> {
        let layers = layers(disks);
        let PagedSpec { tenant, known } = *pages;
        let spec = MemorySpec { memory, known, disks: &layers };
        let tenant = Tenant { inner: Arc::clone(self), space: self.space(tenant)? };
        let put = tenant.put_memory_by(&spec, work)?;
        if dir.has(MEMORY)? {
            dir.unlink(MEMORY)?;
        }
        dir.write(TABLE, &put.table.encode())?;
        Ok((put.table.ram, put.lease))
    }
}

impl From<PagesError> for CommitError {
    fn from(e: PagesError) -> Self {
        match e {
            PagesError::Invalid { place, expected, got } => Self::Invalid { place, expected, got },
            PagesError::Damage(d) => Self::Damage(d),
            PagesError::Io(e) => Self::Io(e),
            PagesError::Work(e) => Self::Work(e),
        }
    }
}

impl From<VerifyError> for PagesError {
    fn from(e: VerifyError) -> Self {
        match e {
            VerifyError::Io(e) => Self::Io(e),
            VerifyError::Damage(d) => Self::Damage(d),
        }
    }
}

impl From<OpenError> for CommitError {
    fn from(e: OpenError) -> Self {
        match e {
            OpenError::NotFound { kind, name } => Self::Damage(Damage::Missing {
                file: std::path::PathBuf::from(name.as_str()),
                what: format!("{kind} {name}"),
                by: "a snapshot in the making".to_owned(),
            }),
            OpenError::Damage(d) => Self::Damage(d),
            OpenError::Io(e) => Self::Io(e),
        }
    }
}
