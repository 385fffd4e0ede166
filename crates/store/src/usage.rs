//! What is stored, and what each snapshot takes of it: from manifests, tables and the indexes in memory. No RAM is materialised and no
//! page is read.

use crate::blob::Dir;
use crate::errors::{IoError, told};
use crate::gc::allocated_below;
use crate::layers::{DATA, LayerId, MAP};
use crate::manifest::{self, SnapshotManifest};
use crate::memory::{BLOCKS, Kind, Table};
use crate::pages::index::prefix;
use crate::pages::report::PagesStats;
use crate::publish::OpenError;
use crate::{Store, refs};
use dayfly_units::{Name, PAGE_SIZE};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How many of something there are, and how much they take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// How many.
    pub count: u64,
    /// The lengths of their files, holes included.
    pub apparent_bytes: u64,
    /// Bytes of disk they take.
    pub disk_bytes: u64,
}

/// The frames of RAM by what they are. A frame has 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Frames {
    /// Zeroes.
    pub zero: u64,
    /// Not used by the guest.
    pub free: u64,
    /// Blocks of the snapshot's own disks.
    pub disk: u64,
    /// Pages that another snapshot of the tenant has too.
    pub shared: u64,
    /// Pages that only this snapshot has.
    pub own: u64,
}

/// What a snapshot takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotUse {
    /// Which.
    pub name: Name,
    /// RAM of its clones.
    pub memory_bytes: u64,
    /// What its frames are. RAM in a file of its own counts as zero and own.
    pub frames: Frames,
    /// Different pages that another snapshot of the tenant has too.
    pub shared_pages: u64,
    /// Different pages that only this snapshot has.
    pub own_pages: u64,
    /// Compressed bytes of `own_pages`: of each its share of the group that it was compressed with. A gc gives them back with the packs
    /// that they are in: at once where most of a pack is not needed, else when it is.
    pub own_page_bytes: u64,
    /// Bytes of disk of the layers that it stands on.
    pub layers: Counted,
    /// Bytes of disk of those of them that no other snapshot stands on. They go when no VM does either.
    pub own_layer_bytes: u64,
    /// Bytes of disk of its own files: manifest, state, table, working set; RAM where that is a file.
    pub own_file_bytes: u64,
}

impl SnapshotUse {
    /// Bytes that only this snapshot keeps in the store.
    #[must_use]
    pub const fn own_bytes(&self) -> u64 {
        self.own_page_bytes.saturating_add(self.own_layer_bytes).saturating_add(self.own_file_bytes)
    }
}

/// Names of snapshots that cannot be read, and why.
pub type Unreadable = Vec<(String, String)>;

/// What the snapshots of a tenant take.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// By name.
    pub snapshots: Vec<SnapshotUse>,
    /// Snapshots that cannot be read, and why. What they share with others counts as those others' own.
    pub unreadable: Unreadable,
}

/// What a tenant sees of the store.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StoreStats {
    /// Root disks.
    pub images: Counted,
    /// Kernels with their initramfs.
    pub kernels: Counted,
    /// Frozen layers: those that the tenant's snapshots stand on, and those that none does.
    pub layers: Counted,
    /// Snapshots, without layers and pages.
    pub snapshots: Counted,
    /// Indexes of disks' blocks.
    pub block_indexes: Counted,
    /// Pages and packs.
    pub pages: PagesStats,
    /// The frames of all snapshots.
    pub frames: Frames,
    /// Snapshots that cannot be read; they are in no other figure.
    pub unreadable: u64,
}

/// A snapshot that could be read.
struct Known {
    manifest: SnapshotManifest,
    table: Option<Table>,
}

