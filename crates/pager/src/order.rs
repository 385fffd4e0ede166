//! What is fetched before anybody asks.
//!
//! Kaleidoscope, section 4.2, prefetches neighbours of the same colour, with a window for each colour; Efficiently Restoring VMs, algorithm 1, goes
//! through the rest by where it lies on disk. Here: what lies beside a fault, then the recorded working set in its order, then all batches as
//! they lie.

use crate::source::{Layout, ZERO};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// How far around a fault is fetched next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Batches before it.
    pub before: u32,
    /// Batches after it.
    pub after: u32,
    /// Whether only those of the same colour.
    pub of_colour: bool,
}

/// Batches still to be fetched, the next first.
#[derive(Debug)]
pub struct Order {
    window: Window,
    beside: VecDeque<u32>,
    rest: VecDeque<u32>,
    /// So many of `rest` are those to be fetched first.
    lead: usize,
    /// Batches by their first frames, and for each batch its place in that.
    by_frame: Vec<u32>,
    rank: Vec<u32>,
}

impl Order {
    /// Those of `layout`: first those of the frames in `first`, then, if `all`, the rest.
    #[must_use]
    pub fn new(layout: &Layout, first: &[u32], all: bool, window: Window) -> Self {
        let mut taken = vec![false; layout.batches.len()];
        let of = |frame: &u32| layout.batch_of.get(*frame as usize).copied().filter(|batch| *batch != ZERO);
        let mut once =
            |batch: &u32| taken.get_mut(*batch as usize).is_some_and(|t| !std::mem::replace(t, true));
        let mut rest: VecDeque<u32> = first.iter().filter_map(of).filter(&mut once).collect();
        let lead = rest.len();
        if all {
            rest.extend(layout.by_place.iter().copied().filter(&mut once));
        }
        let mut by_frame: Vec<u32> = (0..).take(layout.batches.len()).collect();
        by_frame.sort_by_key(|batch| layout.batches[*batch as usize].first);
        let mut rank = vec![0; by_frame.len()];
        for (place, batch) in (0..).zip(&by_frame) {
            rank[*batch as usize] = place;
        }
        Self { window, beside: VecDeque::new(), rest, lead, by_frame, rank }
    }

    /// Somebody asked for `batch`: what lies beside it comes next. Says whether there is anything.
    pub fn asked(&mut self, layout: &Layout, batch: u32) -> bool {
        let Some(&rank) = self.rank.get(batch as usize) else { return false };
        let before_this = self.beside.len();
        let colour = layout.batches[batch as usize].colour;
        let Window { before, after, of_colour } = self.window;
        let places = (rank + 1..=rank.saturating_add(after)).chain((rank.saturating_sub(before)..rank).rev());
        for place in places {
            let Some(&beside) = self.by_frame.get(place as usize) else { continue };
            if !of_colour || layout.batches[beside as usize].colour == colour {
                self.beside.push_back(beside);
            }
        }
        self.beside.len() > before_this
    }

    /// The next; those that are there already come too.
    pub fn take(&mut self) -> Option<u32> {
        if let Some(batch) = self.beside.pop_front() {
            return Some(batch);
        }
        let batch = self.rest.pop_front()?;
        self.lead = self.lead.saturating_sub(1);
        Some(batch)
    }

    /// How many of those to be fetched first are still to come.
    #[must_use]
    pub const fn lead(&self) -> usize {
        self.lead
    }

    /// It could not be had: it is tried again at the end.
    pub fn later(&mut self, batch: u32) {
        self.rest.push_back(batch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Batch;

    /// Batches of two frames, in the order of frames; by place they lie the other way round. The last two are of another colour.
    fn layout() -> Layout {
        let batches = (0..6).map(|n| Batch { first: 2 * n, frames: 2, colour: u8::from(n > 3) }).collect();
        let batch_of = (0..12).map(|frame| frame / 2).chain([ZERO, ZERO]).collect();
        Layout { batch_of, batches, by_place: (0..6).rev().collect() }
    }

    fn all(mut order: Order) -> Vec<u32> {
        std::iter::from_fn(|| order.take()).collect()
    }

    const NONE: Window = Window { before: 0, after: 0, of_colour: false };

    #[test]
    fn the_working_set_comes_first_and_everything_once() {
        assert_eq!(all(Order::new(&layout(), &[5, 4, 1, 12, 900], true, NONE)), [2, 0, 5, 4, 3, 1]);
        let mut order = Order::new(&layout(), &[5, 1, 4], false, NONE);
        assert_eq!((order.lead(), order.take()), (2, Some(2)));
        assert_eq!((order.lead(), all(order)), (1, vec![0]));
    }

    #[test]
    fn neighbours_of_what_was_asked_for_come_before_all_else() {
        let asked = |batch, window| {
            let layout = layout();
            let mut order = Order::new(&layout, &[0], false, window);
            assert_eq!(order.asked(&layout, batch), batch < 6);
            all(order)
        };
        let window = Window { before: 1, after: 2, of_colour: false };
        assert_eq!(asked(2, window), [3, 4, 1, 0]);
        assert_eq!(asked(2, Window { of_colour: true, ..window }), [3, 1, 0]);
        assert_eq!(asked(5, window), [4, 0]);
        assert_eq!(asked(0, window), [1, 2, 0]);
        assert_eq!(asked(99, window), [0]);
    }
}
