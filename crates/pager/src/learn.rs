//! What recorded runs say of the next: which frames to have before they are asked for, which belong together, and for each colour how many of the others to
//! have with one that is asked for.
//!
//! Kaleidoscope, section 4.3, sets a window for each colour by hand and leaves it to future work to find them. Here they are found: for each
//! choice, each run is held against what the others would have had fetched for it, so that no run speaks for itself. What is chosen has the fewest
//! faults of those choices whose fetched frames are hardly ever in vain.

use crate::order::Order;
use crate::policy::{COLOURS, Policy, UNIT};
use crate::source::ZERO;
use crate::stored::{Expected, Shape};
use std::collections::{HashMap, HashSet};

/// Of the frames that are fetched, so many thousandths may be in vain in a run that is not learned from: all of them, and those of the working set.
const WASTE: usize = 20;
/// See [`WASTE`].
const WASTE_OF_FIRST: usize = 10;
/// The windows that are tried.
const WINDOWS: [u8; 5] = [1, 2, 4, 8, UNIT];

/// What was learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Learned {
    /// What comes first, in the order in which runs touched it, and what comes together.
    pub expected: Expected,
    /// For each colour how many frames come at once: [`crate::policy::Policy::windows`].
    pub windows: [u8; COLOURS],
}

/// Faults of a colour's frames, frames fetched for them, and those of them that nobody touched.
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

/// Frames that at least so many of `runs` touched, in the order in which they did.
fn touched_by(runs: &[&Vec<u32>], least: usize) -> Vec<u32> {
    let mut times: HashMap<u32, (usize, usize)> = HashMap::new();
    for run in runs {
        let mut seen = HashSet::new();
        for (place, frame) in run.iter().enumerate().filter(|(_, frame)| seen.insert(**frame)) {
            let (times, places) = times.entry(*frame).or_default();
            *times += 1;
            *places += place;
        }
    }
    let mut first: Vec<(usize, u32)> = times
        .into_iter()
        .filter(|(_, (times, _))| *times >= least)
        .map(|(frame, (times, places))| (places / times, frame))
        .collect();
    first.sort_unstable();
    first.into_iter().map(|(_, frame)| frame).collect()
}

fn within(wasted: usize, fetched: usize, thousandths: usize) -> bool {
    wasted * 1000 <= fetched * thousandths
}

/// Each run, and the others.
fn each_and_others(runs: &[Vec<u32>]) -> impl Iterator<Item = (&Vec<u32>, Vec<&Vec<u32>>)> {
    runs.iter().enumerate().map(|(number, run)| {
        (run, runs.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, run)| run).collect())
    })
}

/// Learns from `runs`, each the frames that a clone touched, in the order of first touches. One run is believed; of none nothing is learned: a
/// working set of nothing, and windows as large as they get.
#[must_use]
pub fn learn(shape: &Shape, runs: &[Vec<u32>]) -> Learned {
    // What is zero has nothing to be fetched.
    let stored =
        |run: &Vec<u32>| run.iter().copied().filter(|frame| shape.colour(*frame).is_some()).collect();
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

/// What `runs` let expect.
fn expected(runs: &[&Vec<u32>], least: usize) -> Expected {
    let first = touched_by(runs, least);
    let early: HashSet<u32> = first.iter().copied().collect();
    let mut together: HashMap<u32, u64> = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        // Of more runs, some share a bit.
        run.iter().for_each(|frame| *together.entry(*frame).or_default() |= 1 << (number % 64));
    }
    together.retain(|frame, _| !early.contains(frame));
    Expected { first, together, ..Expected::default() }
}

/// The smallest number of runs that must have touched a frame for it to be worth fetching.
fn least(runs: &[Vec<u32>]) -> usize {
    let others = runs.len() - 1;
    let in_vain = |least: usize| {
        let mut cost = Cost::default();
        for (run, others) in each_and_others(runs) {
            let touched: HashSet<u32> = run.iter().copied().collect();
            let first = touched_by(&others, least);
            cost.fetched += first.len();
            cost.wasted += first.iter().filter(|frame| !touched.contains(frame)).count();
        }
        !within(cost.wasted, cost.fetched, WASTE_OF_FIRST)
    };
    let least = (1..others).find(|least| !in_vain(*least)).unwrap_or(others);
    // There is one run more than there were others: as many of it in proportion.
    (least * runs.len()).div_ceil(others)
}

