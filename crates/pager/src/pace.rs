//! Measures fetch times while the pager runs, and decides from them when a fault should wait.
//!
//! A *jump* is a fetch for a fault, out of order; a *row* is a series of consecutive batches
//! fetched without a fetch in between. On a disk that seeks, a jump takes as long as many batches
//! of a row. On a network or in memory it does not.
//!
//! The pager does not know the kind of storage, so it measures both. The time of a row is divided
//! by the batches for which something was read; other batches come from a decompressed group.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Recent fetch times in nanoseconds; 0 before the first fetch.
#[derive(Debug, Default)]
pub struct Pace {
    asked: AtomicU64,
    ahead: AtomicU64,
    row: Row,
    /// Time of recent jumps, there and back, in nanoseconds; half of the time that passes is
    /// subtracted.
    jumped: AtomicU64,
    /// When the last jump ended, in nanoseconds after the pager began.
    jumped_at: AtomicU64,
    /// Number of all jumps.
    jumps: AtomicU64,
}

/// Times of recent batches in a row.
#[derive(Debug, Default)]
struct Row {
    ns: AtomicU64,
    batches: AtomicU64,
    /// Number of batches for which something was read.
    reads: AtomicU64,
}

impl Row {
    /// Fewer reads than this are not conclusive.
    const FEW: u64 = 8;
    /// Above this number of batches, all sums are halved.
    const MANY: u64 = 512;

