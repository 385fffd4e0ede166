//! What is in the namespaces: statistics, what a snapshot takes, and the search for damage.

use super::index::prefix;
use super::pack::{PAGE, Pack, PackError};
use super::read::read_span;
use super::space::Space;
use super::{PagesError, Tenant};
use crate::digest::Digest;
use crate::errors::{Damage, IoError};
use crate::memory::{Kind, Table};
use crate::pages::gc::GcPagesError;
use crate::publish::OpenError;
use crate::{Store, workers};
use dayfly_units::Name;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// A tenant's namespace in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PagesStats {
    /// Different pages.
    pub unique_pages: u64,
    /// Their bytes.
    pub raw_bytes: u64,
    /// Bytes of all groups as stored, pages that nobody needs included.
    pub compressed_bytes: u64,
    /// Bytes of memory that the index takes, packs' tables of groups included.
    pub index_bytes: u64,
    /// Packs.
    pub packs: u64,
    /// Packs that could not be opened.
    pub damaged_packs: u64,
    /// Frames of all snapshots of the tenant that are pages of the namespace.
    pub referring_frames: u64,
    /// `referring_frames` for each unique page; 0 without pages.
    pub dedupe_ratio: f64,
}

/// What the frames of a snapshot are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotUse {
    /// Frames of zeroes.
    pub zero: u64,
    /// Frames that the guest did not use.
    pub free: u64,
    /// Frames that are blocks of its disks.
    pub disk: u64,
    /// Frames that are pages of the tenant's namespace.
    pub page_frames: u64,
    /// Different pages that another snapshot of the tenant has too.
    pub shared_pages: u64,
    /// Different pages that only this snapshot has.
    pub own_pages: u64,
}

/// What to search for damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every tenant's pages and every snapshot.
    All,
    /// One snapshot: its table, its pages, its disks.
    Snapshot(Name),
}

/// What a search found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Pages that were decompressed and hashed.
    pub pages: u64,
    /// Packs that were opened.
    pub packs: u64,
    /// Snapshots whose tables and disks were read.
    pub snapshots: u64,
    /// Everything that is damaged or missing.
    pub damage: Vec<Damage>,
}

impl Tenant {
    /// The namespace in numbers.
    ///
    /// # Errors
    /// A snapshot's table cannot be read.
    pub fn stats(&self) -> Result<PagesStats, GcPagesError> {
        let tables = self.inner.tables()?;
        let frames =
            tables.iter().filter(|(_, t)| t.tenant == self.space.tenant).map(|(_, t)| page_frames(t));
        let referring_frames = frames.sum();
        let state = self.space.read();
        let unique_pages = state.index.entries() as u64;
        let group_tables: usize = state.packs.values().map(|pack| pack.memory_bytes()).sum();
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        let dedupe_ratio =
            if unique_pages == 0 { 0.0 } else { referring_frames as f64 / unique_pages as f64 };
        Ok(PagesStats {
            unique_pages,
            raw_bytes: unique_pages * PAGE as u64,
            compressed_bytes: state.packs.values().map(|pack| pack.stored_bytes()).sum(),
            index_bytes: (state.index.bytes() + group_tables) as u64,
            packs: state.packs.len() as u64,
            damaged_packs: state.damaged.len() as u64,
            referring_frames,
            dedupe_ratio,
        })
    }
}

fn page_frames(table: &Table) -> u64 {
    let pages = table.runs().iter().filter(|run| matches!(run.kind, Kind::Page { .. }));
    pages.map(|run| u64::from(run.frames)).sum()
}

impl Store {
    /// The namespaces in numbers, by tenant.
    ///
    /// # Errors
    /// A folder or a snapshot's table cannot be read.
    pub fn pages_stats(&self) -> Result<Vec<(Name, PagesStats)>, GcPagesError> {
        let names = self.0.tenant_names()?;
        names.into_iter().map(|name| Ok((name.clone(), self.tenant(&name)?.stats()?))).collect()
    }

    /// What the frames of the snapshot `name` of `tenant` are, and how many of its pages would go with it.
    ///
    /// # Errors
    /// [`GcPagesError`]: a table cannot be read, or there is no such snapshot of pages: then `Damage` names the table.
    pub fn snapshot_use(&self, tenant: &Name, name: &Name) -> Result<SnapshotUse, GcPagesError> {
        let tables = self.0.tables()?;
        let is_it = |n: &String| n == name.as_str();
        let of_tenant = || tables.iter().filter(|(_, t)| t.tenant == *tenant);
        let Some((_, table)) = of_tenant().find(|(n, _)| is_it(n)) else {
            let file = self.0.snapshots.path().join(name.as_str());
            let what = format!("the table of a snapshot of tenant {tenant}");
            return Err(Damage::Missing { file, what, by: "who asks".to_owned() }.into());
        };
        let others: HashSet<&Digest> =
            of_tenant().filter(|(n, _)| !is_it(n)).flat_map(|(_, t)| t.hashes()).collect();
        let shared_pages = table.hashes().iter().filter(|hash| others.contains(hash)).count() as u64;
        let count = |of: fn(Kind) -> bool| -> u64 {
            table.runs().iter().filter(|run| of(run.kind)).map(|run| u64::from(run.frames)).sum()
        };
        Ok(SnapshotUse {
            zero: count(|k| k == Kind::Zero),
            free: count(|k| k == Kind::Free),
            disk: count(|k| matches!(k, Kind::Disk { .. })),
            page_frames: page_frames(table),
            shared_pages,
            own_pages: table.hashes().len() as u64 - shared_pages,
        })
    }

