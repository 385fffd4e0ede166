use super::*;
use crate::manifest::tests::snapshot;
use proptest::prelude::*;

/// A step in the life of a store.
#[derive(Debug, Clone)]
enum Step {
    /// Snapshot number n appears, standing on these layers.
    Add(u8, Vec<u8>),
    Remove(u8),
    Pin(u8),
    Unpin(u8),
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    let layer = 0_u8..12;
    prop_oneof![
        3 => (0_u8..6, prop::collection::vec(layer.clone(), 0..5)).prop_map(|(n, l)| Step::Add(n, l)),
        2 => (0_u8..6).prop_map(Step::Remove),
        1 => layer.clone().prop_map(Step::Pin),
        1 => layer.prop_map(Step::Unpin),
        2 => Just(Step::Collect),
    ]
}

fn id(n: u8) -> LayerId {
    snapshot("x", &[n]).disks[0].layers[0].id
}

proptest! {
    #[test]
    fn collecting_removes_all_that_nobody_needs_and_nothing_else(steps in prop::collection::vec(step(), 0..40)) {
        let mut snapshots: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
        let mut pins: BTreeSet<u8> = BTreeSet::new();
        let mut present: BTreeSet<u8> = BTreeSet::new();
        for step in steps {
            match step {
                Step::Add(n, layers) => {
                    present.extend(&layers);
                    snapshots.insert(n, layers);
                }
                Step::Remove(n) => {
                    snapshots.remove(&n);
                }
                Step::Pin(l) if present.contains(&l) => {
                    pins.insert(l);
                }
                Step::Pin(_) => {}
                Step::Unpin(l) => {
                    pins.remove(&l);
                }
                Step::Collect => {
                    let manifests: Vec<_> = snapshots.iter().map(|(n, l)| snapshot(&format!("s{n}"), l)).collect();
                    let ids = |set: &BTreeSet<u8>| set.iter().copied().map(id).collect::<BTreeSet<_>>();
                    let gone = unreferenced(&ids(&present), &manifests, &ids(&pins));
                    let needed = |l: &u8| pins.contains(l) || snapshots.values().any(|layers| layers.contains(l));
                    prop_assert_eq!(&gone, &present.iter().copied().filter(|l| !needed(l)).map(id).collect());
                    present.retain(|&l| !gone.contains(&id(l)));
                    prop_assert!(snapshots.values().flatten().all(|l| present.contains(l)), "a snapshot lost a layer");
                }
            }
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
