use crate::blob::fault;
use crate::fixture::{Vm, assert_is, name, store};
use crate::{CommitError, Store, VmLayer};
use dayfly_units::error::chain;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;

const EIO: i32 = 5;

/// A VM whose snapshot failed because the disk did not write its layer's file `failing`, and the
/// layer.
fn failed(store: &Store, failing: &str) -> (Vm, VmLayer) {
    for step in 0.. {
        let mut vm = Vm::boot(store);
        vm.write(store, 3);
        let layer = vm.writable;
        let commit = || vm.commit(store, "s", 3);
        let (result, steps) = fault::with_trace_and_errno_at(step, EIO, commit);
        let last = steps.get(step as usize).expect("the step exists");
        if last.0 == "syncing" && last.1.ends_with(format!("layer0/{failing}")) {
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with("syncing"), "{error}");
            return (vm, layer);
        }
        if result.is_ok() {
            store.remove_snapshot(&name("s")).unwrap();
        }
        store.remove_vm(vm.id).unwrap();
    }
    unreachable!()
}

fn files(store: &Store, layer: &VmLayer) -> [PathBuf; 2] {
    let folder = store.root().join("vms").join(layer.vm.to_string());
    [layer.data_name(), layer.map_name()].map(|name| folder.join(name))
}

fn inode(path: &PathBuf) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// The VM's next snapshot, which has its layers of before.
fn again(store: &Store, vm: &mut Vm) -> Result<crate::Committed, CommitError> {
    vm.write(store, 3);
    vm.snapshot(store, "s", 3)
}

#[test]
fn a_layer_whose_fsync_failed_is_copied_and_not_believed() {
    for (failing, reopened) in [("data", false), ("data", true), ("map", false), ("map", true)] {
        let root = tempfile::tempdir().unwrap();
        let mut store = store(root.path());
        let (mut vm, layer) = failed(&store, failing);
        if reopened {
            drop(store);
            store = Store::open(root.path()).unwrap();
            store.keep_vm_layers(vm.id, &[layer, vm.writable]).unwrap();
        }
        let before = files(&store, &layer).map(|path| inode(&path));
        let committed = again(&store, &mut vm).unwrap();
        let stored = committed.manifest.layer_ids()[0].to_string();
        let folder = root.path().join("layers").join(stored);
        for (file, before) in ["data", "map"].iter().zip(before) {
            assert_ne!(inode(&folder.join(file)), before, "{failing}: {file} is a new file");
        }
        assert_is(&store, "s", 3);
        // What was remembered is forgotten: the next one is not copied.
        let names = fs::read_dir(root.path().join("vms").join(vm.id.to_string())).unwrap();
        let names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert!(!names.iter().any(|name| name.ends_with("unsynced")), "{names:?}");
    }
}

#[test]
fn what_the_page_cache_dropped_after_a_failed_fsync_is_never_stored() {
    for reopened in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let mut store = store(root.path());
        let (mut vm, layer) = failed(&store, "data");
        if reopened {
            drop(store);
            store = Store::open(root.path()).unwrap();
        }
        // The kernel reads from the disk what it never wrote.
        let [data, _] = files(&store, &layer);
        fs::set_permissions(&data, fs::Permissions::from_mode(0o600)).unwrap();
        let file = fs::File::options().write(true).open(&data).unwrap();
        file.write_all_at(&[0; 4096], 3 * 4096).unwrap();
        drop(file);
        for _ in 0..2 {
            let error = chain(&again(&store, &mut vm.clone()).unwrap_err());
            assert!(error.contains("digest of the data: expected "), "{error}");
            assert!(error.contains("the disk failed to write it"), "{error}");
        }
        assert!(store.snapshot(&name("s")).is_err());
        vm.chain.clear();
        store.remove_vm(vm.id).unwrap();
        assert!(!data.exists());
    }
}
