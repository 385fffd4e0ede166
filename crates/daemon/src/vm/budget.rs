//! The memory that VMs may have, by memory node. A VM reserves its memory before it is created, and
//! returns it when it is gone.
//!
//! One short critical section decides (Swift Birth and Quick Death, section 4.1.1 and figure 8).
//! The steps after a reservation run outside it, in parallel with other requests. Dropping the
//! reservation on a failure is the whole roll-back. A reservation covers all memory that a guest
//! could ever write. Clones share unwritten pages, so the budget is a multiple of the host's memory
//! (`dayflyd --overcommit`).
//!
//! Nodes fill in proportion to their size, because a VM runs on the CPUs of its memory. If another
//! node is about as empty as the emptiest and has a warm VMM, that node is taken.

use crate::base::error::ApiError;
use dayfly_api::types::ErrorCode;
use dayfly_host::numa::Node;
use dayfly_units::{Bytes, sync::lock};
use std::cmp::Reverse;
use std::sync::{Arc, Mutex};

/// No node has enough memory left.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory: expected at most {} for this VM, got {}: {} are missing. \
     VMs have {} of the {} that they may have on this host; \
     remove some, or start dayflyd with a higher --overcommit",
    Bytes(*.left), Bytes(*.wanted), Bytes(.wanted - .left), Bytes(*.reserved), Bytes(*.budget)
)]
pub struct NoMemory {
    wanted: u64,
    /// Bytes left on the node with the most.
    left: u64,
    reserved: u64,
    budget: u64,
}

/// How much fuller than the emptiest node a node with a warm VMM may be: a sixteenth of its budget.
const ABOUT: u64 = ALL >> 4;
/// The value of [`Share::used`] for a whole budget.
const ALL: u64 = 1 << 32;

#[derive(Debug)]
struct Share {
    budget: u64,
    reserved: u64,
}

impl Share {
    /// Bytes left; 0 if adopted VMs have more than the budget, because an earlier daemon had a
    /// higher one.
    fn left(&self) -> u64 {
        self.budget.saturating_sub(self.reserved)
    }

    /// The reserved part of the budget, as a fraction of [`ALL`].
    fn used(&self) -> u64 {
        let parts = u128::from(self.reserved) * u128::from(ALL) / u128::from(self.budget.max(1));
        u64::try_from(parts).unwrap_or(u64::MAX)
    }
}

/// The budget of a host, by node.
#[derive(Debug)]
pub struct Budget(Mutex<Vec<Share>>);

/// Memory reserved for one VM; dropping it returns the memory.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    /// Index of the node in the host's list of nodes.
    pub node: usize,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(share) = lock(&self.budget.0).get_mut(self.node) {
            share.reserved = share.reserved.saturating_sub(self.bytes);
        }
    }
}

impl Budget {
    /// A budget of `percent` of the memory of each node.
    #[must_use]
    pub fn new(nodes: &[Node], percent: u32) -> Self {
        let of = |node: &Node| {
            let budget = u128::from(node.memory_bytes) * u128::from(percent) / 100;
            Share { budget: u64::try_from(budget).unwrap_or(u64::MAX), reserved: 0 }
        };
        Self(Mutex::new(nodes.iter().map(of).collect()))
    }

    /// The node that would be emptiest if `waiting` bytes, by node, were reserved too.
    #[must_use]
    pub fn emptiest(&self, waiting: &[u64]) -> usize {
        let with = |(node, share): (usize, &Share)| {
            let waiting = waiting.get(node).copied().unwrap_or(0);
            Share { reserved: share.reserved.saturating_add(waiting), ..*share }
        };
        let shares: Vec<Share> = lock(&self.0).iter().enumerate().map(with).collect();
        emptiest(&shares, 0)
    }

    /// Reserves `bytes` on the emptiest node with enough left. `ready` is a node with a warm VMM:
    /// it is taken instead if it is about as empty.
    ///
    /// # Errors
    /// No node has `bytes` left.
    pub fn reserve(
        self: &Arc<Self>,
        bytes: u64,
        ready: Option<usize>,
    ) -> Result<Reservation, NoMemory> {
        let mut shares = lock(&self.0);
        let emptiest = emptiest(&shares, bytes);
        let most = shares.get(emptiest).map_or(0, Share::used).saturating_add(ABOUT);
        let fits = |share: &Share| share.left() >= bytes && share.used() <= most;
        let node = ready.filter(|node| shares.get(*node).is_some_and(fits)).unwrap_or(emptiest);
        self.take(&mut shares, node, bytes)
    }

    /// Reserves `bytes` on `node`, or as [`Self::reserve`] if that has too little left.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn reserve_on(self: &Arc<Self>, bytes: u64, node: usize) -> Result<Reservation, NoMemory> {
        let mut shares = lock(&self.0);
        let fits = shares.get(node).is_some_and(|share| share.left() >= bytes);
        let node = if fits { node } else { emptiest(&shares, bytes) };
        self.take(&mut shares, node, bytes)
    }

    fn take(
        self: &Arc<Self>,
        shares: &mut [Share],
        node: usize,
        bytes: u64,
    ) -> Result<Reservation, NoMemory> {
        let left = shares.get(node).map_or(0, Share::left);
        if left < bytes {
            let sum = |of: fn(&Share) -> u64| shares.iter().map(of).fold(0, u64::saturating_add);
            let (reserved, budget) = (sum(|share| share.reserved), sum(|share| share.budget));
            return Err(NoMemory { wanted: bytes, left, reserved, budget });
        }
        shares[node].reserved += bytes;
        Ok(Reservation { budget: Arc::clone(self), node, bytes })
    }

    /// Reserves the memory of a VM that an earlier daemon started, even beyond the budget.
    #[must_use]
    pub fn adopt(self: &Arc<Self>, node: usize, bytes: u64) -> Reservation {
        let mut shares = lock(&self.0);
        let node = if node < shares.len() { node } else { emptiest(&shares, 0) };
        if let Some(share) = shares.get_mut(node) {
            share.reserved = share.reserved.saturating_add(bytes);
        }
        Reservation { budget: Arc::clone(self), node, bytes }
    }

    /// Bytes reserved and bytes of budget, by node.
    #[must_use]
    pub fn shares(&self) -> Vec<(u64, u64)> {
        lock(&self.0).iter().map(|share| (share.reserved, share.budget)).collect()
    }
}

