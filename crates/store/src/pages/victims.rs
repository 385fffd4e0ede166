//! The packs that a gc removes, and the pages that it copies out of them.

use super::copies::Superseded;
use super::index::Place;
use super::pack::{PAGE, Pack, PackError};
use super::read::read_span;
use super::record::ALL;
use super::space::{Space, State};
use super::writer::Source;
use crate::errors::{Damage, IoResult};
use crate::meter::Meter;
use dayfly_units::Digest;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A pack is rewritten if less than this percentage of its pages is in use.
pub const REWRITE_BELOW_PERCENT: u32 = 50;

/// A pack to remove, and the pages to copy from it first.
pub(super) struct Victim {
    pub(super) number: u32,
    pub(super) pack: Arc<Pack>,
    /// Pages to copy, in ascending order, with their hashes.
    pub(super) live: Vec<(u32, Digest)>,
}

impl State {
    /// Whether a page with this hash prefix has a copy that is not in quarantine.
    fn is_had(&self, prefix: u64) -> bool {
        self.candidates(prefix).any(|place| !self.is_bad_place(place))
    }

    fn is_bad_place(&self, place: Place) -> bool {
        self.packs.get(&place.pack).is_none_or(|pack| self.is_bad(place, pack))
    }

    /// For each pack the numbers of its pages that are live and not superseded.
    fn used(&self, live: &[u64], superseded: &Superseded) -> BTreeMap<u32, Vec<u32>> {
        let mut used: BTreeMap<u32, Vec<u32>> =
            self.packs.keys().map(|&n| (n, Vec::new())).collect();
        for (_, place) in self.places().filter(|(p, _)| live.binary_search(p).is_ok()) {
            if !superseded.contains_key(&place) {
                used.entry(place.pack).or_default().push(place.page);
            }
        }
        used
    }

    /// Moves each place that `to` has, and removes those for which it returns `None`. A further
    /// place takes the place of one that was removed.
    fn remap(&mut self, to: impl Fn(Place) -> Option<Place>) {
        self.index.remap(&to);
        if self.doubles.entries() == 0 {
            return;
        }
        let doubles = std::mem::take(&mut self.doubles);
        for (prefix, place) in doubles.iter() {
            let Some(place) = to(place) else { continue };
            if self.index.candidates(prefix).any(|known| known == place) {
                continue;
            }
            let only = self.index.candidates(prefix).next().is_none();
            let index = if only { &mut self.index } else { &mut self.doubles };
            index.insert(prefix, place);
        }
    }
}

impl Space {
    /// The packs to remove, given the prefixes of the live pages. Adds to `damaged` what keeps a
    /// pack.
    pub(super) fn victims(
        &self,
        live: &[u64],
        superseded: &Superseded,
        damaged: &mut Vec<Damage>,
        meter: &Meter,
    ) -> IoResult<Vec<Victim>> {
        let (packs, used, bad) = {
            let state = self.read();
            let bad: BTreeSet<u32> = state.quarantine.iter().map(|(number, _)| *number).collect();
            (state.packs.clone(), state.used(live, superseded), bad)
        };
        let mut victims = Vec::new();
        for (number, pages) in used {
            let Some(pack) = packs.get(&number) else { continue };
            let share = u64::from(pack.pages) * u64::from(REWRITE_BELOW_PERCENT);
            if pages.len() as u64 * 100 >= share && !bad.contains(&number) {
                continue;
            }
            match self.victim(number, pack, pages, meter) {
                Ok(victim) => victims.push(victim),
                Err(PackError::Damage(damage)) => damaged.push(damage),
                Err(PackError::Io(e)) => return Err(e),
            }
        }
        Ok(victims)
    }

    /// A pack to remove, if each of its `pages` can be copied. A damaged group goes into
    /// quarantine.
    fn victim(
        &self,
        number: u32,
        pack: &Arc<Pack>,
        mut pages: Vec<u32>,
        meter: &Meter,
    ) -> Result<Victim, PackError> {
        let mut victim = Victim { number, pack: Arc::clone(pack), live: Vec::new() };
        if pages.is_empty() {
            return Ok(victim);
        }
        pages.sort_unstable();
        let read = || {
            let file = self.file(number, pack)?;
            pack.hashes(&file, 0..pack.pages)
        };
        let hashes = read().map_err(|e| self.found_bad((number, ALL), e.into()))?;
        let named = |page: u32| {
            let hash = hashes.get(page as usize).map(|hash| (page, *hash));
            let expected = || format!("below {}", pack.pages);
            hash.ok_or_else(|| pack.damage(page, "the page", expected(), page.to_string()))
        };
        victim.live = pages.into_iter().map(named).collect::<Result<_, Damage>>()?;
        let group = |(page, _): &(u32, Digest)| page / pack.group_pages;
        for of_group in victim.live.chunk_by(|a, b| group(a) == group(b)) {
            let live = of_group.to_vec();
            let one = [Victim { number, pack: Arc::clone(pack), live }];
            LivePages::of(self, &one, meter)
                .pages(0..of_group.len(), &mut |_, _| Ok(()))
                .map_err(|e| self.found_bad((number, group(&of_group[0])), e))?;
        }
        Ok(victim)
    }

