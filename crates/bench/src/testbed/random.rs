//! Random numbers of a fixed seed.

/// `SplitMix64`: the same numbers on every machine, for ever.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    pub fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From 0 up to `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// The place of one of `count` things.
    pub fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(count as u64)).unwrap_or(0)
    }

    /// Puts things in a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for end in (2..=things.len()).rev() {
            things.swap(end - 1, self.index(end));
        }
    }

    /// One of `choices`, as likely as its weight.
    pub fn choose<T: Copy>(
        &mut self,
        choices: impl Iterator<Item = (T, u64)> + Clone,
    ) -> Option<T> {
        let all = choices.clone().map(|(_, weight)| weight).sum::<u64>().max(1);
        let mut at = self.next() % all;
        for (choice, weight) in choices {
            match at.checked_sub(weight) {
                Some(rest) => at = rest,
                None => return Some(choice),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_are_splitmix64() {
        let mut random = Random(0);
        assert_eq!([random.next(), random.next()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn a_shuffle_keeps_all_and_each_comes_first() {
        let (mut random, mut things, mut first) = (Random(1), [0, 1, 2, 3], [0; 4]);
        for _ in 0..1000 {
            random.shuffle(&mut things);
            first[things[0]] += 1;
        }
        things.sort_unstable();
        assert_eq!(things, [0, 1, 2, 3]);
        assert!(first.iter().all(|times| (200..300).contains(times)), "{first:?}");
    }
}
