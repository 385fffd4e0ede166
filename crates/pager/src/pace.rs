//! What fetching takes, as it is measured while it goes on; and what follows from that for who waits.
//!
//! On a disk that seeks, to jump to a page and back takes as long as reading many in a row; on a network, or in memory, it does not. Nobody tells the pager
//! which it is. Batches that lie behind one another, were fetched one after the other with nothing in between, and were read
//! (not kept from a group that was read for another) tell what a row takes; those that somebody asked for tell what a jump takes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a batch takes, lately; nanoseconds, 0 where none has come yet.
#[derive(Debug, Default)]
pub struct Pace {
    asked: AtomicU64,
    ahead: AtomicU64,
    row: Row,
    /// What jumps to pages, and back, have taken of late: of what they took half of the time that passes is forgiven.
    jumped: AtomicU64,
    /// When the last of them ended.
    jumped_at: AtomicU64,
    /// How many of all kinds there were.
    jumps: AtomicU64,
}

/// Batches that were fetched in a row, lately.
#[derive(Debug, Default)]
struct Row {
    ns: AtomicU64,
    batches: AtomicU64,
    /// Of these, those for which something was read.
    reads: AtomicU64,
}

impl Row {
    /// So many say little.
    const FEW: u64 = 8;
    /// So many are enough to forget half of them.
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

    /// What one takes that is read.
    fn read_ns(&self) -> Option<u64> {
        self.mean(&self.reads)
    }

    /// What `batches` of them take.
    fn sweep_ns(&self, batches: usize) -> Option<u64> {
        Some(self.mean(&self.batches)?.saturating_mul(batches as u64))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1)
}

impl Pace {
    /// From here on another thread is let look at a clone before a page is fetched for it. Well above what a page takes that is at hand: what a second
    /// thread costs is in the times, and must not keep it coming.
    const SLOW: u64 = 150_000;
    /// From here on a batch that is asked for may be one that a disk had to seek.
    const SEEK: u64 = 1_000_000;
    /// Nobody waits for a sweep over all that is left which takes longer; far below [`crate::wire::Settings::deadline_s`].
    const SWEEP: u64 = 4_000_000_000;

    /// So many jumps nothing is concluded from.
    const TOLERATED: u64 = 4;
    /// So many batches in a row are enough to tell what they take, also if a few of them are there already: twice [`Row::FEW`].
    const TELLING: usize = 16;

    /// No more than so many come with one that was asked for.
    const WORTH: usize = 64;

    fn note(of: &AtomicU64, took: u64) {
        let before = of.load(Ordering::Relaxed);
        // Several may note at once; that one is lost is no harm.
        of.store(if before == 0 { took } else { before - before / 8 + took / 8 }, Ordering::Relaxed);
    }

    /// A batch was fetched for who waits for it, until `at` after the beginning.
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

    /// How many batches were fetched for who waited for them.
    pub fn jumps(&self) -> u64 {
        self.jumps.load(Ordering::Relaxed)
    }

    /// The next of those that are fetched ahead was. `in_a_row`: it lies behind the last, and nothing was fetched in between; `was_read`: for it.
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

    /// Whether what is asked for comes at once.
    pub fn is_quick(&self) -> bool {
        (1..Self::SLOW).contains(&self.times().0)
    }

    /// Whether to jump to a page is dear.
    pub fn seeks(&self) -> bool {
        let (asked, ahead) = self.times();
        // Who goes ahead may have to jump too, where what comes first lies all over the disk.
        let beside = |less: u64| asked > Self::SEEK && asked / 4 > less;
        (ahead > 0 && beside(ahead)) || self.row.read_ns().is_some_and(beside)
    }

    /// What one takes that is read in a row, where jumps are dearer.
    fn row_ns(&self) -> Option<u64> {
        self.row.read_ns().filter(|read| self.times().0 / 4 > *read && self.seeks())
    }

    /// Whether what is asked for takes long, and nobody can tell yet if that is for the way there: where there is one fault after the other nothing is read in a
    /// row, and who goes ahead goes back and forth as well (a desktop: 357 jumps, 7.6 s).
    pub fn is_puzzled(&self) -> bool {
        let slow = self.jumps() >= Self::TOLERATED && self.times().0 > Self::SEEK;
        slow && self.row.read_ns().is_none()
    }

