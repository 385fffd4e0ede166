//! Every write, fsync and rename of a put of a snapshot, of a put of pages and of a gc, interrupted
//! in every way. A crash is followed by opening every state that `blob::disk` can build; an error
//! is followed by more work on the same store.

use crate::blob::disk::{Disk, build};
use crate::blob::fault;
use crate::blob::watch::{Event, acknowledge, record};
use crate::fixture::{name, store};
use crate::fixture_pages::{PAGE, bake_paged, bytes, file, grow, page, ram, restored, saved};
use crate::{CommitError, Digest, PagedSpec, Scope, Store};
use dayfly_units::VmId;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

pub(crate) fn folder() -> tempfile::TempDir {
    // In memory if the host has /dev/shm, because thousands of disks are built.
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// What was acknowledged: snapshots by name, and pages that were put without a snapshot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    pub(crate) snapshots: BTreeMap<&'static str, Vec<u8>>,
    pub(crate) pages: Vec<Vec<u8>>,
}

/// An operation on a store, and what is known before it and after its acknowledgement.
pub(crate) struct Case {
    pub(crate) prepare: fn(&Path) -> Store,
    pub(crate) run: fn(&Store) -> Result<(), String>,
    pub(crate) before: Known,
    pub(crate) after: Known,
    /// Snapshots that may exist or not until the acknowledgement, but never in part.
    pub(crate) between: BTreeMap<&'static str, Vec<u8>>,
    /// Pages that may exist or not.
    pub(crate) perhaps: Vec<Vec<u8>>,
    /// Whether the snapshot `new` has a working set if it exists.
    pub(crate) put_with_working_set: bool,
}

pub(crate) fn old() -> Vec<u8> {
    ram(1..40)
}

pub(crate) fn new() -> Vec<u8> {
    ram(20..70)
}

/// A store with the snapshot `old`, and pages of a removed snapshot.
fn with_old(root: &Path) -> Store {
    let store = store(root);
    bake_paged(&store, "old", 5, &old(), &PagedSpec::of(&name("one"))).unwrap();
    store
}

/// Like a bake: prepared, the working set of its clones added, stored.
fn put_new(store: &Store) -> Result<(), String> {
    let vm = VmId::random();
    let bake = || {
        let (saved, spec) = saved(store, "new", 6, &new(), vm)?;
        let mut prepared = saved.prepare(&spec, &[])?;
        prepared.keep_working_set(&working_set())?;
        prepared.commit_paged(&PagedSpec::of(&name("one")))
    };
    let done: Result<_, CommitError> = bake();
    let done = store.remove_vm(vm).map_err(CommitError::from).and(done).map_err(|e| e.to_string());
    acknowledge();
    done.map(|_| ())
}

fn working_set() -> Vec<u8> {
    dayfly_units::sealed::seal(b"DFworkse", 1, &[7; 600])
}

fn push(store: &Store) -> Result<(), String> {
    let tenant = store.tenant(&name("one")).map_err(|e| e.to_string())?;
    let put = tenant.put(&file(&new()), &[]).map_err(|e| e.to_string())?;
    acknowledge();
    drop(put);
    Ok(())
}

/// Two snapshots that stay and two that were removed; most pages of the first pack belong only to a
/// removed one.
pub(crate) fn with_garbage(root: &Path) -> Store {
    let store = store(root);
    let one = name("one");
    bake_paged(&store, "gone", 5, &ram(1..200), &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "old", 5, &old(), &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "other", 6, &ram(300..340), &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "gone2", 6, &ram(400..440), &PagedSpec::of(&one)).unwrap();
    store.remove_snapshot(&name("gone")).unwrap();
    store.remove_snapshot(&name("gone2")).unwrap();
    store
}

/// RAM of a clone with its disk's blocks in the page cache, so RAM is wrong if the blocks are.
fn cached(seeds: std::ops::RangeInclusive<u8>) -> Vec<u8> {
    [seeds.flat_map(|seed| [seed; PAGE]).collect(), old()].concat()
}

/// The longest chain that is not flattened; `old` is its end.
fn with_chain(root: &Path) -> Store {
    let store = store(root);
    let mut from = None;
    for (seed, to) in (21..).zip(["s1", "s2", "s3", "old"]) {
        grow(&store, from, to, seed, &cached(21..=seed)).unwrap();
        from = Some(to);
    }
    assert_eq!(store.snapshot(&name("old")).unwrap().disks[0].layers.len(), crate::MOST_LAYERS);
    store
}

fn put_flattened(store: &Store) -> Result<(), String> {
    let done = grow(store, Some("old"), "new", 25, &cached(21..=25)).map_err(|e| e.to_string());
    acknowledge();
    done
}

