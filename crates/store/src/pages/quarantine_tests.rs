use crate::blob::fault;
use crate::fixture::{name, store};
use crate::fixture_pages::{PAGE, bake_one, file, flip, pack_files, page, ram, restored};
use crate::{Digest, Meter, Scope, Store, VerifyReport};
use std::fs;

/// 68 pages, in five groups.
fn memory() -> Vec<u8> {
    ram((1..80).filter(|n| n % 7 != 0))
}

fn verify(store: &Store) -> VerifyReport {
    store.verify(&Scope::All, &Meter::default()).unwrap()
}

fn refusal(store: &Store, snapshot: &str) -> String {
    let error = store.open_snapshot(&name(snapshot)).expect_err("it is damaged");
    dayfly_units::error::chain(&error)
}

/// How the damage becomes known before the next put.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Known {
    /// Only by the put itself.
    No,
    Read,
    Verified,
    /// By a verification in another process.
    Reopened,
}

#[test]
fn the_next_put_writes_a_damaged_group_anew_which_heals_older_snapshots() {
    for known in [Known::No, Known::Read, Known::Verified, Known::Reopened] {
        let root = tempfile::tempdir().unwrap();
        let mut store = store(root.path());
        bake_one(&store, "old", &memory());
        let pack = pack_files(root.path()).remove(0);
        flip(&pack, 30);
        match known {
            Known::No => {}
            Known::Read => {
                let error = refusal(&store, "old");
                assert!(error.contains("group 0, page ") && error.contains("digest"), "{error}");
            }
            Known::Verified | Known::Reopened => {
                let damage = verify(&store).damage;
                assert_eq!(damage.len(), 16, "each page of the group is named: {damage:?}");
                assert!(damage.iter().all(|d| d.snapshots == ["old"]), "{damage:?}");
            }
        }
        if known == Known::Reopened {
            drop(store);
            store = Store::open(root.path()).unwrap();
        }
        let in_quarantine = |store: &Store| {
            let space = store.tenant(&name("one")).unwrap().space;
            let state = space.read();
            state.quarantine.iter().map(|(_, group)| *group).collect::<Vec<_>>()
        };
        let before: &[u32] = if known == Known::No { &[] } else { &[0] };
        assert_eq!(in_quarantine(&store), before, "{known:?}");
        bake_one(&store, "new", &memory());
        assert_eq!(in_quarantine(&store), [0], "{known:?}");
        assert_eq!(pack_files(root.path()).len(), 2, "{known:?}: 16 pages are written anew");
        for snapshot in ["old", "new"] {
            assert!(restored(&store, &name("one"), snapshot) == memory(), "{known:?}: {snapshot}");
        }
        // The pack is damaged, but nothing needs the damaged group.
        let damage = verify(&store).damage;
        assert_eq!(damage.len(), 16, "{damage:?}");
        assert!(damage.iter().all(|d| d.snapshots.is_empty()), "{damage:?}");
        let report = store.gc_pages().unwrap();
        assert_eq!((report.packs, report.damage.len()), (1, 0), "{known:?}");
        assert_eq!(verify(&store).damage, [], "{known:?}");
        assert!(!root.path().join("pages/one/quarantine").exists(), "{known:?}");
        drop(store);
        let store = Store::open(root.path()).unwrap();
        assert!(restored(&store, &name("one"), "old") == memory(), "{known:?}");
    }
}

#[test]
fn what_was_healed_is_found_after_a_restart_whichever_pack_is_opened_first() {
    let mut first = std::collections::BTreeSet::new();
    for seed in 0..8_u64 {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let memory = ram(seed * 100..seed * 100 + 80);
        bake_one(&store, "old", &memory);
        let old = pack_files(root.path()).remove(0);
        flip(&old, 30);
        bake_one(&store, "new", &memory);
        first.insert(pack_files(root.path()).into_iter().min().unwrap() == old);
        drop(store);
        let store = Store::open(root.path()).unwrap();
        for snapshot in ["old", "new"] {
            assert!(restored(&store, &name("one"), snapshot) == memory, "seed {seed}");
        }
    }
    assert_eq!(first.len(), 2, "both orders");
}

#[test]
fn a_pack_whose_name_is_taken_by_a_damaged_one_takes_its_place() {
    let root = tempfile::tempdir().unwrap();
    let one = name("one");
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&one).unwrap();
    drop(tenant.put(&file(&memory()), &[]).unwrap());
    let pack = pack_files(root.path()).remove(0);
    let groups = {
        let state = tenant.space.read();
        let pack = state.packs.values().next().unwrap();
        (0..pack.groups()).map(|group| pack.span(group, group).start).collect::<Vec<_>>()
    };
    assert!(groups.len() > 3);
    groups.iter().for_each(|at| flip(&pack, at + 9));
    // The new pack is the same, to the last byte of its name.
    let put = tenant.put(&file(&memory()), &[]).unwrap();
    assert_eq!((put.stats.new_pages, pack_files(root.path())), (put.stats.pages, vec![pack]));
    let sound = |store: &Store| {
        let tenant = store.tenant(&one).unwrap();
        put.pages.iter().all(|(_, hash)| tenant.fetch(hash).is_ok())
            && tenant.space.read().quarantine.is_empty()
    };
    assert!(sound(&store));
    assert_eq!(verify(&store).damage, []);
    drop((tenant, store));
    assert!(sound(&Store::open(root.path()).unwrap()));
}

