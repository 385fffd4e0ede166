//! The order of fetching ahead of faults: batches beside a fault, then the recorded working set in
//! its order, then all batches in stored order.
//!
//! Efficiently Restoring VMs, algorithm 1, goes through the rest in disk order; batches are
//! numbered in that order. The working set is cut into slices, each twice as long as the one
//! before, and each slice is in stored order. So early pages come early, and a disk does not seek
//! back and forth for later ones.

use crate::policy::Policy;
use crate::source::{Batch, Layout, ZERO};
use crate::streams::Streams;
use std::collections::VecDeque;
use std::ops::Range;

/// Batches in the working set's first slice.
const SLICE: usize = 32;
/// The most batches of a group, on each side, that come with a faulting one.
const GROUP: usize = 64;
/// The place of a batch that is not in the row.
const NOWHERE: u32 = u32::MAX;

/// Batches to fetch ahead, in order.
#[derive(Debug)]
pub struct Order {
    beside_each: u32,
    beside: VecDeque<u32>,
    /// The row: all batches to fetch ahead. `places` has for each batch its index in the row.
    row: Vec<u32>,
    places: Vec<u32>,
    /// Index in the row of the next batch.
    at: usize,
    /// Number of batches from `at` on that belong to the working set.
    lead: usize,
    /// `None` if the policy has no streams.
    streams: Option<Streams>,
}

impl Order {
    /// The batches of `layout` that the policy fetches ahead; `first` are the frames of the working
    /// set.
    #[must_use]
    pub fn new(layout: &Layout, first: &[u32], policy: &Policy) -> Self {
        let mut taken = vec![false; layout.batches.len()];
        let of = |frame: &u32| {
            layout.batch_of.get(*frame as usize).copied().filter(|batch| *batch != ZERO)
        };
        let mut once = |batch: &u32| {
            taken.get_mut(*batch as usize).is_some_and(|t| !std::mem::replace(t, true))
        };
        let first = first.iter().filter(|_| policy.working_set);
        let mut row: Vec<u32> = first.filter_map(of).filter(&mut once).collect();
        let lead = row.len();
        let (mut left, mut slice) = (row.as_mut_slice(), SLICE);
        while !left.is_empty() {
            let (now, later) = left.split_at_mut(slice.min(left.len()));
            now.sort_unstable();
            (left, slice) = (later, slice * 2);
        }
        if policy.background {
            row.extend((0..).take(layout.batches.len()).filter(&mut once));
        }
        let places = vec![NOWHERE; layout.batches.len()];
        let streams = policy.streams.then(Streams::default);
        let (beside_each, beside) = (policy.beside, VecDeque::new());
        let mut order = Self { beside_each, beside, row, places, at: 0, lead, streams };
        order.place(0..order.row.len());
        order
    }

    /// Updates `places` for this part of the row.
    fn place(&mut self, of: Range<usize>) {
        for (place, batch) in (0_u32..).zip(&self.row).skip(of.start).take(of.len()) {
            self.places[*batch as usize] = place;
        }
    }

    /// Number of batches that come before this one. `None` if it is not in the row, or was taken
    /// already.
    #[must_use]
    pub fn comes_after(&self, batch: u32) -> Option<usize> {
        let place = self.places.get(batch as usize).filter(|place| **place != NOWHERE)?;
        Some((*place as usize).checked_sub(self.at)? + self.beside.len())
    }

    /// Sorts the rest of the working set into stored order.
    pub fn sweep(&mut self) {
        let left = self.at..self.at + self.lead;
        self.row[left.clone()].sort_unstable();
        self.place(left);
    }

    /// Sorts all that is left into stored order, and treats all of it as working set.
    pub fn sweep_all(&mut self) {
        let left = self.at..self.row.len();
        if self.lead < left.len() {
            self.row[left.clone()].sort_unstable();
            self.place(left.clone());
            self.lead = left.len();
        }
    }

