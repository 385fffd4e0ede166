//! Removes pages that no snapshot's table names any more.
//!
//! 1. From here on, leases that end still count ([`super::lease`]).
//! 2. Mark every hash in a table or a lease. An unreadable table stops the gc before it changes
//!    anything. Tables are read without the publish lock; what changes meanwhile is read again
//!    ([`crate::watch`]).
//! 3. Of marked pages that have several places, read and hash copies: of each page one is needed
//!    ([`super::copies`]). Remove the packs without needed pages.
//! 4. Of packs whose share of needed pages is below the threshold, and of packs with a group in
//!    quarantine, copy the needed pages into new packs ([`super::victims`]). A pack that has the
//!    only copy of a damaged page is left alone, and the report names the page.
//! 5. Publish the new packs (fsync, rename, fsync).
//! 6. Under the index's lock, check the leases again: a pack that a new lease needs stays. Then
//!    change the index, and unlink the old packs.
//!
//! Steps 4 to 6 are done for some packs at a time, each time for as many as fill one new pack per
//! core. On a full disk they are done for one pack at a time, the one with the fewest marked pages
//! first, so that each frees space for the next; the first of them may spend the reserve
//! ([`crate::reserve`]).
//!
//! A crash after step 5 leaves pages twice. The next open finds both copies, and the next gc needs
//! one of them.

use super::copies::Superseded;
use super::index::prefix;
use super::pack::{MAX_PACK_PAGES, PAGE, PackError};
use super::space::Space;
use super::victims::{LivePages, Victim};
use super::writer::{self, Staged};
use crate::blob::{Stage, interleave};
use crate::errors::{Damage, IoError, IoResult};
use crate::gc::allocated_below;
use crate::inner::{Inner, Store};
use crate::memory::{BLOCKS, Table};
use crate::meter::Meter;
use crate::objects::manifest::{self, ImageManifest, SnapshotManifest};
use crate::publish::OpenError;
use crate::workers;
use dayfly_units::Name;
use dayfly_units::failpoint;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
    /// The disk was too full to rewrite all packs that are mostly unused; this is the error.
    pub no_space: Option<String>,
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

impl GcPagesError {
    fn is_no_space(&self) -> bool {
        matches!(self, Self::Io(e) if e.is_no_space())
    }
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
    /// Rewrites packs of which less than [`crate::REWRITE_BELOW_PERCENT`] is in use. Puts, opens,
    /// fetches and commits run concurrently.
    ///
    /// # Errors
    /// [`GcPagesError`].
    pub fn gc_pages(&self) -> Result<GcPagesReport, GcPagesError> {
        self.0.writable()?;
        let mut report = GcPagesReport::default();
        for tenant in self.0.tenant_names()? {
            let space = self.0.space(&tenant)?;
            self.0.collect(&space, &BTreeSet::new(), &mut report, &Meter::default())?;
        }
        self.0.collect_block_indexes(&mut report)?;
        self.0.restore_reserve();
        Ok(report)
    }

    /// As [`Self::gc_pages`], for one tenant. The report also lists packs that could not be opened.
    /// A snapshot in `without` whose table is damaged references nothing. `meter` shows the
    /// progress.
    ///
    /// # Errors
    /// [`GcPagesError`]; if [`Meter::stop`] ended the gc, each pack is as before or removed.
    pub fn gc_pages_of(
        &self,
        tenant: &Name,
        without: &BTreeSet<Name>,
        meter: &Meter,
    ) -> Result<GcPagesReport, GcPagesError> {
        self.0.writable()?;
        let mut report = GcPagesReport::default();
        let space = self.0.space(tenant)?;
        let collected = self.0.collect(&space, without, &mut report, meter);
        self.0.restore_reserve();
        collected?;
        self.0.collect_block_indexes(&mut report)?;
        report.damage.extend(space.unopened()?);
        Ok(report)
    }
}

/// Tables by the names of their snapshots; `None` if RAM is a file.
type Tables = BTreeMap<String, Option<Table>>;

impl Inner {
    /// The tables of all snapshots that have one.
    pub(super) fn all_tables(&self) -> Result<Vec<Table>, GcPagesError> {
        Ok(self.tables(&BTreeSet::new())?.into_values().flatten().collect())
    }

    /// The tables of all snapshots, at one moment. They are read without the publish lock, because
    /// creating VMs waits for it.
    fn tables(&self, without: &BTreeSet<Name>) -> Result<Tables, GcPagesError> {
        let mut watch = self.watch();
        let mut tables = Tables::new();
        let mut names: BTreeSet<String> = self.snapshots.entries()?.into_iter().collect();
        loop {
            for name in names {
                self.read_table(&mut tables, name, without)?;
            }
            let (changed, _publishing) = watch.changed();
            if changed.is_empty() {
                return Ok(tables);
            }
            names = changed;
        }
    }

    /// Reads the table of a snapshot. One that is gone has none.
    fn read_table(
        &self,
        tables: &mut Tables,
        name: String,
        without: &BTreeSet<Name>,
    ) -> Result<(), GcPagesError> {
        tables.remove(&name);
        match self.table_of(&name) {
            Ok(table) => _ = tables.insert(name, table),
            Err(OpenError::Io(e)) if e.is_not_found() && !self.snapshots.has(&name)? => {}
            Err(source) if source.is_version() => {
                return Err(GcPagesError::Version { snapshot: name, source });
            }
            Err(_) if without.iter().any(|known| known.as_str() == name) => {}
            Err(source) => return Err(GcPagesError::Unreadable { snapshot: name, source }),
        }
        Ok(())
    }

