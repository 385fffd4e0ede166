//! Crashes while images and kernels are put and removed, and while the layers of a running VM are
//! frozen, stored, merged and released.
//!
//! Images and kernels must outlive a loss of power, so each state of [`crate::blob::disk`] is
//! opened. A VM does not outlive the host. So its layers are opened as they are when the daemon is
//! killed: with all that was written. Each acknowledgement stands for a record that the daemon
//! wrote; the record says what the next daemon looks for.

use crate::blob::disk::{Disk, build};
use crate::blob::fault;
use crate::blob::watch::{Event, acknowledge, record};
use crate::fixture::{IMAGE, Vm, disk, name, put_image, store};
use crate::fixture_pages::{bytes, grow_frozen, merge};
use crate::{ChainLayer, Digest, FileId, KernelSpec, Scope, Store, VmLayer};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// What a crash may lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// The host lost power.
    Unsynced,
    /// The daemon was killed.
    Nothing,
}

/// Builds every state that a crash during `run` may leave, and calls `check` with its folder, the
/// number of acknowledgements before the crash, and a text for errors. Returns the number of
/// changes of the disk.
fn each_crash(
    root: &Path,
    loss: Loss,
    run: impl FnOnce(),
    mut check: impl FnMut(&Path, usize, &str),
) -> usize {
    let mut disk = Disk::read(root);
    let ((), events) = record(run);
    let (mut seen, mut acknowledged, mut points) = (HashSet::new(), 0, 0);
    for n in 0..=events.len() {
        let kept =
            |crash: &crate::blob::disk::Crash| loss == Loss::Unsynced || crash.loses_nothing();
        for crash in disk.crashes().into_iter().filter(kept) {
            let state = disk.state(crash);
            if seen.insert(blake3::hash(format!("{acknowledged} {state:?}").as_bytes())) {
                let crashed = folder();
                build(&state, crashed.path());
                let after = n.checked_sub(1).map(|n| &events[n]);
                check(crashed.path(), acknowledged, &format!("{crash:?} after {n}, {after:?}"));
            }
        }
        let Some(event) = events.get(n) else { break };
        disk.apply(root, event);
        match event {
            Event::Acknowledged(_) => acknowledged += 1,
            _ => points += 1,
        }
    }
    println!("{points} changes of the disk, {} different states", seen.len());
    points
}

/// Opens a store after a crash; nothing in it is damaged, and nothing is left in `staging/`.
fn open(root: &Path, at: &str) -> Store {
    let store = Store::open(root).unwrap_or_else(|e| panic!("{at}: {e}"));
    let report = store.verify(&Scope::All, &crate::Meter::default()).unwrap();
    assert_eq!(report.damage, [], "{at}");
    assert!(store.staged().unwrap().is_empty(), "{at}");
    store
}

/// The seed of the disk of an image.
fn seed(store: &Store, at: &str) -> Option<u8> {
    match store.image(&name(IMAGE)) {
        Err(crate::OpenError::NotFound { .. }) => None,
        image => {
            let content = bytes(&image.unwrap_or_else(|e| panic!("{at}: {e}")).disk);
            Some(*[1, 2].iter().find(|seed| disk(**seed) == content).expect(at))
        }
    }
}

#[test]
fn an_image_is_the_old_or_the_new_after_each_crash() {
    type Run = fn(&Store);
    let put: Run = |store| drop(put_image(store, IMAGE, 2).unwrap());
    let remove: Run = |store| store.remove_image(&name(IMAGE)).unwrap();
    for (before, run, after) in
        [(None, put, Some(2)), (Some(1), put, Some(2)), (Some(1), remove, None)]
    {
        let root = folder();
        let store = Store::open(root.path()).unwrap();
        if let Some(seed) = before {
            put_image(&store, IMAGE, seed).unwrap();
        }
        let run = || {
            run(&store);
            acknowledge();
        };
        let points = each_crash(root.path(), Loss::Unsynced, run, |crashed, acknowledged, at| {
            let now = seed(&open(crashed, at), at);
            assert!(now == after || acknowledged == 0 && now == before, "{at}: {now:?}");
        });
        assert!(points > 6, "{points}");
    }
}

fn put_kernel(store: &Store, fill: u8) -> Result<(), crate::PutError> {
    let both = vec![fill; 9000];
    let spec = KernelSpec {
        release: format!("6.{fill}"),
        vmlinux_bytes: 5000,
        initrd_bytes: 4000,
        digest: Digest::of(&both),
        modules: None,
    };
    let body = zstd::encode_all(&both[..], 1).unwrap();
    store.put_kernel(&name("k"), &spec, &mut &body[..]).map(drop)
}

