use super::*;
use crate::objects::manifest::tests::snapshot;
use crate::vms::pins::{Pin, Pinned, Pins};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An operation on a store.
#[derive(Debug, Clone)]
enum Step {
    /// Adds snapshot number n, which depends on these layers.
    Add(u8, Vec<u8>),
    Remove(u8),
    Pin(Vec<u8>),
    /// Copies the first pin.
    Copy,
    /// Drops the n-th newest pin, counted from 0, if there is one.
    Unpin(usize),
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    let layer = 0_u8..12;
    prop_oneof![
        3 => (0_u8..6, prop::collection::vec(layer.clone(), 0..5))
            .prop_map(|(n, l)| Step::Add(n, l)),
        2 => (0_u8..6).prop_map(Step::Remove),
        1 => prop::collection::vec(layer, 1..4).prop_map(Step::Pin),
        1 => Just(Step::Copy),
        2 => (0_usize..4).prop_map(Step::Unpin),
        2 => Just(Step::Collect),
    ]
}

fn id(n: u8) -> LayerId {
    snapshot("x", &[n]).disks[0].layers[0].id
}

proptest! {
    #[test]
    fn collecting_removes_all_that_nothing_needs_and_nothing_else(
        steps in prop::collection::vec(step(), 0..40),
    ) {
        let pins: Arc<Pins> = Arc::default();
        let called: Arc<AtomicBool> = Arc::default();
        let garbage = called.clone();
        pins.when_garbage(move || garbage.store(true, Ordering::Relaxed));
        let mut snapshots: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
        let mut owned: Vec<(Vec<u8>, Pin)> = Vec::new();
        let mut present: BTreeSet<u8> = BTreeSet::new();
        // Whether gc ran since the last snapshot was added or removed.
        let mut collected = false;
        for step in steps {
            let mut collect = false;
            match step {
                Step::Add(n, layers) => {
                    present.extend(&layers);
                    snapshots.insert(n, layers);
                    collected = false;
                }
                Step::Remove(n) => {
                    snapshots.remove(&n);
                    collected = false;
                }
                Step::Pin(mut layers) => {
                    layers.retain(|l| present.contains(l));
                    let ids = layers.iter().copied().map(id).collect();
                    owned.push((layers, pins.pin(Pinned { layers: ids, ..Pinned::default() })));
                }
                Step::Copy => owned.extend(owned.first().cloned()),
                Step::Unpin(n) => {
                    if let Some(at) = owned.len().checked_sub(n + 1) {
                        owned.remove(at);
                    }
                    collect = called.swap(false, Ordering::Relaxed);
                }
                Step::Collect => collect = true,
            }
            let needed = |l: &u8| owned.iter().any(|(h, _)| h.contains(l))
                    || snapshots.values().any(|layers| layers.contains(l));
            if collect {
                let manifests: Vec<_> =
                    snapshots.iter().map(|(n, l)| snapshot(&format!("s{n}"), l)).collect();
                let all = present.iter().copied();
                let gone = pins.unpinned(unreferenced(&all.clone().map(id).collect(), &manifests));
                prop_assert_eq!(&gone, &all.filter(|l| !needed(l)).map(id).collect());
                present.retain(|&l| !gone.contains(&id(l)));
                let mut used = snapshots.values().flatten();
                prop_assert!(used.all(|l| present.contains(l)), "a snapshot lost a layer");
                collected = true;
            }
            // The callback runs in time, whichever reference is dropped last.
            prop_assert!(!collected || present.iter().all(needed), "garbage is left");
        }
    }
}

#[test]
fn an_image_is_used_by_name_and_a_replacement_by_digest() {
    let snapshots = [snapshot("a", &[]), snapshot("b", &[])];
    let image = |name: &str| name.parse::<Name>().unwrap();
    assert_eq!(users_of_image(&snapshots, &image("debian"), None).len(), 2);
    assert_eq!(users_of_image(&snapshots, &image("other"), None).len(), 0);
    assert_eq!(users_of_image(&snapshots, &image("debian"), Some(Digest([2; 32]))).len(), 0);
    assert_eq!(users_of_image(&snapshots, &image("debian"), Some(Digest([3; 32]))).len(), 2);
}
