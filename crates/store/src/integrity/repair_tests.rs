use crate::fixture::{name, store};
use crate::fixture_pages::{bake_one, flip, image_block, pack_files, ram, restored};
use crate::{Digest, Meter, Object, RepairReport, Scope, Store};
use std::fs;

fn repair(store: &Store) -> RepairReport {
    store.repair(&name("one"), &Meter::default()).unwrap()
}

#[test]
fn a_sound_store_needs_no_repair() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake_one(&store, "a", &ram(1..40));
    assert_eq!(repair(&store), RepairReport::default());
}

#[test]
fn what_nothing_has_is_lost_and_named_by_snapshot() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake_one(&store, "a", &ram(1..40));
    let bad = pack_files(root.path()).remove(0);
    bake_one(&store, "b", &ram(100..140));
    flip(&bad, 20);
    let report = repair(&store);
    assert_eq!(report.lost.len(), 1, "{report:?}");
    let lost = &report.lost[0];
    assert_eq!((lost.name.as_str(), lost.pages), ("a", 16));
    assert!(lost.causes[0].contains("group 0, page 0: digest of the group"), "{lost:?}");
    assert!(restored(&store, &name("one"), "b") == ram(100..140));
    // Once the snapshot is removed, the store is sound.
    store.remove_snapshot(&name("a")).unwrap();
    let report = repair(&store);
    assert_eq!((report.lost, report.gc.packs), (vec![], 1));
    assert_eq!(store.verify(&Scope::All, &Meter::default()).unwrap().damage, []);
}

#[test]
fn pages_in_a_damaged_pack_come_back_from_the_blocks_of_a_disk() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (_, block) = image_block();
    // Without the image's disk in its table: the page is in a pack.
    let memory = [block.clone(), ram(1..6)].concat();
    let tenant = store.tenant(&name("one")).unwrap();
    let put = tenant.put(&crate::fixture_pages::file(&memory), &[]).unwrap();
    flip(&pack_files(root.path())[0], 9);
    let space = tenant.space.clone();
    assert!(tenant.fetch(&Digest::of(&block)).is_err());
    let lost = [(Digest::of(&block))];
    let (healed, lease) = store.0.heal_pages(&space, lost.into(), &Meter::default()).unwrap();
    assert_eq!(healed, 1);
    assert_eq!(tenant.fetch(&Digest::of(&block)).unwrap(), block);
    drop((put, lease));
}

#[test]
fn damaged_caches_and_packs_that_nothing_needs_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake_one(&store, "a", &ram(1..40));
    bake_one(&store, "gone", &ram(100..140));
    store.remove_snapshot(&name("gone")).unwrap();
    let index = fs::read_dir(root.path().join("blocks")).unwrap().next().unwrap().unwrap().path();
    flip(&index, 50);
    for pack in pack_files(root.path()) {
        // The footer of one, a group of the other.
        let bytes = fs::metadata(&pack).unwrap().len();
        flip(&pack, bytes - 60);
    }
    drop(store);
    let store = Store::open(root.path()).unwrap();
    let report = repair(&store);
    assert_eq!(report.block_indexes, 1);
    assert_eq!(report.lost.len(), 1);
    bake_one(&store, "again", &ram(1..40));
    assert!(restored(&store, &name("one"), "a") == ram(1..40));
    let report = repair(&store);
    assert_eq!((report.lost, report.damage), (vec![], vec![]));
    assert_eq!(pack_files(root.path()).len(), 1);
    assert_eq!(store.verify(&Scope::All, &Meter::default()).unwrap().damage, []);
}

#[test]
fn a_damaged_hash_tree_loses_no_snapshot_and_is_made_again() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake_one(&store, "a", &ram(1..40));
    let layer = store.snapshot(&name("a")).unwrap().layer_ids()[0];
    let trees = [format!("layers/{layer}/tree"), "images/debian/tree".to_owned()];
    for tree in trees.map(|tree| root.path().join(tree)) {
        let whole = fs::read(&tree).unwrap();
        flip(&tree, 4096 + 33);
        let report = store.verify(&Scope::All, &Meter::default()).unwrap();
        assert_eq!(report.damage.len(), 1, "{:?}", report.damage);
        assert_eq!(
            (report.damage[0].object, &report.damage[0].snapshots),
            (Object::HashTree, &vec![])
        );
        let report = repair(&store);
        assert_eq!((report.hash_trees, report.lost, report.damage), (1, vec![], vec![]));
        assert!(fs::read(&tree).unwrap() == whole);
    }
}