/// What the kernel is filled with.
fn filled(store: &Store, at: &str) -> Option<u8> {
    match store.kernel(&name("k")) {
        Err(crate::OpenError::NotFound { .. }) => None,
        kernel => {
            let kernel = kernel.unwrap_or_else(|e| panic!("{at}: {e}"));
            let all = [bytes(&kernel.vmlinux), bytes(&kernel.initrd)].concat();
            assert!(all.len() == 9000 && all.iter().all(|byte| *byte == all[0]), "{at}");
            assert_eq!(kernel.manifest.release, format!("6.{}", all[0]), "{at}");
            Some(all[0])
        }
    }
}

#[test]
fn a_kernel_is_the_old_or_the_new_after_each_crash() {
    type Run = fn(&Store);
    let put: Run = |store| put_kernel(store, 2).unwrap();
    let remove: Run = |store| store.remove_kernel(&name("k")).unwrap();
    for (before, run, after) in
        [(None, put, Some(2)), (Some(1), put, Some(2)), (Some(1), remove, None)]
    {
        let root = folder();
        let store = Store::open(root.path()).unwrap();
        if let Some(fill) = before {
            put_kernel(&store, fill).unwrap();
        }
        let run = || {
            run(&store);
            acknowledge();
        };
        let points = each_crash(root.path(), Loss::Unsynced, run, |crashed, acknowledged, at| {
            let now = filled(&open(crashed, at), at);
            assert!(now == after || acknowledged == 0 && now == before, "{at}: {now:?}");
        });
        assert!(points > 6, "{points}");
    }
}

#[test]
fn a_step_of_putting_a_kernel_that_fails_leaves_the_old_or_the_new() {
    let mut steps = 0;
    for errno in [None, Some(EIO), Some(ENOSPC)] {
        for n in 0.. {
            let root = folder();
            let store = Store::open(root.path()).unwrap();
            put_kernel(&store, 1).unwrap();
            let put = || put_kernel(&store, 2);
            let (result, hit) = match errno {
                None => fault::with_crash_at(n, put),
                Some(errno) => fault::with_errno_at(n, errno, put),
            };
            let at = format!("{errno:?} at step {n}: {result:?}");
            if errno.is_some() {
                assert_eq!(filled(&store, &at), Some(if result.is_ok() { 2 } else { 1 }), "{at}");
                put_kernel(&store, 2).unwrap_or_else(|e| panic!("{at}: and again: {e}"));
            }
            drop(store);
            let now = filled(&open(root.path(), &at), &at);
            let expected = if errno.is_some() || result.is_ok() { &[2][..] } else { &[1, 2] };
            assert!(now.is_some_and(|now| expected.contains(&now)), "{at}: {now:?}");
            if !hit {
                steps += n;
                break;
            }
        }
    }
    assert!(steps > 40, "only {steps} steps");
}

/// The blocks of a VM's disk above its image: the top one of each layer that has it, as [`merge`]
/// reads the maps. Zeroes for blocks that no frozen layer has.
fn content(store: &Store, vm: &Vm, at: &str) -> Vec<u8> {
    let mut all = vec![0; 16 * 4096];
    for layer in &vm.chain {
        let (data, map) = match layer {
            ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => {
                let open = store.open_frozen_layer(layer);
                let open = open.unwrap_or_else(|e| panic!("{at}: {layer:?}: {e}"));
                (bytes(&open.data), bytes(&open.map))
            }
            ChainLayer::Stored(layer) => {
                let open = store.open_layers(std::slice::from_ref(layer), "a VM");
                let open = open.unwrap_or_else(|e| panic!("{at}: {layer:?}: {e}")).remove(0);
                (bytes(&open.data), bytes(&open.map))
            }
        };
        // Empty until the VMM has written it, here outside of what is recorded.
        let map = map.first_chunk().map_or(0, |bits| u16::from_le_bytes(*bits));
        for block in (0..16).filter(|block| map >> block & 1 == 1) {
            let range = block * 4096..(block + 1) * 4096;
            let mut page = data.get(range.start..).unwrap_or_default().to_vec();
            page.resize(4096, 0);
            all[range].copy_from_slice(&page);
        }
    }
    all
}

