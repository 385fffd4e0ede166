//! What is learned of runs over a shape with known places.

use super::tests::page;
use super::*;
use crate::learn::learn;

/// 64 groups of 16 frames: the first half of one colour, the other of another; every frame is where its number says.
fn shape() -> Shape {
    let slot = |frame: u32| page(frame, frame / 16, frame, if frame < 512 { 3 } else { 5 });
    Shape::new(1100, (0..1024).map(slot).collect())
}

/// Frames 0 to 99 always, and of colour 3 a group of its own, of colour 5 every fourth frame of a group.
fn run(number: u32) -> Vec<u32> {
    let group = 100 / 16 + 1 + number;
    let whole = group * 16..(group + 1) * 16;
    let sparse = (512 + 64 * number..512 + 64 * (number + 1)).step_by(4);
    (0..100).rev().chain(whole).chain(sparse).chain([1090]).collect()
}

#[test]
fn what_all_runs_touch_comes_first_in_their_order_and_windows_follow_what_lies_together() {
    let runs: Vec<Vec<u32>> = (0..4).map(run).collect();
    let learned = learn(&shape(), &runs);
    assert_eq!(learned.expected.first, (0..100).rev().collect::<Vec<_>>());
    assert_eq!(learned.windows[3], UNIT, "groups of this colour are touched whole");
    assert_eq!(learned.windows[5], 1, "three of four would be in vain");
    let of = |frame| learned.expected.together.get(&frame).copied();
    assert_eq!(
        [7 * 16, 8 * 16 - 1, 512, 513, 512 + 64, 5].map(of),
        [Some(1), Some(1), Some(1), None, Some(2), None]
    );
}

#[test]
fn what_one_run_in_many_leaves_out_is_worth_it_and_what_one_alone_touches_is_not() {
    let runs: Vec<Vec<u32>> = (0..8)
        .map(|number| (0..200).filter(|frame| *frame != number).chain([900 + number]).collect())
        .collect();
    let mut first = learn(&shape(), &runs).expected.first;
    first.sort_unstable();
    assert_eq!(first, (0..200).collect::<Vec<_>>());
}

#[test]
fn one_run_is_believed_and_none_teaches_nothing() {
    let learned = learn(&shape(), &[vec![7, 3, 1090, 5]]);
    assert_eq!((learned.expected.first, learned.windows), (vec![7, 3, 5], [UNIT; COLOURS]));
    let learned = learn(&shape(), &[]);
    assert_eq!((learned.expected.first, learned.windows), (vec![], [UNIT; COLOURS]));
    // Frames that memory does not have are in no run.
    assert!(learn(&shape(), &[vec![u32::MAX], vec![u32::MAX, 1099]]).expected.first.is_empty());
}
