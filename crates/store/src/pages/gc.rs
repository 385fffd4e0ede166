//! Removing pages that no snapshot's table names any more.
//!
//! 1. From here on leases that end still count ([`super::lease`]).
//! 2. Mark: every hash in a table, every lease. A table that cannot be read stops the gc before it changes anything.
//! 3. A pack without marked pages goes. Of one whose share of marked pages is below the threshold, the marked pages are copied into new packs, each
//!    hashed; a pack with a damaged page stays as it is, and the report names the page.
//! 4. The new packs are published (fsync, rename, fsync).
//! 5. Under the index's lock: leases are looked at once more, a pack that a late one needs stays; the index changes over.
//! 6. The old packs are renamed into `staging/`, the folder is synced, they are deleted.
//!
//! A crash after 4 leaves pages twice; the next open takes one of them, the next gc finds the other unused.

use super::index::{Place, prefix};
use super::pack::{PAGE, Pack, PackError};
use super::read::read_span;
use super::space::Space;
use super::writer::{self, Source};
use crate::blob::IfTaken;
use crate::digest::Digest;
use crate::errors::{Damage, IoError, IoResult};
use crate::gc::allocated_below;
use crate::memory::{BLOCKS, Table};
use crate::meter::Meter;
use crate::publish::OpenError;
use crate::{Inner, Store, manifest};
use dayfly_units::Name;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// A pack with fewer of its pages in use than this many of a hundred is written anew.
pub const REWRITE_BELOW_PERCENT: u32 = 50;

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcPagesReport {
    /// Packs removed, those written anew among them.
    pub packs: u64,
    /// Of these, packs whose live pages were copied.
    pub rewritten_packs: u64,
    /// Pages copied.
    pub copied_pages: u64,
    /// Pages that are gone.
    pub dropped_pages: u64,
    /// Bytes of packs removed, less those of packs written.
    pub freed_bytes: i64,
    /// Indexes of blocks that nobody needs any more.
    pub block_indexes: u64,
    /// Bytes of disk they took.
    pub block_index_bytes: u64,
    /// What was found damaged and left alone.
    pub damage: Vec<Damage>,
}

/// Why nothing, or not everything, was removed. What is still referred to stays in any case.
#[derive(Debug, thiserror::Error)]
pub enum GcPagesError {
    /// What a snapshot refers to cannot be known, so nothing was removed.
    #[error("snapshot {snapshot}: its table cannot be read, so its pages are not known; remove it first")]
    Unreadable {
        /// Which snapshot.
        snapshot: String,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// A page that was to be copied turned out damaged between two looks at it.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The host could not.
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
    /// Removes every page that no snapshot's table and no lease names, of every tenant, packs as a whole; writes packs anew of which less
    /// than [`REWRITE_BELOW_PERCENT`] is in use. Puts, opens, fetches and commits go on meanwhile.
    ///
    /// # Errors
    /// [`GcPagesError`].
    pub fn gc_pages(&self) -> Result<GcPagesReport, GcPagesError> {
        let mut report = GcPagesReport::default();
        for tenant in self.0.tenant_names()? {
            let space = self.0.space(&tenant)?;
            self.0.collect(&space, &mut report, &Meter::default())?;
        }
        self.0.collect_block_indexes(&mut report)?;
        Ok(report)
    }

    /// As [`Self::gc_pages`], for one tenant; also tells packs that could not be opened. Tells `meter` how far it is.
    ///
    /// # Errors
    /// [`GcPagesError`]; [`Meter::stop`] ends it before anything of the tenant was changed.
    pub fn gc_pages_of(&self, tenant: &Name, meter: &Meter) -> Result<GcPagesReport, GcPagesError> {
        let mut report = GcPagesReport::default();
        let space = self.0.space(tenant)?;
        self.0.collect(&space, &mut report, meter)?;
        self.0.collect_block_indexes(&mut report)?;
        report.damage.extend(space.unopened()?);
        Ok(report)
    }
}

/// A pack that goes, and what of it is copied before.
struct Victim {
    number: u32,
    pack: Arc<Pack>,
    /// Pages that are copied, ascending, with their hashes.
    live: Vec<(u32, Digest)>,
}

impl Inner {
    /// The tables of all snapshots that have one, with the snapshots' names.
    pub(crate) fn tables(&self) -> Result<Vec<(String, Table)>, GcPagesError> {
        let mut tables = Vec::new();
        for name in self.snapshots.entries()? {
            let read = self.snapshots.sub(&name).map_err(OpenError::from).and_then(|dir| self.table_in(&dir));
            match read {
                Ok(Some(table)) => tables.push((name, table)),
                Ok(None) => {}
                // Removed since it was listed.
                Err(OpenError::Io(e)) if e.is_not_found() && !self.snapshots.has(&name)? => {}
                Err(source) => return Err(GcPagesError::Unreadable { snapshot: name, source }),
            }
        }
        Ok(tables)
    }

