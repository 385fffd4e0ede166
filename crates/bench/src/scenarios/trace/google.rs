//! Makes a trace with what *Swift Birth and Quick Death* says about Google's (sections 2 and 6.4.2;
//! 29 days, 12,583 nodes).
//!
//! From the paper: what is looked at are the moments when one node is asked to create more than one
//! task at the same time (6.4.2), and the most solicited node gets "more than 25" of them at once
//! (section 2, figure 3). So births come only in bursts of 2 to 26 in the same millisecond, and a
//! trace has at least one burst of 26.
//!
//! The paper prints neither how often a burst of each size comes, nor sizes in memory, nor
//! lifetimes. These are ours: a burst of n is as likely as 1/n² (many small, few large); bursts are
//! independent of each other (exponential gaps); memory is as in [`MEMORY_MIB`], mostly small;
//! lifetimes are spread evenly over the orders of magnitude from [`LIFETIME_MS`]'s least to its
//! most. How often bursts come is scaled to a host of two CPUs, which is one node, and busy.

use super::csv::Arrival;
use crate::testbed::random::Random;

/// The seed of the trace that is replayed when none is given.
pub const SEED: u64 = 41;
/// About how many births.
const BIRTHS: usize = 450;
/// When the last one comes, at the latest.
const SPAN_MS: f64 = 45_000.0;
/// Births at once.
const BURST: std::ops::RangeInclusive<usize> = 2..=26;
/// Sizes of guests, and how many of a hundred have them.
const MEMORY_MIB: [(u64, u64); 4] = [(64, 40), (128, 30), (256, 20), (512, 10)];
/// Least and most.
const LIFETIME_MS: (f64, f64) = (100.0, 10_000.0);

/// What stands at the top of the file.
pub fn comment(seed: u64) -> String {
    format!(
        "Births on one busy node, as dayfly-bench makes them with seed {seed}:\n\
         bursts of {} to {} at once (Swift Birth and Quick Death, sections 2 and 6.4.2);\n\
         how often, memory and lifetimes are dayfly's choice.",
        BURST.start(),
        BURST.end()
    )
}

impl Random {
    /// As likely as 1/n².
    fn burst(&mut self) -> usize {
        let weight = |n: usize| 1_000_000 / (n as u64 * n as u64);
        self.choose(BURST.map(|n| (n, weight(n)))).unwrap_or(*BURST.start())
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between two constants"
    )]
    fn lifetime_ms(&mut self) -> u64 {
        let (least, most) = LIFETIME_MS;
        (least * (most / least).powf(self.part())) as u64
    }
}

/// A trace.
pub fn trace(seed: u64) -> Vec<Arrival> {
    let mut random = Random(seed);
    // The largest burst is in it whatever the seed, and somewhere among the others.
    let mut bursts = Vec::new();
    let mut left = BIRTHS - BURST.end();
    while left >= *BURST.start() {
        let burst = random.burst().min(left);
        bursts.push(burst);
        left -= burst;
    }
    let largest_at = random.choose((0..=bursts.len()).map(|at| (at, 1))).unwrap_or(0);
    bursts.insert(largest_at, *BURST.end());
    // Exponential gaps, then scaled to the span.
    let gaps: Vec<f64> = bursts.iter().map(|_| -(1.0 - random.part()).ln()).collect();
    let scale = SPAN_MS / gaps.iter().sum::<f64>().max(1e-9);
    let mut arrivals = Vec::new();
    let mut at_ms = 0.0;
    for (burst, gap) in bursts.into_iter().zip(gaps) {
        at_ms += gap * scale;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "within the span"
        )]
        let arrival_ms = at_ms as u64;
        arrivals.extend((0..burst).map(|_| Arrival {
            arrival_ms,
            memory_mib: random.choose(MEMORY_MIB.into_iter()).unwrap_or(MEMORY_MIB[0].0),
            lifetime_ms: random.lifetime_ms(),
        }));
    }
    arrivals
}

#[cfg(test)]
mod tests {
    use super::super::{csv, sizes_of_bursts};
    use super::*;

    #[test]
    fn a_trace_is_what_its_format_allows_and_the_same_every_time() {
        let all = trace(SEED);
        assert_eq!(csv::parse(&csv::format(&comment(SEED), &all)).unwrap(), all);
        assert_eq!(trace(SEED), all);
        assert_ne!(trace(SEED + 1), all);
    }

    #[test]
    fn births_come_in_bursts_up_to_the_largest_of_the_paper() {
        for seed in 0..50 {
            let all = trace(seed);
            assert!(
                (BIRTHS - 1..=BIRTHS).contains(&all.len()),
                "seed {seed}: {} births",
                all.len()
            );
            let last = all.last().unwrap().arrival_ms;
            assert!((30_000..=45_000).contains(&last), "seed {seed}: the last comes at {last}");
            let bursts = sizes_of_bursts(&all);
            // Two bursts may fall into one millisecond.
            assert!(*bursts.iter().max().unwrap() >= *BURST.end(), "seed {seed}");
            assert!(bursts.iter().all(|n| n >= BURST.start()), "seed {seed}");
            let small = bursts.iter().filter(|n| **n <= 4).count();
            assert!(small * 2 > bursts.len(), "seed {seed}: {small} of {} are small", bursts.len());
        }
    }

    #[test]
    fn memory_and_lifetimes_are_spread_as_they_say() {
        let all: Vec<_> = (0..50).flat_map(trace).collect();
        for (mib, percent) in MEMORY_MIB {
            let share = all.iter().filter(|a| a.memory_mib == mib).count() * 1000 / all.len();
            let percent = usize::try_from(percent).unwrap();
            assert!(
                (percent * 10 - 15..=percent * 10 + 15).contains(&share),
                "{mib} MiB: {share} of 1000"
            );
        }
        assert!(all.iter().all(|a| (100..=10_000).contains(&a.lifetime_ms)));
        let short = all.iter().filter(|a| a.lifetime_ms < 1000).count() * 1000 / all.len();
        assert!((475..=525).contains(&short), "{short} of 1000 live less than a second");
    }
}
