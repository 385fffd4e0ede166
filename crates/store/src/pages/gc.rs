//! Removes pages that no snapshot's table names any more.
//!
//! 1. From here on, leases that end still count ([`super::lease`]).
//! 2. Mark every hash in a table or a lease. An unreadable table stops the gc before it changes
//!    anything.
//! 3. A pack without marked pages is removed. If the share of marked pages is below the threshold,
//!    they are copied into new packs, each page hashed. A pack with a damaged page is left alone,
//!    and the report names the page.
//! 4. Publish the new packs (fsync, rename, fsync).
//! 5. Under the index's lock, check the leases again: a pack that a new lease needs stays. Then
//!    change the index.
//! 6. Rename the old packs into `staging/`, sync the folder, delete them.
//!
//! A crash after step 4 leaves pages twice. The next open indexes one copy, and the next gc finds
//! the other copy unused.

use super::index::{Place, prefix};
use super::pack::{PAGE, Pack, PackError};
use super::read::read_span;
use super::space::Space;
use super::writer::{self, Source};
use crate::blob::IfTaken;
use crate::errors::{Damage, IoError, IoResult};
use crate::gc::allocated_below;
use crate::inner::{Inner, Store};
use crate::integrity::verify::Stamp;
use crate::memory::{BLOCKS, Table};
use crate::meter::Meter;
use crate::objects::manifest::{self, ImageManifest, SnapshotManifest};
use crate::publish::OpenError;
use crate::snapshots::files::TABLE;
use dayfly_units::failpoint;
use dayfly_units::sync::lock;
use dayfly_units::{Digest, Name};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A pack is rewritten if less than this percentage of its pages is in use.
pub const REWRITE_BELOW_PERCENT: u32 = 50;

/// What a gc of pages removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcPagesReport {
    /// Packs removed, including those rewritten.
    pub packs: u64,
    /// Removed packs whose live pages were copied.
    pub rewritten_packs: u64,
    /// Pages copied.
    pub copied_pages: u64,
    /// Pages removed.
    pub dropped_pages: u64,
    /// Bytes of packs removed, less the bytes of packs written.
    pub freed_bytes: i64,
    /// Block indexes removed.
    pub block_indexes: u64,
    /// Bytes of disk that the block indexes took.
    pub block_index_bytes: u64,
    /// Damage that was found and left alone.
    pub damage: Vec<Damage>,
}

/// Why a gc removed nothing, or not everything. A referenced page is never removed.
#[derive(Debug, thiserror::Error)]
pub enum GcPagesError {
    /// A table is unreadable, so the references are not known; nothing was removed.
    #[error(
        "snapshot {snapshot}: its table cannot be read, so its pages are not known; remove it first"
    )]
    Unreadable {
        /// Name of the snapshot.
        snapshot: String,
        /// The cause.
        #[source]
        source: OpenError,
    },
    /// Another version of dayfly made a snapshot, so the references are not known; nothing was
    /// removed.
    #[error(
        "snapshot {snapshot}: another version of dayfly made it, so its pages are not known; \
         start that version, or remove the snapshot"
    )]
    Version {
        /// Name of the snapshot.
        snapshot: String,
        /// The version expected and the version found.
        #[source]
        source: OpenError,
    },
    /// A page to copy was damaged between two reads.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The host could not read or write a file.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl From<PackError> for GcPagesError {
    fn from(e: PackError) -> Self {
        match e {
            PackError::Io(e) => Self::Io(e),
            PackError::Damage(d) => Self::Damage(d),
        }
    }
}

impl Store {
    /// Removes packs of pages that no snapshot's table and no lease names, for every tenant.
    /// Rewrites packs of which less than [`REWRITE_BELOW_PERCENT`] is in use. Puts, opens, fetches
    /// and commits run concurrently.
    ///
    /// # Errors
    /// [`GcPagesError`].
    pub fn gc_pages(&self) -> Result<GcPagesReport, GcPagesError> {
        self.0.writable()?;
        let mut report = GcPagesReport::default();
        for tenant in self.0.tenant_names()? {
            let space = self.0.space(&tenant)?;
            self.0.collect(&space, &mut report, &Meter::default())?;
        }
        self.0.collect_block_indexes(&mut report)?;
        Ok(report)
    }