fn gc(store: &Store) -> Result<(), String> {
    let report = store.gc_pages().map_err(|e| e.to_string())?;
    report.no_space.map_or(Ok(()), Err)?;
    acknowledge();
    // Including leftovers of an earlier attempt.
    let left = std::fs::read_dir(store.root().join("pages/one")).unwrap().count();
    assert_eq!(left, 2, "packs are left");
    Ok(())
}

/// Two snapshots that stay, and a third that is removed.
fn with_three(root: &Path) -> Store {
    let store = with_old(root);
    let one = name("one");
    bake_paged(&store, "other", 6, &ram(300..340), &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "new", 6, &new(), &PagedSpec::of(&one)).unwrap();
    store
}

fn remove_and_gc(store: &Store) -> Result<(), String> {
    match store.remove_snapshot(&name("new")) {
        Ok(()) | Err(crate::RemoveError::NotFound { .. }) => {}
        Err(e) => return Err(e.to_string()),
    }
    acknowledge();
    store.gc_pages().map(|_| ()).map_err(|e| e.to_string())
}

fn cases() -> Vec<(&'static str, Case)> {
    let one: BTreeMap<_, _> = [("old", old())].into();
    let with_new: BTreeMap<_, _> = [("old", old()), ("new", new())].into();
    let two: BTreeMap<_, _> = [("old", old()), ("other", ram(300..340))].into();
    let known =
        |snapshots: &BTreeMap<_, _>| Known { snapshots: snapshots.clone(), pages: Vec::new() };
    let pages: Vec<Vec<u8>> = (20..70).filter(|n| n % 7 != 0).map(page).collect();
    let put = Case {
        prepare: with_old,
        run: put_new,
        before: known(&one),
        after: known(&with_new),
        between: [("new", new())].into(),
        perhaps: Vec::new(),
        put_with_working_set: true,
    };
    let pushed = Known { snapshots: one.clone(), pages: pages.clone() };
    let push = Case {
        prepare: with_old,
        run: push,
        before: known(&one),
        after: pushed,
        between: BTreeMap::new(),
        perhaps: pages,
        put_with_working_set: false,
    };
    let gc = Case {
        prepare: with_garbage,
        run: gc,
        before: known(&two),
        after: known(&two),
        between: BTreeMap::new(),
        perhaps: Vec::new(),
        put_with_working_set: false,
    };
    let removal = Case {
        prepare: with_three,
        run: remove_and_gc,
        before: known(&two),
        after: known(&two),
        between: [("new", new())].into(),
        perhaps: Vec::new(),
        put_with_working_set: false,
    };
    let chain: BTreeMap<_, _> = [
        ("s1", cached(21..=21)),
        ("s2", cached(21..=22)),
        ("s3", cached(21..=23)),
        ("old", cached(21..=24)),
    ]
    .into();
    let mut longer = chain.clone();
    longer.insert("new", cached(21..=25));
    let flattened = Case {
        prepare: with_chain,
        run: put_flattened,
        before: known(&chain),
        after: known(&longer),
        between: [("new", cached(21..=25))].into(),
        perhaps: Vec::new(),
        put_with_working_set: false,
    };
    vec![
        ("a put that flattens", flattened),
        ("a snapshot's put", put),
        ("a put of pages", push),
        ("a gc", gc),
        ("a removal and a gc", removal),
    ]
}