    /// Reads and hashes everything of `scope` again, whatever was verified before, and tells all damage, not only the first.
    ///
    /// # Errors
    /// The host cannot read a folder, or it cannot read a file for another reason than what is in it.
    pub fn verify_pages(&self, scope: &Scope) -> Result<VerifyReport, IoError> {
        let mut report = VerifyReport::default();
        self.0.verifier.forget(self.root());
        match scope {
            Scope::All => {
                for tenant in self.0.tenant_names()? {
                    self.tenant(&tenant)?.space.verify(None, &mut report)?;
                }
                for name in self.0.snapshots.entries()? {
                    match name.parse() {
                        Ok(name) => self.verify_snapshot(&name, false, &mut report)?,
                        Err(_) => tracing::warn!(name, "leaving alone what is not named like a snapshot"),
                    }
                }
            }
            Scope::Snapshot(name) => self.verify_snapshot(name, true, &mut report)?,
        }
        Ok(report)
    }

    /// With `pages`, also hashes the pages that its table names.
    fn verify_snapshot(&self, name: &Name, pages: bool, report: &mut VerifyReport) -> Result<(), IoError> {
        report.snapshots += 1;
        let opened = match self.0.open_snapshot_parts(name) {
            Ok(opened) => opened,
            Err(OpenError::Io(e)) => return Err(e),
            Err(OpenError::Damage(damage)) => {
                report.damage.push(damage);
                return Ok(());
            }
            Err(OpenError::NotFound { .. }) => {
                let file = self.0.snapshots.path().join(name.as_str());
                let what = format!("snapshot {name}");
                report.damage.push(Damage::Missing { file, what, by: "who asks".to_owned() });
                return Ok(());
            }
        };
        let Some((table, disks)) = opened.table() else { return Ok(()) };
        let tenant = self.tenant(&table.tenant)?;
        let before = report.damage.len();
        let by = format!("snapshot {name}");
        for hash in table.hashes() {
            if tenant.space.find(hash)?.is_none() {
                report.damage.push(tenant.space.missing(hash, &by));
            }
        }
        if pages {
            let wanted: HashSet<u64> = table.hashes().iter().map(prefix).collect();
            tenant.space.verify(Some(&wanted), report)?;
        }
        if report.damage.len() == before {
            match tenant.prove(table, &disks) {
                Ok(()) => {}
                Err(PagesError::Io(e)) => return Err(e),
                Err(PagesError::Damage(damage)) => report.damage.push(damage),
                Err(PagesError::Invalid { place, expected, got }) => {
                    let file = self.0.snapshots.path().join(name.as_str());
                    report.damage.push(Damage::Content { file, place, expected, got });
                }
            }
        }
        Ok(())
    }
}

impl Space {
    /// Reads packs again: all of them, or the groups with pages of these prefixes.
    fn verify(&self, only: Option<&HashSet<u64>>, report: &mut VerifyReport) -> Result<(), IoError> {
        let packs: Vec<Arc<Pack>> = self.read().packs.values().cloned().collect();
        let unopened = self.read().damaged.clone();
        let done = Mutex::new((0_u64, 0_u64, Vec::new()));
        workers::each(packs.len(), <(Vec<u8>, Vec<u8>)>::default, |scratch, n| {
            let mut damage = Vec::new();
            let pages = match self.verify_pack(&packs[n], only, scratch, &mut damage) {
                Ok(pages) => pages,
                // Written anew meanwhile: its live pages are in another pack, which was hashed when it was made.
                Err(PackError::Io(e)) if e.is_not_found() => return Ok(()),
                Err(PackError::Io(e)) => return Err(e),
                Err(PackError::Damage(d)) => {
                    damage.push(d);
                    0
                }
            };
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            done.0 += 1;
            done.1 += pages;
            done.2.append(&mut damage);
            Ok(())
        })?;
        let (packs, pages, damage) = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.packs += packs;
        report.pages += pages;
        report.damage.extend(damage);
        report.damage.extend(unopened);
        Ok(())
    }

    fn verify_pack(
        &self,
        pack: &Pack,
        only: Option<&HashSet<u64>>,
        (buffer, raw): &mut (Vec<u8>, Vec<u8>),
        damage: &mut Vec<Damage>,
    ) -> Result<u64, PackError> {
        let file = self.dir.open(&pack.id.to_string())?;
        let again = Pack::open(&pack.path, &file, &self.tenant)?;
        let mut pages = 0;
        for group in 0..again.groups() {
            let hashes = again.hashes(&file, again.pages_of(group))?;
            if only.is_some_and(|only| !hashes.iter().any(|hash| only.contains(&prefix(hash)))) {
                continue;
            }
            let stored = read_span(&again, &file, group, group, buffer)?;
            for (slot, (page, hash)) in again.pages_of(group).zip(&hashes).enumerate() {
                // Decoded for each page of a damaged group, so that every page that is lost is named.
                let decoded =
                    if slot == 0 || raw.is_empty() { again.decode(group, page, stored, raw) } else { Ok(()) };
                match decoded {
                    Ok(()) => damage.extend(again.check(page, hash, &raw[slot * PAGE..][..PAGE]).err()),
                    Err(d) => {
                        raw.clear();
                        damage.push(d);
                    }
                }
                pages += 1;
            }
        }
        Ok(pages)
    }
}
