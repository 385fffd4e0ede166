//! Leases: pages that [`crate::Store::gc_pages`] must leave although no snapshot's table names them, because one will, or because somebody
//! reads them.
//!
//! A lease is taken **before** its pages are looked up. A gc marks what tables and leases name, works, and looks at the leases once more
//! under the lock that it changes the index with; a lease that ends meanwhile still counts until the gc has ended. So a page that a lookup
//! finds under a lease stays found. Leases hold prefixes of hashes: two pages of one prefix are both kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All leases of a tenant.
#[derive(Debug, Default)]
pub(super) struct Leases(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    next: u64,
    held: BTreeMap<u64, Arc<[u64]>>,
    /// Of leases that ended while a gc was running.
    ended: Vec<Arc<[u64]>>,
    collecting: bool,
}

/// Pages that stay while this lives.
#[derive(Debug)]
pub struct Lease {
    leases: Arc<Leases>,
    key: u64,
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lease of the pages with these prefixes.
    pub(super) fn take(self: &Arc<Self>, prefixes: impl Iterator<Item = u64>) -> Lease {
        let prefixes: Arc<[u64]> = prefixes.collect();
        let mut inner = self.lock();
        let key = inner.next;
        inner.next += 1;
        inner.held.insert(key, prefixes);
        Lease { leases: Arc::clone(self), key }
    }

    /// From now on leases that end count on, until the guard is dropped.
    pub(super) fn collect(&self) -> Collecting<'_> {
        self.lock().collecting = true;
        Collecting(self)
    }

    /// Every prefix that is held, or was since [`Self::collect`].
    pub(super) fn prefixes(&self) -> BTreeSet<u64> {
        let inner = self.lock();
        inner.held.values().chain(&inner.ended).flat_map(|p| p.iter().copied()).collect()
    }
}

/// A gc is running.
pub(super) struct Collecting<'a>(&'a Leases);

impl Drop for Collecting<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.collecting = false;
        inner.ended.clear();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut inner = self.leases.lock();
        if let Some(prefixes) = inner.held.remove(&self.key)
            && inner.collecting
        {
            inner.ended.push(prefixes);
        }
    }
}
