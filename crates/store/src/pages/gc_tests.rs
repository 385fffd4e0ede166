use super::Superseded;
use crate::blob::lock_work;
use crate::fixture::{name, store};
use crate::fixture_pages::{bake_paged, file, page, ram, restored};
use crate::{Digest, Known, PagedSpec, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};

fn pages(range: std::ops::Range<u64>) -> Vec<u8> {
    ram(range.filter(|n| n % 7 != 0))
}

#[test]
fn pages_without_a_table_go_and_a_lease_keeps_them() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&name("one")).unwrap();
    let put = tenant.put(&file(&pages(0..100)), &[]).unwrap();
    let kept = tenant.lease(&[Digest::of(&page(8))]);
    assert_eq!(store.gc_pages().unwrap(), crate::GcPagesReport::default());
    drop(put);
    let report = store.gc_pages().unwrap();
    assert_eq!(
        (report.packs, report.rewritten_packs, report.copied_pages, report.dropped_pages),
        (1, 1, 1, 84)
    );
    assert!(report.freed_bytes > 0);
    assert_eq!(tenant.fetch(&Digest::of(&page(8))).unwrap(), page(8));
    assert!(!tenant.has(&Digest::of(&page(9))).unwrap());
    // The index has the copy at the place that the lease finds.
    assert_eq!(store.gc_pages().unwrap(), crate::GcPagesReport::default());
    drop(kept);
    assert_eq!(store.gc_pages().unwrap().dropped_pages, 1);
    assert_eq!(fs::read_dir(root.path().join("pages/one")).unwrap().count(), 0);
}

/// After the marking and before the change of the index, a lease is taken of an unmarked page.
#[test]
fn a_lease_taken_while_a_gc_works_is_seen_and_one_that_ended_meanwhile_too() {
    for ended in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path()).unwrap();
        let space = store.tenant(&name("one")).unwrap().space;
        drop(store.tenant(&name("one")).unwrap().put(&file(&pages(0..100)), &[]).unwrap());
        let _collecting = space.leases().collect();
        let none = Superseded::new();
        let victims = space.victims(&[], &none, &mut Vec::new(), &crate::Meter::default()).unwrap();
        assert_eq!(victims.len(), 1);
        let hash = Digest::of(&page(8));
        let lease = space.lease([hash].iter());
        assert!(space.find(&hash).unwrap().is_some());
        // `filter`, because a shadowed binding would live on.
        let lease = Some(lease).filter(|_| !ended);
        let gone = space.change_over(victims, Vec::new(), &none);
        assert_eq!(gone.len(), 0, "ended: {ended}");
        assert_eq!(space.fetch(&hash).unwrap(), page(8));
        drop(lease);
    }
}

#[test]
fn a_reader_that_comes_late_does_not_keep_a_removed_pack_open() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let space = store.tenant(&name("one")).unwrap().space;
    drop(store.tenant(&name("one")).unwrap().put(&file(&pages(0..100)), &[]).unwrap());
    let found = space.find(&Digest::of(&page(8))).unwrap().unwrap();
    assert!(space.keeps_open(found.number));
    let none = Superseded::new();
    let victims = space.victims(&[], &none, &mut Vec::new(), &crate::Meter::default());
    assert_eq!(space.change_over(victims.unwrap(), Vec::new(), &none).len(), 1);
    assert!(!space.keeps_open(found.number));
    // The gc has not removed the file yet.
    space.file(found.number, &found.pack).unwrap();
    assert!(!space.keeps_open(found.number));
}