    /// Called before a fault's `batch` is fetched: returns the batches to fetch with it. `missing`
    /// reports which batches are not present.
    pub fn with(&mut self, layout: &Layout, batch: u32, missing: impl Fn(u32) -> bool) -> Vec<u32> {
        self.streams.as_mut().map_or_else(Vec::new, |streams| streams.asked(layout, batch, missing))
    }

    /// Called after a fault's `batch` was fetched: queues the batches beside it. If it has a group,
    /// these are the rest of the group; otherwise, the next batches of its colour. Returns whether
    /// any were queued.
    ///
    /// Up to `behind` further batches behind it are queued too, if they are still in the row.
    pub fn asked(&mut self, layout: &Layout, batch: u32, behind: usize) -> bool {
        if behind > 0 {
            // Batches queued for an earlier fault come with the row; going back for them would be
            // another seek.
            self.beside.clear();
        }
        let before_this = self.beside.len();
        let places =
            (0_u32..).zip(&self.places).skip((batch as usize).saturating_add(1)).take(behind);
        let to_come = places.filter(|(_, place)| **place != NOWHERE && **place as usize >= self.at);
        self.beside.extend(to_come.map(|(batch, _)| batch));
        let of = |n: u32| layout.batches.get(n as usize);
        let Some(&Batch { colour, group, .. }) = of(batch) else { return false };
        if group != 0 {
            let same = |n: &u32| of(*n).is_some_and(|beside| beside.group == group);
            self.beside.extend((batch + 1..).take(GROUP).take_while(same));
            self.beside.extend((0..batch).rev().take(GROUP).take_while(same));
            return self.beside.len() > before_this;
        }
        let last = batch.saturating_add(self.beside_each);
        let same =
            |n: &u32| layout.batches.get(*n as usize).is_some_and(|beside| beside.colour == colour);
        self.beside.extend((batch + 1..=last).filter(same));
        self.beside.len() > before_this
    }

    /// The next batch, which may be present already.
    pub fn take(&mut self) -> Option<u32> {
        if let Some(batch) = self.beside.pop_front() {
            return Some(batch);
        }
        let batch = *self.row.get(self.at)?;
        self.at += 1;
        self.lead = self.lead.saturating_sub(1);
        Some(batch)
    }

    /// Number of batches of the working set that are still to come.
    #[must_use]
    pub const fn lead(&self) -> usize {
        self.lead
    }

    /// Number of batches still to come; batches beside a fault are mostly in the row too.
    #[must_use]
    pub fn left(&self) -> usize {
        self.row.len().saturating_sub(self.at).max(self.beside.len())
    }

