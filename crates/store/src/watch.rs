//! The publish lock, and how a gc looks at all snapshots beside publishing and removing.
//!
//! A gc reads every manifest or table. It does so without the publish lock, because creating VMs
//! waits for that lock. Then it takes the lock for a moment, and reads again without the lock what
//! the log names, until nothing has changed in between. So the work under the lock does not grow
//! with the store.

use crate::blob::{interleave, lock_work};
use crate::inner::Inner;
use crate::published::Published;
use std::collections::BTreeSet;
use std::sync::MutexGuard;

/// The held publish lock.
pub(crate) struct Publishing<'a>(MutexGuard<'a, Published>);

impl Publishing<'_> {
    /// Notes that the snapshot was published, or removed, or that either was undone.
    pub(crate) fn change(&mut self, snapshot: &str) {
        if self.0.watches > 0 {
            self.0.changed.push(snapshot.to_owned());
        }
    }
}

impl Drop for Publishing<'_> {
    fn drop(&mut self) {
        lock_work::end();
    }
}

/// A look at all snapshots.
pub(crate) struct Watch<'a> {
    inner: &'a Inner,
    /// How much of the log it has seen.
    seen: usize,
}

impl Inner {
    pub(crate) fn publishing(&self) -> Publishing<'_> {
        let guard = interleave::lock(&self.publish);
        lock_work::begin();
        Publishing(guard)
    }

    /// Begins a look at all snapshots. Waits for a removal that is not synced: it may still fail,
    /// or a crash may undo it.
    pub(crate) fn watch(&self) -> Watch<'_> {
        let mut publishing = self.publishing();
        publishing.0.watches += 1;
        Watch { inner: self, seen: publishing.0.changed.len() }
    }
}

impl Watch<'_> {
    /// The snapshots that changed since the last call, and the lock. If there are none, what was
    /// read before is true as long as the lock is held.
    pub(crate) fn changed(&mut self) -> (BTreeSet<String>, Publishing<'_>) {
        let publishing = self.inner.publishing();
        let changed = publishing.0.changed.iter().skip(self.seen).cloned().collect();
        self.seen = publishing.0.changed.len();
        (changed, publishing)
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut publishing = self.inner.publishing();
        publishing.0.watches -= 1;
        if publishing.0.watches == 0 {
            publishing.0.changed.clear();
        }
    }
}
