//! Searches packs of pages.

use super::{Finding, MAX_FINDINGS, Object, Scrub};
use crate::errors::{Damage, IoError};
use crate::pages::index::prefix;
use crate::pages::pack::{PAGE, Pack, PackError};
use crate::pages::read::read_span;
use crate::pages::record::ALL;
use crate::pages::space::Space;
use crate::workers;
use dayfly_units::sync::lock;
use dayfly_units::{Digest, Name};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A pack's name, its damage, and the affected pages by hash prefix.
type Wrong = (String, String, Vec<u64>);

/// The result for one pack.
#[derive(Default)]
struct Seen {
    pages: u64,
    wrong: Vec<(Damage, Vec<u64>)>,
    /// Damaged pages that are only counted, because the report is full.
    unsaid: Vec<u64>,
    /// Groups with damage, and groups in quarantine that are sound: the pack's number and the
    /// group's, as in [`crate::pages::quarantine`].
    bad: Vec<(u32, u32)>,
    good: Vec<(u32, u32)>,
}

/// The result for all packs.
#[derive(Default)]
struct All {
    packs: u64,
    pages: u64,
    /// Damage by index of the pack.
    wrong: Vec<(usize, (Damage, Vec<u64>))>,
    unsaid: Vec<u64>,
    bad: Vec<(u32, u32)>,
    good: Vec<(u32, u32)>,
}

