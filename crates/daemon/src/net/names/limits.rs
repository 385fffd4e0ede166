//! Limits on one guest's use of the service. The state of a guest is in its entry of the
//! [`index`](super::index), so all state is bounded by the number of VMs' addresses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Questions that a guest may ask per second.
pub const QUESTIONS_PER_SECOND: u32 = 200;
/// Questions that a guest may ask at once after a pause.
pub const BURST: u32 = 400;

/// A token bucket.
#[derive(Debug)]
pub struct Bucket {
    /// Saved time, of which a question costs a part.
    saved: Duration,
    seen: Option<Instant>,
}

const COST: Duration = Duration::from_nanos(1_000_000_000 / QUESTIONS_PER_SECOND as u64);
const FULL: Duration =
    Duration::from_nanos(1_000_000_000 / QUESTIONS_PER_SECOND as u64 * BURST as u64);

impl Default for Bucket {
    fn default() -> Self {
        Self { saved: FULL, seen: None }
    }
}

impl Bucket {
    /// Takes one question at time `now`; false if the limit is reached.
    pub fn take(&mut self, now: Instant) -> bool {
        let passed = self.seen.map_or(Duration::ZERO, |seen| now.saturating_duration_since(seen));
        self.saved = self.saved.saturating_add(passed).min(FULL);
        self.seen = Some(now);
        match self.saved.checked_sub(COST) {
            Some(left) => {
                self.saved = left;
                true
            }
            None => false,
        }
    }
}

/// Turns (permits) of guests. The first turn of each guest is reserved for it, so other guests can
/// never use it up. Further turns come out of `shared`. One guest has at most `each` turns, and at
/// most a quarter of the shared ones that are left.
///
/// The number of all turns is therefore at most `shared` plus one for each VM's address.
#[derive(Debug)]
pub struct Gate {
    shared: usize,
    each: usize,
    held: AtomicUsize,
}

/// A turn; dropping it returns it.
#[derive(Debug)]
pub struct Turn {
    /// The gate to which a shared turn returns; `None` for a guest's reserved turn.
    gate: Option<Arc<Gate>>,
    own: Arc<AtomicUsize>,
}

impl Gate {
    /// A gate with `shared` turns besides the first of each guest, and at most `each` turns for one
    /// guest.
    #[must_use]
    pub fn new(shared: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { shared, each, held: AtomicUsize::new(0) })
    }

    /// Takes a turn for a guest that holds `own`; `None` if the guest has its maximum.
    #[must_use]
    pub fn enter(self: &Arc<Self>, own: &Arc<AtomicUsize>) -> Option<Turn> {
        let one_more = |limit: usize| move |held: usize| (held < limit).then_some(held + 1);
        let left = self.shared.saturating_sub(self.held.load(Ordering::Relaxed));
        let limit = self.each.min(left.div_ceil(4).max(1));
        let before = own.try_update(Ordering::Relaxed, Ordering::Relaxed, one_more(limit)).ok()?;
        if before == 0 {
            return Some(Turn { gate: None, own: own.clone() });
        }
        // A `Turn` exists only once both counters include it, because its drop decrements both.
        if self
            .held
            .try_update(Ordering::Relaxed, Ordering::Relaxed, one_more(self.shared))
            .is_err()
        {
            own.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Turn { gate: Some(self.clone()), own: own.clone() })
    }

    /// Number of shared turns in use.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.own.fetch_sub(1, Ordering::Relaxed);
        if let Some(gate) = &self.gate {
            gate.held.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The most questions of one guest that may be let through `within` that time, at whatever speed
/// the host works.
#[cfg(test)]
pub(super) fn most_within(within: Duration) -> u64 {
    u64::from(BURST) + u64::from(QUESTIONS_PER_SECOND) * (within.as_secs() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_a_burst_and_then_a_rate() {
        let (mut bucket, start) = (Bucket::default(), Instant::now());
        let taken = |bucket: &mut Bucket, at: Duration| {
            (0..10_000).filter(|_| bucket.take(start + at)).count()
        };
        let second = Duration::from_secs(1);
        assert_eq!(taken(&mut bucket, Duration::ZERO), 400);
        assert_eq!(taken(&mut bucket, second / 2), 100);
        assert_eq!(taken(&mut bucket, second), 100);
        // A pause fills the bucket once.
        assert_eq!(taken(&mut bucket, 3600 * second), 400);
        // A clock that stands still or goes back adds nothing.
        assert_eq!(taken(&mut bucket, 3600 * second), 0);
        assert_eq!(taken(&mut bucket, second), 0);
    }

    #[test]
    fn one_guest_has_its_share_and_every_other_guest_has_a_turn() {
        let gate = Gate::new(256, 32);
        let take =
            |own: &Arc<AtomicUsize>| std::iter::from_fn(|| gate.enter(own)).collect::<Vec<Turn>>();
        // Far more guests than shared turns; each guest takes as many as it gets.
        let owns: Vec<Arc<AtomicUsize>> = (0..1000).map(|_| Arc::default()).collect();
        let turns: Vec<Vec<Turn>> = owns.iter().map(take).collect();
        assert_eq!(turns[0].len(), 32);
        let counts: Vec<usize> = turns.iter().map(Vec::len).collect();
        assert!(counts.iter().all(|n| (1..=32).contains(n)), "{counts:?}");
        let shared = counts.iter().sum::<usize>() - owns.len();
        assert!(gate.held() == shared && shared <= 256, "{shared}");
        drop(turns);
        assert!(gate.held() == 0 && owns.iter().all(|own| own.load(Ordering::Relaxed) == 0));
        assert_eq!(take(&owns[0]).len(), 32);
    }
}