/// A gc reads the other snapshots without the lock; what changes meanwhile is read again.
#[test]
fn tables_that_change_while_they_are_read_are_read_again() {
    let root = tempfile::tempdir().unwrap();
    let (store, one) = (store(root.path()), name("one"));
    for (snapshot, seed) in [("a", 5), ("b", 6), ("c", 7)] {
        bake_paged(&store, snapshot, seed, &ram(1..40), &PagedSpec::of(&one)).unwrap();
    }
    let inner = &store.0;
    let none = std::collections::BTreeSet::new();
    let before = inner.tables(&none).unwrap();
    let mut watch = inner.watch();
    assert!(watch.changed().0.is_empty());
    // One goes, one is replaced by another under its name, one is new.
    store.remove_snapshot(&name("a")).unwrap();
    store.remove_snapshot(&name("b")).unwrap();
    for (snapshot, seed) in [("b", 8), ("d", 9)] {
        let pages = ram(100 * u64::from(seed)..100 * u64::from(seed) + 40);
        bake_paged(&store, snapshot, seed, &pages, &PagedSpec::of(&one)).unwrap();
    }
    let changed = watch.changed().0;
    assert_eq!(changed.iter().map(String::as_str).collect::<String>(), "abd");
    assert!(watch.changed().0.is_empty());
    drop(watch);
    let mut tables = before;
    for snapshot in changed {
        inner.read_table(&mut tables, snapshot, &none).unwrap();
    }
    assert!(tables == inner.tables(&none).unwrap());
    assert_eq!(tables.keys().map(String::as_str).collect::<String>(), "bcd");
}

/// The operations on the disk under the publish lock of a gc of layers, a gc of pages and a
/// verification, in a store of `count` snapshots of which one was removed.
fn work_under_the_lock(count: u32) -> [usize; 3] {
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (store, one) = (store(root.path()), name("one"));
    for n in 0..count {
        let memory = ram(u64::from(n)..u64::from(n) + 3);
        let seed = u8::try_from(n % 250).unwrap();
        bake_paged(&store, &format!("s{n}"), seed, &memory, &PagedSpec::of(&one)).unwrap();
    }
    bake_paged(&store, "gone", 251, &ram(70_000..70_040), &PagedSpec::of(&one)).unwrap();
    store.remove_snapshot(&name("gone")).unwrap();
    let (layers, of_layers) = lock_work::counted(|| store.gc().unwrap().layers.len());
    let (packs, of_pages) = lock_work::counted(|| store.gc_pages().unwrap().packs);
    assert_eq!((layers, packs), (1, 1));
    let scope = crate::Scope::Tenant { tenant: one, snapshots: vec![name("s0")] };
    let verify = || store.verify(&scope, &crate::Meter::default()).unwrap();
    let (report, of_verify) = lock_work::counted(verify);
    assert_eq!(report.damage, []);
    [of_layers, of_pages, of_verify]
}

#[test]
fn the_work_under_the_publish_lock_does_not_grow_with_the_store() {
    let (few, many) = (work_under_the_lock(10), work_under_the_lock(1000));
    println!("operations under the lock, of 10 snapshots and of 1000: {few:?}, {many:?}");
    assert_eq!(few, many);
    assert!(few[0] > 0, "the removal of a layer counts");
}

#[test]
fn a_damaged_page_keeps_its_pack_and_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&name("one")).unwrap();
    drop(tenant.put(&file(&pages(0..100)), &[]).unwrap());
    let _kept = tenant.lease(&[Digest::of(&page(8)), Digest::of(&page(90))]);
    let path = fs::read_dir(root.path().join("pages/one")).unwrap().next().unwrap().unwrap().path();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::File::options().write(true).open(&path).unwrap().write_all_at(&[0xff; 8], 30).unwrap();
    let report = store.gc_pages().unwrap();
    assert_eq!((report.packs, report.damage.len()), (0, 1));
    assert!(
        report.damage[0].to_string().contains("group 0, page 6: digest of the group as stored")
    );
    assert_eq!(tenant.fetch(&Digest::of(&page(90))).unwrap(), page(90));
}

#[test]
fn a_table_that_cannot_be_read_stops_the_gc() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    bake_paged(&store, "a", 5, &pages(0..50), &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "b", 5, &pages(50..100), &PagedSpec::of(&one)).unwrap();
    let table = root.path().join("snapshots/b/table");
    fs::remove_file(&table).unwrap();
    fs::write(&table, "x").unwrap();
    store.remove_snapshot(&name("a")).unwrap();
    let error = store.gc_pages().unwrap_err().to_string();
    assert!(error.starts_with("snapshot b: its table cannot be read"), "{error}");
    store.remove_snapshot(&name("b")).unwrap();
    assert_eq!(store.gc_pages().unwrap().packs, 2);
}

