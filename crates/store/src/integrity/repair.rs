//! Repairs a tenant's store: writes damaged pages anew from elsewhere, makes damaged hash trees
//! again, removes damaged packs and caches that nothing needs, and names what is lost.
//!
//! A page can be had from a block of an image or a stored layer, if the block index of that file
//! has its hash, and from a second copy of its pack that the disk reads again. Nothing else is
//! rebuilt: an image comes back by its upload, and each other page by the next put that has it.

use crate::blob::Dir;
use crate::errors::IoError;
use crate::inner::{Inner, Store};
use crate::integrity::scrub::{Finding, Object, Scope, SearchError};
use crate::integrity::verify::Kind;
use crate::memory::BLOCKS;
use crate::meter::Meter;
use crate::objects::images::DISK;
use crate::objects::manifest::{self, ImageManifest, SnapshotManifest};
use crate::objects::tree::TREE;
use crate::objects::types::{DATA, FileRef};
use crate::pages::gc::{GcPagesError, GcPagesReport};
use crate::pages::pack::PAGE;
use crate::pages::space::Space;
use crate::pages::{Lease, PagesError};
use dayfly_units::{Digest, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// What a repair did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// Damaged pages that were written anew.
    pub healed_pages: u64,
    /// Damaged block indexes that were removed. The next bake of their image makes them again.
    pub block_indexes: u64,
    /// Damaged hash trees of disk files that were made again.
    pub hash_trees: u64,
    /// What the gc after it removed.
    pub gc: GcPagesReport,
    /// Snapshots that cannot be cloned any more.
    pub lost: Vec<LostSnapshot>,
    /// Damage that no snapshot needs, or that is not of a snapshot.
    pub damage: Vec<Finding>,
}

/// A snapshot that cannot be cloned, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostSnapshot {
    /// The snapshot's name.
    pub name: String,
    /// Its pages that no pack has.
    pub pages: u64,
    /// File, place, expected value and value found of each thing that it needs, at most 100.
    pub causes: Vec<String>,
}

/// The most causes that are listed for a snapshot.
const MAX_CAUSES: usize = 100;

/// Why a repair stopped. What it did before stays.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The damage was not found out.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// The unused packs were not removed.
    #[error(transparent)]
    Gc(Box<GcPagesError>),
    /// The pages were not written.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// The host could not read or write.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl From<GcPagesError> for RepairError {
    fn from(e: GcPagesError) -> Self {
        Self::Gc(Box::new(e))
    }
}

impl Store {
    /// Verifies everything that `tenant` sees, and repairs what can be repaired. A second call
    /// finds what is left.
    ///
    /// # Errors
    /// [`RepairError`].
    pub fn repair(&self, tenant: &Name, meter: &Meter) -> Result<RepairReport, RepairError> {
        let inner = &self.0;
        inner.writable()?;
        let scope = Scope::Tenant { tenant: tenant.clone(), snapshots: Vec::new() };
        let before = self.verify(&scope, meter)?;
        let mut report = RepairReport::default();
        for index in before.damage.iter().filter(|found| found.object == Object::BlockIndex) {
            inner.root.sub(BLOCKS)?.unlink(&index.name)?;
            report.block_indexes += 1;
        }
        for tree in before.damage.iter().filter(|found| found.object == Object::HashTree) {
            report.hash_trees += u64::from(inner.mend_tree(&tree.name)?);
        }
        let space = inner.space(tenant)?;
        // The lease keeps the new pages until the gc has marked the tables that name them.
        let (healed, _lease) = inner.heal(&space, meter)?;
        report.healed_pages = healed;
        report.gc = self.gc_pages_of(tenant, &BTreeSet::new(), meter).or_else(tolerated)?;
        let after = self.verify(&scope, meter)?;
        let mut lost: BTreeMap<String, LostSnapshot> = BTreeMap::new();
        for finding in after.damage {
            match finding.object {
                Object::Snapshot => lose(&mut lost, &finding.name, &finding.text),
                _ if finding.snapshots.is_empty() => report.damage.push(finding),
                _ => {
                    finding.snapshots.iter().for_each(|name| lose(&mut lost, name, &finding.text));
                }
            }
        }
        for (snapshot, hashes) in inner.lost_pages(&space)? {
            if let Some(lost) = lost.get_mut(&snapshot) {
                lost.pages = hashes.len() as u64;
            }
        }
        report.lost = lost.into_values().collect();
        Ok(report)
    }
}

/// A gc that is stopped by a damaged snapshot is no failure of the repair, which reports the
/// snapshot.
fn tolerated(e: GcPagesError) -> Result<GcPagesReport, GcPagesError> {
    match e {
        GcPagesError::Unreadable { .. } | GcPagesError::Version { .. } => {
            Ok(GcPagesReport::default())
        }
        e => Err(e),
    }
}

fn lose(lost: &mut BTreeMap<String, LostSnapshot>, name: &str, cause: &str) {
    let lost = lost.entry(name.to_owned()).or_insert_with(|| {
        let (name, pages, causes) = (name.to_owned(), 0, Vec::new());
        LostSnapshot { name, pages, causes }
    });
    if lost.causes.len() < MAX_CAUSES {
        lost.causes.push(cause.to_owned());
    }
}

