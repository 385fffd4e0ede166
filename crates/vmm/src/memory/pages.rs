//! A set of pages of RAM.

use std::ops::Range;

/// A bit for each page of a memory file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pages(Vec<u64>);

impl Pages {
    /// None of RAM of `memory_bytes`.
    #[must_use]
    pub fn none(memory_bytes: u64) -> Self {
        let words = (memory_bytes / dayfly_units::PAGE_SIZE).div_ceil(64);
        Self(vec![0; usize::try_from(words).unwrap_or(0)])
    }

    /// With a page; one that RAM does not have is none.
    pub fn insert(&mut self, page: u64) {
        let word = usize::try_from(page / 64).ok().and_then(|word| self.0.get_mut(word));
        word.into_iter().for_each(|word| *word |= 1 << (page % 64));
    }

    /// With the pages of `bitmap`, whose first bit is page `first`.
    pub fn insert_bitmap(&mut self, first: u64, bitmap: &[u64]) {
        let (word, shift) = (usize::try_from(first / 64).unwrap_or(usize::MAX), first % 64);
        for (n, bits) in bitmap.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            let mut or = |at: usize, bits: u64| {
                let word = at.checked_add(word).and_then(|at| self.0.get_mut(at));
                word.into_iter().for_each(|word| *word |= bits);
            };
            or(n, bits << shift);
            if shift > 0 {
                or(n + 1, bits >> (64 - shift));
            }
        }
    }

    /// With all pages of the other.
    pub fn insert_all(&mut self, other: &Self) {
        self.insert_bitmap(0, &other.0);
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Pages in a row, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let end = self.next(start, false).unwrap_or(self.0.len() as u64 * 64);
            at = end;
            Some(start..end)
        })
    }

    /// The first page from `at` on that is in the set, or is not.
    fn next(&self, at: u64, inside: bool) -> Option<u64> {
        let mut word = usize::try_from(at / 64).ok()?;
        let bits = |word: usize| self.0.get(word).map(|bits| if inside { *bits } else { !bits });
        let mut left = bits(word)? & (u64::MAX << (at % 64));
        while left == 0 {
            word += 1;
            left = bits(word)?;
        }
        Some(word as u64 * 64 + u64::from(left.trailing_zeros()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(
            pages in prop::collection::btree_set(0_u64..512, 0..80),
            bitmap in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 0..6),
            first in 0_u64..300,
        ) {
            let mut set = Pages::none(512 * 4096);
            pages.iter().for_each(|page| set.insert(*page));
            set.insert(512);
            set.insert_bitmap(first, &bitmap);
            let mut other = Pages::none(512 * 4096);
            other.insert_all(&set);
            let bits = (0..).zip(&bitmap).flat_map(|(n, word)| (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| n * 64 + bit));
            let expected: BTreeSet<u64> = pages.into_iter().chain(bits.map(|bit| first + bit)).filter(|page| *page < 512).collect();
            prop_assert_eq!(other.count(), expected.len() as u64);
            let runs: Vec<Range<u64>> = other.runs().collect();
            prop_assert!(runs.windows(2).all(|two| two[0].end < two[1].start));
            prop_assert_eq!(runs.into_iter().flatten().collect::<BTreeSet<u64>>(), expected);
        }
    }
}
