//! The index of unique pages in memory: 16 bytes per entry.
//!
//! An entry has the first 8 bytes of the page's hash, the number of its pack, and its number in the
//! pack. Eight bytes of BLAKE3 are enough to find a page, but not enough to trust it. Callers
//! compare all 32 bytes with the pack's footer ([`super::space`]), so two pages with equal prefixes
//! are two entries.
//!
//! The index is a hash table with open addressing and linear probing. An entry's home slot is its
//! prefix, mixed with a secret of this process and scaled to the table's length, which works for
//! any length. A process that makes hashes up ([`super::work`]) does not know which slots are near.
//! The table grows by an eighth when it is more than 17/20 full, and so takes 18.8 to 21.3 bytes
//! per entry ([`Index::bytes`]).
//!
//! With the packs' tables of groups (see `stats`) this is less than 24 bytes per page, or 6 MiB per
//! GiB. Prebaked uVMs, section V-C, needs 342 MB of such entries for 49.6 GB.

use dayfly_units::Digest;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

/// The place of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    /// Number of the pack, valid in this process only.
    pub(crate) pack: u32,
    /// Number of the page in the pack.
    pub(crate) page: u32,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    prefix: u64,
    place: Place,
}

const FREE: Slot = Slot { prefix: 0, place: Place { pack: u32::MAX, page: 0 } };
const _: () = assert!(size_of::<Slot>() == 16);

/// The places of unique pages, by the prefix of their hash.
#[derive(Debug, Default)]
pub(crate) struct Index {
    slots: Vec<Slot>,
    entries: usize,
}

/// The first 8 bytes of a hash.
pub(crate) fn prefix(hash: &Digest) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|n| hash.0[n]))
}

/// The prefix, mixed with a secret of this process: one to one.
pub(super) fn mixed(prefix: u64) -> u64 {
    static SECRET: LazyLock<[u64; 2]> = LazyLock::new(|| {
        let secret = || RandomState::new().build_hasher().finish();
        [secret(), secret() | 1]
    });
    let [added, factor] = *SECRET;
    let mixed = (prefix ^ added).wrapping_mul(factor);
    // MurmurHash3's finalizer.
    let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53)
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
        let scaled = (u128::from(mixed(prefix)) * self.slots.len() as u128) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }

    /// The places of all pages with this hash prefix: nearly always none or one.
    pub(crate) fn candidates(&self, prefix: u64) -> impl Iterator<Item = Place> {
        self.probe(prefix).filter(move |slot| slot.prefix == prefix).map(|slot| slot.place)
    }

    /// Makes space for `more` entries, so that the table grows at most once for them.
    pub(crate) fn reserve(&mut self, more: usize) {
        let length = (self.entries + more) * 20 / 17 + 1;
        if length > self.slots.len() + self.slots.len() / 8 {
            self.rebuild(length.max(64), Some);
        }
    }

    /// Adds an entry; the caller has checked that the page is not in the index.
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
        if let Some(free) = after.iter_mut().chain(before).find(|s| s.place.pack == FREE.place.pack)
        {
            *free = slot;
            self.entries += 1;
        }
    }

    /// Moves each entry to the place that `to` returns, or removes it for `None`.
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

    /// All entries: prefix and place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Place)> {
        self.slots.iter().filter(|s| s.place.pack != FREE.place.pack).map(|s| (s.prefix, s.place))
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
