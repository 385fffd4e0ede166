//! Snapshots that stay open for the next who asks.

use super::Loaded;
use dayfly_units::Name;
use std::sync::Arc;

/// How many stay open.
const MOST: usize = 32;
/// Which part of the host's memory the RAM of snapshots just made may take while they are open: an eighth.
const RESIDENT_PART: u64 = 8;

/// Snapshots that are open, the one that was asked for last at the end.
#[derive(Debug)]
pub(super) struct Recent {
    entries: Vec<Entry>,
    /// Bytes of the host's memory that all of them may take.
    pub(super) resident_most: u64,
}

#[derive(Debug)]
struct Entry {
    name: Name,
    open: Arc<Loaded>,
    /// Bytes of the host's memory that it takes, which cannot be had back while it is open.
    resident_bytes: u64,
}

impl Recent {
    /// None, on this host.
    pub(super) fn new() -> Self {
        let host = rustix::system::sysinfo();
        let memory = u64::from(host.mem_unit).saturating_mul(host.totalram);
        Self { entries: Vec::new(), resident_most: memory / RESIDENT_PART }
    }

    /// The snapshot, and how much of the host's memory it takes.
    pub(super) fn find(&mut self, name: &Name) -> Option<(Arc<Loaded>, u64)> {
        let place = self.entries.iter().position(|entry| entry.name == *name)?;
        let found = self.entries.remove(place);
        let answer = (found.open.clone(), found.resident_bytes);
        self.entries.push(found);
        Some(answer)
    }

    /// The snapshot, without having been asked for.
    pub(super) fn peek(&self, name: &Name) -> Option<Arc<Loaded>> {
        self.entries.iter().find(|entry| entry.name == *name).map(|entry| entry.open.clone())
    }

    /// Keeps it, and of all those that were asked for last as many as may be.
    pub(super) fn keep(&mut self, name: Name, open: Arc<Loaded>, resident_bytes: u64) {
        self.forget(&name);
        if self.entries.len() >= MOST {
            self.entries.remove(0);
        }
        self.entries.push(Entry { name, open, resident_bytes });
        let bytes = self.entries.iter().map(|entry| entry.resident_bytes);
        let mut fits = kept(bytes, self.resident_most).into_iter();
        self.entries.retain(|_| fits.next().unwrap_or(false));
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<Arc<Loaded>> {
        self.entries.iter().map(|entry| entry.open.clone()).collect()
    }

    pub(super) fn forget(&mut self, name: &Name) {
        self.entries.retain(|entry| entry.name != *name);
    }
}

/// Which stay when all together may take `most` bytes: the last ones first, and what takes nothing in any case.
fn kept(bytes: impl DoubleEndedIterator<Item = u64>, most: u64) -> Vec<bool> {
    let mut left = most;
    let mut kept: Vec<bool> =
        bytes.rev().map(|bytes| left.checked_sub(bytes).inspect(|rest| left = *rest).is_some()).collect();
    kept.reverse();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_last_stays_in_memory() {
        let kept = |bytes: &[u64]| kept(bytes.iter().copied(), 10);
        assert_eq!(kept(&[4, 0, 4, 6]), [false, true, true, true]);
        assert_eq!(kept(&[4, 0, 4, 2]), [true; 4]);
        assert_eq!(kept(&[1, 7, 9]), [true, false, true]);
        assert_eq!(kept(&[u64::MAX, u64::MAX]), [false, false]);
    }
}
