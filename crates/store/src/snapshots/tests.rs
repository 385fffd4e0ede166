use super::*;
use crate::blob::fault;
use crate::fixture::{IMAGE, Vm, assert_is, bake, name, reopen, store, tree};
use crate::{ChainLayer, Damage, GcError, OpenError, RemoveError, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

fn layers(root: &Path) -> usize {
    std::fs::read_dir(root.join("layers")).unwrap().count()
}

#[test]
fn a_snapshot_is_made_opened_listed_and_removed() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let committed = bake(&store, "base", 5).unwrap();
    assert_is(&store, "base", 5);
    assert_eq!(store.snapshots().unwrap().items, std::slice::from_ref(&committed.manifest));
    assert_eq!(store.snapshot(&name("base")).unwrap(), committed.manifest);
    assert!(matches!(bake(&store, "base", 6), Err(CommitError::Exists { .. })));
    let (own, layers_size) = store.snapshot_sizes(&name("base")).unwrap();
    assert!(own.apparent_bytes > 64 * 4096 && own.allocated_bytes < 64 * 4096, "{own:?}");
    assert!(
        layers_size.apparent_bytes >= 16 * 4096 && layers_size.allocated_bytes <= 16 * 4096,
        "{layers_size:?}"
    );
    store.remove_snapshot(&name("base")).unwrap();
    assert!(matches!(store.remove_snapshot(&name("base")), Err(RemoveError::NotFound { .. })));
    assert_eq!(store.gc().unwrap().layers, [], "the VM of the snapshot may go on");
    drop(committed);
    let report = store.gc().unwrap();
    assert_eq!((report.layers.len(), layers(root.path())), (1, 0));
    assert!(report.freed_bytes >= 4096);
}

#[test]
fn clones_of_clones_share_their_layers() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "s0", 1).unwrap();
    for n in 1..=5_u8 {
        let mut vm = Vm::clone_of(&store, &format!("s{}", n - 1));
        vm.write(&store, n + 1);
        vm.snapshot(&store, &format!("s{n}"), n + 1).unwrap();
        store.remove_vm(vm.id).unwrap();
    }
    assert_eq!(layers(root.path()), 6);
    for n in 0..=5_u8 {
        assert_is(&store, &format!("s{n}"), n + 1);
    }
    for n in 0..5 {
        store.remove_snapshot(&name(&format!("s{n}"))).unwrap();
    }
    assert_eq!(store.gc().unwrap().layers, [], "the last one needs them all");
    assert_is(&store, "s5", 6);
    store.remove_snapshot(&name("s5")).unwrap();
    assert_eq!(store.gc().unwrap().layers.len(), 6);
}

#[test]
fn a_vm_that_goes_on_is_snapshotted_again() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    let mut pins = Vec::new();
    for n in 1..=3_u8 {
        vm.write(&store, n);
        pins.push(vm.snapshot(&store, &format!("s{n}"), n).unwrap().pin);
        assert_eq!(vm.chain.len(), usize::from(n));
        assert_eq!(vm.writable.number, u32::from(n));
    }
    // The VM's own folder has only the layer that it writes now.
    assert_eq!(
        std::fs::read_dir(root.path().join("vms").join(vm.id.to_string())).unwrap().count(),
        1
    );
    store.remove_snapshot(&name("s1")).unwrap();
    store.remove_snapshot(&name("s2")).unwrap();
    assert_eq!(store.gc().unwrap().layers, []);
    assert_is(&store, "s3", 3);
    assert!(store.vm_disk_bytes(vm.id, &[]).unwrap() == 0);
    vm.write(&store, 9);
    assert!(store.vm_disk_bytes(vm.id, &[]).unwrap() >= 4096);
    store.remove_vm(vm.id).unwrap();
    assert_eq!(store.vm_folders().unwrap(), []);
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let vm = Vm::boot(&store);
    let before = tree(root.path());
    let mut writer = store.snapshot_writer(&name("s")).unwrap();
    let first = writer.freeze(&vm.writable).unwrap();
    assert_ne!(tree(root.path()), before);
    drop(writer);
    assert_eq!(tree(root.path()), before);
    // The same layer can be frozen again.
    let mut writer = store.snapshot_writer(&name("s")).unwrap();
    assert_eq!(writer.freeze(&vm.writable).unwrap().next, first.next);
    drop(writer);
    drop(store);
    reopen(root.path());
}

