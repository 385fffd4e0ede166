//! Searches snapshots: the plan of a search, and each snapshot's own files.

use super::{
    Object, Planned, Read, Scope, Scrub, SearchError, entry, length, missing, same_folder,
};
use crate::blob::Dir;
use crate::errors::{Damage, IoError};
use crate::inner::Store;
use crate::integrity::verify::Kind;
use crate::memory::{BLOCKS, DiskLayer, Kind as Frame, Table};
use crate::meter::Meter;
use crate::objects::images::DISK;
use crate::objects::manifest::{self, SnapshotManifest};
use crate::objects::types::{DATA, MAP};
use crate::pages::Lease;
use crate::pages::index::prefix;
use crate::publish::needed;
use crate::snapshots::files::{MAX_WORKING_SET_BYTES, MEMORY, STATE, TABLE, WORKING_SET};
use crate::vms::pins::{Pin, Pinned};
use dayfly_units::{Name, PAGE_SIZE, sealed};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{Read as _, Seek as _};

impl<'a> Scrub<'a> {
    /// Finds out what to read, and how many bytes.
    pub(super) fn plan(
        store: &'a Store,
        scope: &Scope,
        meter: &'a Meter,
    ) -> Result<Self, SearchError> {
        meter.begin("looking at what there is", 0);
        let (tenant, chosen) = match scope {
            Scope::All => (None, &[][..]),
            Scope::Tenant { tenant, snapshots } => (Some(tenant.clone()), snapshots.as_slice()),
        };
        let mut scrub = Self {
            store,
            inner: &store.0,
            meter,
            tenant,
            chosen: !chosen.is_empty(),
            planned: Vec::new(),
            wanted: HashMap::new(),
            report: crate::VerifyReport::default(),
            bad_images: BTreeSet::new(),
            bad_layers: BTreeSet::new(),
            bad_pages: HashMap::new(),
            found: HashMap::new(),
        };
        let mut total = 0;
        if scrub.chosen {
            for name in chosen.iter().collect::<BTreeSet<_>>() {
                if !scrub.plan_snapshot(name, &mut total)? {
                    return Err(SearchError::NotFound { name: name.clone() });
                }
            }
        } else {
            scrub.foreign()?;
            for name in scrub.inner.snapshots.entries()? {
                match name.parse() {
                    Ok(name) => _ = scrub.plan_snapshot(&name, &mut total)?,
                    Err(_) => {
                        tracing::warn!(name, "leaving alone what is not named like a snapshot")
                    }
                }
            }
        }
        total += scrub.bytes_of_disks()?;
        for tenant in scrub.tenants()? {
            let only = scrub.chosen.then(|| scrub.wanted.get(&tenant).cloned().unwrap_or_default());
            total += scrub.inner.space(&tenant)?.bytes_to_read(only.as_ref());
        }
        meter.begin("reading and hashing", total);
        Ok(scrub)
    }

    /// Adds a snapshot to the plan, and its bytes to `total`. Returns whether the searched tenant
    /// has such a snapshot. A snapshot with an unreadable table counts for every tenant.
    fn plan_snapshot(&mut self, name: &Name, total: &mut u64) -> Result<bool, IoError> {
        let inner = self.inner;
        let Some(dir) = self.folder(Object::Snapshot, &inner.snapshots, name.as_str())? else {
            return Ok(false);
        };
        let table = self.inner.table_in(&dir).ok().flatten();
        if let (Some(table), Some(tenant)) = (&table, &self.tenant)
            && table.tenant != *tenant
        {
            return Ok(false);
        }
        let manifest: Option<SnapshotManifest> = manifest::read(&dir).ok();
        if let Some(manifest) = &manifest {
            *total += manifest.state.bytes;
            *total += if table.is_none() { manifest.memory.data_bytes } else { 0 };
        }
        if let Some(table) = &table {
            let blocks = table.runs().iter().filter(|run| matches!(run.kind, Frame::Disk { .. }));
            *total += blocks.map(|run| u64::from(run.frames) * PAGE_SIZE).sum::<u64>();
            if self.chosen {
                self.wanted
                    .entry(table.tenant.clone())
                    .or_default()
                    .extend(table.hashes().iter().map(prefix));
            }
        }
        self.planned.push(Planned { name: name.clone(), manifest });
        Ok(true)
    }

    /// The readable manifests of the planned snapshots.
    pub(super) fn manifests(&self) -> impl Iterator<Item = &SnapshotManifest> {
        self.planned.iter().filter_map(|planned| planned.manifest.as_ref())
    }

