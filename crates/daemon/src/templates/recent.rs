//! The snapshots that stay open, least recently used first.

use crate::templates::open::OpenTemplate;
use dayfly_units::Name;
use std::sync::Arc;

/// The most snapshots that stay open.
const MOST: usize = 32;
/// Divisor of the host's memory: the RAM of open snapshots just made may take an eighth of it.
const RESIDENT_SHARE: u64 = 8;

/// Open snapshots, the most recently used last.
#[derive(Debug)]
pub(super) struct Recent {
    entries: Vec<Entry>,
    /// The most bytes of the host's memory that all of them together may take.
    pub(super) resident_most: u64,
}

#[derive(Debug)]
struct Entry {
    name: Name,
    open: Arc<OpenTemplate>,
    /// Bytes of the host's memory that it takes, which the kernel cannot reclaim while it is open.
    resident_bytes: u64,
}

impl Recent {
    /// An empty list, with the limit for this host.
    pub(super) fn new() -> Self {
        let host = rustix::system::sysinfo();
        let memory = u64::from(host.mem_unit).saturating_mul(host.totalram);
        Self { entries: Vec::new(), resident_most: memory / RESIDENT_SHARE }
    }

    /// The snapshot, and the bytes of the host's memory that it takes. Marks it as used last.
    pub(super) fn find(&mut self, name: &Name) -> Option<(Arc<OpenTemplate>, u64)> {
        let place = self.entries.iter().position(|entry| entry.name == *name)?;
        let found = self.entries.remove(place);
        let answer = (found.open.clone(), found.resident_bytes);
        self.entries.push(found);
        Some(answer)
    }

    /// The snapshot, without marking it as used.
    pub(super) fn peek(&self, name: &Name) -> Option<Arc<OpenTemplate>> {
        self.entries.iter().find(|entry| entry.name == *name).map(|entry| entry.open.clone())
    }

    /// Adds a snapshot as the most recently used. Returns the snapshots beyond the limits, which
    /// are no longer in the list.
    pub(super) fn keep(
        &mut self,
        name: Name,
        open: Arc<OpenTemplate>,
        resident_bytes: u64,
    ) -> Evicted {
        let mut evicted = self.forget(&name);
        if self.entries.len() >= MOST {
            evicted.0.push(self.entries.remove(0).open);
        }
        self.entries.push(Entry { name, open, resident_bytes });
        let bytes = self.entries.iter().map(|entry| entry.resident_bytes);
        let mut fits = kept(bytes, self.resident_most).into_iter();
        evicted.take(&mut self.entries, |_| !fits.next().unwrap_or(false));
        evicted
    }

    /// All open snapshots, the most recently used last.
    pub(super) fn all(&self) -> Vec<Arc<OpenTemplate>> {
        self.entries.iter().map(|entry| entry.open.clone()).collect()
    }

    /// Removes a snapshot from the list, and returns it.
    pub(super) fn forget(&mut self, name: &Name) -> Evicted {
        let mut evicted = Evicted::default();
        evicted.take(&mut self.entries, |entry| entry.name == *name);
        evicted
    }
}

/// Snapshots that are no longer in the list. The drop of the last reference to one frees its RAM,
/// which takes 50 to 200 ms for each GiB. So it must happen without the list's lock, for which each
/// creation of a VM waits.
#[derive(Debug, Default)]
#[must_use = "drop it after the lock of the list"]
pub(super) struct Evicted(Vec<Arc<OpenTemplate>>);

impl Evicted {
    fn take(&mut self, entries: &mut Vec<Entry>, goes: impl FnMut(&mut Entry) -> bool) {
        self.0.extend(entries.extract_if(.., goes).map(|entry| entry.open));
    }

    /// Adds those of `other`.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Whether each entry stays if all together may take `most` bytes. The last ones are kept first;
/// entries of 0 bytes always stay.
fn kept(bytes: impl DoubleEndedIterator<Item = u64>, most: u64) -> Vec<bool> {
    let mut left = most;
    let mut kept: Vec<bool> = bytes
        .rev()
        .map(|bytes| left.checked_sub(bytes).inspect(|rest| left = *rest).is_some())
        .collect();
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