#[test]
fn a_layer_that_a_vm_froze_survives_a_commit_that_failed() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    vm.write(&store, 1);
    bake(&store, "taken", 9).unwrap();
    let mut writer = store.snapshot_writer(&name("s")).unwrap();
    let freeze = writer.freeze(&vm.writable).unwrap();
    drop(writer.saved());
    vm.chain.push(freeze.frozen);
    vm.writable = freeze.next;
    std::os::unix::fs::FileExt::write_all_at(&freeze.map, b"map", 0).unwrap();
    drop((freeze.map, freeze.next_data));
    vm.write(&store, 2);
    let committed = vm.snapshot(&store, "s", 2).unwrap();
    assert_eq!(committed.manifest.disks[0].layers.len(), 2);
    assert!(vm.chain.iter().all(|l| matches!(l, ChainLayer::Stored(_))));
    assert_is(&store, "s", 2);
}

#[test]
fn the_same_layer_twice_is_stored_once_and_a_damaged_one_is_healed() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "a", 5).unwrap();
    bake(&store, "b", 5).unwrap();
    assert_eq!(layers(root.path()), 1);
    let layer = store.snapshot(&name("a")).unwrap().layer_ids()[0];
    let data = root.path().join("layers").join(layer.to_string()).join("data");
    std::fs::remove_file(&data).unwrap();
    std::fs::write(&data, "garbage").unwrap();
    assert!(matches!(store.open_snapshot(&name("a")), Err(OpenError::Damage(_))));
    bake(&store, "c", 5).unwrap();
    for snapshot in ["a", "b", "c"] {
        assert_is(&store, snapshot, 5);
    }
    assert_eq!(store.staged().unwrap(), Vec::<PathBuf>::new());
}

#[test]
fn a_commit_names_what_it_depends_on_that_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "base", 1).unwrap();
    // The clone's pin is dropped at once, as by a daemon that lost it.
    let mut vm = Vm::clone_of(&store, "base");
    let layer = store.snapshot(&name("base")).unwrap().layer_ids()[0];
    store.remove_snapshot(&name("base")).unwrap();
    assert_eq!(store.gc().unwrap().layers, [layer]);
    vm.write(&store, 2);
    match vm.snapshot(&store, "next", 2) {
        Err(CommitError::Damage(Damage::Missing { what, by, .. })) => {
            assert_eq!((what, by), (format!("layer {layer}"), "snapshot next".to_owned()));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        store.pin("VM x", &[], &[layer], &[]),
        Err(crate::PinError::Damage(Damage::Missing { .. }))
    ));
    let image = vm.image.clone();
    let pin = store.pin("VM x", std::slice::from_ref(&image), &[], &[]).unwrap();
    assert!(matches!(
        store.remove_image(&name(IMAGE)),
        Err(RemoveError::InUse { by, .. }) if by == ["VM x"]
    ));
    drop(pin);
    store.remove_image(&name(IMAGE)).unwrap();
    assert!(store.pin("VM x", &[image], &[], &[]).is_err());
}

