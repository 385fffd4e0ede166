use crate::fixture::{name, store};
use crate::fixture_pages::{PAGE, bytes, ram, restored, saved};
use crate::{Kind, Known, OpenSnapshot, PageReader, PagedSpec, Plan, Store};
use dayfly_units::VmId;
use std::os::unix::fs::FileExt;

const FREE: std::ops::Range<u32> = 100..200;

fn read(open: &OpenSnapshot) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let mut block = vec![0; PAGE];
    open.disks[0].layers[0].data.read_exact_at(&mut block, 3 * PAGE as u64).unwrap();
    (bytes(&open.memory), bytes(&open.state), block)
}

#[test]
fn what_is_prepared_can_be_used_before_it_is_stored_and_is_what_is_stored() {
    let root = tempfile::tempdir().unwrap();
    let store: Store = store(root.path());
    let (tenant, s, vm) = (name("one"), name("s"), VmId::random());
    let (saved, spec) = saved(&store, "s", 3, &ram(0..600), vm).unwrap();
    let mut prepared = saved.prepare(&spec, &[FREE]).unwrap();
    // The VM may be removed at once.
    store.remove_vm(vm).unwrap();
    assert!(store.snapshot(&s).is_err(), "it is not in the store");
    let before = prepared.open().unwrap();
    assert!(before.is_current() && before.working_set.is_none());
    let record = dayfly_units::sealed::seal(b"DFworkse", 1, b"");
    prepared.keep_working_set(&record).unwrap();
    let seen = read(&before);
    assert!(seen.0[100 * PAGE..200 * PAGE].iter().all(|b| *b == 0), "what was free is given back");
    assert!(seen.2.iter().all(|b| *b == 3));
    // In reverse order, and only these.
    let order: Vec<u32> = (300..332).rev().collect();
    let known = Known { order: &order, ..Known::default() };
    let committed = prepared.commit_paged(&PagedSpec { tenant: &tenant, known }).unwrap();
    assert_eq!(committed.manifest.memory.bytes, 600 * PAGE as u64);
    let after = store.open_snapshot(&s).unwrap();
    assert_eq!((read(&after), bytes(after.working_set.as_ref().unwrap())), (seen.clone(), record));
    assert_eq!(read(&before), seen, "who has it open keeps it");
    assert!(restored(&store, &tenant, "s") == seen.0);

    // Pages of the working set are in the first groups, in its order.
    let (_, plan) = store.open_lazily(&s).unwrap();
    let Plan { table, places, packs, disks, .. } = plan.unwrap();
    let reader = PageReader::open(&table, &places, packs, disks).unwrap();
    let place = |frame: &u32| {
        let run = reader.table().from_frame(*frame).unwrap();
        let Kind::Page { hash } = run.kind else { return None };
        reader.group_of(hash + frame - run.first)
    };
    let places: Vec<_> = order.iter().filter_map(place).collect();
    assert!(places.len() > 16 && places.is_sorted(), "{places:?}");
    let others = (0..300).filter_map(|frame| place(&frame));
    assert!(others.min().unwrap() >= *places.last().unwrap());
}

#[test]
fn what_is_dropped_before_it_is_stored_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store: Store = store(root.path());
    let vm = VmId::random();
    let (saved, spec) = saved(&store, "s", 3, &ram(0..100), vm).unwrap();
    let prepared = saved.prepare(&spec, &[]).unwrap();
    let open = prepared.open().unwrap();
    drop(prepared);
    assert_eq!(std::fs::read_dir(root.path().join("staging")).unwrap().count(), 0);
    assert!(store.snapshots().unwrap().items.is_empty());
    // A running clone keeps its files open.
    assert!(read(&open).0 == ram(0..100));
    drop(open);
    store.remove_vm(vm).unwrap();
    assert!(store.gc().unwrap().layers.is_empty());
}