    /// As [`Self::gc_pages`], for one tenant. The report also lists packs that could not be opened.
    /// `meter` shows the progress.
    ///
    /// # Errors
    /// [`GcPagesError`]; if [`Meter::stop`] ended the gc, nothing of the tenant was changed.
    pub fn gc_pages_of(&self, tenant: &Name, meter: &Meter) -> Result<GcPagesReport, GcPagesError> {
        self.0.writable()?;
        let mut report = GcPagesReport::default();
        let space = self.0.space(tenant)?;
        self.0.collect(&space, &mut report, meter)?;
        self.0.collect_block_indexes(&mut report)?;
        report.damage.extend(space.unopened()?);
        Ok(report)
    }
}

/// A pack to remove, and the pages to copy from it first.
struct Victim {
    number: u32,
    pack: Arc<Pack>,
    /// Pages to copy, in ascending order, with their hashes.
    live: Vec<(u32, Digest)>,
}

/// The table of a snapshot, and the stamps of its files.
struct ReadTable {
    /// As [`Inner::stamps`]; `None` if the files must be read again.
    stamps: Option<[Stamp; 2]>,
    /// `None` if RAM is a file.
    table: Option<Table>,
}

/// Tables by the names of their snapshots.
type Tables = BTreeMap<String, ReadTable>;

impl Inner {
    /// The tables of all snapshots that have one.
    pub(super) fn all_tables(&self) -> Result<Vec<Table>, GcPagesError> {
        let (tables, _) = self.tables(Tables::new())?;
        Ok(tables.into_values().filter_map(|read| read.table).collect())
    }

    /// The tables of all snapshots, by the snapshots' names, and how many were read. Those in
    /// `known` are taken over, if their files are still the same.
    fn tables(&self, mut known: Tables) -> Result<(Tables, usize), GcPagesError> {
        let (mut tables, mut read) = (Tables::new(), 0);
        for name in self.snapshots.entries()? {
            let current =
                |known: &ReadTable| known.stamps.is_some() && known.stamps == self.stamps(&name);
            if let Some(known) = known.remove(&name).filter(current) {
                tables.insert(name, known);
                continue;
            }
            read += 1;
            // The stamps are taken before the files are read.
            let stamps = self.stamps(&name);
            match self.table_of(&name) {
                Ok(table) => _ = tables.insert(name, ReadTable { stamps, table }),
                // The snapshot was removed after it was listed.
                Err(OpenError::Io(e)) if e.is_not_found() && !self.snapshots.has(&name)? => {}
                Err(source) if source.is_version() => {
                    return Err(GcPagesError::Version { snapshot: name, source });
                }
                Err(source) => return Err(GcPagesError::Unreadable { snapshot: name, source }),
            }
        }
        Ok((tables, read))
    }

    fn table_of(&self, snapshot: &str) -> Result<Option<Table>, OpenError> {
        let dir = self.snapshots.sub(snapshot)?;
        // A snapshot of another version may have its pages elsewhere than in a table.
        match manifest::read::<SnapshotManifest>(&dir) {
            Err(e) if e.is_version() => Err(e.into()),
            _ => self.table_in(&dir),
        }
    }

    /// Stamps of a snapshot's manifest and table; `None` for a file that is absent, or changed so
    /// lately that a change may leave the same stamp.
    fn stamps(&self, snapshot: &str) -> Option<[Stamp; 2]> {
        let folder = self.snapshots.path().join(snapshot);
        let stamp = |file| Stamp::at(&folder.join(file)).ok().filter(Stamp::is_settled);
        Some([stamp(manifest::FILE)?, stamp(TABLE)?])
    }

