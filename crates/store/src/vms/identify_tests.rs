use super::*;
use crate::fixture::{Vm, name, store};
use crate::fixture_pages::grow_frozen;
use dayfly_units::VmId;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

fn id(file: &File) -> FileId {
    let meta = file.metadata().unwrap();
    FileId { dev: meta.dev(), ino: meta.ino() }
}

/// The data files of a VM's chain, as its VMM has them open, and their identities.
fn open(store: &Store, vm: &Vm) -> (Vec<File>, Vec<FileId>) {
    let data = |layer: &ChainLayer| match layer {
        ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => {
            store.open_vm_layer(layer, false).unwrap()
        }
        ChainLayer::Stored(layer) => {
            store.open_layers(std::slice::from_ref(layer), "a test").unwrap().remove(0).data
        }
    };
    let mut files: Vec<File> = vm.chain.iter().map(data).collect();
    // For reading only, as a VMM has it once it is frozen. Otherwise a commit copies it.
    files.push(store.open_vm_layer(&vm.writable, false).unwrap());
    let ids = files.iter().map(id).collect();
    (files, ids)
}

/// The chain of a VM with its writable layer on top, as [`Store::find_layers`] finds it.
fn whole(vm: &Vm) -> Vec<Option<ChainLayer>> {
    let writable = ChainLayer::Frozen(vm.writable);
    vm.chain.iter().copied().chain([writable]).map(Some).collect()
}

#[test]
fn a_chain_is_found_by_its_files_wherever_its_layers_are() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut parent = Vm::boot(&store);
    grow_frozen(&store, &mut parent, 1);
    parent.write(&store, 2);
    parent.snapshot(&store, "s", 2).unwrap();
    let frozen = [3, 4].map(|seed| grow_frozen(&store, &mut parent, seed));
    assert!(matches!(
        parent.chain[..],
        [
            ChainLayer::Stored(_),
            ChainLayer::Stored(_),
            ChainLayer::Frozen(_),
            ChainLayer::Frozen(_)
        ]
    ));
    let (_files, ids) = open(&store, &parent);
    assert_eq!(store.find_layers(parent.id, 0, &ids).unwrap(), whole(&parent));
    // A fork of it.
    let mut clone = Vm::boot(&store);
    clone.chain = parent.chain[..2].to_vec();
    clone.chain.extend(frozen.map(ChainLayer::Shared));
    let (_files, ids) = open(&store, &clone);
    assert_eq!(store.find_layers(clone.id, 0, &ids).unwrap(), whole(&clone));
    // In any order, with files that are no layers of this disk.
    let image = id(&store.image(&name("debian")).unwrap().disk);
    let some = [ids[4], image, ids[0], FileId { dev: ids[0].dev, ino: u64::MAX }];
    let all = whole(&clone);
    assert_eq!(store.find_layers(clone.id, 0, &some).unwrap(), [all[4], None, all[0], None]);
    assert_eq!(store.find_layers(clone.id, 1, &ids[2..]).unwrap(), [None; 3]);
    assert_eq!(store.find_layers(VmId::random(), 0, &ids[..2]).unwrap(), all[..2]);
}

#[test]
fn a_layer_is_found_before_and_after_its_vm_releases_it() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    vm.write(&store, 2);
    let own = ChainLayer::Frozen(vm.writable);
    let (files, ids) = open(&store, &vm);
    assert_eq!(store.find_layers(vm.id, 0, &ids).unwrap(), [Some(own)]);
    let committed = vm.commit(&store, "s", 2).unwrap();
    assert_eq!(store.find_layers(vm.id, 0, &ids).unwrap(), [Some(own)], "both are right");
    store.remove_vm_layers(&committed.replaced).unwrap();
    let stored = Some(ChainLayer::Stored(committed.manifest.disks[0].layers[0]));
    assert_eq!(store.find_layers(vm.id, 0, &ids).unwrap(), [stored]);
    // The snapshot is gone, so the digests come from the files.
    store.remove_snapshot(&name("s")).unwrap();
    assert_eq!(store.find_layers(vm.id, 0, &ids).unwrap(), [stored]);
    drop(committed);
    store.gc().unwrap();
    assert_eq!(store.find_layers(vm.id, 0, &ids).unwrap(), [None], "only the VMM has it");
    drop(files);
}