    fn collect(
        self: &Arc<Self>,
        space: &Space,
        report: &mut GcPagesReport,
        meter: &Meter,
    ) -> Result<(), GcPagesError> {
        meter.begin("looking for pages that nobody needs", 0);
        let _one_at_a_time = space.collecting.lock().unwrap_or_else(PoisonError::into_inner);
        let _collecting = space.leases().collect();
        let tables = {
            // A removal that is not on disk yet may still fail, or be undone by a crash: its snapshot counts until it is over.
            let _publishing = self.publishing();
            self.tables()?
        };
        let named = tables.iter().filter(|(_, t)| t.tenant == space.tenant).flat_map(|(_, t)| t.hashes());
        let mut live: Vec<u64> = named.map(prefix).chain(space.leases().prefixes()).collect();
        live.sort_unstable();
        live.dedup();
        drop(tables);
        let victims = space.victims(&live, report, meter)?;
        if victims.is_empty() {
            let _changing = space.changing();
            return Ok(self.retire_packs(space)?);
        }
        let stage = self.stage()?;
        let source = LivePages::of(space, &victims, meter);
        meter.begin("copying pages out of packs that go", source.pages.len() as u64 * PAGE as u64);
        let staged = writer::stage(&stage, &space.tenant, &source)?;
        let _changing = space.changing();
        let packs = writer::publish(&stage, &space.dir, &space.tenant, &staged)?;
        let written: u64 = packs.iter().map(|p| p.bytes).sum();
        let gone = space.change_over(victims, packs);
        self.retire_packs(space)?;
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

    /// Removes the files of packs that are in no state any more. Where that fails, the next gc does it, or finds that a put has
    /// made the same pack again. Call it while you hold `changing`.
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

    /// Removes the indexes of files that are in no image and no layer of a snapshot. They are a cache.
    fn collect_block_indexes(&self, report: &mut GcPagesReport) -> Result<(), GcPagesError> {
        if !self.root.has(BLOCKS)? {
            return Ok(());
        }
        let images =
            manifest::list::<crate::ImageManifest>(&self.images)?.items.into_iter().map(|i| i.disk.digest);
        let snapshots = manifest::list::<crate::SnapshotManifest>(&self.snapshots)?.items;
        let layers =
            snapshots.iter().flat_map(|s| s.disks.iter().flat_map(|d| &d.layers)).map(|l| l.data.digest);
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
    /// The packs that go, given the prefixes of the pages that stay.
    fn victims(&self, live: &[u64], report: &mut GcPagesReport, meter: &Meter) -> IoResult<Vec<Victim>> {
        let (packs, used) = {
            let state = self.read();
            let mut used: BTreeMap<u32, Vec<u32>> = state.packs.keys().map(|&n| (n, Vec::new())).collect();
            for (_, place) in state.index.iter().filter(|(p, _)| live.binary_search(p).is_ok()) {
                used.entry(place.pack).or_default().push(place.page);
            }
            (state.packs.clone(), used)
        };
        let mut victims = Vec::new();
        for (number, mut pages) in used {
            let Some(pack) = packs.get(&number) else { continue };
            if pages.len() as u64 * 100 >= u64::from(pack.pages) * u64::from(REWRITE_BELOW_PERCENT) {
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

    /// Changes the index over to the copies, which hold the victims' live pages in their order; gives the victims that nobody needs from now
    /// on. Nothing in it can fail, so that the index is never left half changed.
    fn change_over(&self, victims: Vec<Victim>, copies: Vec<Pack>) -> Vec<Victim> {
        let places = |v: &Victim| -> Vec<Place> {
            v.live.iter().map(|(page, _)| Place { pack: v.number, page: *page }).collect()
        };
        let old: Vec<Place> = victims.iter().flat_map(places).collect();
        let mut state = self.write();
        let late = self.leases().prefixes();
        let copied: HashSet<Place> = old.iter().copied().collect();
        let left = state.index.iter().filter(|(p, place)| late.contains(p) && !copied.contains(place));
        let needed: BTreeSet<u32> = left.map(|(_, place)| place.pack).collect();
        let gone: Vec<Victim> = victims.into_iter().filter(|v| !needed.contains(&v.number)).collect();
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

/// The pages of victims that are copied, in the order they lie in.
struct LivePages<'a> {
    space: &'a Space,
    victims: &'a [Victim],
    /// Victim and place in its `live`.
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
        let group_of =
            |&(n, at): &(usize, usize)| (n, self.victims[n].live[at].0 / self.victims[n].pack.group_pages);
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
