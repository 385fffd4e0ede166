//! Leases: references that keep pages although no snapshot's table names them. A put holds one
//! until its table is published; a reader holds one while it reads.
//!
//! Take a lease **before** you look up its pages. A gc first marks the pages that tables and leases
//! name. Later it checks the leases again, under the lock with which it changes the index. A lease
//! that ends meanwhile counts until the gc ends. So a page that a lookup finds under a lease stays
//! findable.
//!
//! Leases hold hash prefixes: if two pages share a prefix, both are kept.

use dayfly_units::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

/// All leases of a tenant.
#[derive(Debug, Default)]
pub(super) struct Leases(Mutex<Leased>);

#[derive(Debug, Default)]
struct Leased {
    next: u64,
    all: BTreeMap<u64, Arc<[u64]>>,
    /// Leases that ended while a gc was running.
    ended: Vec<Arc<[u64]>>,
    collecting: bool,
}

/// A reference that keeps pages until it is dropped.
#[derive(Debug)]
pub struct Lease {
    leases: Arc<Leases>,
    key: u64,
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, Leased> {
        lock(&self.0)
    }

    /// Takes a lease of the pages with these hash prefixes.
    pub(super) fn take(self: &Arc<Self>, prefixes: impl Iterator<Item = u64>) -> Lease {
        let prefixes: Arc<[u64]> = prefixes.collect();
        let mut inner = self.lock();
        let key = inner.next;
        inner.next += 1;
        inner.all.insert(key, prefixes);
        Lease { leases: Arc::clone(self), key }
    }

    /// From now on ended leases still count, until the guard is dropped.
    pub(super) fn collect(&self) -> Collecting<'_> {
        self.lock().collecting = true;
        Collecting(self)
    }

    /// Every leased prefix, including leases that ended since [`Self::collect`].
    pub(super) fn prefixes(&self) -> BTreeSet<u64> {
        let inner = self.lock();
        inner.all.values().chain(&inner.ended).flat_map(|p| p.iter().copied()).collect()
    }
}

/// Guard of a running gc.
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
        if let Some(prefixes) = inner.all.remove(&self.key)
            && inner.collecting
        {
            inner.ended.push(prefixes);
        }
    }
}
