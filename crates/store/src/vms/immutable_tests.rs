//! A VMM that its guest took over is emulated by what it may keep of a layer: a writable descriptor
//! or a shared mapping.

use crate::fixture::{Vm, assert_is, bake, name, reopen, store};
use crate::fixture_pages::{bytes, grow_frozen};
use crate::integrity::scrub::Scope;
use crate::{FrozenLayer, Meter, Store, VmLayer};
use dayfly_sys::writers::{Writers, writers};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

/// What a process keeps of a file that it could write to.
enum Kept {
    Descriptor(File),
    Mapping(*mut std::ffi::c_void, usize),
}

impl Kept {
    fn descriptor(file: File) -> Self {
        Self::Descriptor(file)
    }

    fn mapping(file: File) -> Self {
        let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which only `self` uses.
        let at =
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) };
        Self::Mapping(at.unwrap(), bytes)
    }

    /// Overwrites the first bytes at `at`.
    fn attack(&self, at: usize) {
        match self {
            Self::Descriptor(file) => file.write_all_at(&[0xa5; 100], at as u64).unwrap(),
            Self::Mapping(address, bytes) => {
                assert!(at + 100 <= *bytes);
                // SAFETY: within the mapping, to which no reference exists.
                unsafe { address.byte_add(at).cast::<u8>().write_bytes(0xa5, 100) };
            }
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Self::Mapping(at, bytes) = *self {
            // SAFETY: the mapping of `mapping`, to which no reference exists.
            unsafe { munmap(at, bytes) }.unwrap();
        }
    }
}

type Keep = fn(File) -> Kept;

const WAYS: [Keep; 2] = [Kept::descriptor, Kept::mapping];

fn writable(store: &Store, layer: &VmLayer) -> File {
    store.open_vm_layer(layer, true).unwrap()
}

fn contents(layer: &FrozenLayer) -> (Vec<u8>, Vec<u8>) {
    (bytes(&layer.data), bytes(&layer.map))
}

#[test]
fn a_layer_that_its_vmm_can_write_is_shared_as_a_copy() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    for keep in WAYS {
        let mut vm = Vm::boot(&store);
        let layer = grow_frozen(&store, &mut vm, 3);
        let honest = store.open_frozen_layer(&layer).unwrap();
        assert!(honest.replaced.is_none(), "a layer without a writer was copied");
        let before = contents(&honest);

        let kept = keep(writable(&store, &layer));
        let shared = store.open_frozen_layer(&layer).unwrap();
        let replaced = shared.replaced.as_ref().unwrap();
        assert!(replaced.has_writer().unwrap());
        assert_eq!(replaced.layer, layer);
        kept.attack(3 * 4096);
        assert_eq!(bytes(&replaced.data)[3 * 4096], 0xa5, "the attack hit nothing");
        assert_eq!(contents(&shared), before);
        assert_eq!(writers(&shared.data).unwrap(), Writers::None);
        assert_eq!(writers(&shared.map).unwrap(), Writers::None);
        let (copy, original) = (shared.data.metadata().unwrap(), honest.data.metadata().unwrap());
        assert_ne!(copy.ino(), original.ino());
        assert!(copy.blocks() <= original.blocks(), "holes were filled");

        // A later clone has the same copy.
        let later = store.open_frozen_layer(&layer).unwrap();
        assert!(later.replaced.is_none());
        assert_eq!(later.data.metadata().unwrap().ino(), copy.ino());
        assert_eq!(contents(&later), before);
        drop(kept);
        assert!(!replaced.has_writer().unwrap());
        store.remove_vm(vm.id).unwrap();
    }
    assert_eq!(store.staged().unwrap(), [] as [std::path::PathBuf; 0]);
}

#[test]
fn a_layer_whose_map_its_vmm_can_write_is_shared_as_a_copy() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    let layer = grow_frozen(&store, &mut vm, 3);
    let before = contents(&store.open_frozen_layer(&layer).unwrap());
    let map = root.path().join(format!("vms/{}/{}", vm.id, layer.map_name()));
    let kept = File::options().write(true).open(map).unwrap();
    let shared = store.open_frozen_layer(&layer).unwrap();
    assert!(shared.replaced.as_ref().unwrap().has_writer().unwrap());
    kept.write_all_at(&[0xa5], 0).unwrap();
    assert_eq!(contents(&shared), before);
    assert_eq!(contents(&store.open_frozen_layer(&layer).unwrap()), before);
}

#[test]
fn a_vmm_that_keeps_its_layer_changes_no_published_snapshot() {
    for keep in WAYS {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let mut vm = Vm::boot(&store);
        vm.write(&store, 5);
        let kept = keep(writable(&store, &vm.writable));
        vm.snapshot(&store, "s", 5).unwrap();
        let running = store.open_snapshot(&name("s")).unwrap();
        kept.attack(3 * 4096);
        assert_is(&store, "s", 5);
        assert_eq!(bytes(&running.disks[0].layers[0].data)[3 * 4096], 5, "a running clone");
        let report = store.verify(&Scope::All, &Meter::default()).unwrap();
        assert_eq!(report.damage.len(), 0, "{:?}", report.damage);
        // Nor after a restart, which hashes everything again.
        drop((running, store));
        assert_is(&reopen(root.path()), "s", 5);
    }
}

#[test]
fn a_state_that_its_vmm_can_write_is_published_as_it_was() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    vm.write(&store, 6);
    let mut writer = store.snapshot_writer(&name("s")).unwrap();
    let freeze = writer.freeze(&vm.writable).unwrap();
    let (state, memory) = (writer.state().try_clone().unwrap(), writer.memory());
    crate::fixture::save(&state, memory, &freeze.map, 6);
    drop((freeze.map, freeze.next_data));
    vm.chain.push(freeze.frozen);
    let prepared = writer.saved().prepare(&vm.spec(6, None), &[]).unwrap();
    state.write_all_at(&[0xa5; 300], 0).unwrap();
    let clone = prepared.open().unwrap();
    assert_eq!(bytes(&clone.state), [6; 300]);
    prepared.commit_paged(&crate::PagedSpec::of(&name("one"))).unwrap();
    state.set_len(1 << 40).unwrap();
    assert_eq!(bytes(&store.open_snapshot(&name("s")).unwrap().state), [6; 300]);
    assert_eq!(writers(&store.open_snapshot(&name("s")).unwrap().state).unwrap(), Writers::None);
}

#[test]
fn a_state_without_end_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let vm = Vm::boot(&store);
    let writer = store.snapshot_writer(&name("s")).unwrap();
    writer.state().set_len(1 << 40).unwrap();
    let error = writer.saved().prepare(&vm.spec(1, None), &[]).unwrap_err().to_string();
    assert!(error.contains("bytes of the state") && error.contains("1099511627776"), "{error}");
}

#[test]
fn no_file_of_a_published_snapshot_has_a_writer() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "s", 7).unwrap();
    let open = store.open_snapshot(&name("s")).unwrap();
    let layer = &open.disks[0].layers[0];
    for file in [&open.state, &open.disks[0].base, &layer.data, &layer.map] {
        assert_eq!(writers(file).unwrap(), Writers::None);
    }
}