    /// Bytes of images, kernels, layers and block indexes, from manifests and file sizes.
    fn bytes_of_disks(&self) -> Result<u64, IoError> {
        let inner = self.inner;
        let images = manifest::list::<crate::ImageManifest>(&inner.images)?.items;
        let layers = self.manifests().flat_map(|m| &m.disks).flat_map(|d| &d.layers);
        let layers: BTreeMap<_, _> =
            layers.map(|l| (l.id, l.data.data_bytes + l.map.bytes)).collect();
        let mut total: u64 = layers.values().sum();
        if self.chosen {
            let needed: BTreeSet<&Name> =
                self.manifests().flat_map(|m| &m.disks).map(|d| &d.image.name).collect();
            return Ok(total
                + images
                    .iter()
                    .filter(|i| needed.contains(&i.name))
                    .map(|i| i.disk.data_bytes)
                    .sum::<u64>());
        }
        total += images.iter().map(|i| i.disk.data_bytes).sum::<u64>();
        let kernels = manifest::list::<crate::KernelManifest>(&inner.kernels)?.items;
        total += kernels.iter().map(|k| k.vmlinux.bytes + k.initrd.bytes).sum::<u64>();
        let unknown = inner.layers.entries()?.into_iter().filter_map(|name| name.parse().ok());
        let unknown = unknown.filter(|id| !layers.contains_key(id)).map(|id| {
            let folder = inner.layers.path().join(id.to_string());
            crate::gc::allocated(&folder.join(DATA)) + length(&folder.join(MAP))
        });
        total += unknown.sum::<u64>();
        if inner.root.has(BLOCKS)? {
            let dir = inner.root.sub(BLOCKS)?;
            total += dir.entries()?.iter().map(|name| length(&dir.path().join(name))).sum::<u64>();
        }
        Ok(total)
    }

    pub(super) fn snapshots(&mut self) -> Result<(), IoError> {
        let mut users: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for n in 0..self.planned.len() {
            let name = self.planned[n].name.clone();
            let Some(dir) = entry(&self.inner.snapshots, name.as_str())? else { continue };
            self.report.snapshots += 1;
            match self.open(&dir, &name) {
                Ok(Some(open)) => self.snapshot(&dir, &name, &open, &mut users)?,
                Ok(None) => {}
                Err(trouble) => {
                    let at = (&self.inner.snapshots, &dir);
                    self.judge(Object::Snapshot, name.as_str(), at, Err(trouble), Vec::new())?;
                }
            }
        }
        for (finding, snapshots) in users {
            if let Some(finding) = self.report.damage.get_mut(finding) {
                finding.snapshots = snapshots.into_iter().collect();
            }
        }
        Ok(())
    }

    /// Opens a snapshot's files, leases its pages and pins its layers, so that nothing needed can
    /// be removed. `None` if the snapshot is gone.
    fn open(&self, dir: &Dir, name: &Name) -> Read<Option<Open>> {
        let by = format!("snapshot {name}");
        let manifest: SnapshotManifest = manifest::read(dir)?;
        let table = self.inner.checked_table(dir, &manifest)?;
        let space = table.as_ref().map(|table| self.inner.space(&table.tenant)).transpose()?;
        // A gc sees the snapshot or the lease: the snapshot is there after the lease is taken.
        let lease =
            space.zip(table.as_ref()).map(|(space, table)| space.lease(table.hashes().iter()));
        let pinned = Pinned::of(&manifest, format!("a verification of {by}"));
        // The publish lock is held only for this block, because creating VMs waits for it.
        let pin = {
            let _publishing = self.inner.publishing();
            if !same_folder(&self.inner.snapshots, dir)? {
                return Ok(None);
            }
            self.inner.pins.pin(pinned)
        };
        let ram = match table.zip(lease) {
            Some((table, lease)) => Ram::Table(Box::new(table), lease),
            None => Ram::File(needed(dir, MEMORY, &by)?),
        };
        let state = needed(dir, STATE, &by)?;
        let working_set = if dir.has(WORKING_SET)? { Some(dir.open(WORKING_SET)?) } else { None };
        Ok(Some(Open { manifest, ram, state, working_set, _pin: pin }))
    }

    fn snapshot(
        &mut self,
        dir: &Dir,
        name: &Name,
        open: &Open,
        users: &mut BTreeMap<usize, BTreeSet<String>>,
    ) -> Result<(), IoError> {
        let inner = self.inner;
        let at = (&inner.snapshots, dir);
        let results = [
            self.content(dir, STATE, &open.state, &open.manifest.state, Kind::Plain),
            open.working_set.as_ref().map_or(Ok(()), |record| self.working_set(dir, record)),
            match &open.ram {
                Ram::File(memory) => {
                    self.content(dir, MEMORY, memory, &open.manifest.memory, Kind::Sparse)
                }
                Ram::Table(..) => Ok(()),
            },
        ];
        for result in results {
            self.judge(Object::Snapshot, name.as_str(), at, result, Vec::new())?;
        }
        let mut disks = true;
        for result in self.references(name, &open.manifest) {
            disks &= self.judge(Object::Snapshot, name.as_str(), at, result, Vec::new())?;
        }
        disks &= open.manifest.disks.iter().all(|disk| {
            !self.bad_images.contains(&disk.image.name)
                && !disk.layers.iter().any(|l| self.bad_layers.contains(&l.id))
        });
        let Ram::Table(table, _lease) = &open.ram else { return Ok(()) };
        let pages = self.pages(name, table, users);
        let pages = match pages {
            Ok(Some(lost)) => {
                self.judge(Object::Snapshot, name.as_str(), at, lost, Vec::new())?;
                false
            }
            Ok(None) => true,
            Err(e) => return Err(e),
        };
        // The proof of RAM as a whole only runs if all parts are sound; damaged parts are reported
        // already.
        if pages && disks {
            let proof = self.proof(name, table, &open.manifest);
            self.judge(Object::Snapshot, name.as_str(), at, proof, Vec::new())?;
        }
        Ok(())
    }

