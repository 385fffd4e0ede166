use crate::fixture::{Vm, assert_is, name, reopen, store};
use crate::fixture_pages::{PAGE, bytes, ram, restored, saved};
use crate::integrity::verify::{Stamp, after_reading};
use crate::{ChainLayer, Kind, Known, OpenSnapshot, PageReader, PagedSpec, Plan, Store};
use dayfly_units::VmId;
use std::cell::RefCell;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::rc::Rc;

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

/// A VM whose snapshot `s` is published, and whose record still names the layer that it froze. Also
/// returns the names that the commit left in the VM's folder.
fn published_but_not_noted(store: &Store) -> (Vm, Vec<PathBuf>, crate::Committed) {
    let mut vm = Vm::boot(store);
    vm.write(store, 3);
    let (recorded, writable) = (ChainLayer::Frozen(vm.writable), vm.writable);
    let committed = vm.commit(store, "s", 3).unwrap();
    vm.chain = vec![recorded];
    assert_eq!(committed.replaced, [writable]);
    let folder = store.root().join("vms").join(vm.id.to_string());
    let names = [writable.data_name(), writable.map_name()].map(|name| folder.join(name)).to_vec();
    (vm, names, committed)
}

#[test]
fn a_vm_whose_record_was_not_written_after_the_commit_can_be_saved_again() {
    let root = tempfile::tempdir().unwrap();
    let mut vm = {
        let store = store(root.path());
        published_but_not_noted(&store).0
        // The daemon is killed here.
    };
    let store = reopen(root.path());
    vm.snapshot(&store, "again", 3).unwrap();
    assert_is(&store, "s", 3);
    let layers = |of: &str| store.snapshot(&name(of)).unwrap().layer_ids();
    assert_eq!(layers("s")[0], layers("again")[0], "the same layer is stored once");
}

#[test]
fn a_new_daemon_removes_the_names_of_layers_that_the_record_has_as_stored() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (vm, names, committed) = published_but_not_noted(&store);
    assert!(names.iter().all(|name| name.exists()));
    // The record was written, and the daemon was killed before it removed the names.
    store.keep_vm_layers(vm.id, &[vm.writable]).unwrap();
    assert!(!names.iter().any(|name| name.exists()));
    store.remove_vm_layers(&committed.replaced).unwrap();
    assert_is(&store, "s", 3);
}

#[test]
fn an_open_snapshot_stays_current_when_the_vm_releases_its_own_layers() {
    type Remove = fn(&Store, &Vm, &crate::Committed);
    let ways: [Remove; 3] = [
        |store, _, committed| store.remove_vm_layers(&committed.replaced).unwrap(),
        |store, vm, _| store.remove_vm(vm.id).unwrap(),
        // A clone has the last reference.
        |store, vm, committed| {
            let pin = store.pin("a clone", &[], &[], &committed.replaced).unwrap();
            store.remove_vm(vm.id).unwrap();
            drop(pin);
        },
    ];
    for remove in ways {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let (vm, names, committed) = published_but_not_noted(&store);
        let open = store.open_snapshot(&name("s")).unwrap();
        let layer = store.layer_path(committed.manifest.layer_ids()[0]);
        let stamp = || Stamp::at(&layer.join("data")).unwrap();
        let before = stamp();
        assert!(open.is_current());
        remove(&store, &vm, &committed);
        assert!(!names.iter().any(|name| name.exists()));
        assert!(stamp() != before, "a name less changes the ctime");
        assert!(open.is_current(), "the next clone opens the snapshot again");
        drop(open);
        // A write is not a removed name.
        let open = store.open_snapshot(&name("s")).unwrap();
        let path = layer.join("data");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&path, std::fs::read(&path).unwrap()).unwrap();
        assert!(!open.is_current(), "it was written to");
    }
}

#[test]
fn other_content_with_the_times_of_before_is_noticed_where_no_tree_proves_it() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (_vm, ..) = published_but_not_noted(&store);
    let state = root.path().join("snapshots/s/state");
    let open = store.open_snapshot(&name("s")).unwrap();
    std::fs::set_permissions(&state, PermissionsExt::from_mode(0o600)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&state).unwrap();
    let before = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 0).unwrap();
    file.set_modified(before).unwrap();
    assert!(!open.is_current(), "the ctime shows the write");
    let error = store.open_snapshot(&name("s")).unwrap_err().to_string();
    assert!(error.contains("state"), "{error}");
}

#[test]
fn a_layer_that_is_stored_already_is_not_hashed_while_creations_wait() {
    let root = tempfile::tempdir().unwrap();
    let mut vm = {
        let store = store(root.path());
        published_but_not_noted(&store).0
    };
    // This process has verified nothing yet, and stores the same layer again.
    let store = reopen(root.path());
    let saved = {
        let mut writer = store.snapshot_writer(&name("again")).unwrap();
        let freeze = writer.freeze(&vm.writable).unwrap();
        vm.chain.push(freeze.frozen);
        writer.saved()
    };
    // What was written in the last two ticks of the kernel's file times is hashed again.
    std::thread::sleep(std::time::Duration::from_millis(30));
    let (free, same) = (Rc::new(RefCell::new(Vec::new())), store.clone());
    let seen = free.clone();
    after_reading::each(move || seen.borrow_mut().push(same.0.publish.try_lock().is_ok()));
    saved.commit(&vm.spec(3, None)).unwrap();
    after_reading::stop();
    let free = free.borrow();
    assert!(free.len() > 4 && free.iter().all(|free| *free), "{free:?}");
}

impl Store {
    fn layer_path(&self, id: crate::LayerId) -> PathBuf {
        self.root().join("layers").join(id.to_string())
    }
}
