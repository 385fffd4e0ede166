//! Where each unique page is: the index in memory, 16 bytes an entry.
//!
//! An entry is the first 8 bytes of the page's hash, the number of its pack and its place in it. Eight bytes of BLAKE3 are enough to find a
//! page and not enough to believe it: callers compare all 32 against the pack's footer ([`super::space`]), so that two pages with the same
//! prefix are two entries.
//!
//! Open addressing, linear probing. An entry's home is its prefix scaled to the length of the table, which works for any length: the table
//! grows by an eighth when it is more than 17/20 full, and so takes 18.8 to 21.3 bytes an entry ([`Index::bytes`]; with the packs' tables
//! of groups, see `stats`, still less than 24 bytes a page or 6 MiB per GiB). Prebaked uVMs, section V-C, pays 342 MB of such entries for
//! 49.6 GB.

use crate::digest::Digest;

/// A page's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    /// Number of the pack in this process.
    pub(crate) pack: u32,
    /// Which page of it.
    pub(crate) page: u32,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    prefix: u64,
    place: Place,
}

const FREE: Slot = Slot { prefix: 0, place: Place { pack: u32::MAX, page: 0 } };
const _: () = assert!(size_of::<Slot>() == 16);

/// Unique pages by the prefix of their hash.
#[derive(Debug, Default)]
pub(crate) struct Index {
    slots: Vec<Slot>,
    entries: usize,
}

/// The first 8 bytes of a hash.
pub(crate) fn prefix(hash: &Digest) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|n| hash.0[n]))
}

impl Index {
    pub(crate) const fn entries(&self) -> usize {
        self.entries
    }

    /// Bytes of memory that the table takes.
    pub(crate) const fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    /// The slots from `prefix`'s home up to the first free one.
    fn probe(&self, prefix: u64) -> impl Iterator<Item = &Slot> {
        let (before, after) = self.slots.split_at(self.home(prefix));
        after.iter().chain(before).take_while(|slot| slot.place.pack != FREE.place.pack)
    }

    fn home(&self, prefix: u64) -> usize {
        let scaled = (u128::from(prefix) * self.slots.len() as u128) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }

    /// The places of all pages whose hash has this prefix: nearly always none or one.
    pub(crate) fn candidates(&self, prefix: u64) -> impl Iterator<Item = Place> {
        self.probe(prefix).filter(move |slot| slot.prefix == prefix).map(|slot| slot.place)
    }

    /// Adds an entry; whether the page is there already is the caller's question.
    pub(crate) fn insert(&mut self, prefix: u64, place: Place) {
        if (self.entries + 1) * 20 > self.slots.len() * 17 {
            let length = (self.slots.len() + self.slots.len() / 8).max(64);
            self.rebuild(length, Some);
        }
        self.put(Slot { prefix, place });
    }

    fn put(&mut self, slot: Slot) {
        let home = self.home(slot.prefix);
        let (before, after) = self.slots.split_at_mut(home);
        if let Some(free) = after.iter_mut().chain(before).find(|s| s.place.pack == FREE.place.pack) {
            *free = slot;
            self.entries += 1;
        }
    }

    /// Gives each entry the place that `to` says, or removes it.
    pub(crate) fn remap(&mut self, to: impl Fn(Place) -> Option<Place>) {
        let kept = self.iter().filter(|&(_, place)| to(place).is_some()).count();
        self.rebuild((kept * 20 / 16).max(64), to);
    }

    fn rebuild(&mut self, length: usize, to: impl Fn(Place) -> Option<Place>) {
        let old = std::mem::replace(&mut self.slots, vec![FREE; length]);
        self.entries = 0;
        for slot in old.into_iter().filter(|s| s.place.pack != FREE.place.pack) {
            if let Some(place) = to(slot.place) {
                self.put(Slot { place, ..slot });
            }
        }
    }

    /// Every entry: prefix and place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Place)> {
        self.slots.iter().filter(|s| s.place.pack != FREE.place.pack).map(|s| (s.prefix, s.place))
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