    fn note(&self, took: u64, was_read: bool) {
        self.ns.fetch_add(took, Ordering::Relaxed);
        self.reads.fetch_add(u64::from(was_read), Ordering::Relaxed);
        if self.batches.fetch_add(1, Ordering::Relaxed) >= Self::MANY {
            for of in [&self.ns, &self.reads, &self.batches] {
                of.store(of.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
    }

    fn mean(&self, of: &AtomicU64) -> Option<u64> {
        let enough = self.reads.load(Ordering::Relaxed) >= Self::FEW;
        enough.then(|| self.ns.load(Ordering::Relaxed) / of.load(Ordering::Relaxed).max(1))
    }

    /// Nanoseconds per batch that was read.
    fn read_ns(&self) -> Option<u64> {
        self.mean(&self.reads)
    }

    /// Nanoseconds for `batches` of a row.
    fn sweep_ns(&self, batches: usize) -> Option<u64> {
        Some(self.mean(&self.batches)?.saturating_mul(batches as u64))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1)
}

impl Pace {
    /// From this mean jump time in ns on, another thread may serve the clone during a fetch. Well
    /// above the time of a page at hand: the measured times include the cost of a second thread,
    /// which must not keep that thread active.
    const SLOW: u64 = 150_000;
    /// From this mean jump time in ns on, the storage may be a disk that seeks.
    const SEEK: u64 = 1_000_000;
    /// The longest sweep over everything left, in ns, that a fault waits for; far below
    /// [`crate::wire::Settings::deadline_s`].
    const SWEEP: u64 = 4_000_000_000;

    /// Fewer jumps than this are not conclusive.
    const TOLERATED: u64 = 4;
    /// Number of batches in a row that is enough to measure, even if a few are present already:
    /// twice [`Row::FEW`].
    const TELLING: usize = 16;

    /// The most batches that are fetched behind a jump.
    const WORTH: usize = 64;

    fn note(of: &AtomicU64, took: u64) {
        let before = of.load(Ordering::Relaxed);
        // Several threads may update at once; a lost update does no harm.
        of.store(
            if before == 0 { took } else { before - before / 8 + took / 8 },
            Ordering::Relaxed,
        );
    }

    /// Notes a fetch for a fault, which ended `at` after the pager began.
    pub fn jumped(&self, took: Duration, at: Duration) {
        let (took, at) = (nanoseconds(took), nanoseconds(at));
        let passed = at.saturating_sub(self.jumped_at.swap(at, Ordering::Relaxed));
        Self::note(&self.asked, took);
        self.jumps.fetch_add(1, Ordering::Relaxed);
        if self.seeks() {
            let before = self.jumped.load(Ordering::Relaxed).saturating_sub(passed / 2);
            self.jumped.store(before.saturating_add(took.saturating_mul(2)), Ordering::Relaxed);
        }
    }

    /// Number of fetches for faults.
    pub fn jumps(&self) -> u64 {
        self.jumps.load(Ordering::Relaxed)
    }

    /// Notes a fetch of the prefetcher. `in_a_row`: the batch is right behind the last one, without
    /// a fetch in between. `was_read`: something was read for it.
    pub fn went_on(&self, took: Duration, in_a_row: bool, was_read: bool) {
        let took = nanoseconds(took);
        Self::note(&self.ahead, took);
        if in_a_row {
            self.row.note(took, was_read);
        }
    }

    fn times(&self) -> (u64, u64) {
        (self.asked.load(Ordering::Relaxed), self.ahead.load(Ordering::Relaxed))
    }

    /// Whether fetches for faults are fast.
    pub fn is_quick(&self) -> bool {
        (1..Self::SLOW).contains(&self.times().0)
    }

    /// Whether jumps are expensive.
    pub fn seeks(&self) -> bool {
        let (asked, ahead) = self.times();
        // The prefetcher may have to seek too, if the working set is spread over the disk.
        let beside = |less: u64| asked > Self::SEEK && asked / 4 > less;
        (ahead > 0 && beside(ahead)) || self.row.read_ns().is_some_and(beside)
    }

    /// Nanoseconds per batch read in a row, if jumps are more expensive.
    fn row_ns(&self) -> Option<u64> {
        self.row.read_ns().filter(|read| self.times().0 / 4 > *read && self.seeks())
    }

    /// Whether fetches for faults are slow, but it is unknown whether seeks are the reason. With
    /// one fault after the other nothing is read in a row, and the prefetcher seeks back and forth
    /// too (a desktop guest: 357 jumps in 7.6 s).
    pub fn is_puzzled(&self) -> bool {
        let slow = self.jumps() >= Self::TOLERATED && self.times().0 > Self::SEEK;
        slow && self.row.read_ns().is_none()
    }

    /// Number of batches of a row that take as long as a jump. It pays to read that many on after a
    /// jump, because faults are near other faults.
    pub fn worth(&self) -> usize {
        if self.is_puzzled() {
            return Self::TELLING;
        }
        let batches = self.row_ns().map_or(0, |row| self.times().0 / row.max(1));
        usize::try_from(batches).map_or(Self::WORTH, |batches| batches.min(Self::WORTH))
    }

    /// Nanoseconds of a sweep over everything `left`, if it is known, jumps are more expensive, and
    /// it is below [`Self::SWEEP`].
    fn sweep(&self, left: usize) -> Option<u64> {
        self.row_ns()?;
        self.row.sweep_ns(left).filter(|sweep| *sweep < Self::SWEEP)
    }

    /// Whether a sweep over everything `left` takes less time than the `lead` batches of the
    /// working set, which are not in a row.
    pub fn all_is_sooner(&self, lead: usize, left: usize) -> bool {
        self.sweep(left).is_some_and(|sweep| (lead as u64).saturating_mul(self.times().1) > sweep)
    }

    /// Whether a fault should wait for a batch instead of jumping to it. The batch comes after
    /// `batches` others, with `left` still to come in all.
    ///
    /// It should wait if those others take less time than a jump and back. It should also wait if
    /// recent jumps took more than half the time of a sweep over everything left. Otherwise one
    /// fault after the other makes the disk seek until everything could have been read (a desktop
    /// guest: 357 jumps in 7.6 s; a sweep takes 1 s). A few jumps per second are fine, because the
    /// guest runs in between (a mail server: 91 jumps; 6 s if it waits for the sweep).
    pub fn waits(&self, batches: usize, left: usize) -> bool {
        let (asked, ahead) = self.times();
        let near =
            (batches as u64).saturating_add(1).saturating_mul(ahead) < asked.saturating_mul(2);
        let enough = |sweep: u64| self.jumped.load(Ordering::Relaxed) > sweep / 2;
        self.seeks() && (near || self.sweep(left).is_some_and(enough))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn pace(asked: u64, ahead: u64) -> Pace {
        Pace { asked: asked.into(), ahead: ahead.into(), ..Pace::default() }
    }

    /// A disk: 8 ms for a seek there and back; 0.5 ms for a batch in a row.
    fn disk() -> Pace {
        let disk = pace(8_000_000, 500_000);
        (0..100).for_each(|_| disk.went_on(Duration::from_micros(500), true, true));
        disk
    }

    #[test]
    fn faults_wait_only_if_seeking_is_expensive() {
        assert!(!Pace::default().is_quick() && !Pace::default().seeks(), "nothing is known");
        assert!(pace(6_000, 0).is_quick() && !pace(8_000_000, 0).is_quick());
        // A network: jumps take as long as other fetches. Memory: neither takes long.
        assert!(!pace(2_000_000, 1_500_000).seeks() && !pace(20_000, 1000).seeks());
        let disk = pace(8_000_000, 500_000);
        assert!(
            disk.seeks() && disk.waits(0, 3000) && disk.waits(30, 3000) && !disk.waits(31, 3000),
            "{disk:?}"
        );
        assert!(!disk.waits(usize::MAX, usize::MAX) && !pace(8_000_000, 3_000_000).waits(0, 1));
        let paced = Pace::default();
        paced.jumped(Duration::from_nanos(800), MS(0));
        assert_eq!(paced.times(), (800, 0), "the first is believed");
        paced.jumped(Duration::ZERO, MS(0));
        assert_eq!(paced.times(), (700, 0));
    }

    #[test]
    fn slow_jumps_alone_say_nothing_until_some_are_read_in_a_row() {
        let pace = Pace::default();
        for n in 0..Pace::TOLERATED {
            assert!(!pace.is_puzzled(), "after {n}");
            pace.jumped(MS(8), MS(0));
            // As slow, because the disk has to seek back.
            pace.went_on(MS(8), false, true);
        }
        assert!(pace.is_puzzled() && !pace.seeks() && pace.worth() == Pace::TELLING, "{pace:?}");
        (0..Row::FEW).for_each(|_| pace.went_on(Duration::from_micros(500), true, true));
        assert!(!pace.is_puzzled() && pace.seeks() && pace.worth() == 16, "{pace:?}");
        let memory = Pace::default();
        (0..100).for_each(|_| memory.jumped(Duration::from_micros(6), MS(0)));
        assert!(!memory.is_puzzled());
    }

    #[test]
    fn jumps_end_when_they_have_cost_half_of_reading_everything() {
        // A sweep over everything left takes 1.5 s.
        let disk = disk();
        (0..46).for_each(|_| disk.jumped(MS(8), MS(0)));
        assert!(!disk.waits(2000, 3000), "{disk:?}");
        disk.jumped(MS(8), MS(0));
        assert!(disk.waits(2000, 3000) && disk.waits(2000, 2001), "{disk:?}");
        assert!(
            !disk.waits(2000, 3200) && !disk.waits(2000, 100_000),
            "a long sweep is not waited for"
        );
        disk.jumped.fetch_add(60_000_000_000, Ordering::SeqCst);
        assert!(
            disk.waits(2000, 7900) && !disk.waits(2000, 8100),
            "longer than a clone should wait"
        );
    }

    #[test]
    fn jumps_now_and_then_are_forgiven() {
        let (often, rarely) = (disk(), disk());
        for n in 0..200 {
            // Jumps take all of the time, and a sixth of it.
            often.jumped(MS(8), MS(8 * n));
            rarely.jumped(MS(8), MS(48 * n));
        }
        assert!(often.waits(2000, 3000) && !rarely.waits(2000, 3000), "{often:?} {rarely:?}");
    }

    #[test]
    fn what_lies_apart_comes_with_all_the_rest_where_that_is_sooner() {
        // 400 batches apart take 3.2 s; all 3000 in a row take half of that.
        let apart = disk();
        apart.ahead.store(8_000_000, Ordering::SeqCst);
        assert!(apart.seeks(), "who goes ahead jumps too");
        assert!(apart.all_is_sooner(400, 3000) && !apart.all_is_sooner(100, 3000));
        assert!(!apart.all_is_sooner(4000, 9000), "longer than a clone should wait");
    }

    #[test]
    fn what_a_group_had_kept_does_not_make_a_network_a_disk() {
        let network = pace(2_000_000, 400_000);
        for n in 0..2000_u64 {
            // One batch of eight is read, and takes as long as a jump.
            let is_read = n % 8 == 0;
            network.went_on(if is_read { MS(1) } else { Duration::from_micros(2) }, true, is_read);
            assert!(!network.all_is_sooner(2000, 3000), "{n}: {network:?}");
        }
        network.jumped.store(60_000_000_000, Ordering::SeqCst);
        assert!(
            network.row.read_ns().unwrap() > 900_000
                && network.row.batches.load(Ordering::SeqCst) <= Row::MANY + 1
        );
        assert!(!network.waits(2000, 3000), "{network:?}");
        assert_eq!((disk().worth(), network.worth()), (16, 0));
        // Neither does a row that was interrupted, or a short one.
        let few = pace(8_000_000, 8_000_000);
        (0..100).for_each(|_| few.went_on(MS(8), false, true));
        (1..Row::FEW).for_each(|_| few.went_on(MS(0), true, true));
        assert!(!few.all_is_sooner(400, 500), "{few:?}");
    }
}