    /// So many in a row take as long as the jump to the first of them: who has come so far reads on, as faults lie near to others.
    pub fn worth(&self) -> usize {
        if self.is_puzzled() {
            return Self::TELLING;
        }
        let so_many = self.row_ns().map_or(0, |row| self.times().0 / row.max(1));
        usize::try_from(so_many).map_or(Self::WORTH, |so_many| so_many.min(Self::WORTH))
    }

    /// What all that is `left` takes in a row, where that is known and jumps are dearer.
    fn sweep(&self, left: usize) -> Option<u64> {
        self.row_ns()?;
        self.row.sweep_ns(left).filter(|sweep| *sweep < Self::SWEEP)
    }

    /// Whether all that is `left` in a row takes less than `lead` of them, which do not lie in a row.
    pub fn all_is_sooner(&self, lead: usize, left: usize) -> bool {
        self.sweep(left).is_some_and(|sweep| (lead as u64).saturating_mul(self.times().1) > sweep)
    }

    /// Whether it is better to wait for a batch than to jump to it, which comes after `batches` others, with `left` still to come in all: when these take less
    /// than to jump there and back; or when jumps have taken half as long of late as a sweep over all that is left, as one fault after the other
    /// makes it go back and forth until everything could have been read (a desktop: 357 jumps, 7.6 s, where all of it takes one). A few in a second do not: who has
    /// them goes on in between (a mail server: 91, and 6 s where it waited for the sweep).
    pub fn waits(&self, batches: usize, left: usize) -> bool {
        let (asked, ahead) = self.times();
        let near = (batches as u64).saturating_add(1).saturating_mul(ahead) < asked.saturating_mul(2);
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

    /// A disk: 8 ms to go there, and to go back; 0.5 ms for a batch in a row.
    fn disk() -> Pace {
        let disk = pace(8_000_000, 500_000);
        (0..100).for_each(|_| disk.went_on(Duration::from_micros(500), true, true));
        disk
    }

    #[test]
    fn who_waits_does_so_only_where_to_seek_is_dear() {
        assert!(!Pace::default().is_quick() && !Pace::default().seeks(), "nothing is known");
        assert!(pace(6_000, 0).is_quick() && !pace(8_000_000, 0).is_quick());
        // A network: what is asked for takes as long as what is not. Memory: neither takes long.
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
            // As slow: it has to go back.
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
        // All that is left takes 1.5 s.
        let disk = disk();
        (0..46).for_each(|_| disk.jumped(MS(8), MS(0)));
        assert!(!disk.waits(2000, 3000), "{disk:?}");
        disk.jumped(MS(8), MS(0));
        assert!(disk.waits(2000, 3000) && disk.waits(2000, 2001), "{disk:?}");
        assert!(!disk.waits(2000, 3200) && !disk.waits(2000, 100_000), "a long sweep is not waited for");
        disk.jumped.fetch_add(60_000_000_000, Ordering::SeqCst);
        assert!(disk.waits(2000, 7900) && !disk.waits(2000, 8100), "longer than anybody should wait");
    }

    #[test]
    fn jumps_now_and_then_are_forgiven() {
        let (often, rarely) = (disk(), disk());
        for n in 0..200 {
            // All of the time, and a sixth of it.
            often.jumped(MS(8), MS(8 * n));
            rarely.jumped(MS(8), MS(48 * n));
        }
        assert!(often.waits(2000, 3000) && !rarely.waits(2000, 3000), "{often:?} {rarely:?}");
    }

    #[test]
    fn what_lies_apart_comes_with_all_the_rest_where_that_is_sooner() {
        // 400 that lie apart take 3.2 s, all of 3000 half of that.
        let apart = disk();
        apart.ahead.store(8_000_000, Ordering::SeqCst);
        assert!(apart.seeks(), "who goes ahead jumps too");
        assert!(apart.all_is_sooner(400, 3000) && !apart.all_is_sooner(100, 3000));
        assert!(!apart.all_is_sooner(4000, 9000), "longer than anybody should wait");
    }

    #[test]
    fn what_a_group_had_kept_does_not_make_a_network_a_disk() {
        let network = pace(2_000_000, 400_000);
        for n in 0..2000_u64 {
            // One of eight is read, and takes what it takes if somebody asks for it.
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
        // Nor does one that was interrupted, or that few were in a row.
        let few = pace(8_000_000, 8_000_000);
        (0..100).for_each(|_| few.went_on(MS(8), false, true));
        (1..Row::FEW).for_each(|_| few.went_on(MS(0), true, true));
        assert!(!few.all_is_sooner(400, 500), "{few:?}");
    }
}