    fn collect(
        self: &Arc<Self>,
        space: &Space,
        report: &mut GcPagesReport,
        meter: &Meter,
    ) -> Result<(), GcPagesError> {
        meter.begin("looking for unused pages", 0);
        let _one_at_a_time = lock(&space.collecting);
        let _collecting = space.leases().collect();
        // Most tables are read before the publish lock is taken, because creating VMs waits for it.
        let (known, _) = self.tables(Tables::new())?;
        let (tables, _) = {
            // The publish lock waits for a removal that is not synced: it may still fail, or a
            // crash may undo it, so its snapshot's pages must count until it is durable.
            let _publishing = self.publishing();
            self.tables(known)?
        };
        let of_tenant = tables.values().filter_map(|read| read.table.as_ref());
        let named =
            of_tenant.filter(|table| table.tenant == space.tenant).flat_map(|table| table.hashes());
        let mut live: Vec<u64> = named.map(prefix).chain(space.leases().prefixes()).collect();
        live.sort_unstable();
        live.dedup();
        drop(tables);
        failpoint::reached("store.gc_pages.marked");
        let victims = space.victims(&live, report, meter)?;
        if victims.is_empty() {
            let _changing = space.changing();
            return Ok(self.retire_packs(space)?);
        }
        let stage = self.stage()?;
        let source = LivePages::of(space, &victims, meter);
        meter.begin("copying pages out of packs that go", source.pages.len() as u64 * PAGE as u64);
        let staged = writer::stage(&stage, &space.tenant, &source)?;
        failpoint::reached("store.gc_pages.staged");
        let _changing = space.changing();
        let packs = writer::publish(&stage, &space.dir, &space.tenant, &staged)?;
        failpoint::reached("store.gc_pages.published");
        let written: u64 = packs.iter().map(|p| p.bytes).sum();
        let gone = space.change_over(victims, packs);
        self.retire_packs(space)?;
        failpoint::reached("store.gc_pages.retired");
        report.packs += gone.len() as u64;
        report.rewritten_packs += gone.iter().filter(|v| !v.live.is_empty()).count() as u64;
        report.copied_pages += gone.iter().map(|v| v.live.len() as u64).sum::<u64>();
        report.dropped_pages +=
            gone.iter().map(|v| u64::from(v.pack.pages) - v.live.len() as u64).sum::<u64>();
        let freed: u64 = gone.iter().map(|v| v.pack.bytes).sum();
        report.freed_bytes =
            report.freed_bytes.saturating_add_unsigned(freed).saturating_sub_unsigned(written);
        Ok(())
    }

    /// Removes the files of retired packs. If this fails, the next gc tries again, unless a put has
    /// made the same pack meanwhile. The caller holds `changing`.
    fn retire_packs(self: &Arc<Self>, space: &Space) -> IoResult<()> {
        let retired = space.read().retired.clone();
        if retired.is_empty() {
            return Ok(());
        }
        let stage = self.stage()?;
        for id in &retired {
            let name = id.to_string();
            match space.dir.rename(&name, &stage, &name, IfTaken::Refuse) {
                Err(e) if e.is_not_found() => {}
                other => other?,
            }
        }
        space.dir.sync()?;
        space.write().retired.clear();
        Ok(())
    }

    /// Removes block indexes of files that are in no image and in no snapshot's layers, if all of
    /// these are known. The indexes are a cache.
    fn collect_block_indexes(&self, report: &mut GcPagesReport) -> Result<(), GcPagesError> {
        if !self.root.has(BLOCKS)? {
            return Ok(());
        }
        let mut images = manifest::list::<ImageManifest>(&self.images)?;
        let mut snapshots = manifest::list::<SnapshotManifest>(&self.snapshots)?;
        if images.other_version().is_some() || snapshots.other_version().is_some() {
            return Ok(());
        }
        let images = images.items.into_iter().map(|i| i.disk.digest);
        let layers = snapshots
            .items
            .iter()
            .flat_map(|s| s.disks.iter().flat_map(|d| &d.layers))
            .map(|l| l.data.digest);
        let needed: BTreeSet<String> = images.chain(layers).map(|d| d.to_string()).collect();
        let dir = self.root.sub(BLOCKS)?;
        for name in dir.entries()?.into_iter().filter(|name| !needed.contains(name)) {
            let bytes = allocated_below(&dir, &name);
            dir.remove(&name)?;
            report.block_indexes += 1;
            report.block_index_bytes += bytes;
        }
        Ok(())
    }
}

impl Space {
    /// The packs to remove, given the prefixes of the live pages.
    fn victims(
        &self,
        live: &[u64],
        report: &mut GcPagesReport,
        meter: &Meter,
    ) -> IoResult<Vec<Victim>> {
        let (packs, used) = {
            let state = self.read();
            let mut used: BTreeMap<u32, Vec<u32>> =
                state.packs.keys().map(|&n| (n, Vec::new())).collect();
            for (_, place) in state.index.iter().filter(|(p, _)| live.binary_search(p).is_ok()) {
                used.entry(place.pack).or_default().push(place.page);
            }
            (state.packs.clone(), used)
        };
        let mut victims = Vec::new();
        for (number, mut pages) in used {
            let Some(pack) = packs.get(&number) else { continue };
            if pages.len() as u64 * 100 >= u64::from(pack.pages) * u64::from(REWRITE_BELOW_PERCENT)
            {
                continue;
            }
            pages.sort_unstable();
            let live = if pages.is_empty() {
                Vec::new()
            } else {
                let file = self.file(number, pack)?;
                let hashes = pack.hashes(&file, 0..pack.pages)?;
                pages.into_iter().map(|page| (page, hashes[page as usize])).collect()
            };
            let victim = Victim { number, pack: Arc::clone(pack), live };
            match LivePages::of(self, std::slice::from_ref(&victim), meter)
                .pages(0..victim.live.len(), &mut |_, _| Ok(()))
            {
                Ok(()) => victims.push(victim),
                Err(PackError::Damage(damage)) => report.damage.push(damage),
                Err(PackError::Io(e)) => return Err(e),
            }
        }
        Ok(victims)
    }