impl Scrub<'_> {
    pub(super) fn packs(&mut self) -> Result<(), IoError> {
        for tenant in self.tenants()? {
            let space = self.inner.space(&tenant)?;
            let only = if self.chosen {
                Some(self.wanted.get(&tenant).cloned().unwrap_or_default())
            } else {
                None
            };
            let (wrong, unsaid) = self.packs_of(&space, only.as_ref())?;
            let mut bad = HashMap::new();
            for (name, text, pages) in wrong {
                let at =
                    self.list(Finding { object: Object::Pack, name, text, snapshots: Vec::new() });
                bad.extend(pages.into_iter().map(|page| (page, at)));
            }
            self.report.more_damage += unsaid.len() as u64;
            bad.extend(unsaid.into_iter().map(|page| (page, None)));
            self.bad_pages.insert(tenant, bad);
        }
        Ok(())
    }

    /// The tenants to search.
    pub(super) fn tenants(&self) -> Result<Vec<Name>, IoError> {
        let mut all = self.inner.tenant_names()?;
        all.retain(|name| self.tenant.as_ref().is_none_or(|only| only == name));
        Ok(all)
    }

    /// Reads packs on all cores: all packs, or only the groups with pages of the prefixes `only`.
    fn packs_of(
        &mut self,
        space: &Space,
        only: Option<&HashSet<u64>>,
    ) -> Result<(Vec<Wrong>, Vec<u64>), IoError> {
        let packs: Vec<(u32, Arc<Pack>)> = {
            let state = space.read();
            let places =
                only.iter().flat_map(|only| only.iter()).flat_map(|p| state.candidates(*p));
            let needed: HashSet<u32> = places.map(|place| place.pack).collect();
            let all = state.packs.iter().filter(|(n, _)| only.is_none() || needed.contains(n));
            all.map(|(n, pack)| (*n, Arc::clone(pack))).collect()
        };
        let done = Mutex::new(All::default());
        let said = AtomicUsize::new(self.report.damage.len());
        workers::each(packs.len(), <(Vec<u8>, Vec<u8>)>::default, |scratch, n| {
            let (number, pack) = &packs[n];
            let mut seen = Seen::default();
            match self.pack(space, (*number, pack), only, scratch, &said, &mut seen) {
                Ok(()) => {}
                // A gc removed the pack meanwhile; its live pages are in another pack, and were
                // hashed when that was written. If the file was deleted otherwise, the snapshots
                // that miss its pages report them.
                Err(PackError::Io(e)) if e.is_not_found() => return Ok(()),
                Err(PackError::Io(e)) if !e.is_damage() => return Err(e),
                Err(e) => {
                    seen.bad.push((*number, ALL));
                    seen.wrong.push((e.into_damage(), all_of(space, *number)));
                }
            }
            let mut done = lock(&done);
            done.packs += 1;
            done.pages += seen.pages;
            done.wrong.extend(seen.wrong.into_iter().map(|wrong| (n, wrong)));
            done.unsaid.append(&mut seen.unsaid);
            done.bad.append(&mut seen.bad);
            done.good.append(&mut seen.good);
            Ok(())
        })?;
        let All { packs: opened, pages, mut wrong, unsaid, bad, good } =
            done.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.report.packs += opened;
        self.report.pages += pages;
        // Between the two, groups that are bad may be in no quarantine.
        let changing = space.changing();
        space.release(&good);
        space.quarantine(&bad);
        drop(changing);
        wrong.sort_by_key(|(n, _)| *n);
        // The next use opens these packs anew, because good copies may have replaced them.
        space.close(&wrong.iter().map(|(n, _)| packs[*n].0).collect());
        let wrong = wrong
            .into_iter()
            .map(|(n, (damage, pages))| (packs[n].1.id.to_string(), damage.to_string(), pages));
        // The pages of packs that could not be opened are unknown; snapshots that miss pages report
        // those.
        let unopened = space.unopened()?;
        let unopened = unopened.iter().map(|damage| {
            let name = damage.file().file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, damage.to_string(), Vec::new())
        });
        let unopened = unopened.filter(|_| only.is_none());
        Ok((wrong.chain(unopened).collect(), unsaid))
    }

    fn pack(
        &self,
        space: &Space,
        (number, pack): (u32, &Pack),
        only: Option<&HashSet<u64>>,
        (buffer, raw): &mut (Vec<u8>, Vec<u8>),
        said: &AtomicUsize,
        seen: &mut Seen,
    ) -> Result<(), PackError> {
        let file = space.dir.open(&pack.id.to_string())?;
        let again = Pack::open(&pack.path, &file, &space.tenant)?;
        let in_quarantine = space.read().is_pack_bad(number);
        for group in 0..again.groups() {
            let hashes = again.hashes(&file, again.pages_of(group))?;
            if only.is_some_and(|only| !hashes.iter().any(|hash| only.contains(&prefix(hash)))) {
                continue;
            }
            let place = (number, u32::try_from(group).unwrap_or(ALL));
            let stored = match read_span(&again, &file, group, group, buffer) {
                Err(e) if e.is_damage() => {
                    let pages = hashes.iter().map(prefix).collect();
                    seen.wrong.push((PackError::Io(e).into_damage(), pages));
                    seen.bad.push(place);
                    continue;
                }
                other => other?,
            };
            self.meter.step_at(stored.len() as u64, &pack.path)?;
            let before = seen.wrong.len() + seen.unsaid.len();
            self.group(&again, group, &hashes, (stored, raw), said, seen);
            if before < seen.wrong.len() + seen.unsaid.len() {
                seen.bad.push(place);
            } else if in_quarantine {
                seen.good.push(place);
            }
        }
        if in_quarantine && only.is_none() {
            // Every group was read. Those with damage are in quarantine by themselves.
            seen.good.push((number, ALL));
        }
        Ok(())
    }

    /// Checks all pages of a group. A damaged group is decoded again for each of its pages, so that
    /// every lost page is named.
    fn group(
        &self,
        pack: &Pack,
        group: usize,
        hashes: &[Digest],
        (stored, raw): (&[u8], &mut Vec<u8>),
        said: &AtomicUsize,
        seen: &mut Seen,
    ) {
        raw.clear();
        for (slot, (page, hash)) in pack.pages_of(group).zip(hashes).enumerate() {
            let decoded =
                if raw.is_empty() { pack.decode(group, page, stored, raw) } else { Ok(()) };
            let decoded = decoded.inspect_err(|_| raw.clear());
            let checked =
                decoded.and_then(|()| pack.check(page, hash, &raw[slot * PAGE..][..PAGE]));
            if let Err(damage) = checked {
                if said.fetch_add(1, Ordering::Relaxed) < MAX_FINDINGS {
                    seen.wrong.push((damage, vec![prefix(hash)]));
                } else {
                    seen.unsaid.push(prefix(hash));
                }
            }
            seen.pages += 1;
        }
    }
}

/// The known pages of pack `number`, by hash prefix.
fn all_of(space: &Space, number: u32) -> Vec<u64> {
    let state = space.read();
    state.places().filter(|(_, place)| place.pack == number).map(|(prefix, _)| prefix).collect()
}

impl Space {
    /// Compressed bytes of the groups with pages of the prefixes `only`; of all groups if it is
    /// `None`.
    pub(super) fn bytes_to_read(&self, only: Option<&HashSet<u64>>) -> u64 {
        let state = self.read();
        let Some(only) = only else {
            return state.packs.values().map(|pack| pack.stored_bytes()).sum();
        };
        let places = only.iter().flat_map(|prefix| state.candidates(*prefix));
        let groups: HashSet<(u32, usize)> = places
            .filter_map(|place| {
                let pack = state.packs.get(&place.pack)?;
                Some((place.pack, (place.page / pack.group_pages) as usize))
            })
            .collect();
        let bytes = |&(pack, group): &(u32, usize)| {
            let span = state.packs.get(&pack).map_or(0..0, |pack| pack.span(group, group));
            span.end - span.start
        };
        groups.iter().map(bytes).sum()
    }
}
