//! Which pages of RAM this process writes to by itself, for its devices, while RAM is copied beneath a running guest.
//!
//! KVM tells what vCPUs write; it knows nothing of a disk's data that a device thread reads straight into a guest's buffer.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

const PAGE: usize = 4096;

/// Pages by their addresses in this process, divided by their size.
#[derive(Debug, Default)]
pub struct Writes {
    watched: AtomicBool,
    pages: Mutex<BTreeSet<usize>>,
}

impl Writes {
    fn pages(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on writes are noted, or not any more. What was noted before is forgotten.
    pub fn watch(&self, watched: bool) {
        self.pages().clear();
        self.watched.store(watched, Ordering::SeqCst);
        // Who writes looks at the flag afterwards: he sees it, or whoever reads from here on sees what he wrote.
        fence(Ordering::SeqCst);
    }

    /// These addresses were written to.
    pub fn note(&self, written: impl Iterator<Item = Range<usize>>) {
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::SeqCst) {
            let mut pages = self.pages();
            written.filter(|range| !range.is_empty()).for_each(|range| {
                pages.extend(range.start / PAGE..=(range.end - 1) / PAGE);
            });
        }
    }

    /// What was noted since the last call.
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
}