/// Saves the VM as daemon and VMM do, with nothing in its writable layer, and returns what the
/// store commits.
fn saved(store: &Store, vm: &mut Vm, to: &str) -> crate::SavedSnapshot {
    let mut writer = store.snapshot_writer(&name(to)).unwrap();
    let freeze = writer.freeze(&vm.writable).unwrap();
    writer.state().write_all_at(&[7; 300], 0).unwrap();
    writer.memory().set_len(64 * 4096).unwrap();
    freeze.map.write_all_at(&[0; 2], 0).unwrap();
    drop((freeze.map, freeze.next_data));
    vm.chain.push(freeze.frozen);
    vm.writable = freeze.next;
    writer.saved()
}

/// The chain of a snapshot's disk as that of a VM.
fn stored(manifest: &crate::SnapshotManifest) -> Vec<ChainLayer> {
    manifest.disks[0].layers.iter().copied().map(ChainLayer::Stored).collect()
}

/// The VM's own layers, as its record names them.
fn own(vm: &Vm) -> Vec<VmLayer> {
    let frozen = vm.chain.iter().filter_map(|layer| match layer {
        ChainLayer::Frozen(layer) => Some(*layer),
        ChainLayer::Stored(_) | ChainLayer::Shared(_) => None,
    });
    frozen.chain([vm.writable]).collect()
}

/// What a new daemon does with a VM that it finds by its record, and what a client asks for then.
fn adopt_and_save(root: &Path, recorded: &Vm, expected: &[u8], at: &str) {
    let store = open(root, at);
    let mut vm = recorded.clone();
    let layers = vm.chain.iter().filter_map(|layer| match layer {
        ChainLayer::Stored(layer) => Some(layer.id),
        ChainLayer::Frozen(_) | ChainLayer::Shared(_) => None,
    });
    let layers: Vec<_> = layers.collect();
    let pin = store.pin("a VM", &[vm.image.clone()], &layers, &[]);
    let pin = pin.unwrap_or_else(|e| panic!("{at}: {e}"));
    let left = || {
        let folder = store.root().join("vms").join(vm.id.to_string());
        let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
        let layer = |name: std::ffi::OsString| VmLayer::named(vm.id, name.to_str()?);
        // A file may say that an fsync failed.
        let names = names.filter(|name| !name.to_string_lossy().ends_with(".unsynced"));
        names.map(|name| layer(name).unwrap()).collect::<BTreeSet<_>>()
    };
    store.keep_vm_layers(vm.id, &own(&vm)).unwrap();
    store.gc().unwrap();
    assert_eq!(left(), own(&vm).into_iter().collect(), "{at}");
    assert!(content(&store, &vm, at) == expected, "{at}: the disk has changed");
    // A fork, and a snapshot of the VM that goes on.
    let mut expected = expected.to_vec();
    grow_frozen(&store, &mut vm, 9);
    expected[9 * 4096..10 * 4096].fill(9);
    let saved = saved(&store, &mut vm, "again").commit(&vm.spec(7, None));
    let saved = saved.unwrap_or_else(|e| panic!("{at}: {e}"));
    vm.chain = stored(&saved.manifest);
    assert!(content(&store, &vm, at) == expected, "{at}");
    store.remove_vm_layers(&saved.replaced).unwrap();
    assert!(content(&store, &vm, at) == expected, "{at}");
    drop((pin, saved));
}

/// A VM with frozen layers, each with another block, and the content of its disk.
fn with_frozen(store: &Store, layers: u8) -> (Vm, Vec<u8>) {
    let mut vm = Vm::boot(store);
    for seed in 1..=layers {
        grow_frozen(store, &mut vm, seed);
    }
    let content = content(store, &vm, "before");
    assert_eq!(content.chunks(4096).filter(|c| c[0] != 0).count(), usize::from(layers));
    (vm, content)
}

#[test]
fn a_vm_whose_daemon_is_killed_while_its_layers_are_stored_can_be_saved_again() {
    let root = folder();
    let store = store(root.path());
    let (mut vm, expected) = with_frozen(&store, 2);
    let saved = saved(&store, &mut vm, "s");
    let records = RefCell::new(vec![vm.clone()]);
    let run = || {
        let committed = saved.commit(&vm.spec(7, None)).unwrap();
        records.borrow_mut().push(Vm { chain: stored(&committed.manifest), ..vm.clone() });
        acknowledge();
        store.remove_vm_layers(&committed.replaced).unwrap();
        acknowledge();
    };
    let points = each_crash(root.path(), Loss::Nothing, run, |crashed, acknowledged, at| {
        let records = records.borrow();
        let recorded = &records[acknowledged.min(1)];
        adopt_and_save(crashed, recorded, &expected, at);
        let snapshot = Store::open(crashed).unwrap().open_snapshot(&name("s"));
        match snapshot {
            Err(crate::OpenError::NotFound { .. }) if acknowledged == 0 => {}
            snapshot => {
                let open = snapshot.unwrap_or_else(|e| panic!("{at}: {e}"));
                assert_eq!(bytes(&open.state), [7; 300], "{at}");
            }
        }
    });
    assert!(points > 20, "{points}");
}