    /// Appends a batch that could not be fetched, for another attempt at the end.
    pub fn later(&mut self, batch: u32) {
        self.row.push(batch);
        self.place(self.row.len() - 1..self.row.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches of two frames; the last two batches have another colour.
    fn layout() -> Layout {
        let batches = (0..6)
            .map(|n| Batch { first: 2 * n, frames: 2, colour: u8::from(n > 3), group: 0 })
            .collect();
        let batch_of = (0..12).map(|frame| frame / 2).chain([ZERO, ZERO]).collect();
        Layout { batch_of, batches }
    }

    fn all(mut order: Order) -> Vec<u32> {
        std::iter::from_fn(|| order.take()).collect()
    }

    fn order(first: &[u32], policy: Policy) -> Order {
        Order::new(&layout(), first, &policy)
    }

    #[test]
    fn the_working_set_comes_first_and_everything_once() {
        assert_eq!(all(order(&[5, 4, 1, 12, 900], Policy::default())), [0, 2, 1, 3, 4, 5]);
        let only = Policy::MINIMAL.with_working_set();
        let mut first = order(&[5, 1, 4], only);
        assert_eq!((first.lead(), first.take()), (2, Some(0)));
        assert_eq!((first.lead(), all(first)), (1, vec![2]));
        assert!(all(order(&[5, 1, 4], Policy::MINIMAL)).is_empty());
    }

    #[test]
    fn a_group_comes_whole() {
        let mut layout = layout();
        for (number, group) in [(1, 7), (2, 7), (3, 7), (4, 8), (5, 7)] {
            layout.batches[number].group = group;
        }
        let asked = |batch, beside| {
            let mut order = Order::new(&layout, &[], &Policy { beside, ..Policy::MINIMAL });
            (order.asked(&layout, batch, 0), all(order))
        };
        assert_eq!(asked(2, 0), (true, vec![3, 1]));
        assert_eq!(asked(1, 2), (true, vec![2, 3]));
        assert_eq!(asked(4, 2), (false, vec![]), "its group, and not its colour");
        assert_eq!(asked(5, 0), (false, vec![]), "neighbours only");
    }

    #[test]
    fn what_lies_behind_comes_where_it_is_to_come_anyway() {
        let asked = |batch, behind, policy: Policy| {
            let mut order = order(&[2], Policy { beside: 0, ..policy });
            assert_eq!(order.take(), Some(1));
            (order.asked(&layout(), batch, behind), order.beside.into_iter().collect::<Vec<u32>>())
        };
        assert_eq!(asked(0, 3, Policy::default()), (true, vec![2, 3]), "1 has come");
        assert_eq!(asked(3, 9, Policy::default()), (true, vec![4, 5]));
        assert_eq!(asked(u32::MAX, 9, Policy::default()), (false, vec![]));
        assert_eq!(asked(0, 3, Policy::MINIMAL.with_working_set()), (false, vec![]));
    }

    #[test]
    fn slices_of_the_working_set_come_as_they_lie() {
        let batches =
            (0..500).map(|n| Batch { first: n, frames: 1, colour: 0, group: 0 }).collect();
        let layout = Layout { batch_of: (0..500).collect(), batches };
        let backwards: Vec<u32> = (0..500).rev().collect();
        let order = all(Order::new(&layout, &backwards, &Policy::MINIMAL.with_working_set()));
        let expected = [468..500, 404..468, 276..404, 20..276, 0..20].into_iter().flatten();
        assert_eq!(order, expected.collect::<Vec<u32>>());
    }

    #[test]
    fn a_sweep_takes_what_is_left_of_the_working_set_as_it_lies() {
        let mut order = order(&[10, 0, 6, 2], Policy::default());
        order.row[..4].copy_from_slice(&[5, 0, 3, 1]);
        order.place(0..4);
        let after = |order: &Order| [0, 1, 2, 3, 4, 5, 6].map(|batch| order.comes_after(batch));
        assert_eq!(after(&order), [Some(1), Some(3), Some(4), Some(2), Some(5), Some(0), None]);
        assert_eq!(order.take(), Some(5));
        order.sweep();
        assert_eq!(after(&order), [Some(0), Some(1), Some(3), Some(2), Some(4), None, None]);
        assert_eq!(order.take(), Some(0));
        order.later(0);
        assert_eq!(order.comes_after(0), Some(4));
        assert_eq!((order.lead(), all(order)), (2, vec![1, 3, 2, 4, 0]));
    }

    #[test]
    fn a_sweep_over_all_takes_the_rest_with_it() {
        let mut order = order(&[10, 2], Policy::default());
        assert_eq!(order.take(), Some(1));
        order.sweep_all();
        assert_eq!((order.lead(), order.left()), (5, 5));
        assert_eq!(order.comes_after(5), Some(4));
        assert_eq!(all(order), [0, 2, 3, 4, 5]);
    }

    #[test]
    fn what_lies_behind_what_was_asked_for_comes_before_all_else() {
        let asked = |batch, beside| {
            let mut order = order(&[0], Policy { beside, ..Policy::MINIMAL.with_working_set() });
            let any = order.asked(&layout(), batch, 0);
            (any, all(order))
        };
        assert_eq!(asked(0, 2), (true, vec![1, 2, 0]));
        assert_eq!(asked(2, 3), (true, vec![3, 0]), "those of its colour");
        assert_eq!(asked(4, 3), (true, vec![5, 0]));
        assert_eq!(asked(5, 2), (false, vec![0]));
        assert_eq!(asked(1, 0), (false, vec![0]));
        assert_eq!(asked(99, 2), (false, vec![0]));
        assert_eq!(asked(u32::MAX, 2), (false, vec![0]));
    }
}