impl Store {
    /// What each snapshot of `tenant` takes.
    ///
    /// # Errors
    /// A folder cannot be listed. What cannot be read of a snapshot is in the answer.
    pub fn usage(&self, tenant: &Name) -> Result<Usage, IoError> {
        let (known, unreadable) = self.known(tenant)?;
        let users = self.users(&known)?;
        let space = self.0.space(tenant)?;
        let mut snapshots = Vec::with_capacity(known.len());
        for (Known { manifest, table }, pages) in known.iter().zip(shared_pages(&known)) {
            let mut used = SnapshotUse {
                name: manifest.name.clone(),
                memory_bytes: manifest.memory_bytes,
                frames: frames(manifest, table.as_ref(), &pages),
                shared_pages: pages.iter().filter(|shared| **shared).count() as u64,
                own_pages: pages.iter().filter(|shared| !**shared).count() as u64,
                own_page_bytes: 0,
                layers: Counted::default(),
                own_layer_bytes: 0,
                own_file_bytes: allocated_below(&self.0.snapshots, manifest.name.as_str()),
            };
            let hashes = table.iter().flat_map(|table| table.hashes()).zip(&pages);
            for (hash, _) in hashes.filter(|(_, shared)| !**shared) {
                let Some((place, pack)) = space.guess(hash) else { continue };
                let group = (place.page / pack.group_pages) as usize;
                let span = pack.span(group, group);
                used.own_page_bytes += (span.end - span.start) / (pack.pages_of(group).len() as u64).max(1);
            }
            for id in manifest.layer_ids().into_iter().collect::<BTreeSet<_>>() {
                let counted = self.0.layer_counted(id);
                used.layers.add(counted);
                if users.get(&id).is_none_or(|users| users.len() <= 1) {
                    used.own_layer_bytes += counted.disk_bytes;
                }
            }
            snapshots.push(used);
        }
        Ok(Usage { snapshots, unreadable })
    }

    /// The store in numbers, as `tenant` sees it.
    ///
    /// # Errors
    /// A folder cannot be listed.
    pub fn stats(&self, tenant: &Name) -> Result<StoreStats, IoError> {
        let inner = &self.0;
        let (known, unreadable) = self.known(tenant)?;
        let mut stats = StoreStats { unreadable: unreadable.len() as u64, ..StoreStats::default() };
        for (Known { manifest, table }, pages) in known.iter().zip(shared_pages(&known)) {
            stats.frames.add(frames(manifest, table.as_ref(), &pages));
            stats.snapshots.add(inner.folder_counted(&inner.snapshots, manifest.name.as_str())?);
        }
        for name in inner.images.entries()? {
            stats.images.add(inner.folder_counted(&inner.images, &name)?);
        }
        for name in inner.kernels.entries()? {
            stats.kernels.add(inner.folder_counted(&inner.kernels, &name)?);
        }
        let ours: BTreeSet<LayerId> = known.iter().flat_map(|k| k.manifest.layer_ids()).collect();
        let all = refs::layer_users(&manifest::list(&inner.snapshots)?.items);
        let present = inner.layers.entries()?.into_iter().filter_map(|name| name.parse().ok());
        for id in present.filter(|id| ours.contains(id) || !all.contains_key(id)) {
            stats.layers.add(inner.layer_counted(id));
        }
        if inner.root.has(BLOCKS)? {
            let dir = inner.root.sub(BLOCKS)?;
            dir.entries()?
                .iter()
                .for_each(|name| stats.block_indexes.add(file_counted(&dir.path().join(name))));
        }
        let tables = known.iter().filter_map(|k| k.table.as_ref());
        stats.pages = inner.space(tenant)?.stats(tables);
        Ok(stats)
    }

    /// The snapshots of `tenant`, and what could not be read. A snapshot without a table is everybody's.
    fn known(&self, tenant: &Name) -> Result<(Vec<Known>, Unreadable), IoError> {
        let snapshots = &self.0.snapshots;
        let (mut known, mut unreadable) = (Vec::new(), Vec::new());
        for name in snapshots.entries()? {
            let read = || -> Result<Known, OpenError> {
                let dir = snapshots.sub(&name)?;
                let table = self.0.table_in(&dir)?;
                Ok(Known { manifest: manifest::read(&dir)?, table })
            };
            match read() {
                Ok(Known { table: Some(table), .. }) if table.tenant != *tenant => {}
                Ok(snapshot) => known.push(snapshot),
                // Removed since it was listed.
                Err(_) if !snapshots.has(&name)? => {}
                Err(OpenError::Io(e)) => unreadable.push((name, told(&e))),
                Err(e) => unreadable.push((name, e.to_string())),
            }
        }
        Ok((known, unreadable))
    }