/// A gc changes the index but cannot remove the file. Then the same pack is put again, and the next
/// gc must not finish the removal.
#[test]
fn a_pack_that_was_to_be_removed_and_is_put_again_stays() {
    let mut failed = 0;
    for step in 0.. {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path()).unwrap();
        let tenant = store.tenant(&name("one")).unwrap();
        drop(tenant.put(&file(&pages(0..50)), &[]).unwrap());
        let (result, hit) = crate::blob::fault::with_failure_at(step, || store.gc_pages());
        failed += usize::from(result.is_err());
        let _put = tenant.put(&file(&pages(0..50)), &[]).unwrap();
        store.gc_pages().unwrap();
        assert_eq!(tenant.fetch(&Digest::of(&page(8))).unwrap(), page(8), "step {step}");
        assert_eq!(fs::read_dir(root.path().join("pages/one")).unwrap().count(), 1, "step {step}");
        if !hit {
            break;
        }
    }
    assert!(failed > 1, "{failed}");
}

/// A crash after copies are published and before their originals are retired. The next gc makes the
/// same copies again; the pages stay, whichever of the two packs is opened first.
#[test]
fn a_gc_after_one_that_was_interrupted_keeps_the_copies() {
    let mut first = std::collections::BTreeSet::new();
    for seed in 0..12_u64 {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path()).unwrap();
        let one = name("one");
        drop(store.tenant(&one).unwrap().put(&file(&pages(seed..seed + 100)), &[]).unwrap());
        let packs = || -> Vec<_> {
            let all = fs::read_dir(root.path().join("pages/one")).unwrap();
            all.map(|e| e.unwrap().path()).collect()
        };
        let (old, aside) = (packs().remove(0), root.path().join("aside"));
        fs::copy(&old, &aside).unwrap();
        let kept: Vec<Digest> =
            (40..50).filter(|n| n % 7 != 0).map(|n| Digest::of(&page(n))).collect();
        let lease = store.tenant(&one).unwrap().lease(&kept);
        assert_eq!(store.gc_pages().unwrap().rewritten_packs, 1);
        let copy = packs().remove(0);
        first.insert(old < copy);
        drop((lease, store));
        fs::rename(&aside, &old).unwrap();
        let store = Store::open(root.path()).unwrap();
        let tenant = store.tenant(&one).unwrap();
        let _lease = tenant.lease(&kept);
        assert!(store.gc_pages().unwrap().packs >= 1);
        for _ in 0..2 {
            assert!(kept.iter().all(|hash| tenant.fetch(hash).is_ok()), "seed {seed}");
            assert_eq!(packs(), std::slice::from_ref(&copy));
            assert_eq!(store.gc_pages().unwrap(), crate::GcPagesReport::default());
        }
        drop((_lease, tenant, store));
        let store = Store::open(root.path()).unwrap();
        assert!(
            kept.iter().all(|hash| store.tenant(&one).unwrap().fetch(hash).is_ok()),
            "seed {seed}"
        );
    }
    assert_eq!(first.len(), 2, "both orders");
}

/// A page in two packs, as after a crash between publishing a copy and retiring the original: one
/// pack is removed.
#[test]
fn a_page_that_is_there_twice_is_collected_once() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    bake_paged(&store, "base", 5, &pages(0..50), &PagedSpec::of(&one)).unwrap();
    let path = fs::read_dir(root.path().join("pages/one")).unwrap().next().unwrap().unwrap().path();
    let aside = root.path().join("aside");
    fs::rename(&path, &aside).unwrap();
    drop(store);
    let store = Store::open(root.path()).unwrap();
    // One more page gives a pack with another id.
    drop(store.tenant(&one).unwrap().put(&file(&pages(0..51)), &[]).unwrap());
    fs::rename(&aside, &path).unwrap();
    drop(store);
    let store = Store::open(root.path()).unwrap();
    assert_eq!(store.tenant(&one).unwrap().stats().unwrap().unique, 43);
    assert_eq!(store.gc_pages().unwrap().packs, 1);
    assert!(restored(&store, &one, "base") == pages(0..50));
}