/// The node with the smallest reserved part among those with `bytes` left: of equals the larger
/// one, then the first. If no node has `bytes` left, the one with the most left.
fn emptiest(shares: &[Share], bytes: u64) -> usize {
    let order = |share: &Share| {
        let short = share.left() < bytes;
        (short, if short { 0 } else { share.used() }, Reverse(share.left()))
    };
    shares.iter().enumerate().min_by_key(|(_, share)| order(share)).map_or(0, |(node, _)| node)
}

impl From<NoMemory> for ApiError {
    fn from(e: NoMemory) -> Self {
        Self::new(ErrorCode::Exhausted, e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn budget(sizes: &[u64], percent: u32) -> Arc<Budget> {
        let nodes =
            sizes.iter().map(|&memory_bytes| Node { number: None, cpus: Vec::new(), memory_bytes });
        Arc::new(Budget::new(&nodes.collect::<Vec<_>>(), percent))
    }

    #[test]
    fn what_is_reserved_is_returned_and_no_more_than_there_is_is_reserved() {
        let budget = budget(&[GIB], 200);
        let first = budget.reserve(GIB, None).unwrap();
        let second = budget.reserve(GIB, None).unwrap();
        let refused = budget.reserve(64 << 20, None).unwrap_err().to_string();
        assert!(
            refused.contains("64.0 MiB are missing") && refused.contains("--overcommit"),
            "{refused}"
        );
        drop(first);
        assert_eq!(budget.shares(), [(GIB, 2 * GIB)]);
        let third = budget.reserve(GIB, None).unwrap();
        assert!(budget.reserve(1, None).is_err());
        drop((second, third));
        assert_eq!(budget.shares(), [(0, 2 * GIB)]);
    }

    #[test]
    fn nodes_fill_in_proportion_and_none_gives_what_only_all_have() {
        let budget = budget(&[GIB, 3 * GIB, 2 * GIB], 100);
        let nodes: Vec<usize> = {
            let reserved: Vec<_> = (0..6).map(|_| budget.reserve(GIB, None).unwrap()).collect();
            assert!(budget.reserve(1, None).is_err());
            reserved.iter().map(|reservation| reservation.node).collect()
        };
        assert_eq!(nodes, [1, 2, 0, 1, 2, 1]);
        assert!(budget.reserve(4 * GIB, None).is_err());
    }

    #[test]
    fn the_emptiest_node_is_of_no_use_where_it_is_too_small() {
        let budget = budget(&[GIB, 8 * GIB], 100);
        let _reserved = budget.reserve(4 * GIB, None).unwrap();
        assert_eq!((budget.emptiest(&[]), budget.emptiest(&[GIB])), (0, 1));
        assert_eq!(budget.reserve(2 * GIB, None).unwrap().node, 1);
    }

    #[test]
    fn a_node_with_a_vmm_ready_is_taken_where_it_is_about_as_empty() {
        let budget = budget(&[16 * GIB, 16 * GIB], 100);
        let reserved: Vec<_> = (0..4).map(|_| budget.reserve(GIB, Some(1)).unwrap()).collect();
        let nodes: Vec<usize> = reserved.iter().map(|reservation| reservation.node).collect();
        // A sixteenth fuller counts as about as empty, two sixteenths do not.
        assert_eq!(nodes, [1, 1, 0, 1]);
        assert_eq!(budget.reserve(GIB, Some(7)).unwrap().node, 0);
        // The other node has too little left.
        assert_eq!(budget.reserve(14 * GIB, Some(1)).unwrap().node, 0);
        // With booked CPUs, only that counts.
        let on: Vec<usize> = [(GIB, 1), (14 * GIB, 1), (1, 7)]
            .map(|(b, n)| budget.reserve_on(b, n).unwrap().node)
            .into();
        assert_eq!(on, [1, 0, 0]);
    }

    #[test]
    fn what_an_earlier_daemon_gave_counts_even_where_it_is_too_much() {
        let budget = budget(&[GIB], 100);
        let reserved = budget.adopt(7, 5 * GIB);
        assert_eq!((reserved.node, budget.shares()), (0, vec![(5 * GIB, GIB)]));
        assert!(budget.reserve(1, None).is_err());
        drop(reserved);
        assert!(budget.reserve(GIB, None).is_ok());
    }

    #[test]
    fn reservations_at_once_never_exceed_the_budget() {
        let budget = budget(&[10 * GIB, 10 * GIB], 100);
        let got: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let reserved: Vec<_> =
                            (0..10).filter_map(|_| budget.reserve(GIB, None).ok()).collect();
                        let got = reserved.len();
                        std::mem::forget(reserved);
                        got
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(got, 20);
    }
}