/// Opens the store at `root` and checks everything that is known or may exist. Then runs gc twice
/// and checks again.
pub(crate) fn check(root: &Path, case: &Case, acknowledged: bool, at: &str) {
    let store = Store::open(root).unwrap_or_else(|e| panic!("{at}: {e}"));
    let known = if acknowledged { &case.after } else { &case.before };
    let one = name("one");
    let tenant = store.tenant(&one).unwrap();
    for page in &known.pages {
        assert!(
            tenant.fetch(&Digest::of(page)).is_ok_and(|got| got == *page),
            "{at}: a page is lost"
        );
    }
    for page in &case.perhaps {
        let hash = Digest::of(page);
        assert!(
            !tenant.has(&hash).unwrap() || tenant.fetch(&hash).unwrap() == *page,
            "{at}: half a page"
        );
    }
    let all = || {
        for (snapshot, memory) in &known.snapshots {
            assert!(restored(&store, &one, snapshot) == *memory, "{at}: {snapshot} is lost");
        }
        let listing = store.snapshots().unwrap();
        assert!(listing.damaged.is_empty(), "{at}: {:?}", listing.damaged);
        for manifest in listing.items {
            let snapshot = manifest.name.as_str();
            let between = case.between.get(snapshot).filter(|_| !acknowledged);
            let expected = known.snapshots.get(snapshot).or(between);
            let expected = expected.unwrap_or_else(|| panic!("{at}: {snapshot} is there"));
            assert!(
                restored(&store, &one, snapshot) == *expected,
                "{at}: half of {snapshot} is there"
            );
            let record =
                store.open_snapshot(&manifest.name).unwrap().working_set.map(|file| bytes(&file));
            let has_one = snapshot == "new" && case.put_with_working_set;
            assert!(record == has_one.then(working_set), "{at}: half of a working set");
        }
        let report = store.verify(&Scope::All, &crate::Meter::default()).unwrap();
        assert_eq!(report.damage, [], "{at}");
    };
    all();
    store.gc().unwrap();
    store.gc_pages().unwrap();
    all();
    let again = store.gc_pages().unwrap();
    assert_eq!((again.packs, again.block_indexes), (0, 0), "{at}: garbage is left");
    assert_eq!(store.gc().unwrap().layers, [], "{at}: garbage is left");
    assert_eq!(store.staged().unwrap(), Vec::<std::path::PathBuf>::new(), "{at}");
    let named: HashSet<Digest> = known
        .snapshots
        .keys()
        .chain(case.between.keys())
        .filter_map(|s| store.open_snapshot_pages(&one, &name(s)).ok())
        .flat_map(|open| open.table.hashes().to_vec())
        .collect();
    let unique = tenant.stats().unwrap().unique;
    assert!(
        unique < 2 * named.len() as u64 + 1,
        "{at}: {unique} pages for {} that are named",
        named.len()
    );
}

#[test]
fn every_state_that_a_crash_may_leave_keeps_what_was_acknowledged_and_nothing_half() {
    for (what, case) in cases() {
        let root = folder();
        let store = (case.prepare)(root.path());
        let mut disk = Disk::read(root.path());
        let (done, events) = record(|| (case.run)(&store));
        done.unwrap();
        drop(store);
        let (mut points, mut states, mut seen) = (0, 0, HashSet::new());
        let mut acknowledged = false;
        for n in 0..=events.len() {
            for crash in disk.crashes() {
                states += 1;
                let state = disk.state(crash);
                let digest = blake3::hash(format!("{acknowledged} {state:?}").as_bytes());
                if seen.insert(digest) {
                    let crashed = folder();
                    build(&state, crashed.path());
                    let after = n.checked_sub(1).map(|n| &events[n]);
                    check(
                        crashed.path(),
                        &case,
                        acknowledged,
                        &format!("{what}: {crash:?} after {n}, {after:?}"),
                    );
                }
            }
            let Some(event) = events.get(n) else { break };
            disk.apply(root.path(), event);
            match event {
                Event::Acknowledged(_) => acknowledged = true,
                _ => points += 1,
            }
        }
        assert!(points > 9, "{what}: only {points} points");
        println!(
            "{what}: {points} points, {states} states, {} of them different, none lost anything",
            seen.len()
        );
    }
}

#[test]
fn every_step_that_fails_or_is_the_last_leaves_the_old_or_the_new() {
    for (what, case) in cases() {
        let mut steps = 0;
        for kind in [None, Some(EIO), Some(ENOSPC)] {
            let mut n = 0;
            loop {
                let root = folder();
                let store = (case.prepare)(root.path());
                let run = || (case.run)(&store);
                let (result, hit) = match kind {
                    None => fault::with_crash_at(n, run),
                    Some(errno) => fault::with_errno_at(n, errno, run),
                };
                let at = format!("{what}: {kind:?} at step {n}: {result:?}");
                let live = if result.is_ok() { &case.after } else { &case.before };
                for (snapshot, memory) in &live.snapshots {
                    assert!(
                        restored(&store, &name("one"), snapshot) == *memory,
                        "{at}: {snapshot}"
                    );
                }
                if kind.is_some() {
                    // At most one entry, if its removal failed; the next open removes it.
                    assert!(store.staged().unwrap().len() <= 1, "{at}");
                    // The same operation again, on the store that continues.
                    if result.is_err() && store.snapshot(&name("new")).is_err() {
                        (case.run)(&store).unwrap_or_else(|e| panic!("{at}: and again: {e}"));
                    }
                }
                let acknowledged = result.is_ok();
                drop(store);
                check(root.path(), &case, acknowledged, &at);
                if !hit {
                    break;
                }
                n += 1;
            }
            steps += n;
        }
        assert!(steps > 25, "{what}: only {steps} steps");
        println!("{what}: {steps} steps failed or were the last");
    }
}
