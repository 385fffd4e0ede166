//! Merges of layers that a VMM's disk wrote, through the store: clones read what the VM wrote.

#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::merge;
use dayfly_store::{
    BlockHint, ChainLayer, Digest, FileTree, ImageConfig, ImageRef, ImageSpec, KernelRef, Kind,
    Known, MOST_LAYERS, OpenDisk, OpenLayer, OpenSnapshot, PagedSpec, SnapshotSpec, Store, VmLayer,
    sparse,
};
use dayfly_units::{CpuModel, Name, VmId};
use dayfly_vmm::disk::{Disk, DiskSpec, IoList, LayerSpec, TreeSpec};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

const IMAGE: &str = "debian";
const PAGE: usize = 4096;
const BLOCKS: usize = 16;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Bytes of the image's disk.
fn image() -> Vec<u8> {
    let mut bytes = vec![0; BLOCKS * PAGE];
    bytes[PAGE..2 * PAGE].fill(1);
    bytes[5 * PAGE..6 * PAGE].fill(2);
    bytes
}

/// A store that contains [`IMAGE`].
fn store(root: &Path) -> Store {
    let store = Store::open(root).unwrap();
    let bytes = image();
    let file = tempfile::tempfile().unwrap();
    let size_bytes = bytes.len() as u64;
    let digest = sparse::copy(&mut bytes.as_slice(), &file, size_bytes).unwrap().digest;
    let (source, config) = ("a test".to_owned(), ImageConfig::default());
    let spec = ImageSpec { size_bytes, digest, source, config };
    store.put_image_raw(&name(IMAGE), &spec, &mut bytes.as_slice()).unwrap();
    store
}

