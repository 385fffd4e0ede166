//! Pages that have more than one place. Two packs have the same page if a crash interrupted a gc,
//! if a put has written a damaged page anew, or if two puts stored it at the same time. One of the
//! copies may have other bytes than its footer names: the disk may have lost them, or a process
//! that a guest has taken over wrote the pack ([`super::work`]).
//!
//! So a gc gives a copy up only if it has read and hashed the group of another one. Hashes that a
//! guest makes up prove nothing, whatever their first 8 bytes are, because no bytes have them.

use super::index::Place;
use super::sound::Asked;
use super::space::{Found, Space};
use crate::errors::{IoError, IoResult};
use crate::meter::Meter;
use dayfly_units::Digest;
use std::collections::HashMap;
use std::sync::Arc;

/// For each place that is not needed, the place of a copy whose group was hashed.
pub(super) type Superseded = HashMap<Place, Place>;

/// A place of a page.
struct PageCopy {
    found: Found,
    /// The hash that its footer names; `None` if the disk cannot read it.
    hash: Option<Digest>,
    is_bad: bool,
}

impl PageCopy {
    const fn place(&self) -> Place {
        Place { pack: self.found.number, page: self.found.page }
    }
}

impl Space {
    /// The places of pages with these hash prefixes that a gc may give up.
    pub(super) fn superseded(&self, live: &[u64], meter: &Meter) -> IoResult<Superseded> {
        let several: Vec<u64> = {
            let state = self.read();
            let has_several = |prefix: &u64| state.candidates(*prefix).nth(1).is_some();
            live.iter().copied().filter(has_several).collect()
        };
        let (mut superseded, mut asked) = (Superseded::new(), Asked::default());
        for prefix in several {
            meter.step_at(0, self.dir.path())?;
            let copies = self.copies(prefix)?;
            let proven = self.proven(&copies, &mut asked)?;
            for copy in &copies {
                let other = match copy.hash {
                    Some(hash) => proven.iter().find(|(known, _)| *known == hash),
                    // That other pages have the same prefix is not to be expected: only bytes that
                    // have such a hash are proven.
                    None => proven.first(),
                };
                if let Some((_, other)) = other
                    && *other != copy.place()
                {
                    superseded.insert(copy.place(), *other);
                }
            }
        }
        Ok(superseded)
    }

    /// Whether each of these prefixes has a copy that is not in quarantine, and whose group was
    /// hashed. Reads nearly all of the packs that have them.
    pub(super) fn are_proven(&self, live: &[u64], meter: &Meter) -> IoResult<bool> {
        let mut asked = Asked::default();
        for prefix in live {
            meter.step_at(0, self.dir.path())?;
            if self.proven(&self.copies(*prefix)?, &mut asked)?.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// All places with this hash prefix.
    fn copies(&self, prefix: u64) -> IoResult<Vec<PageCopy>> {
        let found: Vec<(Found, bool)> = {
            let state = self.read();
            let found = |place: Place| {
                let pack = state.packs.get(&place.pack)?;
                let is_bad = state.is_bad(place, pack);
                let (number, page) = (place.pack, place.page);
                Some((Found { number, pack: Arc::clone(pack), page }, is_bad))
            };
            state.candidates(prefix).filter_map(found).collect()
        };
        let copy = |(found, is_bad): (Found, bool)| {
            let hash = match self.hash_of(&found) {
                Err(e) if e.is_damage() || e.is_not_found() => None,
                hash => hash?,
            };
            Ok::<_, IoError>(PageCopy { found, hash, is_bad })
        };
        found.into_iter().map(copy).collect()
    }

    /// The hash that the footer on disk names.
    fn hash_of(&self, found: &Found) -> IoResult<Option<Digest>> {
        let Found { number, pack, page } = found;
        let file = self.file(*number, pack)?;
        Ok(pack.hashes(&file, *page..page + 1)?.pop())
    }

    /// For each page among `copies` the first place that is not in quarantine and whose group has
    /// its bytes. A group that has not goes into quarantine.
    fn proven(&self, copies: &[PageCopy], asked: &mut Asked) -> IoResult<Vec<(Digest, Place)>> {
        let mut proven: Vec<(Digest, Place)> = Vec::new();
        for copy in copies.iter().filter(|copy| !copy.is_bad) {
            let Some(hash) = copy.hash else { continue };
            if proven.iter().any(|(known, _)| *known == hash) {
                continue;
            }
            if self.is_sound(&copy.found, asked)? {
                proven.push((hash, copy.place()));
            } else {
                let Found { number, pack, page } = &copy.found;
                self.quarantine(&[(*number, page / pack.group_pages)]);
            }
        }
        Ok(proven)
    }
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