#[test]
fn pins_hold_layers_while_they_live() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "base", 1).unwrap();
    let open = store.open_snapshot(&name("base")).unwrap();
    store.remove_snapshot(&name("base")).unwrap();
    assert_eq!(store.gc().unwrap().layers, []);
    let pin =
        store.pin("VM adopted", &open.manifest.images(), &open.manifest.layer_ids(), &[]).unwrap();
    let called = Arc::new(AtomicU32::new(0));
    let garbage = called.clone();
    store.when_garbage(move || {
        garbage.fetch_add(1, Ordering::Relaxed);
    });
    drop(open);
    assert_eq!(called.load(Ordering::Relaxed), 0);
    assert_eq!(store.gc().unwrap().layers, []);
    drop(pin);
    assert_eq!(called.load(Ordering::Relaxed), 1);
    assert_eq!(store.gc().unwrap().layers.len(), 1);
}

#[test]
fn a_snapshot_whose_files_are_others_has_another_fingerprint() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "base", 1).unwrap();
    let fingerprint = || store.open_snapshot(&name("base")).unwrap().fingerprint;
    let first = fingerprint();
    assert_eq!(fingerprint(), first);
    let record = dayfly_units::sealed::seal(b"DFtest\r\n", 1, b"pages");
    std::fs::write(root.path().join("snapshots/base/working-set"), &record).unwrap();
    let second = fingerprint();
    assert_ne!(second, first);
    // The same bytes in another file: a process that has the old file open has a different file.
    let memory = root.path().join("snapshots/base/memory");
    let beside = root.path().join("snapshots/base/beside");
    std::fs::copy(&memory, &beside).unwrap();
    std::fs::rename(&beside, &memory).unwrap();
    assert_ne!(fingerprint(), second);
    // A damaged record is refused like any other file.
    let path = root.path().join("snapshots/base/working-set");
    let mut bad = record;
    *bad.last_mut().unwrap() ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bad).unwrap();
    let refused = store.open_snapshot(&name("base"));
    assert!(
        matches!(&refused, Err(OpenError::Damage(Damage::Seal { file, .. })) if *file == path),
        "{refused:?}"
    );
}

#[test]
fn nothing_is_collected_while_a_manifest_cannot_be_read() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    for (snapshot, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        bake(&store, snapshot, seed).unwrap();
    }
    store.remove_snapshot(&name("c")).unwrap();
    let manifest = root.path().join("snapshots/a/manifest");
    std::fs::remove_file(&manifest).unwrap();
    std::fs::write(&manifest, "garbage").unwrap();
    match store.gc() {
        Err(GcError::Unreadable { snapshot, .. }) => assert_eq!(snapshot, "a"),
        other => panic!("{other:?}"),
    }
    assert_eq!(layers(root.path()), 3);
    let listing = store.snapshots().unwrap();
    assert_eq!((listing.items.len(), listing.damaged.len()), (1, 1));
    assert!(matches!(
        store.remove_image(&name(IMAGE)),
        Err(RemoveError::InUse { by, .. }) if by.len() == 2
    ));
    store.remove_snapshot(&name("a")).unwrap();
    assert_eq!(store.gc().unwrap().layers.len(), 2);
    assert_is(&store, "b", 2);
}

/// Commits with a fault at step `n`; returns the store, the VM and the result.
fn commit_with_fault(
    root: &Path,
    n: u32,
    crash: bool,
) -> (Store, Vm, Result<Committed, CommitError>, bool) {
    let store = store(root);
    bake(&store, "old", 1).unwrap();
    let mut vm = Vm::clone_of(&store, "old");
    vm.write(&store, 2);
    let run = || vm.snapshot(&store, "new", 2);
    let (result, hit) =
        if crash { fault::with_crash_at(n, run) } else { fault::with_failure_at(n, run) };
    (store, vm, result, hit)
}