fn windows(shape: &Shape, runs: &[Vec<u32>], least: usize) -> [u8; COLOURS] {
    let mut of_first = Cost::default();
    let mut costs = [[Cost::default(); COLOURS]; WINDOWS.len()];
    for (run, others) in each_and_others(runs) {
        let touched: HashSet<u32> = run.iter().copied().collect();
        let expected = expected(&others, (least * others.len() / runs.len()).max(1));
        of_first.fetched += expected.first.len();
        of_first.wasted += expected.first.iter().filter(|frame| !touched.contains(frame)).count();
        for (window, costs) in WINDOWS.iter().zip(&mut costs) {
            for (colour, cost) in replayed(shape, run, &touched, &expected, *window) {
                costs[usize::from(colour) % COLOURS].add(cost);
            }
        }
    }
    // From the smallest windows on, always the step that spares most faults for what it fetches in vain, as long as all of it stays within bounds.
    let mut chosen = [0_usize; COLOURS];
    loop {
        let total = |chosen: &[usize; COLOURS]| {
            let mut total = of_first;
            chosen.iter().enumerate().for_each(|(colour, window)| total.add(costs[*window][colour]));
            total
        };
        let now = total(&chosen);
        let steps =
            (0..COLOURS).flat_map(|colour| (chosen[colour] + 1..WINDOWS.len()).map(move |w| (colour, w)));
        let best = steps
            .filter_map(|(colour, window)| {
                let mut next = chosen;
                next[colour] = window;
                let then = total(&next);
                let spared = now.faults.checked_sub(then.faults).filter(|spared| *spared > 0)?;
                let waste = then.wasted.saturating_sub(now.wasted);
                within(then.wasted, then.fetched, WASTE).then_some((
                    spared * 1000 / (waste + 1),
                    colour,
                    window,
                ))
            })
            .max();
        match best {
            Some((_, colour, window)) => chosen[colour] = window,
            None => return chosen.map(|window| WINDOWS[window]),
        }
    }
}

/// What `run` costs with all windows alike.
fn replayed(
    shape: &Shape,
    run: &[u32],
    touched: &HashSet<u32>,
    expected: &Expected,
    window: u8,
) -> HashMap<u8, Cost> {
    let layout = shape.layout(expected, window);
    let mut frames: HashMap<u32, Vec<u32>> = HashMap::new();
    for (frame, batch) in (0..).zip(&layout.batch_of).filter(|(_, batch)| **batch != ZERO) {
        frames.entry(*batch).or_default().push(frame);
    }
    let mut order = Order::new(&layout, &[], &Policy { streams: true, ..Policy::MINIMAL });
    let mut there: HashSet<u32> = HashSet::new();
    let early: HashSet<u32> = expected.first.iter().copied().collect();
    let mut costs: HashMap<u8, Cost> = HashMap::new();
    for frame in run.iter().filter(|frame| !early.contains(frame)) {
        let batch = layout.batch_of.get(*frame as usize).copied().filter(|batch| *batch != ZERO);
        let (Some(batch), Some(colour)) = (batch, shape.colour(*frame)) else { continue };
        if there.contains(&batch) {
            continue;
        }
        let with = order.with(&layout, batch, |other| other != batch && !there.contains(&other));
        order.asked(&layout, batch, 0);
        let beside = with.into_iter().chain(std::iter::from_fn(|| order.take()));
        let cost = costs.entry(colour).or_default();
        cost.faults += 1;
        for batch in std::iter::once(batch).chain(beside).filter(|batch| there.insert(*batch)) {
            let frames = frames.get(&batch).map_or(&[][..], Vec::as_slice);
            cost.fetched += frames.len();
            cost.wasted += frames.iter().filter(|frame| !touched.contains(frame)).count();
        }
    }
    costs
}
