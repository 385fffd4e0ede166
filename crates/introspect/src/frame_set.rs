//! A set of frames, one bit each.

use std::ops::Range;

/// A set of numbers below a fixed bound. It never contains a number beyond the bound.
#[derive(Debug, Clone)]
pub(crate) struct FrameSet {
    words: Vec<u64>,
    bound: usize,
}

impl FrameSet {
    /// An empty set for numbers below `bound`.
    pub(crate) fn new(bound: usize) -> Self {
        Self { words: vec![0; bound.div_ceil(64)], bound }
    }

    /// Whether the set contains `n`.
    pub(crate) fn contains(&self, n: usize) -> bool {
        self.words.get(n / 64).is_some_and(|word| word >> (n % 64) & 1 == 1)
    }

    /// Adds `n`. Returns whether `n` is new; a number beyond the bound is ignored and is not new.
    pub(crate) fn insert(&mut self, n: usize) -> bool {
        if n >= self.bound {
            return false;
        }
        let word = &mut self.words[n / 64];
        let bit = 1 << (n % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Adds a range up to the bound, with one step for each 64 numbers.
    pub(crate) fn insert_range(&mut self, range: Range<usize>) {
        let end = range.end.min(self.bound);
        let mut at = range.start;
        while at < end {
            let n = (64 - at % 64).min(end - at);
            let ones = if n == 64 { u64::MAX } else { (1 << n) - 1 };
            self.words[at / 64] |= ones << (at % 64);
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set_with_a_bound(
            bound in 0usize..300,
            ranges in prop::collection::vec((0usize..400, 0usize..200), 0..8),
        ) {
            let (mut set, mut model) = (FrameSet::new(bound), BTreeSet::new());
            for (start, len) in ranges {
                set.insert_range(start..start + len);
                model.extend((start..start + len).filter(|n| *n < bound));
                prop_assert_eq!(set.insert(start), start < bound && model.insert(start));
            }
            for n in 0..500 {
                prop_assert_eq!(set.contains(n), model.contains(&n), "{}", n);
            }
        }
    }
}