/// Copies of a gc that did not end: the file of that name is not the one that the index has.
#[test]
fn a_copy_that_a_gc_finds_under_its_name_is_compared_before_the_original_goes() {
    let mut compared = 0;
    for seed in 0..12_u64 {
        let root = tempfile::tempdir().unwrap();
        let one = name("one");
        let memory = |range: std::ops::Range<u64>| ram(range.filter(|n| n % 7 != 0));
        let store = Store::open(root.path()).unwrap();
        drop(store.tenant(&one).unwrap().put(&file(&memory(seed..seed + 100)), &[]).unwrap());
        let old = pack_files(root.path()).remove(0);
        let aside = root.path().join("aside");
        fs::copy(&old, &aside).unwrap();
        let kept: Vec<Digest> =
            (40..50).filter(|n| n % 7 != 0).map(|n| Digest::of(&page(n))).collect();
        let lease = store.tenant(&one).unwrap().lease(&kept);
        assert_eq!(store.gc_pages().unwrap().rewritten_packs, 1);
        let copy = pack_files(root.path()).remove(0);
        drop((lease, store));
        fs::rename(&aside, &old).unwrap();
        if copy < old {
            // The index has the copy.
            continue;
        }
        compared += 1;
        flip(&copy, 20);
        let store = Store::open(root.path()).unwrap();
        let _lease = store.tenant(&one).unwrap().lease(&kept);
        assert_eq!(store.gc_pages().unwrap().rewritten_packs, 1, "seed {seed}");
        assert_eq!(pack_files(root.path()), [copy]);
        let tenant = store.tenant(&one).unwrap();
        assert!(kept.iter().all(|hash| tenant.fetch(hash).is_ok()), "seed {seed}");
    }
    assert!(compared > 0);
}

#[test]
fn a_pack_that_the_disk_cannot_read_hides_only_its_own_pages() {
    for opened_before in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let one = name("one");
        let mut store = store(root.path());
        bake_one(&store, "a", &memory());
        let bad = pack_files(root.path()).remove(0);
        bake_one(&store, "b", &ram(200..230));
        bake_one(&store, "gone", &ram(300..330));
        store.remove_snapshot(&name("gone")).unwrap();
        if !opened_before {
            drop(store);
            store = Store::open(root.path()).unwrap();
        }
        let io = fault::unreadable(&bad);
        // Open, verify, gc and put go on for all else.
        assert!(restored(&store, &one, "b") == ram(200..230));
        let error = refusal(&store, "a");
        assert!(error.contains(bad.to_str().unwrap()) || !opened_before, "{error}");
        let damage = verify(&store).damage;
        let id = bad.file_name().unwrap().to_str().unwrap();
        assert!(damage.iter().any(|d| d.name == id && d.text.contains("os error 5")), "{damage:?}");
        assert!(damage.iter().all(|d| d.name == id || d.name == "a"), "{damage:?}");
        assert_eq!(store.gc_pages().unwrap().packs, 1);
        assert!(bad.exists(), "a table needs its pages");
        // With another page, so that the pack has another name.
        let more = [memory(), ram(500..501)].concat();
        bake_one(&store, "again", &more);
        assert!(restored(&store, &one, "a") == memory(), "{opened_before}");
        assert!(restored(&store, &one, "again") == more, "{opened_before}");
        // Now nothing needs it.
        store.gc_pages().unwrap();
        assert!(!bad.exists(), "{opened_before}");
        assert_eq!(verify(&store).damage, [], "{opened_before}");
        drop(io);
    }
}

#[test]
fn what_the_disk_reads_again_is_served_and_leaves_the_quarantine() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake_one(&store, "a", &memory());
    let bad = pack_files(root.path()).remove(0);
    let tenant = store.tenant(&name("one")).unwrap();
    let hash = Digest::of(&page(8));
    let io = fault::unreadable(&bad);
    assert!(tenant.fetch(&hash).is_err());
    assert!(!tenant.has(&hash).unwrap());
    drop(io);
    assert_eq!(tenant.fetch(&hash).unwrap(), page(8));
    assert!(!tenant.has(&hash).unwrap(), "a put does not rely on it");
    assert_eq!(verify(&store).damage, []);
    assert!(tenant.has(&hash).unwrap());
    assert!(!root.path().join("pages/one/quarantine").exists());
}

#[test]
fn a_record_that_is_damaged_or_not_written_costs_only_another_look() {
    let root = tempfile::tempdir().unwrap();
    let mut store = store(root.path());
    bake_one(&store, "a", &memory());
    flip(&pack_files(root.path()).remove(0), 30);
    // The disk is full for each step of writing the record.
    let record = root.path().join("pages/one/quarantine");
    let mut steps = 0;
    for step in 0.. {
        drop(store.tenant(&name("one")).unwrap());
        let (_, hit) = fault::with_errno_at(step, 28, || verify(&store));
        if !hit {
            break;
        }
        steps += 1;
        let hash = Digest::of(&page(1));
        assert!(!store.tenant(&name("one")).unwrap().has(&hash).unwrap(), "step {step}");
        drop(store);
        let _ = fs::remove_file(&record);
        store = Store::open(root.path()).unwrap();
    }
    assert!(steps > 4, "{steps}");
    verify(&store);
    let whole = fs::read(&record).unwrap();
    for length in 0..whole.len() {
        drop(store);
        fs::remove_file(&record).unwrap();
        fs::write(&record, &whole[..length]).unwrap();
        store = Store::open(root.path()).unwrap();
        assert!(refusal(&store, "a").contains("group 0"), "{length}");
    }
    bake_one(&store, "b", &memory());
    assert!(restored(&store, &name("one"), "a") == memory());
    assert_eq!(memory().len() % PAGE, 0);
}
