//! Learns from recorded runs: the working set, the frames that belong together, and a window for
//! each colour.
//!
//! Kaleidoscope, section 4.3, sets a window for each colour by hand and leaves finding windows to
//! future work. This module finds them by cross-validation: each run is compared with what the
//! other runs would have caused to be fetched for it. It chooses the settings with the fewest
//! faults, among those that waste hardly any fetched frames.

use dayfly_pager::order::Order;
use dayfly_pager::policy::{COLOURS, Policy, UNIT};
use dayfly_pager::source::ZERO;
use dayfly_pager::stored::{Expected, Shape};
use std::collections::{HashMap, HashSet};

/// Limit on waste: of 1000 frames fetched, at most this many may stay untouched in the run that was
/// left out. This one is for all fetched frames.
const WASTE: usize = 20;
/// As [`WASTE`], for the frames of the working set.
const WASTE_OF_FIRST: usize = 10;
/// The windows to try.
const WINDOWS: [u8; 5] = [1, 2, 4, 8, UNIT];

/// The result of learning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Learned {
    /// The working set in the order of first touches, and the frames that belong together.
    pub expected: Expected,
    /// For each colour the number of frames that come together: [`Policy::windows`].
    pub windows: [u8; COLOURS],
}

/// Faults on a colour's frames, frames fetched for them, and fetched frames that stayed untouched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Cost {
    faults: usize,
    fetched: usize,
    wasted: usize,
}

impl Cost {
    fn add(&mut self, other: Self) {
        self.faults += other.faults;
        self.fetched += other.fetched;
        self.wasted += other.wasted;
    }
}

/// Frames that at least `least` of `runs` touched, ordered by their mean place in the runs.
fn touched_by(runs: &[&Vec<u32>], least: usize) -> Vec<u32> {
    let mut places: HashMap<u32, Vec<usize>> = HashMap::new();
    for run in runs {
        let mut seen = HashSet::new();
        for (place, frame) in run.iter().enumerate().filter(|(_, frame)| seen.insert(**frame)) {
            places.entry(*frame).or_default().push(place);
        }
    }
    places.retain(|_, places| places.len() >= least);
    let mean =
        |(frame, places): (u32, Vec<usize>)| (places.iter().sum::<usize>() / places.len(), frame);
    let mut first: Vec<(usize, u32)> = places.into_iter().map(mean).collect();
    first.sort_unstable();
    first.into_iter().map(|(_, frame)| frame).collect()
}

fn within(wasted: usize, fetched: usize, thousandths: usize) -> bool {
    wasted * 1000 <= fetched * thousandths
}

/// Each run as the set of frames that it touched, with all other runs.
fn each_and_others(runs: &[Vec<u32>]) -> impl Iterator<Item = Left<'_>> {
    runs.iter().enumerate().map(|(number, run)| {
        let others = runs.iter().enumerate().filter(|(other, _)| *other != number);
        let touched = run.iter().copied().collect();
        Left { run, touched, others: others.map(|(_, run)| run).collect() }
    })
}

/// A run that is left out.
struct Left<'a> {
    run: &'a [u32],
    touched: HashSet<u32>,
    others: Vec<&'a Vec<u32>>,
}

impl Left<'_> {
    /// What fetching `frames` for the run would cost.
    fn cost<'f>(&self, frames: impl IntoIterator<Item = &'f u32>, faults: usize) -> Cost {
        let mut cost = Cost { faults, ..Cost::default() };
        for frame in frames {
            cost.fetched += 1;
            cost.wasted += usize::from(!self.touched.contains(frame));
        }
        cost
    }
}

/// Learns from `runs`; each lists the frames that a clone touched, in the order of first touches. A
/// single run becomes the working set as it is. From no run nothing is learned: the working set is
/// empty, and windows are as large as possible.
#[must_use]
pub fn learn(shape: &Shape, runs: &[Vec<u32>]) -> Learned {
    // A zero frame is never fetched.
    let stored = |run: &Vec<u32>| {
        run.iter().copied().filter(|frame| shape.colour(*frame).is_some()).collect()
    };
    let runs: Vec<Vec<u32>> = runs.iter().map(stored).collect();
    let all: Vec<&Vec<u32>> = runs.iter().collect();
    if runs.len() < 2 {
        let expected = Expected { first: touched_by(&all, 1), ..Expected::default() };
        return Learned { expected, windows: [UNIT; COLOURS] };
    }
    let least = least(&runs);
    let windows = windows(shape, &runs, least);
    Learned { expected: expected(&all, least), windows }
}

