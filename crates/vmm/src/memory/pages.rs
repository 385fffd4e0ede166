//! A set of pages of RAM.

use std::ops::Range;

/// A bitmap with one bit for each page of a memory file, and a summary with one bit for each word
/// that may have bits set. Sets are used while a guest is paused. The cost of most operations
/// therefore depends on the pages in the set, not on the size of RAM.
#[derive(Debug, Clone, Default)]
pub struct Pages {
    words: Vec<u64>,
    marks: Vec<u64>,
}

impl PartialEq for Pages {
    fn eq(&self, other: &Self) -> bool {
        self.words == other.words
    }
}

impl Eq for Pages {}

impl Pages {
    /// The empty set, for RAM of `memory_bytes`.
    #[must_use]
    pub fn none(memory_bytes: u64) -> Self {
        let words = (memory_bytes / dayfly_units::PAGE_SIZE).div_ceil(64);
        let words = usize::try_from(words).unwrap_or(0);
        Self { words: vec![0; words], marks: vec![0; words.div_ceil(64)] }
    }

    fn or(&mut self, at: usize, bits: u64) {
        if let (Some(word), Some(mark)) = (self.words.get_mut(at), self.marks.get_mut(at / 64)) {
            *word |= bits;
            *mark |= u64::from(bits != 0) << (at % 64);
        }
    }

    /// The indices of words that may have set bits, ascending.
    fn marked(&self) -> impl Iterator<Item = usize> {
        let bits = |(n, mark): (usize, &u64)| {
            let mut mark = *mark;
            std::iter::from_fn(move || {
                let bit = mark.trailing_zeros() as usize;
                mark &= mark.wrapping_sub(1);
                (bit < 64).then_some(n * 64 + bit)
            })
        };
        self.marks.iter().enumerate().flat_map(bits)
    }

    fn word(&self, at: usize) -> u64 {
        self.words.get(at).copied().unwrap_or_default()
    }

    /// Adds a page; a page outside RAM is ignored.
    pub fn insert(&mut self, page: u64) {
        self.or(usize::try_from(page / 64).unwrap_or(usize::MAX), 1 << (page % 64));
    }

