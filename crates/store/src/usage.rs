//! What is stored, and how much of it each snapshot takes. The figures come from manifests, tables
//! and the indexes in memory; no RAM is materialised and no page is read.

use crate::blob::Dir;
use crate::errors::IoError;
use crate::gc::allocated_below;
use crate::inner::{Inner, Store};
use crate::memory::{BLOCKS, Kind, Table};
use crate::objects::manifest::{self, SnapshotManifest};
use crate::objects::refs;
use crate::objects::tree::TREE;
use crate::objects::types::{DATA, LayerId, MAP};
use crate::pages::index::prefix;
use crate::publish::OpenError;
use dayfly_units::error::chain;
use dayfly_units::{Counted, MemoryKinds, Name, PAGE_SIZE, StoreStats, Unreadable};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The space that one snapshot takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotUse {
    /// The snapshot's name.
    pub name: Name,
    /// RAM of a clone, in bytes.
    pub memory_bytes: u64,
    /// The kinds of its RAM. If RAM is a file, its frames count as zero or own.
    pub memory: MemoryKinds,
    /// Unique pages that another snapshot of the tenant also has.
    pub shared_pages: u64,
    /// Unique pages that only this snapshot has.
    pub own_pages: u64,
    /// Compressed bytes of `own_pages`: for each page its share of its group. A gc frees them with
    /// their pack: at once if most of the pack is unused, otherwise when it becomes so.
    pub own_page_bytes: u64,
    /// Size of the stored layers that the snapshot depends on.
    pub layers: Counted,
    /// Bytes of disk of the layers that no other snapshot depends on. A gc frees them when no VM
    /// depends on them either.
    pub own_layer_bytes: u64,
    /// Bytes of disk of the snapshot's own files: manifest, state, table, working set, and `memory`
    /// if RAM is a file.
    pub own_file_bytes: u64,
}

impl SnapshotUse {
    /// Bytes that only this snapshot keeps in the store.
    #[must_use]
    pub const fn own_bytes(&self) -> u64 {
        self.own_page_bytes.saturating_add(self.own_layer_bytes).saturating_add(self.own_file_bytes)
    }
}

/// The space that the snapshots of a tenant take.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Sorted by name.
    pub snapshots: Vec<SnapshotUse>,
    /// Unreadable snapshots, each with the cause. Pages and layers that only they share with
    /// another snapshot count as that snapshot's own.
    pub unreadable: Vec<Unreadable>,
}

/// A readable snapshot.
struct Known {
    manifest: SnapshotManifest,
    table: Option<Table>,
}

impl Store {
    /// The space that each snapshot of `tenant` takes.
    ///
    /// # Errors
    /// A folder cannot be listed. An unreadable snapshot is not an error: it is listed in the
    /// result.
    pub fn usage(&self, tenant: &Name) -> Result<Usage, IoError> {
        let (known, unreadable) = self.known(tenant)?;
        let users = self.users(&known)?;
        let space = self.0.space(tenant)?;
        let mut snapshots = Vec::with_capacity(known.len());
        for (Known { manifest, table }, pages) in known.iter().zip(shared_pages(&known)) {
            let mut used = SnapshotUse {
                name: manifest.name.clone(),
                memory_bytes: manifest.memory_bytes,
                memory: memory(manifest, table.as_ref(), &pages),
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
                used.own_page_bytes +=
                    (span.end - span.start) / (pack.pages_of(group).len() as u64).max(1);
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
            stats.memory.add(memory(manifest, table.as_ref(), &pages));
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
        stats.dedup_ratio = stats.pages.dedup_ratio();
        stats.compression_ratio = stats.pages.compression_ratio();
        Ok(stats)
    }

    /// The readable snapshots of `tenant`, and the unreadable ones. A snapshot without a table
    /// belongs to every tenant.
    fn known(&self, tenant: &Name) -> Result<(Vec<Known>, Vec<Unreadable>), IoError> {
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
                // The snapshot was removed after it was listed.
                Err(_) if !snapshots.has(&name)? => {}
                Err(OpenError::Io(e)) => unreadable.push(Unreadable { name, message: chain(&e) }),
                Err(e) => unreadable.push(Unreadable { name, message: e.to_string() }),
            }
        }
        Ok((known, unreadable))
    }

    /// The snapshots that depend on each layer of `known`, including snapshots of other tenants and
    /// those with unreadable tables.
    fn users(&self, known: &[Known]) -> Result<BTreeMap<LayerId, BTreeSet<Name>>, IoError> {
        let mut users = refs::layer_users(&manifest::list(&self.0.snapshots)?.items);
        let needed: BTreeSet<LayerId> = known.iter().flat_map(|k| k.manifest.layer_ids()).collect();
        users.retain(|id, _| needed.contains(id));
        Ok(users)
    }
}

/// For every snapshot and every hash of its table: whether another snapshot has the hash too.
/// Hashes are compared by their first 8 bytes, as in a gc.
fn shared_pages(known: &[Known]) -> Vec<Vec<bool>> {
    let hashes =
        |k: &Known| k.table.iter().flat_map(|t| t.hashes()).map(prefix).collect::<Vec<u64>>();
    // A table has each hash once, so a hash that occurs twice here is in two snapshots.
    let mut all: Vec<u64> = known.iter().flat_map(hashes).collect();
    all.sort_unstable();
    let times = |hash: u64| {
        let first = all.partition_point(|&other| other < hash);
        all.get(first..).unwrap_or_default().iter().take(2).filter(|&&other| other == hash).count()
    };
    known.iter().map(|k| hashes(k).into_iter().map(|hash| times(hash) > 1).collect()).collect()
}

fn memory(manifest: &SnapshotManifest, table: Option<&Table>, shared: &[bool]) -> MemoryKinds {
    let Some(table) = table else {
        let own_bytes = manifest.memory.data_bytes.div_ceil(PAGE_SIZE).saturating_mul(PAGE_SIZE);
        let zero_bytes = manifest.memory.bytes.saturating_sub(own_bytes);
        return MemoryKinds { zero_bytes, own_bytes, ..MemoryKinds::default() };
    };
    let mut memory = MemoryKinds::default();
    for run in table.runs() {
        let bytes = u64::from(run.frames) * PAGE_SIZE;
        match run.kind {
            Kind::Zero => memory.zero_bytes += bytes,
            Kind::Free => memory.free_bytes += bytes,
            Kind::Disk { .. } => memory.disk_bytes += bytes,
            Kind::Page { hash } => {
                let of_run = shared.iter().skip(hash as usize).take(run.frames as usize);
                let common = of_run.filter(|shared| **shared).count() as u64 * PAGE_SIZE;
                memory.shared_bytes += common;
                memory.own_bytes += bytes - common;
            }
        }
    }
    memory
}

/// Counts one file; zero if it does not exist.
fn file_counted(path: &Path) -> Counted {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).map_or_else(
        |_| Counted::default(),
        |meta| Counted { count: 1, apparent_bytes: meta.len(), disk_bytes: meta.blocks() * 512 },
    )
}

impl Inner {
    /// Counts a folder of files as one object; zero if it does not exist. A folder removed
    /// meanwhile is still open, but has no entries and cannot be listed; it counts as zero too.
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
        let files = [DATA, TREE, MAP].into_iter();
        files.for_each(|file| counted.add(file_counted(&folder.join(file))));
        Counted { count: 1, ..counted }
    }
}

#[cfg(test)]
#[path = "usage_tests.rs"]
mod tests;