    /// Switches the index to the copies, which hold the victims' live pages in the same order.
    /// Returns the victims that nothing references any more. No step can fail, so the index is
    /// never left half changed.
    fn change_over(&self, victims: Vec<Victim>, copies: Vec<Pack>) -> Vec<Victim> {
        let places = |v: &Victim| -> Vec<Place> {
            v.live.iter().map(|(page, _)| Place { pack: v.number, page: *page }).collect()
        };
        let old: Vec<Place> = victims.iter().flat_map(places).collect();
        let mut state = self.write();
        let late = self.leases().prefixes();
        let copied: HashSet<Place> = old.iter().copied().collect();
        let left =
            state.index.iter().filter(|(p, place)| late.contains(p) && !copied.contains(place));
        let needed: BTreeSet<u32> = left.map(|(_, place)| place.pack).collect();
        let gone: Vec<Victim> =
            victims.into_iter().filter(|v| !needed.contains(&v.number)).collect();
        let numbers: BTreeSet<u32> = gone.iter().map(|v| v.number).collect();
        state.packs.retain(|number, _| !numbers.contains(number));
        state.retired.extend(gone.iter().map(|v| v.pack.id));
        let new = copies.into_iter().flat_map(|pack| {
            let pages = pack.pages;
            let number = state.enter(pack);
            (0..pages).map(move |page| Place { pack: number, page })
        });
        let moved: HashMap<Place, Place> = old.into_iter().zip(new.collect::<Vec<_>>()).collect();
        state.index.remap(|place| match numbers.contains(&place.pack) {
            true => moved.get(&place).copied(),
            false => Some(place),
        });
        self.close(&numbers);
        gone
    }
}

/// The live pages of victims, as a source for new packs.
struct LivePages<'a> {
    space: &'a Space,
    victims: &'a [Victim],
    /// Index of the victim, and index in its `live`.
    pages: Vec<(usize, usize)>,
    meter: &'a Meter,
}

impl<'a> LivePages<'a> {
    fn of(space: &'a Space, victims: &'a [Victim], meter: &'a Meter) -> Self {
        let of = |(n, victim): (usize, &Victim)| (0..victim.live.len()).map(move |at| (n, at));
        Self { space, victims, pages: victims.iter().enumerate().flat_map(of).collect(), meter }
    }
}

impl Source for LivePages<'_> {
    fn count(&self) -> usize {
        self.pages.len()
    }

    fn pages(
        &self,
        range: Range<usize>,
        push: &mut dyn FnMut(Digest, &[u8]) -> IoResult<()>,
    ) -> Result<(), PackError> {
        let (mut buffer, mut raw) = (Vec::new(), Vec::new());
        let group_of = |&(n, at): &(usize, usize)| {
            (n, self.victims[n].live[at].0 / self.victims[n].pack.group_pages)
        };
        for of_group in self.pages[range].chunk_by(|a, b| group_of(a) == group_of(b)) {
            let (n, number) = group_of(&of_group[0]);
            let victim = &self.victims[n];
            let file = self.space.file(victim.number, &victim.pack)?;
            let group = number as usize;
            let stored = read_span(&victim.pack, &file, group, group, &mut buffer)?;
            victim.pack.decode(group, victim.live[of_group[0].1].0, stored, &mut raw)?;
            for &(_, at) in of_group {
                let (page, hash) = victim.live[at];
                let start = (page % victim.pack.group_pages) as usize * PAGE;
                let bytes = &raw[start..start + PAGE];
                victim.pack.check(page, &hash, bytes)?;
                push(hash, bytes)?;
            }
            self.meter.step_at((of_group.len() * PAGE) as u64, &victim.pack.path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "gc_tests.rs"]
mod tests;