    /// Adds the pages of `bitmap`, whose first bit is page `first`.
    pub fn insert_bitmap(&mut self, first: u64, bitmap: &[u64]) {
        let (word, shift) = (usize::try_from(first / 64).unwrap_or(usize::MAX), first % 64);
        for (n, bits) in bitmap.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            let at = word.saturating_add(n);
            self.or(at, bits << shift);
            if shift > 0 {
                self.or(at.saturating_add(1), bits >> (64 - shift));
            }
        }
    }

    /// Adds all pages of `other`.
    pub fn insert_all(&mut self, other: &Self) {
        other.marked().for_each(|at| self.or(at, other.word(at)));
    }

    /// Removes all pages of `other`.
    pub fn remove_all(&mut self, other: &Self) {
        for at in other.marked() {
            self.words.get_mut(at).into_iter().for_each(|word| *word &= !other.word(at));
        }
    }

    /// A copy in which the shortest gaps are filled, so that it has at most `most` runs.
    #[must_use]
    pub fn joined(&self, most: usize) -> Self {
        let mut joined = self.clone();
        let ends = self.runs().zip(self.runs().skip(1));
        let mut gaps: Vec<Range<u64>> = ends.map(|(run, next)| run.end..next.start).collect();
        let close = (gaps.len() + 1).saturating_sub(most.max(1));
        if close > 0 && close <= gaps.len() {
            gaps.select_nth_unstable_by_key(close - 1, |gap| gap.end - gap.start);
            gaps.truncate(close);
            gaps.into_iter().flatten().for_each(|page| joined.insert(page));
        }
        joined
    }

    /// The number of pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.marked().map(|at| u64::from(self.word(at).count_ones())).sum()
    }

    /// The runs of consecutive pages, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at)?;
            at = self.end(start);
            Some(start..at)
        })
    }

    /// The first page of the set at or after `at`.
    fn next(&self, at: u64) -> Option<u64> {
        let word = usize::try_from(at / 64).ok()?;
        let found = |word: usize, bits: u64| {
            (bits != 0).then(|| word as u64 * 64 + u64::from(bits.trailing_zeros()))
        };
        if let Some(page) = found(word, self.word(word) & (u64::MAX << (at % 64))) {
            return Some(page);
        }
        let word = word + 1;
        let mut mark = word / 64;
        let mut left = self.marks.get(mark)? & (u64::MAX << (word % 64));
        loop {
            while left == 0 {
                mark += 1;
                left = *self.marks.get(mark)?;
            }
            let at = mark * 64 + left.trailing_zeros() as usize;
            if let Some(page) = found(at, self.word(at)) {
                return Some(page);
            }
            left &= left - 1;
        }
    }

    /// The first page at or after `at` that is not in the set.
    fn end(&self, at: u64) -> u64 {
        let mut word = usize::try_from(at / 64).unwrap_or(usize::MAX);
        let mut left = !self.word(word) & (u64::MAX << (at % 64));
        while left == 0 {
            word += 1;
            left = !self.word(word);
        }
        (word as u64 * 64 + u64::from(left.trailing_zeros())).min(self.words.len() as u64 * 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(of: &BTreeSet<u64>) -> Pages {
        let mut set = Pages::none(512 * 4096);
        of.iter().for_each(|page| set.insert(*page));
        set
    }

    proptest! {
        #[test]
        fn runs_are_joined_over_the_shortest_gaps(
            pages in prop::collection::btree_set(0_u64..512, 0..80),
            others in prop::collection::btree_set(0_u64..512, 0..80),
            most in 0_usize..40,
        ) {
            let whole = set(&pages);
            let joined = whole.joined(most);
            let mut left = whole.clone();
            left.remove_all(&joined);
            prop_assert_eq!(left.count(), 0, "nothing is lost");
            prop_assert_eq!(joined.runs().count(), whole.runs().count().min(most.max(1)));
            // Filled gaps are no longer than gaps left open, and lie between pages.
            let mut closed = joined.clone();
            closed.remove_all(&whole);
            let pairs = joined.runs().zip(joined.runs().skip(1));
            let open = pairs.map(|(run, next)| next.start - run.end).min();
            let longest = closed.runs().map(|gap| gap.end - gap.start).max();
            prop_assert!(longest.zip(open).is_none_or(|(closed, open)| closed <= open));
            let between = |gap: Range<u64>| {
                let before = gap.start.checked_sub(1);
                before.is_some_and(|page| pages.contains(&page)) && pages.contains(&gap.end)
            };
            prop_assert!(closed.runs().all(between));
            let mut without = whole.clone();
            without.remove_all(&set(&others));
            prop_assert_eq!(without, set(&(&pages - &others)));
        }

        #[test]
        fn it_is_a_set(
            pages in prop::collection::btree_set(0_u64..512, 0..80),
            bitmap in prop::collection::vec(
                prop_oneof![Just(0), Just(u64::MAX), any::<u64>()],
                0..6,
            ),
            first in 0_u64..300,
        ) {
            let mut set = Pages::none(512 * 4096);
            pages.iter().for_each(|page| set.insert(*page));
            set.insert(512);
            set.insert_bitmap(first, &bitmap);
            let mut other = Pages::none(512 * 4096);
            other.insert_all(&set);
            let bits = (0..).zip(&bitmap).flat_map(|(n, word)| {
                (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| n * 64 + bit)
            });
            let all = pages.into_iter().chain(bits.map(|bit| first + bit));
            let expected: BTreeSet<u64> = all.filter(|page| *page < 512).collect();
            prop_assert_eq!(other.count(), expected.len() as u64);
            let runs: Vec<Range<u64>> = other.runs().collect();
            prop_assert!(runs.windows(2).all(|two| two[0].end < two[1].start));
            prop_assert_eq!(runs.into_iter().flatten().collect::<BTreeSet<u64>>(), expected);
        }
    }
}