    fn table_of(&self, snapshot: &str) -> Result<Option<Table>, OpenError> {
        let dir = self.snapshots.sub(snapshot)?;
        // A snapshot of another version may have its pages elsewhere than in a table.
        match manifest::read::<SnapshotManifest>(&dir) {
            Err(e) if e.is_version() => Err(e.into()),
            _ => self.table_in(&dir),
        }
    }

    /// The hash prefixes that a table of the tenant or a lease names, ascending.
    fn marked(&self, space: &Space, without: &BTreeSet<Name>) -> Result<Vec<u64>, GcPagesError> {
        let tables = self.tables(without)?;
        let of_tenant = tables.values().flatten().filter(|table| table.tenant == space.tenant);
        let named = of_tenant.flat_map(|table| table.hashes()).map(prefix);
        let mut live: Vec<u64> = named.chain(space.leases().prefixes()).collect();
        live.sort_unstable();
        live.dedup();
        Ok(live)
    }

    fn collect(
        self: &Arc<Self>,
        space: &Space,
        without: &BTreeSet<Name>,
        report: &mut GcPagesReport,
        meter: &Meter,
    ) -> Result<(), GcPagesError> {
        meter.begin("looking for unused pages", 0);
        let _one_at_a_time = interleave::lock(&space.collecting);
        let _collecting = space.leases().collect();
        let live = self.marked(space, without)?;
        failpoint::reached("store.gc_pages.marked");
        space.remove_unopened(&live, meter)?;
        let superseded = space.superseded(&live, meter)?;
        let victims = space.victims(&live, &superseded, &mut report.damage, meter)?;
        let (unused, mut mostly): (Vec<_>, Vec<_>) =
            victims.into_iter().partition(|victim| victim.live.is_empty());
        if !unused.is_empty() {
            self.replace_packs(space, unused, None, &superseded, report)?;
        }
        let pages = mostly.iter().map(|victim| victim.live.len()).sum::<usize>();
        meter.begin("copying pages out of packs that go", (pages * PAGE) as u64);
        // The last is rewritten first.
        mostly.sort_by_key(|victim| std::cmp::Reverse(victim.live.len()));
        let mut most = workers::threads() * MAX_PACK_PAGES as usize;
        while let Some(batch) = next_batch(&mut mostly, most) {
            let copied = self.with_reserve(
                |e: &GcPagesError| most == 0 && e.is_no_space(),
                || self.copy_live(space, &batch, meter),
            );
            match copied {
                Ok(copies) => {
                    self.replace_packs(space, batch, Some(copies), &superseded, report)?;
                }
                Err(e) if !e.is_no_space() => return Err(e),
                // One at a time from here on.
                Err(_) if most > 0 => {
                    most = 0;
                    mostly.extend(batch.into_iter().rev());
                }
                Err(e) => {
                    report.no_space = Some(dayfly_units::error::chain(&e));
                    break;
                }
            }
        }
        let _changing = space.changing();
        self.unlink_retired(space)?;
        space.record();
        Ok(())
    }

    /// Writes the live pages of packs into new packs in a stage, which are synced.
    fn copy_live(
        self: &Arc<Self>,
        space: &Space,
        victims: &[Victim],
        meter: &Meter,
    ) -> Result<Copies, GcPagesError> {
        let stage = self.stage()?;
        let packs = writer::stage(&stage, &space.tenant, &LivePages::of(space, victims, meter))?;
        Ok(Copies { stage, packs })
    }

    /// Publishes the copies of the victims' live pages, and removes the victims.
    fn replace_packs(
        self: &Arc<Self>,
        space: &Space,
        victims: Vec<Victim>,
        copies: Option<Copies>,
        superseded: &Superseded,
        report: &mut GcPagesReport,
    ) -> Result<(), GcPagesError> {
        failpoint::reached("store.gc_pages.staged");
        let _changing = space.changing();
        let packs = match &copies {
            Some(Copies { stage, packs }) => {
                writer::publish(stage, &space.dir, &space.tenant, packs)?
            }
            None => Vec::new(),
        };
        failpoint::reached("store.gc_pages.published");
        let written: u64 = packs.iter().map(|p| p.bytes).sum();
        let gone = space.change_over(victims, packs, superseded);
        self.unlink_retired(space)?;
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

    /// Unlinks the files of retired packs: a pack is one file, so this needs no space. If it fails,
    /// the next gc tries again, unless a put has made the same pack meanwhile. The caller holds
    /// `changing`.
    fn unlink_retired(&self, space: &Space) -> IoResult<()> {
        let retired = space.read().retired.clone();
        if retired.is_empty() {
            return Ok(());
        }
        for id in &retired {
            let unlink = || space.dir.unlink(&id.to_string());
            self.with_reserve(IoError::is_no_space, unlink)?;
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

/// Packs in a stage.
struct Copies {
    stage: Stage,
    packs: Vec<Staged>,
}

/// Takes victims from the end, of at most `most` live pages together, but at least one.
fn next_batch(victims: &mut Vec<Victim>, most: usize) -> Option<Vec<Victim>> {
    let mut batch = vec![victims.pop()?];
    let mut pages = batch[0].live.len();
    while let Some(next) = victims.pop_if(|next| pages + next.live.len() <= most) {
        pages += next.live.len();
        batch.push(next);
    }
    Some(batch)
}

#[cfg(test)]
#[path = "gc_tests.rs"]
mod tests;