    /// How many snapshots stand on each layer of these, other tenants' and those whose tables cannot be read included.
    fn users(&self, known: &[Known]) -> Result<BTreeMap<LayerId, BTreeSet<Name>>, IoError> {
        let mut users = refs::layer_users(&manifest::list(&self.0.snapshots)?.items);
        let needed: BTreeSet<LayerId> = known.iter().flat_map(|k| k.manifest.layer_ids()).collect();
        users.retain(|id, _| needed.contains(id));
        Ok(users)
    }
}

/// For every snapshot, of each hash of its table whether another's has it too. By the hashes' first bytes, as a gc tells them apart.
fn shared_pages(known: &[Known]) -> Vec<Vec<bool>> {
    let hashes = |k: &Known| k.table.iter().flat_map(|t| t.hashes()).map(prefix).collect::<Vec<u64>>();
    // Each once for each snapshot, as a table has each hash once.
    let mut all: Vec<u64> = known.iter().flat_map(hashes).collect();
    all.sort_unstable();
    let times = |hash: u64| {
        let first = all.partition_point(|&other| other < hash);
        all.get(first..).unwrap_or_default().iter().take(2).filter(|&&other| other == hash).count()
    };
    known.iter().map(|k| hashes(k).into_iter().map(|hash| times(hash) > 1).collect()).collect()
}

fn frames(manifest: &SnapshotManifest, table: Option<&Table>, shared: &[bool]) -> Frames {
    let Some(table) = table else {
        let own = manifest.memory.data_bytes.div_ceil(PAGE_SIZE);
        let zero = (manifest.memory.bytes / PAGE_SIZE).saturating_sub(own);
        return Frames { zero, own, ..Frames::default() };
    };
    let mut frames = Frames::default();
    for run in table.runs() {
        let count = u64::from(run.frames);
        match run.kind {
            Kind::Zero => frames.zero += count,
            Kind::Free => frames.free += count,
            Kind::Disk { .. } => frames.disk += count,
            Kind::Page { hash } => {
                let of_run = shared.iter().skip(hash as usize).take(run.frames as usize);
                let common = of_run.filter(|shared| **shared).count() as u64;
                frames.shared += common;
                frames.own += count - common;
            }
        }
    }
    frames
}

impl Frames {
    fn add(&mut self, other: Self) {
        let Self { zero, free, disk, shared, own } = other;
        self.zero += zero;
        self.free += free;
        self.disk += disk;
        self.shared += shared;
        self.own += own;
    }
}

impl Counted {
    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.apparent_bytes += other.apparent_bytes;
        self.disk_bytes += other.disk_bytes;
    }
}

/// One file; nothing where it is not there.
fn file_counted(path: &Path) -> Counted {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).map_or_else(
        |_| Counted::default(),
        |meta| Counted { count: 1, apparent_bytes: meta.len(), disk_bytes: meta.blocks() * 512 },
    )
}

impl crate::Inner {
    /// A folder of files, as one; nothing where it is gone, also if it goes while it is looked at: what is open then has no entries, and cannot be listed.
    fn folder_counted(&self, parent: &Dir, name: &str) -> Result<Counted, IoError> {
        let (folder, files) = match parent.sub(name).and_then(|folder| {
            let files = folder.entries()?;
            Ok((folder, files))
        }) {
            Err(e) if e.is_not_found() => return Ok(Counted::default()),
            other => other?,
        };
        let mut counted = Counted::default();
        files.iter().for_each(|file| counted.add(file_counted(&folder.path().join(file))));
        Ok(Counted { count: 1, ..counted })
    }

    fn layer_counted(&self, id: LayerId) -> Counted {
        let folder = self.layers.path().join(id.to_string());
        let mut counted = Counted::default();
        [DATA, MAP].into_iter().for_each(|file| counted.add(file_counted(&folder.join(file))));
        Counted { count: 1, ..counted }
    }
}

#[cfg(test)]
#[path = "usage_tests.rs"]
mod tests;