fn bytes(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A daemon's record of a VM with one disk.
struct Vm {
    id: VmId,
    image: ImageRef,
    chain: Vec<ChainLayer>,
    writable: VmLayer,
}

impl Vm {
    /// A VM whose disk is the image, stored layers, and an empty layer.
    fn new(store: &Store, chain: Vec<ChainLayer>) -> Self {
        let id = VmId::random();
        let image = store.image(&name(IMAGE)).unwrap().reference();
        Self { id, image, chain, writable: store.create_vm_layer(id, 0).unwrap().0 }
    }

    fn spec(&self, memory_bytes: u64) -> SnapshotSpec {
        let digest = Digest([7; 32]);
        SnapshotSpec {
            parent: None,
            ancestors: Vec::new(),
            kernel: KernelRef { name: name("6.12"), release: "6.12.0".to_owned(), digest },
            vcpus: 1,
            max_vcpus: 0,
            cpu_model: CpuModel::Host,
            nets: 0,
            memory_bytes,
            agent_version: "0.1".to_owned(),
            config: ImageConfig::default(),
            labels: std::collections::BTreeMap::new(),
            egress: None,
            disks: vec![dayfly_store::DiskSpec {
                image: self.image.clone(),
                size_bytes: (BLOCKS * PAGE) as u64,
                writable: true,
                layers: self.chain.clone(),
            }],
        }
    }
}

/// A VM and the disk that its VMM has.
struct Machine {
    vm: Vm,
    disk: Disk,
    /// The disk's content as the guest sees it.
    content: Vec<u8>,
}

fn opened(open: &OpenSnapshot, writable: Option<File>) -> Disk {
    let file = &open.disks[0];
    let layer = |l: &OpenLayer| LayerSpec {
        data: l.data.try_clone().unwrap().into(),
        map: l.map.try_clone().unwrap().into(),
    };
    Disk::open(DiskSpec {
        size_bytes: file.size_bytes,
        base: file.base.try_clone().unwrap().into(),
        layers: file.layers.iter().map(layer).collect(),
        writable: writable.map(Into::into),
        trees: trees(file),
    })
    .unwrap()
}

/// The hash trees of a disk's files.
fn trees(disk: &OpenDisk) -> Vec<Option<TreeSpec>> {
    let tree =
        |tree: &FileTree| TreeSpec { file: tree.file.try_clone().unwrap().into(), root: tree.root };
    let trees = std::iter::once(&disk.tree).chain(disk.layers.iter().map(|layer| &layer.tree));
    trees.map(|of| of.as_ref().map(tree)).collect()
}

fn read(disk: &Disk) -> Vec<u8> {
    let mut all = vec![0; BLOCKS * PAGE];
    disk.read(0, &IoList::of(&mut all)).unwrap();
    all
}

impl Machine {
    fn boot(store: &Store) -> Self {
        let vm = Vm::new(store, Vec::new());
        let base = store.image(&name(IMAGE)).unwrap().disk.into();
        let writable = Some(store.open_vm_layer(&vm.writable, true).unwrap().into());
        let size_bytes = (BLOCKS * PAGE) as u64;
        let (layers, trees) = (Vec::new(), Vec::new());
        let disk = Disk::open(DiskSpec { size_bytes, base, layers, writable, trees }).unwrap();
        Self { vm, disk, content: image() }
    }

    fn clone_of(store: &Store, from: &str, content: &[u8]) -> Self {
        let open = store.open_snapshot(&name(from)).unwrap();
        let chain = open.manifest.disks[0].layers.iter().copied().map(ChainLayer::Stored);
        let vm = Vm::new(store, chain.collect());
        let writable = store.open_vm_layer(&vm.writable, true).unwrap();
        let disk = opened(&open, Some(writable));
        Self { vm, disk, content: content.to_owned() }
    }

    fn write(&mut self, random: &mut u64) {
        for _ in 0..3 {
            *random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (block, fill) = ((*random >> 33) as usize % BLOCKS, (*random >> 60) as u8);
            let at = block * PAGE;
            if fill == 0 {
                self.disk.discard(at as u64, PAGE as u64).unwrap();
                self.content[at..at + PAGE].fill(0);
            } else {
                let mut bytes = [(*random >> 40) as u8; PAGE];
                self.content[at..at + PAGE].copy_from_slice(&bytes);
                self.disk.write(at as u64, &IoList::of(&mut bytes)).unwrap();
            }
        }
    }

    /// Saves and commits. RAM equals the disk, with hints from every layer. With `rebase`, the
    /// VMM gets the new chain.
    fn snapshot(&mut self, store: &Store, to: &str, rebase: bool) {
        let mut writer = store.snapshot_writer(&name(to)).unwrap();
        let freeze = writer.freeze(&self.vm.writable).unwrap();
        self.disk.prepare_freeze(freeze.map.as_fd(), freeze.next_data.as_fd()).unwrap();
        self.disk.freeze(freeze.next_data.into());
        drop((self.disk.keep_read_only(freeze.read_only.into()), freeze.map));
        writer.state().write_all_at(&[1; 300], 0).unwrap();
        sparse::copy(&mut self.content.as_slice(), writer.memory(), self.content.len() as u64)
            .unwrap();
        self.vm.chain.push(freeze.frozen);
        let top = store.open_vm_layer(&self.vm.writable, false).unwrap();
        self.vm.writable = freeze.next;
        let layers = self.disk.frozen_layers() as u8;
        let blocks =
            (0..BLOCKS as u32).flat_map(|block| (0..=layers).map(move |layer| (block, layer)));
        let one = name("one");
        let hints: Vec<_> =
            blocks.map(|(block, layer)| (block, BlockHint { disk: 0, layer, block })).collect();
        let known = Known { hints: &hints, ..Known::default() };
        let pages = PagedSpec { known, ..PagedSpec::of(&one) };
        let spec = self.vm.spec(self.content.len() as u64);
        let committed = writer.saved().merging(merge).commit_paged(&spec, &pages).unwrap();
        let stored = &committed.manifest.disks[0].layers;
        assert!(stored.len() <= MOST_LAYERS);
        assert!(self.vm.chain.len() > MOST_LAYERS || stored.len() == self.vm.chain.len());
        if rebase && stored.len() < self.vm.chain.len() {
            let open = store.open_layers(stored, "a test").unwrap().into_iter();
            let layers =
                open.map(|l| LayerSpec { data: l.data.into(), map: l.map.into() }).collect();
            self.disk.rebase(top.as_fd(), layers).unwrap();
            assert_eq!(self.disk.frozen_layers(), stored.len());
        }
        self.vm.chain = stored.iter().copied().map(ChainLayer::Stored).collect();
        assert_eq!(read(&self.disk), self.content);
    }
}

/// Asserts that a clone of the snapshot sees this disk and this RAM.
fn assert_holds(store: &Store, snapshot: &str, content: &[u8]) {
    let open = store.open_snapshot(&name(snapshot)).unwrap();
    assert!(open.disks[0].layers.len() <= MOST_LAYERS);
    assert!(read(&opened(&open, None)) == content, "{snapshot}: the disk");
    assert!(bytes(&open.memory) == content, "{snapshot}: RAM");
    let pages = store.open_snapshot_pages(&name("one"), &name(snapshot)).unwrap();
    // All of RAM is on the disk, in whichever layer.
    assert!(
        !pages.table.runs().iter().any(|run| matches!(run.kind, Kind::Page { .. })),
        "{snapshot}"
    );
}

#[test]
fn a_vm_may_be_snapshotted_a_hundred_times_in_a_row_and_each_is_what_it_was() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut machine = Machine::boot(&store);
    let (mut random, mut all) = (7, Vec::new());
    for n in 0..100 {
        machine.write(&mut random);
        let to = format!("s{n}");
        // A VMM that does not get the new chain for a while continues on the old one.
        machine.snapshot(&store, &to, n % 30 > 20);
        all.push((to, machine.content.clone()));
    }
    for (to, content) in &all {
        assert_holds(&store, to, content);
    }
    // A chain of clones, starting from a snapshot in the middle.
    let (mut from, mut content) = all[50].clone();
    for n in 0..10 {
        let mut clone = Machine::clone_of(&store, &from, &content);
        clone.write(&mut random);
        (from, content) = (format!("c{n}"), {
            clone.snapshot(&store, &format!("c{n}"), true);
            clone.content.clone()
        });
        store.remove_vm(clone.vm.id).unwrap();
    }
    assert_holds(&store, &from, &content);
    // A layer is removed with the last snapshot that depends on it, and no other layer is.
    for (n, (to, _)) in all.iter().enumerate().filter(|(n, _)| n % 10 != 0) {
        store.remove_snapshot(&name(to)).unwrap();
        if n % 20 == 1 {
            store.gc().unwrap();
        }
    }
    store.remove_vm(machine.vm.id).unwrap();
    store.gc().unwrap();
    drop(store);
    let store = Store::open(root.path()).unwrap();
    all.iter().step_by(10).for_each(|(to, content)| assert_holds(&store, to, content));
    assert_holds(&store, &from, &content);
    for manifest in store.snapshots().unwrap().items {
        store.remove_snapshot(&manifest.name).unwrap();
    }
    store.gc().unwrap();
    assert_eq!(
        std::fs::read_dir(root.path().join("layers")).unwrap().count(),
        0,
        "layers are left"
    );
}

