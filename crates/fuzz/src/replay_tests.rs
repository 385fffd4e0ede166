//! Replays seeds and corpora, a test for each file of targets.

use crate::target::{Heap, Outcome, Target, planted};
use crate::{corpus, targets};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Replays all inputs of these targets, and shows which one fails. A corpus whose inputs are all
/// refused would replay nothing.
fn replay(all: &[Target]) {
    for target in all {
        let seeds = (target.seeds)().into_iter().enumerate();
        let seeds = seeds.map(|(number, seed)| (format!("seed {number}"), seed));
        let files = corpus::files(&corpus::folder(target)).unwrap().into_iter();
        let files = files.map(|(path, bytes)| (path.display().to_string(), bytes));
        let mut accepted = 0;
        for (name, input) in seeds.chain(files) {
            match catch_unwind(AssertUnwindSafe(|| target.check(&input))) {
                Ok(outcome) => accepted += usize::from(outcome == Outcome::Accepted),
                Err(_) => panic!("target {}, {name}", target.name),
            }
        }
        assert!(accepted > 0, "target {}: no input was accepted", target.name);
    }
}

macro_rules! replay {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(targets::$name::TARGETS);
        })*

        #[test]
        fn every_target_is_replayed() {
            let replayed = [$(targets::$name::TARGETS.len()),*].iter().sum::<usize>();
            assert_eq!(targets::all().count(), replayed);
        }
    };
}

replay! {
    agent archives balloon boot daemon devices dns introspect packer pager registry relay store
    tree units vmm
    volume vsock
}

#[test]
fn every_target_has_a_name_seeds_and_a_corpus_and_all_are_small() {
    let mut names: Vec<&str> = targets::all().map(|target| target.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "two targets of one name");
    let mut total = 0;
    for target in targets::all() {
        assert!(!(target.seeds)().is_empty(), "target {}: no seeds", target.name);
        let files = corpus::files(&corpus::folder(target)).unwrap();
        assert!(!files.is_empty(), "target {}: no corpus; `make fuzz` makes one", target.name);
        total += files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    }
    assert!(total <= corpus::MOST_BYTES, "corpora of {total} bytes");
    let folder = corpus::folder(targets::all().next().unwrap());
    for entry in std::fs::read_dir(folder.parent().unwrap()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&name.as_str()), "the corpus {name} has no target");
    }
}

/// A target that takes more memory than it may, breaks a property, and has a planted fault.
const BAD: Target = Target {
    name: "bad",
    what: "this test",
    stateful: false,
    most_bytes: 8,
    heap: Heap { fixed: 1000, per_byte: 10 },
    run: |input| {
        let taken = vec![0_u8; usize::from(input[0]) * 100];
        for _ in 0..input[1] {
            std::hint::black_box(Box::new([0_u8; 512]));
        }
        planted(|| input[2] == 7);
        Outcome::of(!taken.is_empty())
    },
    seeds: Vec::new,
};

#[test]
fn memory_and_work_are_limited_and_no_fault_is_planted() {
    let fails = |input: [u8; 3]| catch_unwind(|| BAD.check(&input)).is_err();
    assert!(!fails([10, 0, 0]), "1000 of 1030 bytes");
    assert!(fails([11, 0, 0]), "1100 of 1030 bytes");
    assert!(!fails([0, 32, 0]), "16384 of 16480 bytes in all");
    assert!(fails([0, 33, 0]), "16896 of 16480 bytes in all");
    assert!(!fails([0, 0, 7]), "faults are not planted");
}