#[test]
fn puts_opens_removals_and_gcs_at_once() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    bake_paged(&store, "base", 5, &pages(0..150), &PagedSpec::of(&one)).unwrap();
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (store, one, done) = (&store, &one, &done);
            scope.spawn(move || {
                for round in 0..12_u64 {
                    let memory = pages(thread * 30 + round * 11..thread * 30 + round * 11 + 120);
                    let snapshot = format!("s{thread}-{round}");
                    bake_paged(store, &snapshot, 5, &memory, &PagedSpec::of(one)).unwrap();
                    assert!(restored(store, one, &snapshot) == memory, "{snapshot}");
                    if round % 3 != 0 {
                        store.remove_snapshot(&name(&snapshot)).unwrap();
                    }
                }
                done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            });
        }
        let (store, one, done) = (&store, &one, &done);
        scope.spawn(move || {
            while done.load(std::sync::atomic::Ordering::Relaxed) < 4 {
                assert_eq!(store.gc_pages().unwrap().damage, []);
                store.gc().unwrap();
                assert!(restored(store, one, "base") == pages(0..150));
            }
        });
    });
    assert_eq!(store.verify(&crate::Scope::All, &crate::Meter::default()).unwrap().damage, []);
    drop(store);
    let store = Store::open(root.path()).unwrap();
    assert_eq!(store.verify(&crate::Scope::All, &crate::Meter::default()).unwrap().damage, []);
    for thread in 0..4_u64 {
        for round in (0..12_u64).filter(|r| r % 3 == 0) {
            let memory = pages(thread * 30 + round * 11..thread * 30 + round * 11 + 120);
            assert!(restored(&store, &one, &format!("s{thread}-{round}")) == memory);
        }
    }
}

/// An operation on a store.
#[derive(Debug, Clone)]
enum Step {
    /// A snapshot whose RAM is a range of pages, with some frames free.
    Put(u8, u64, u64, Option<(u32, u32)>),
    Remove(u8),
    Collect,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let free = prop::option::of((0_u32..60, 0_u32..60));
    prop_oneof![
        4 => (0_u8..5, 0_u64..120, 1_u64..70, free)
            .prop_map(|(n, at, count, free)| Step::Put(n, at, count, free)),
        2 => (0_u8..5).prop_map(Step::Remove),
        2 => Just(Step::Collect),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn every_snapshot_that_is_there_comes_back_whatever_happened(
        steps in prop::collection::vec(step(), 1..25),
    ) {
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut store = store(root.path());
        let one = name("one");
        let mut model: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Put(n, ..) if model.contains_key(&n) => {}
                Step::Put(n, at, count, free) => {
                    let mut memory = ram(at..at + count);
                    let free = free.map(|(a, b)| a.min(b)..a.max(b));
                    let free: Vec<_> = free.into_iter().collect();
                    let known = Known { free: &free, ..Known::default() };
                    let spec = PagedSpec { known, ..PagedSpec::of(&one) };
                    bake_paged(&store, &format!("s{n}"), n, &memory, &spec).unwrap();
                    for range in free {
                        let end = (range.end as usize * 4096).min(memory.len());
                        memory[(range.start as usize * 4096).min(end)..end].fill(0);
                    }
                    model.insert(n, memory);
                }
                Step::Remove(n) => {
                    if model.remove(&n).is_some() {
                        store.remove_snapshot(&name(&format!("s{n}"))).unwrap();
                    }
                }
                Step::Collect => {
                    prop_assert_eq!(store.gc_pages().unwrap().damage, []);
                    store.gc().unwrap();
                }
                Step::Reopen => {
                    drop(store);
                    store = Store::open(root.path()).unwrap();
                }
            }
            for (n, memory) in &model {
                prop_assert!(restored(&store, &one, &format!("s{n}")) == *memory, "s{}", n);
            }
        }
    }
}