#[test]
fn a_commit_that_fails_at_any_step_leaves_all_as_it_was_and_can_be_done_again() {
    let mut n = 0;
    loop {
        let root = tempfile::tempdir().unwrap();
        let (store, mut vm, result, hit) = commit_with_fault(root.path(), n, false);
        assert_is(&store, "old", 1);
        assert!(store.staged().unwrap().len() <= 1, "step {n}");
        match result {
            Ok(_) => assert_is(&store, "new", 2),
            Err(_) => {
                let there = store.open_snapshot(&name("new"));
                assert!(matches!(there, Err(OpenError::NotFound { .. })), "step {n}: {there:?}");
                if vm.chain.len() == 1 {
                    vm.write(&store, 2);
                }
                vm.snapshot(&store, "new", 2).unwrap_or_else(|e| panic!("step {n}, again: {e}"));
                store.open_snapshot(&name("new")).unwrap();
            }
        }
        store.remove_vm(vm.id).unwrap();
        store.gc().unwrap();
        let used = store.snapshot(&name("new")).unwrap().layer_ids();
        assert_eq!(
            layers(root.path()),
            used.iter().collect::<std::collections::BTreeSet<_>>().len(),
            "step {n}"
        );
        drop(store);
        assert_eq!(reopen(root.path()).staged().unwrap(), Vec::<PathBuf>::new());
        if !hit {
            break;
        }
        n += 1;
    }
    assert!(n > 30, "only {n} steps");
}

#[test]
fn a_crash_at_any_step_of_a_commit_leaves_the_old_or_the_new() {
    let (mut n, mut old, mut new) = (0, 0, 0);
    loop {
        let root = tempfile::tempdir().unwrap();
        let (store, vm, _result, hit) = commit_with_fault(root.path(), n, true);
        drop(store);
        let store = reopen(root.path());
        assert_eq!(store.staged().unwrap(), Vec::<PathBuf>::new());
        assert_is(&store, "old", 1);
        match store.open_snapshot(&name("new")) {
            Ok(_) => {
                assert_is(&store, "new", 2);
                new += 1;
            }
            Err(OpenError::NotFound { .. }) => {
                // What the VM depends on still exists, however much of it was published.
                let data = store.open_vm_layer(&vm.writable, true);
                data.unwrap_or_else(|e| panic!("step {n}: {e}"));
                old += 1;
            }
            Err(e) => panic!("step {n}: {e}"),
        }
        store.remove_vm(vm.id).unwrap();
        store.gc().unwrap();
        assert!(store.snapshots().unwrap().damaged.is_empty());
        assert_is(&store, "old", 1);
        if !hit {
            break;
        }
        n += 1;
    }
    assert!(old > 20 && new > 1, "{old} old, {new} new");
}

#[test]
fn a_crash_at_any_step_of_a_removal_leaves_all_or_nothing() {
    let mut n = 0;
    loop {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        bake(&store, "a", 1).unwrap();
        bake(&store, "b", 2).unwrap();
        let remove = || store.remove_snapshot(&name("a")).map(|()| store.gc());
        let (_result, hit) = fault::with_crash_at(n, remove);
        drop(store);
        let store = reopen(root.path());
        match store.open_snapshot(&name("a")) {
            Ok(_) => assert_is(&store, "a", 1),
            Err(OpenError::NotFound { .. }) => {}
            Err(e) => panic!("step {n}: {e}"),
        }
        assert_is(&store, "b", 2);
        store.gc().unwrap();
        assert_eq!(layers(root.path()), store.snapshots().unwrap().items.len());
        if !hit {
            break;
        }
        n += 1;
    }
    assert!(n > 10, "only {n} steps");
}