#[test]
fn a_vm_whose_daemon_is_killed_while_its_layers_are_merged_keeps_its_disk() {
    let root = folder();
    let store = store(root.path());
    let (vm, expected) = with_frozen(&store, 5);
    let merged = RefCell::new(None);
    let run = || {
        let layers = own(&vm)[..5].to_vec();
        let one = store.merge_vm_layers(vm.id, &layers, 16 * 4096, merge).unwrap().unwrap();
        merged.replace(Some(Vm { chain: vec![ChainLayer::Frozen(one)], ..vm.clone() }));
        acknowledge();
        store.remove_vm_layers(&layers).unwrap();
    };
    let points = each_crash(root.path(), Loss::Nothing, run, |crashed, acknowledged, at| {
        let merged = merged.borrow();
        let recorded = if acknowledged == 0 { &vm } else { merged.as_ref().unwrap() };
        adopt_and_save(crashed, recorded, &expected, at);
    });
    assert!(points > 15, "{points}");
}

#[test]
fn a_vm_whose_daemon_is_killed_while_it_is_frozen_has_a_chain_of_files() {
    let root = folder();
    let store = store(root.path());
    let (vm, expected) = with_frozen(&store, 2);
    let frozen = RefCell::new(None);
    let run = || {
        let mut freezing = store.freezing();
        let freeze = freezing.freeze(&vm.writable).unwrap();
        // Here the VMM freezes the layer.
        let mut chain = vm.chain.clone();
        chain.push(freeze.frozen);
        frozen.replace(Some(Vm { chain, writable: freeze.next, ..vm.clone() }));
        acknowledge();
        freezing.keep();
    };
    let points = each_crash(root.path(), Loss::Nothing, run, |crashed, acknowledged, at| {
        let frozen = frozen.borrow();
        let Some(frozen) = frozen.as_ref().filter(|_| acknowledged > 0) else {
            // The VMM was not asked yet.
            return adopt_and_save(crashed, &vm, &expected, at);
        };
        // The record may be that of before. The VMM knows its files.
        let folder = crashed.join("vms").join(vm.id.to_string());
        let files = own(frozen).into_iter().map(|layer| {
            let meta = std::fs::metadata(folder.join(layer.data_name())).unwrap();
            FileId { dev: meta.dev(), ino: meta.ino() }
        });
        let files: Vec<_> = files.collect();
        let found = open(crashed, at).find_layers(vm.id, 0, &files).unwrap();
        let all: Vec<_> = own(frozen).into_iter().map(ChainLayer::Frozen).map(Some).collect();
        assert_eq!(found, all, "{at}");
        adopt_and_save(crashed, frozen, &expected, at);
    });
    assert!(points >= 2, "{points}");
}

#[test]
fn a_step_of_storing_layers_that_fails_leaves_a_vm_that_can_be_saved_again() {
    let mut steps = 0;
    for errno in [EIO, ENOSPC] {
        for n in 0.. {
            let root = folder();
            let store = store(root.path());
            let (mut vm, expected) = with_frozen(&store, 2);
            let saved = saved(&store, &mut vm, "s");
            let commit = || {
                let committed = saved.commit(&vm.spec(7, None)).ok()?;
                let chain = stored(&committed.manifest);
                // A name that cannot be removed is left to the next daemon.
                let _left = store.remove_vm_layers(&committed.replaced);
                Some(chain)
            };
            let (chain, hit) = fault::with_errno_at(n, errno, commit);
            let at = format!("{errno} at step {n}, stored: {}", chain.is_some());
            let recorded = Vm { chain: chain.unwrap_or_else(|| vm.chain.clone()), ..vm };
            drop(store);
            adopt_and_save(root.path(), &recorded, &expected, &at);
            if !hit {
                steps += n;
                break;
            }
        }
    }
    assert!(steps > 60, "only {steps} steps");
}
