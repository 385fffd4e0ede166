//! Demand for warm clones: how many clones of a snapshot should wait.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The fewest warm VMMs of a shape in use, and the fewest warm clones of a snapshot in use.
pub const LEAST: usize = 1;
/// Demand is the number of takes within this time.
pub const WINDOW: Duration = Duration::from_secs(2);
/// Time for which the peak of the demand is remembered in full.
const HOLD: Duration = Duration::from_secs(20);
/// Period at which surplus is removed. After `HOLD` the remembered peak fades by a quarter each
/// period.
pub const TICK: Duration = Duration::from_secs(2);
/// A snapshot or shape without a request for this long is not in use.
pub const IDLE: Duration = Duration::from_secs(600);

/// The demand for clones of one snapshot, or for warm VMMs of one shape.
#[derive(Debug)]
pub struct Demand {
    taken: VecDeque<Instant>,
    /// The most takes within a window; fades.
    peak: usize,
    /// When the peak was reached.
    peak_at: Instant,
    /// When the snapshot or shape was last requested.
    pub last: Instant,
}

impl Demand {
    /// No demand yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { taken: VecDeque::new(), peak: 0, peak_at: now, last: now }
    }

    /// Notes a take. At most `most` takes are remembered.
    pub fn note(&mut self, now: Instant, most: usize) {
        self.last = now;
        self.taken.push_back(now);
        while self.taken.len() > most {
            self.taken.pop_front();
        }
        self.forget(now);
        if self.taken.len() >= self.peak {
            (self.peak, self.peak_at) = (self.taken.len(), now);
        }
    }

    fn forget(&mut self, now: Instant) {
        while self.taken.front().is_some_and(|then| now.duration_since(*then) > WINDOW) {
            self.taken.pop_front();
        }
    }

    /// Lets the remembered peak fade.
    pub fn fade(&mut self, now: Instant) {
        self.forget(now);
        if now.duration_since(self.peak_at) > HOLD {
            self.peak = self.taken.len().max(self.peak - self.peak.div_ceil(4));
        }
    }

    /// The number that should wait.
    #[must_use]
    pub fn target(&self, now: Instant) -> usize {
        if now.duration_since(self.last) > IDLE { 0 } else { self.peak.max(LEAST) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_wait_as_were_taken_at_the_busiest_moment_and_fewer_later() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut demand = Demand::new(begun);
        assert_eq!(demand.target(begun), LEAST);
        for ms in 0..20 {
            demand.note(at(ms), 64);
        }
        assert_eq!(demand.target(at(20)), 20);
        let mut targets = Vec::new();
        for tick in 2..32u64 {
            demand.fade(at(tick * 2000));
            targets.push(demand.target(at(tick * 2000)));
        }
        assert!(targets.is_sorted_by(|a, b| a >= b), "{targets:?}");
        assert_eq!(
            (targets[0], targets[8], targets[9], targets.last()),
            (20, 20, 15, Some(&LEAST))
        );
        assert_eq!(demand.target(begun + IDLE), LEAST);
        assert_eq!(demand.target(begun + IDLE + WINDOW), 0);
    }

    #[test]
    fn no_demand_fills_the_host() {
        let begun = Instant::now();
        let mut demand = Demand::new(begun);
        for _ in 0..10_000 {
            demand.note(begun, 64);
        }
        assert_eq!(demand.target(begun), 64);
        assert!(demand.taken.len() <= 64);
    }
}
