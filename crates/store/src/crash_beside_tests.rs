//! Two operations at once: at each step of one the other runs, and at each change of the disk from
//! there on the power is lost, or the daemon is killed. Nothing acknowledged is lost.
//!
//! The second operation goes on after the end of the first if it needs a lock that the first holds
//! ([`crate::blob::interleave`]). So each order that the locks allow is run, up to one change from
//! one operation to the other and back.

use crate::blob::disk::{Crash, Disk, build};
use crate::blob::interleave::beside;
use crate::blob::watch::{Event, Log, acknowledge_as, record_to};
use crate::crash_tests::{Case, Known, check, folder, new, old, with_garbage};
use crate::fixture::{Vm, name, store};
use crate::fixture_pages::{PAGE, bake_paged, file, grow_frozen, page, ram, restored};
use crate::{ChainLayer, Digest, Meter, PagedSpec, Scope, Store};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Mutex;

fn bake(store: &Store, to: &'static str, memory: &[u8]) {
    bake_paged(store, to, 9, memory, &PagedSpec::of(&name("one"))).unwrap();
    acknowledge_as(to);
}

fn put_new(store: &Store) {
    bake(store, "new", &new());
}

/// Shares pages with `new`, and a layer.
fn put_second(store: &Store) {
    bake(store, "second", &second());
}

fn second() -> Vec<u8> {
    ram(40..90)
}

fn gc(store: &Store) {
    assert_eq!(store.gc_pages().unwrap().damage, []);
    store.gc().unwrap();
    acknowledge_as("gc");
}

/// What is read is right at each step of the other operation.
fn open(store: &Store) {
    assert!(restored(store, &name("one"), "old") == old());
    assert_eq!(store.verify(&Scope::All, &Meter::default()).unwrap().damage, []);
}

/// Pages without a table, which their lease keeps.
fn put_pages(store: &Store) {
    let tenant = store.tenant(&name("one")).unwrap();
    let put = tenant.put(&file(&second()), &[]).unwrap();
    store.gc_pages().unwrap();
    for number in (40..90).filter(|n| n % 7 != 0) {
        assert_eq!(tenant.fetch(&Digest::of(&page(number))).unwrap(), page(number));
    }
    drop(put);
}

fn remove_other(store: &Store) {
    store.remove_snapshot(&name("other")).unwrap();
    acknowledge_as("other");
    store.gc_pages().unwrap();
}

/// Two operations by name; the snapshots that they make.
struct Pair {
    first: (&'static str, fn(&Store)),
    second: (&'static str, fn(&Store)),
    made: &'static [&'static str],
}

const GC: (&str, fn(&Store)) = ("a gc", gc);
const COMMIT: (&str, fn(&Store)) = ("a commit", put_new);
const OPEN: (&str, fn(&Store)) = ("an open and a verification", open);

/// The state as one digest. Ids of VMs and times in manifests differ from run to run, and count as
/// equal.
fn digest(state: &BTreeMap<String, Option<Vec<u8>>>, more: &str) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(more.as_bytes());
    for (path, content) in state {
        let mut path = path.clone();
        if let Some(at) = path.find("/vms/").map(|at| at + 5) {
            let end = path[at..].find('/').map_or(path.len(), |length| at + length);
            path.replace_range(at..end, "vm");
        }
        hasher.update(&(path.len() as u64).to_le_bytes()).update(path.as_bytes());
        let content = content.as_deref();
        let content = match content {
            Some(bytes) if path.ends_with("/manifest") && !bytes.is_empty() => Some(&[1][..]),
            content => content,
        };
        hasher.update(&content.map_or(u64::MAX, |bytes| bytes.len() as u64).to_le_bytes());
        hasher.update(content.unwrap_or_default());
    }
    hasher.finalize()
}