/// The expectation from `runs`, with a working set of the frames that at least `least` runs
/// touched.
fn expected(runs: &[&Vec<u32>], least: usize) -> Expected {
    let first = touched_by(runs, least);
    let early: HashSet<u32> = first.iter().copied().collect();
    let mut together: HashMap<u32, u64> = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        // With more than 64 runs, some share a bit.
        run.iter().for_each(|frame| *together.entry(*frame).or_default() |= 1 << (number % 64));
    }
    together.retain(|frame, _| !early.contains(frame));
    Expected { first, together, ..Expected::default() }
}

/// The smallest number of runs that must touch a frame before the working set includes it.
fn least(runs: &[Vec<u32>]) -> usize {
    let others = runs.len() - 1;
    let in_vain = |least: usize| {
        let mut cost = Cost::default();
        for left in each_and_others(runs) {
            cost.add(left.cost(&touched_by(&left.others, least), 0));
        }
        !within(cost.wasted, cost.fetched, WASTE_OF_FIRST)
    };
    let least = (1..others).find(|least| !in_vain(*least)).unwrap_or(others);
    // `least` is for one run less than there are: scale it up.
    (least * runs.len()).div_ceil(others)
}

fn windows(shape: &Shape, runs: &[Vec<u32>], least: usize) -> [u8; COLOURS] {
    let mut of_first = Cost::default();
    let mut costs = [[Cost::default(); COLOURS]; WINDOWS.len()];
    for left in each_and_others(runs) {
        let least = (least * left.others.len() / runs.len()).max(1);
        let expected = expected(&left.others, least);
        of_first.add(left.cost(&expected.first, 0));
        for (window, costs) in WINDOWS.iter().zip(&mut costs) {
            for (colour, cost) in replayed(shape, &left, &expected, *window) {
                costs[usize::from(colour) % COLOURS].add(cost);
            }
        }
    }
    // Greedy: start with the smallest windows, and take the step that saves the most faults per
    // wasted frame, while the total waste is within the limit.
    let mut chosen = [0_usize; COLOURS];
    loop {
        let total = |chosen: &[usize; COLOURS]| {
            let mut total = of_first;
            (0..).zip(chosen).for_each(|(colour, window)| total.add(costs[*window][colour]));
            total
        };
        let now = total(&chosen);
        let steps = (0..COLOURS)
            .flat_map(|colour| (chosen[colour] + 1..WINDOWS.len()).map(move |w| (colour, w)));
        let best = steps
            .filter_map(|(colour, window)| {
                let mut next = chosen;
                next[colour] = window;
                let then = total(&next);
                let spared = now.faults.checked_sub(then.faults).filter(|spared| *spared > 0)?;
                let waste = then.wasted.saturating_sub(now.wasted);
                let worth = spared * 1000 / (waste + 1);
                within(then.wasted, then.fetched, WASTE).then_some((worth, colour, window))
            })
            .max();
        match best {
            Some((_, colour, window)) => chosen[colour] = window,
            None => return chosen.map(|window| WINDOWS[window]),
        }
    }
}

/// The cost of a run by colour, if all windows are `window`.
fn replayed(shape: &Shape, left: &Left, expected: &Expected, window: u8) -> HashMap<u8, Cost> {
    let layout = shape.layout(expected, window);
    let mut frames: HashMap<u32, Vec<u32>> = HashMap::new();
    for (frame, batch) in (0..).zip(&layout.batch_of).filter(|(_, batch)| **batch != ZERO) {
        frames.entry(*batch).or_default().push(frame);
    }
    let mut order = Order::new(&layout, &[], &Policy { streams: true, ..Policy::MINIMAL });
    let mut there: HashSet<u32> = HashSet::new();
    let early: HashSet<u32> = expected.first.iter().copied().collect();
    let mut costs: HashMap<u8, Cost> = HashMap::new();
    for frame in left.run.iter().filter(|frame| !early.contains(frame)) {
        let batch = layout.batch_of.get(*frame as usize).copied().filter(|batch| *batch != ZERO);
        let (Some(batch), Some(colour)) = (batch, shape.colour(*frame)) else { continue };
        if there.contains(&batch) {
            continue;
        }
        let with = order.with(&layout, batch, |other| other != batch && !there.contains(&other));
        order.asked(&layout, batch, 0);
        let beside = with.into_iter().chain(std::iter::from_fn(|| order.take()));
        let mut batches: Vec<u32> = std::iter::once(batch).chain(beside).collect();
        batches.retain(|batch| there.insert(*batch));
        let fetched = batches.iter().filter_map(|batch| frames.get(batch)).flatten();
        costs.entry(colour).or_default().add(left.cost(fetched, 1));
    }
    costs
}

#[cfg(test)]
#[path = "learn_tests.rs"]
mod tests;