    /// The error, as damage if the disk failed to read; its group goes into quarantine then.
    fn found_bad(&self, group: (u32, u32), e: PackError) -> PackError {
        match e {
            PackError::Io(e) if !e.is_damage() => PackError::Io(e),
            e => {
                self.quarantine(&[group]);
                PackError::Damage(e.into_damage())
            }
        }
    }

    /// Removes the packs that could not be opened, if every live page is in another pack. Those of
    /// another version of dayfly stay. The caller runs the only gc.
    pub(super) fn remove_unopened(&self, live: &[u64], meter: &Meter) -> IoResult<()> {
        let gone: Vec<Damage> = {
            let state = self.read();
            if state.damaged.is_empty() || !live.iter().all(|prefix| state.is_had(*prefix)) {
                return Ok(());
            }
            state.damaged.iter().filter(|damage| !damage.is_version()).cloned().collect()
        };
        // A copy with other bytes proves nothing.
        if gone.is_empty() || !self.are_proven(live, meter)? {
            return Ok(());
        }
        let _changing = self.changing();
        for damage in gone {
            let name = damage.file().file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match self.dir.unlink(name) {
                Err(e) if !e.is_damage() => return Err(e),
                Err(_) => continue,
                Ok(()) => tracing::info!(name, "removed a damaged pack that nothing needs"),
            }
            self.write().damaged.retain(|known| known.file() != damage.file());
        }
        self.dir.sync()
    }

    /// Switches the index to the copies, which hold the victims' live pages in the same order.
    /// Returns the victims that nothing references any more. No step can fail, so the index is
    /// never left half changed.
    ///
    /// A pack stays if a place in `superseded` has lost its other copy meanwhile.
    pub(super) fn change_over(
        &self,
        victims: Vec<Victim>,
        copies: Vec<Pack>,
        superseded: &Superseded,
    ) -> Vec<Victim> {
        let places = |v: &Victim| -> Vec<Place> {
            v.live.iter().map(|(page, _)| Place { pack: v.number, page: *page }).collect()
        };
        let old: Vec<Place> = victims.iter().flat_map(places).collect();
        let mut state = self.write();
        let late = self.leases().prefixes();
        let copied: HashSet<Place> = old.iter().copied().collect();
        let is_needed = |(p, place): &(u64, Place)| {
            let other = superseded.get(place);
            let has_other = other.is_some_and(|other| !state.is_bad_place(*other));
            (other.is_some() || late.contains(p)) && !copied.contains(place) && !has_other
        };
        let left = state.places().filter(is_needed);
        let needed: BTreeSet<u32> = left.map(|(_, place)| place.pack).collect();
        let gone: Vec<Victim> =
            victims.into_iter().filter(|v| !needed.contains(&v.number)).collect();
        let numbers: BTreeSet<u32> = gone.iter().map(|v| v.number).collect();
        state.packs.retain(|number, _| !numbers.contains(number));
        state.quarantine.retain(|(number, _)| !numbers.contains(number));
        state.retired.extend(gone.iter().map(|v| v.pack.id));
        let new = copies.into_iter().flat_map(|pack| {
            let pages = pack.pages;
            let number = state.enter(pack);
            (0..pages).map(move |page| Place { pack: number, page })
        });
        let moved: HashMap<Place, Place> = old.into_iter().zip(new.collect::<Vec<_>>()).collect();
        state.remap(|place| match numbers.contains(&place.pack) {
            true => moved.get(&place).copied(),
            false => Some(place),
        });
        self.close(&numbers);
        gone
    }
}

/// The live pages of victims, as a source for new packs.
pub(super) struct LivePages<'a> {
    space: &'a Space,
    victims: &'a [Victim],
    /// Index of the victim, and index in its `live`.
    pages: Vec<(usize, usize)>,
    meter: &'a Meter,
}

impl<'a> LivePages<'a> {
    pub(super) fn of(space: &'a Space, victims: &'a [Victim], meter: &'a Meter) -> Self {
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