impl Inner {
    /// For each snapshot of the tenant whose table can be read, its pages that no pack has.
    fn lost_pages(&self, space: &Space) -> Result<BTreeMap<String, Vec<Digest>>, IoError> {
        let mut lost = BTreeMap::new();
        for name in self.snapshots.entries()? {
            let table = self.snapshots.sub(&name).ok().and_then(|dir| self.table_in(&dir).ok());
            let Some(table) = table.flatten().filter(|table| table.tenant == space.tenant) else {
                continue;
            };
            let mut missing = Vec::new();
            for hash in table.hashes() {
                if space.find(hash)?.is_none() {
                    missing.push(*hash);
                }
            }
            if !missing.is_empty() {
                lost.insert(name, missing);
            }
        }
        Ok(lost)
    }

    /// Makes the hash tree of the disk file in `folder` again. Returns whether there is one now.
    fn mend_tree(&self, folder: &str) -> Result<bool, IoError> {
        let file = self.disk_files()?.into_iter().find(|file| file.dir.path().ends_with(folder));
        let Some(DiskFile { dir, name, expected }) = file else { return Ok(false) };
        if dir.has(TREE)? {
            dir.unlink(TREE)?;
        }
        self.verifier.forget(dir.path());
        let Ok(file) = dir.open(name) else { return Ok(false) };
        // A damaged file gets no tree; the second verification reports the file.
        Ok(matches!(self.verify_disk(&dir, name, &file, &expected, None), Ok(Some(_))))
    }

    /// Writes lost pages anew that can be had from elsewhere. Returns their number.
    fn heal(
        self: &Arc<Self>,
        space: &Space,
        meter: &Meter,
    ) -> Result<(u64, Option<Lease>), RepairError> {
        let lost = self.lost_pages(space)?.into_values().flatten().collect();
        self.heal_pages(space, lost, meter)
    }

    fn heal_pages(
        self: &Arc<Self>,
        space: &Space,
        lost: BTreeSet<Digest>,
        meter: &Meter,
    ) -> Result<(u64, Option<Lease>), RepairError> {
        if lost.is_empty() {
            return Ok((0, None));
        }
        meter.begin("looking for lost pages on disks", 0);
        // In a file, because all pages of a store may be lost.
        let stage = self.stage()?;
        let (file, path) = (stage.create("pages")?, stage.path().join("pages"));
        let mut found = Found { file, path, hashes: Vec::new() };
        let mut missing = Vec::new();
        for hash in lost {
            match space.fetch(&hash) {
                Ok(page) => found.add(hash, &page)?,
                Err(_) => missing.push(hash),
            }
        }
        for DiskFile { dir, name, expected } in self.disk_files()? {
            if missing.is_empty() {
                break;
            }
            let Ok(file) = dir.open(name) else { continue };
            // A damaged file has no index.
            if self.verify(&dir, name, &file, &expected, Kind::Sparse).is_err() {
                continue;
            }
            let Ok(index) = self.block_index(&expected.digest, &file, meter) else { continue };
            let mut page = vec![0; PAGE];
            for hash in std::mem::take(&mut missing) {
                let at = index.find(&hash).map(|block| u64::from(block) * PAGE as u64);
                let read = at.is_some_and(|at| file.read_exact_at(&mut page, at).is_ok());
                if read && Digest::of(&page) == hash {
                    found.add(hash, &page)?;
                } else {
                    missing.push(hash);
                }
            }
        }
        if found.hashes.is_empty() {
            return Ok((0, None));
        }
        let pages = (0..).zip(found.hashes);
        let (stats, lease) = space.store(self, &found.file, pages, None, meter)?;
        Ok((stats.new_pages, Some(lease)))
    }

    /// The files of images and of the layers of readable snapshots.
    fn disk_files(&self) -> Result<Vec<DiskFile>, IoError> {
        let mut files = BTreeMap::new();
        for image in manifest::list::<ImageManifest>(&self.images)?.items {
            let dir = self.images.sub(image.name.as_str());
            let of = |dir| DiskFile { dir, name: DISK, expected: image.disk };
            files.extend(dir.ok().map(|dir| (dir.path().to_owned(), of(dir))));
        }
        for snapshot in manifest::list::<SnapshotManifest>(&self.snapshots)?.items {
            for layer in snapshot.disks.iter().flat_map(|disk| &disk.layers) {
                let dir = self.layers.sub(&layer.id.to_string());
                let of = |dir| DiskFile { dir, name: DATA, expected: layer.data };
                files.extend(dir.ok().map(|dir| (dir.path().to_owned(), of(dir))));
            }
        }
        Ok(files.into_values().collect())
    }
}

/// Pages that were found elsewhere, one after the other in a file.
struct Found {
    file: File,
    path: PathBuf,
    hashes: Vec<Digest>,
}

impl Found {
    fn add(&mut self, hash: Digest, page: &[u8]) -> Result<(), IoError> {
        self.file.write_all(page).map_err(IoError::new("writing", &self.path))?;
        self.hashes.push(hash);
        Ok(())
    }
}

/// A file that may have pages, not verified yet.
struct DiskFile {
    dir: Dir,
    name: &'static str,
    expected: FileRef,
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;