    fn working_set(&self, dir: &Dir, mut file: &File) -> Read<()> {
        let path = dir.path().join(WORKING_SET);
        let mut bytes = Vec::new();
        let most = MAX_WORKING_SET_BYTES + sealed::HEADER_BYTES as u64 + 1;
        let read = file.rewind().and_then(|()| file.take(most).read_to_end(&mut bytes));
        read.map_err(IoError::new("reading", &path))?;
        let sealed = sealed::verify(MAX_WORKING_SET_BYTES, &bytes);
        Ok(sealed.map(drop).map_err(|error| Damage::Seal { file: path, error })?)
    }

    /// Checks that the images and layers exist; their content was read before.
    fn references(&self, name: &Name, manifest: &SnapshotManifest) -> Vec<Read<()>> {
        let by = format!("snapshot {name}");
        let mut results = Vec::new();
        for disk in &manifest.disks {
            // An image with an unreadable manifest is reported already.
            if !self.bad_images.contains(&disk.image.name) {
                results.push(self.inner.image_is(&disk.image, &by).map_err(Into::into));
            }
            results.extend(
                disk.layers.iter().map(|l| self.inner.layer_is(l.id, &by).map_err(Into::into)),
            );
        }
        results
    }

    /// Looks up every page of the table. `None` if all pages exist and are sound. Otherwise the
    /// error about missing pages, if any. Damaged pages were reported with their pack; `users` gets
    /// this snapshot for those findings.
    fn pages(
        &mut self,
        name: &Name,
        table: &Table,
        users: &mut BTreeMap<usize, BTreeSet<String>>,
    ) -> Result<Option<Read<()>>, IoError> {
        let space = self.inner.space(&table.tenant)?;
        let bad = self.bad_pages.get(&table.tenant);
        let found = self.found.entry(table.tenant.clone()).or_default();
        let (mut damaged, mut lost, mut first) = (false, 0_u64, None);
        for hash in table.hashes() {
            let finding = bad.and_then(|bad| bad.get(&prefix(hash)));
            // The damaged copy is in quarantine, so only another copy is found.
            if let Some(finding) = finding
                && space.find(hash)?.is_none()
            {
                damaged = true;
                if let Some(finding) = finding {
                    users.entry(*finding).or_default().insert(name.to_string());
                }
            } else if !found.contains(hash) {
                let any = match space.find_any(hash) {
                    Err(e) if e.is_damage() => None,
                    any => any?,
                };
                if any.is_some() {
                    found.insert(*hash);
                } else {
                    lost += 1;
                    first = first.or(Some(*hash));
                }
            }
        }
        Ok(match first {
            Some(hash) => {
                let of = table.hashes().len();
                let what = format!(
                    "{lost} of {of} pages of tenant {}, the first of them {hash}",
                    table.tenant
                );
                Some(Err(missing(space.dir.path().to_owned(), what, format!("snapshot {name}"))))
            }
            None => damaged.then_some(Ok(())),
        })
    }

    /// Checks that pages and disk blocks combine to the table's digest of frames.
    fn proof(&self, name: &Name, table: &Table, manifest: &SnapshotManifest) -> Read<()> {
        let by = format!("snapshot {name}");
        let mut files: Vec<Vec<(File, crate::Digest)>> = Vec::new();
        for disk in &manifest.disks {
            let base = needed(&self.inner.images.sub(disk.image.name.as_str())?, DISK, &by)?;
            let mut chain = vec![(base, disk.image.digest)];
            for layer in &disk.layers {
                let (_, data, _) = self.inner.open_layer_files(layer.id, &by)?;
                chain.push((data, layer.data.digest));
            }
            files.push(chain);
        }
        let disks: Vec<Vec<DiskLayer>> = files
            .iter()
            .map(|chain| {
                chain.iter().map(|(file, digest)| DiskLayer { file, digest: *digest }).collect()
            })
            .collect();
        let tenant = self.store.tenant(&table.tenant)?;
        let path = self.inner.snapshots.path().join(name.as_str()).join(TABLE);
        tenant.prove(table, &disks, self.meter).map_err(|e| super::Trouble::of(e, path))
    }
}

/// The open files of a snapshot that is being read.
struct Open {
    manifest: SnapshotManifest,
    ram: Ram,
    state: File,
    working_set: Option<File>,
    _pin: Pin,
}

enum Ram {
    File(File),
    /// With the lease of its pages.
    Table(Box<Table>, Lease),
}