#[test]
fn everything_is_on_disk_before_it_is_renamed_and_the_name_after() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    vm.write(&store, 2);
    let (result, trace) = fault::with_trace(|| vm.snapshot(&store, "new", 2));
    let layer = result.unwrap().manifest.layer_ids()[0].to_string();
    let position = |doing: &str, path: &str| {
        let found = trace.iter().rposition(|(d, p)| *d == doing && p.ends_with(path));
        found.unwrap_or_else(|| panic!("{doing} {path} is not in {trace:#?}"))
    };
    let stage =
        trace.iter().find(|(_, p)| p.parent().unwrap().ends_with("staging")).unwrap().1.clone();
    let stage = stage.file_name().unwrap().to_str().unwrap().to_owned();
    let (layers, vm) = (format!("layers/{layer}"), format!("vms/{}/disk0.0.data", vm.id));
    let (layer0, snapshot) = (format!("{stage}/layer0"), format!("{stage}/snapshot"));
    let order = [
        (("the VMM writes", ""), ("syncing", "snapshot/state")),
        (("the VMM writes", ""), ("syncing", "snapshot/memory")),
        (("the VMM writes", ""), ("syncing", "layer0/data")),
        (("the VMM writes", ""), ("syncing", "layer0/map")),
        (("writing", "snapshot/manifest"), ("syncing", "snapshot/manifest")),
        (("syncing", "snapshot/state"), ("syncing folder", &snapshot)),
        (("syncing", "snapshot/memory"), ("syncing folder", &snapshot)),
        (("syncing", "snapshot/manifest"), ("syncing folder", &snapshot)),
        (("syncing", "layer0/data"), ("syncing folder", &layer0)),
        (("syncing", "layer0/map"), ("syncing folder", &layer0)),
        (("syncing folder", &layer0), ("syncing folder", &stage)),
        (("syncing folder", &snapshot), ("syncing folder", &stage)),
        (("syncing folder", &stage), ("renaming to", &layers)),
        (("renaming to", &layers), ("syncing folder", "layers")),
        (("syncing folder", "layers"), ("renaming to", "snapshots/new")),
        (("renaming to", "snapshots/new"), ("syncing folder", "snapshots")),
        (("syncing folder", "snapshots"), ("removing", &vm)),
    ];
    for (before, after) in order {
        let positions = (position(before.0, before.1), position(after.0, after.1));
        assert!(positions.0 < positions.1, "{before:?} must come before {after:?}");
    }
}

#[test]
fn many_commit_one_name_at_once_and_one_of_them_is_there() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let made: Vec<u8> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=8_u8)
            .map(|seed| {
                let store = store.clone();
                scope.spawn(move || match bake(&store, "one", seed) {
                    Ok(_) => Some(seed),
                    Err(CommitError::Exists { .. }) => None,
                    Err(e) => panic!("{e}"),
                })
            })
            .collect();
        threads.into_iter().filter_map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(made.len(), 1);
    assert_is(&store, "one", made[0]);
    store.gc().unwrap();
    assert_eq!(layers(root.path()), 1);
}

#[test]
fn collecting_while_others_commit_clone_and_remove_breaks_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "base", 1).unwrap();
    let (stop, collected) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3_u8)
            .map(|t| {
                let (store, collected) = (store.clone(), &collected);
                scope.spawn(move || {
                    for round in 0..200_u8 {
                        // On a busy host the collector may stand still for many rounds.
                        if round >= 15 && collected.load(Ordering::Relaxed) > 0 {
                            break;
                        }
                        let (clone, again) = (format!("t{t}"), format!("t{t}-again"));
                        let open = store.open_snapshot(&name("base")).unwrap();
                        let mut vm = Vm::clone_of(&store, "base");
                        vm.write(&store, 10 + round);
                        let first = vm.snapshot(&store, &clone, 10 + round).unwrap();
                        drop(open);
                        store.remove_snapshot(&name(&clone)).unwrap();
                        // The layers are in no snapshot now, but the VM depends on them.
                        vm.write(&store, 11 + round);
                        let second = vm.snapshot(&store, &again, 11 + round).unwrap();
                        drop(first);
                        assert_is(&store, &again, 11 + round);
                        store.remove_snapshot(&name(&again)).unwrap();
                        drop(second);
                        store.remove_vm(vm.id).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let layers = store.gc().unwrap().layers.len();
                collected.fetch_add(u32::try_from(layers).unwrap(), Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
    });
    assert!(collected.into_inner() > 0, "nothing was collected beside the others");
    assert_is(&store, "base", 1);
    store.gc().unwrap();
    assert_eq!(layers(root.path()), 1);
}
