//! The pages of RAM that this process writes itself, for its devices, while RAM is copied under a
//! running guest.
//!
//! KVM logs the writes of vCPUs. It does not see a disk's data that a device thread reads into a
//! guest's buffer. Both device threads note their writes here.

use dayfly_units::sync::lock;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Mutex, MutexGuard};

const PAGE: usize = 4096;

/// A set of pages: addresses in this process, divided by the page size.
#[derive(Debug, Default)]
pub struct Writes {
    watched: AtomicBool,
    pages: Mutex<BTreeSet<usize>>,
}

impl Writes {
    fn pages(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        lock(&self.pages)
    }

    /// Starts or stops noting writes, and forgets the writes noted before.
    pub fn watch(&self, watched: bool) {
        self.pages().clear();
        self.watched.store(watched, Ordering::SeqCst);
        // Pairs with the fence in `note`. A writer reads the flag after its write: either it sees
        // the flag, or a reader of the page after this fence sees the write.
        fence(Ordering::SeqCst);
    }

    /// Whether writes are noted. A write that begins afterwards may have to be noted all the same,
    /// because another thread may start the log meanwhile.
    #[must_use]
    pub fn watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }

    /// Notes that these address ranges were written.
    pub fn note(&self, written: impl Iterator<Item = Range<usize>>) {
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::SeqCst) {
            let mut pages = self.pages();
            written.filter(|range| !range.is_empty()).for_each(|range| {
                pages.extend(range.start / PAGE..=(range.end - 1) / PAGE);
            });
        }
    }

    /// The pages noted since the last call.
    #[must_use]
    pub fn take(&self) -> BTreeSet<usize> {
        std::mem::take(&mut *self.pages())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_noted_while_they_are_watched() {
        let writes = Writes::default();
        let note = |starts_and_ends: &[[usize; 2]]| {
            writes.note(starts_and_ends.iter().map(|[start, end]| *start..*end));
        };
        note(&[[0, 9]]);
        writes.watch(true);
        note(&[[4095, 4097], [9000, 9000], [8192, 8193]]);
        note(&[[40960, 49152]]);
        assert_eq!(Vec::from_iter(writes.take()), [0, 1, 2, 10, 11]);
        note(&[[4096, 8192]]);
        assert_eq!(Vec::from_iter(writes.take()), [1]);
        note(&[[0, 1]]);
        writes.watch(false);
        note(&[[0, 1]]);
        assert!(writes.take().is_empty());
    }

    #[test]
    fn what_several_threads_note_at_once_is_taken_once_and_none_is_lost() {
        const PAGES: usize = 20_000;
        let (writes, mut taken) = (Writes::default(), Vec::new());
        writes.watch(true);
        let left = std::sync::atomic::AtomicUsize::new(2);
        std::thread::scope(|scope| {
            for first in 0..2 {
                let (writes, left) = (&writes, &left);
                scope.spawn(move || {
                    for page in (first..PAGES).step_by(2) {
                        writes.note(std::iter::once(page * PAGE..page * PAGE + 1));
                    }
                    left.fetch_sub(1, Ordering::SeqCst);
                });
            }
            while left.load(Ordering::SeqCst) > 0 {
                taken.extend(writes.take());
            }
        });
        taken.extend(writes.take());
        taken.sort_unstable();
        assert_eq!(taken, (0..PAGES).collect::<Vec<_>>());
    }
}