/// Builds each state that a crash may leave at each change of the disk from number `from` on, and
/// calls `check` for those that are not in `seen`, with what was acknowledged.
fn each_crash(
    root: &Path,
    mut disk: Disk,
    (events, from): (&[Event], usize),
    kept: impl Fn(&Crash) -> bool,
    seen: &mut HashSet<blake3::Hash>,
    mut check: impl FnMut(&Path, &[&'static str], &str),
) -> usize {
    let mut acknowledged = Vec::new();
    let mut points = 0;
    for n in 0..=events.len() {
        if n >= from {
            points += 1;
            for crash in disk.crashes().into_iter().filter(&kept) {
                let state = disk.state(crash);
                if seen.insert(digest(&state, &format!("{acknowledged:?}"))) {
                    let crashed = folder();
                    build(&state, crashed.path());
                    let after = n.checked_sub(1).map(|n| &events[n]);
                    check(
                        crashed.path(),
                        &acknowledged,
                        &format!("{crash:?} after {n}, {after:?}"),
                    );
                }
            }
        }
        let Some(event) = events.get(n) else { break };
        disk.apply(root, event);
        if let Event::Acknowledged(what) = event {
            acknowledged.push(*what);
        }
    }
    points
}

fn expected(snapshot: &str) -> Vec<u8> {
    match snapshot {
        "old" => old(),
        "other" => ram(300..340),
        "new" => new(),
        _ => second(),
    }
}

/// What has to be in a store after these acknowledgements, and what may be.
fn case(made: &[&'static str], acknowledged: &[&'static str], removes: bool) -> Case {
    let mut before = Known::default();
    let mut between = BTreeMap::new();
    for snapshot in ["old", "other"].iter().chain(made) {
        let is_made = made.contains(snapshot);
        let is_acknowledged = acknowledged.contains(snapshot);
        let content = expected(snapshot);
        if *snapshot == "other" && removes {
            if !is_acknowledged {
                between.insert(*snapshot, content);
            }
        } else if is_made && !is_acknowledged {
            between.insert(*snapshot, content);
        } else {
            before.snapshots.insert(*snapshot, content);
        }
    }
    Case {
        prepare: with_garbage,
        run: |_| Ok(()),
        after: before.clone(),
        before,
        between,
        perhaps: Vec::new(),
        put_with_working_set: false,
    }
}

impl Pair {
    /// Runs the second operation at each step of the first.
    fn run(&self) {
        let ((first_name, first), (second_name, second)) = (self.first, self.second);
        let mut seen = HashSet::new();
        let (mut steps, mut points) = (0, 0);
        for n in 0.. {
            let root = folder();
            let store = with_garbage(root.path());
            let disk = Disk::read(root.path());
            let (log, from) = (Log::default(), Mutex::new(0));
            let run = beside(
                n,
                || record_to(&log, || first(&store)),
                || {
                    *from.lock().unwrap() = log.lock().unwrap().len();
                    record_to(&log, || second(&store));
                },
            );
            if !run {
                break;
            }
            steps += 1;
            let at = format!("{second_name} at step {n} of {first_name}");
            for snapshot in self.made.iter().chain(&["old"]) {
                let memory = restored(&store, &name("one"), snapshot);
                assert!(memory == expected(snapshot), "{at}: {snapshot}");
            }
            drop(store);
            let events = std::mem::take(&mut *log.lock().unwrap());
            let from = *from.lock().unwrap();
            let removes = second_name.contains("removal");
            // An open changes nothing. One folder that differs from the others, and a torn write,
            // are tried by the tests of one operation.
            if second_name.contains("open") {
                continue;
            }
            let kept = |crash: &Crash| crash.has_no_exception() && !crash.torn;
            points += each_crash(root.path(), disk, (&events, from), kept, &mut seen, {
                |crashed, acknowledged, text| {
                    let case = case(self.made, acknowledged, removes);
                    check(crashed, &case, false, &format!("{at}: {text}"));
                }
            });
        }
        assert!(steps > 12, "{first_name}: only {steps} steps");
        println!(
            "{second_name} beside {first_name}: {steps} steps, {points} points, {} different \
             states, nothing lost",
            seen.len()
        );
    }
}

/// Each pair takes minutes, so each is one test.
mod whatever_runs_beside {
    use super::*;

    #[test]
    #[ignore = "long"]
    fn a_commit_beside_a_gc() {
        Pair { first: GC, second: COMMIT, made: &["new"] }.run();
    }

    #[test]
    #[ignore = "long"]
    fn a_gc_beside_a_commit() {
        Pair { first: COMMIT, second: GC, made: &["new"] }.run();
    }

    #[test]
    #[ignore = "long"]
    fn another_commit_beside_a_commit() {
        let second = ("another commit", put_second as fn(&Store));
        Pair { first: COMMIT, second, made: &["new", "second"] }.run();
    }

    #[test]
    #[ignore = "long"]
    fn a_put_of_pages_beside_a_gc() {
        let second = ("a put of pages and a gc", put_pages as fn(&Store));
        Pair { first: GC, second, made: &[] }.run();
    }

    #[test]
    #[ignore = "long"]
    fn an_open_beside_a_gc() {
        Pair { first: GC, second: OPEN, made: &[] }.run();
    }

    #[test]
    #[ignore = "long"]
    fn an_open_beside_a_commit() {
        Pair { first: COMMIT, second: OPEN, made: &["new"] }.run();
    }

    #[test]
    #[ignore = "long"]
    fn a_removal_beside_a_commit() {
        let second = ("a removal and a gc", remove_other as fn(&Store));
        Pair { first: COMMIT, second, made: &["new"] }.run();
    }
}

/// The blocks of the VM's first two layers, by its record.
fn layers_are_there(store: &Store, vm: &Vm, at: &str) {
    for (layer, seed) in vm.chain.iter().zip(1_u8..=2) {
        let data = match layer {
            ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => {
                store.open_frozen_layer(layer).unwrap_or_else(|e| panic!("{at}: {e}")).data
            }
            ChainLayer::Stored(layer) => {
                let open = store.open_layers(std::slice::from_ref(layer), "a VM");
                open.unwrap_or_else(|e| panic!("{at}: {e}")).remove(0).data
            }
        };
        let block = usize::from(seed % 16) * PAGE;
        let bytes = crate::fixture_pages::bytes(&data);
        assert!(bytes[block..block + PAGE] == [seed; PAGE], "{at}: layer {seed}");
    }
}

/// A snapshot of a VM with two frozen layers, and a gc beside it. The daemon is killed; the record
/// that it has written last says what the next one looks for.
#[test]
fn a_vm_keeps_its_layers_if_the_daemon_dies_in_a_commit_with_a_gc_beside_it() {
    let (mut seen, mut steps, mut points) = (HashSet::new(), 0, 0);
    for n in 0.. {
        let root = folder();
        let store = store(root.path());
        let mut vm = Vm::boot(&store);
        for seed in 1..=2 {
            grow_frozen(&store, &mut vm, seed);
        }
        let records = Mutex::new(vec![vm.clone()]);
        let disk = Disk::read(root.path());
        let (log, from) = (Log::default(), Mutex::new(0));
        let commit = || {
            let mut vm = vm.clone();
            let committed = vm.commit(&store, "s", 7).unwrap();
            records.lock().unwrap().push(vm);
            acknowledge_as("record");
            store.remove_vm_layers(&committed.replaced).unwrap();
            drop(committed.pin);
        };
        let collect = || {
            *from.lock().unwrap() = log.lock().unwrap().len();
            record_to(&log, || {
                store.gc().unwrap();
                store.gc_pages().unwrap();
            });
        };
        if !beside(n, || record_to(&log, commit), collect) {
            break;
        }
        steps += 1;
        drop(store);
        let events = std::mem::take(&mut *log.lock().unwrap());
        let from = *from.lock().unwrap();
        let records = RefCell::new(records.into_inner().unwrap());
        let kept = |crash: &Crash| crash.loses_nothing();
        points += each_crash(root.path(), disk, (&events, from), kept, &mut seen, {
            |crashed, acknowledged, text| {
                let at = format!("a gc at step {n} of a commit: {text}");
                let store = Store::open(crashed).unwrap();
                let vm = records.borrow()[acknowledged.len()].clone();
                let stored = vm.chain.iter().filter_map(|layer| match layer {
                    ChainLayer::Stored(layer) => Some(layer.id),
                    _ => None,
                });
                let stored: Vec<_> = stored.collect();
                let pin = store.pin("a VM", std::slice::from_ref(&vm.image), &stored, &[]);
                let _pin = pin.unwrap_or_else(|e| panic!("{at}: {e}"));
                store.gc().unwrap();
                layers_are_there(&store, &vm, &at);
                let damage = store.verify(&Scope::All, &Meter::default()).unwrap().damage;
                assert_eq!(damage, [], "{at}");
            }
        });
    }
    assert!(steps > 20, "only {steps} steps");
    println!("{steps} steps, {points} points, {} different states", seen.len());
}