impl Machine {
    /// Freezes layers as a fork does, and keeps them; no snapshot is made.
    fn freeze(&mut self, store: &Store) {
        let mut freezing = store.freezing();
        let freeze = freezing.freeze(&self.vm.writable).unwrap();
        self.disk.prepare_freeze(freeze.map.as_fd(), freeze.next_data.as_fd()).unwrap();
        self.disk.freeze(freeze.next_data.into());
        drop((self.disk.keep_read_only(freeze.read_only.into()), freeze.map));
        freezing.keep();
        self.vm.chain.push(freeze.frozen);
        self.vm.writable = freeze.next;
    }
}

fn frozen(chain: &[ChainLayer]) -> Vec<VmLayer> {
    let frozen = |layer: &ChainLayer| match layer {
        ChainLayer::Frozen(layer) => *layer,
        other => panic!("not frozen by the VM: {other:?}"),
    };
    chain.iter().map(frozen).collect()
}

/// The disk over layers that VMs have frozen.
fn over(store: &Store, layers: &[VmLayer]) -> Disk {
    let layer = |layer: &VmLayer| {
        let open = store.open_frozen_layer(layer).unwrap();
        assert!(open.replaced.is_none(), "copied without need");
        LayerSpec { data: open.data.into(), map: open.map.into() }
    };
    let base = store.image(&name(IMAGE)).unwrap().disk.into();
    let layers = layers.iter().map(layer).collect();
    let (size_bytes, trees) = ((BLOCKS * PAGE) as u64, Vec::new());
    Disk::open(DiskSpec { size_bytes, base, layers, writable: None, trees }).unwrap()
}

#[test]
fn layers_that_a_vm_froze_are_shared_and_merged_and_outlive_it() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut parent = Machine::boot(&store);
    let (mut random, mut children) = (9, Vec::new());
    for _ in 0..30 {
        parent.write(&mut random);
        parent.freeze(&store);
        let child = VmId::random();
        let shared = frozen(&parent.vm.chain);
        let pin = store.pin("a child", &[], &[], &shared).unwrap();
        let takes = || store.vm_disk_bytes(child, &shared).unwrap();
        assert_eq!(takes(), 0, "both depend on them");
        children.push((child, shared.clone(), parent.content.clone(), pin));
        if parent.vm.chain.len() > MOST_LAYERS {
            let old = frozen(&parent.vm.chain);
            let size = (BLOCKS * PAGE) as u64;
            let one = store.merge_vm_layers(parent.vm.id, &old, size, merge).unwrap().unwrap();
            assert_eq!(read(&over(&store, &[one])), parent.content);
            old.iter().for_each(|layer| store.remove_vm_layer(layer).unwrap());
            parent.vm.chain = vec![ChainLayer::Frozen(one)];
            assert_ne!(one.number, parent.vm.writable.number);
            // Only this child depends on the layer that was frozen last.
            assert!(takes() >= 4096);
        }
    }
    // A child merges the layers that it shares with others into one new layer; the shared layers
    // stay.
    let (child, shared, content, _pin) = children.last().unwrap();
    store.create_vm_layer(*child, 0).unwrap();
    let size = (BLOCKS * PAGE) as u64;
    let one = store.merge_vm_layers(*child, shared, size, merge).unwrap().unwrap();
    assert_eq!((one.vm, one.number), (*child, 1));
    assert_eq!(read(&over(&store, &[one])), *content);
    store.remove_vm(*child).unwrap();
    store.remove_vm(parent.vm.id).unwrap();
    assert_eq!(store.shared_layer_owners(), [parent.vm.id]);
    for (child, layers, content, _pin) in children {
        assert_eq!(read(&over(&store, &layers)), content, "{child}");
    }
    assert_eq!((store.shared_layer_owners(), store.vm_folders().unwrap()), (vec![], vec![]));
}
