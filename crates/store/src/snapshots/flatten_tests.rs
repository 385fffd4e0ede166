#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::*;
use crate::fixture::{IMAGE, Vm, disk as image, name, store};
use crate::fixture_pages::{PAGE, bytes, merge};
use crate::memory::Kind;
use crate::{ChainLayer, Known, OpenSnapshot, PagedSpec, SnapshotSpec, Store};
use dayfly_units::VmId;
use dayfly_vmm::disk::{Disk, DiskSpec, IoList, LayerSpec};
use proptest::prelude::*;

const BLOCKS: usize = 16;

proptest! {
    #[test]
    fn a_plan_keeps_every_layer_in_order_and_leaves_as_many_as_may_be(
        sizes in proptest::collection::vec(0..u64::MAX, 0..80),
        most in 0..10_usize,
    ) {
        let groups = plan(&sizes, most);
        prop_assert!(groups.len() <= most.max(1) && groups.is_empty() == sizes.is_empty());
        prop_assert!(sizes.len() > most || groups.len() == sizes.len());
        let all: Vec<usize> = groups.into_iter().flatten().collect();
        prop_assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
    }
}

#[test]
fn a_large_layer_is_not_copied_for_a_small_one() {
    const MIB: u64 = 1 << 20;
    assert_eq!(plan(&[1000 * MIB, MIB, MIB, MIB], 4), [0..1, 1..2, 2..3, 3..4]);
    assert_eq!(plan(&[1000 * MIB, MIB, MIB, MIB, MIB], 4), [0..1, 1..5]);
    assert_eq!(plan(&[MIB, 1000 * MIB, 5 * MIB, MIB, MIB], 4), [0..1, 1..2, 2..3, 3..5]);
    assert!(plan(&[MIB; 64], 4).iter().eq([&(0..64)]));
    // What N snapshots of one VM that writes 1 MiB before each copy in all.
    let (mut sizes, mut copied) = (vec![1000 * MIB], 0);
    for _ in 0..100 {
        sizes.push(MIB);
        let group = |group: Range<usize>| sizes[group].iter().sum::<u64>();
        let groups = plan(&sizes, MOST);
        copied += groups.iter().filter(|g| g.len() > 1).map(|g| group(g.clone())).sum::<u64>();
        sizes = groups.into_iter().map(group).collect();
    }
    assert_eq!(sizes[0], 1000 * MIB, "the bake's layer was copied");
    assert_eq!(copied / MIB, 470, "copied");
}

#[test]
fn hints_follow_their_blocks() {
    let moves = Moves(vec![vec![0, 1, 1, 2]]);
    let hint = |disk, layer| BlockHint { disk, layer, block: 7 };
    for (was, now) in [(0, 0), (1, 1), (2, 1), (3, 2), (9, 9)] {
        assert_eq!(moves.hint((5, hint(0, was))), (5, hint(0, now)));
    }
    assert_eq!(moves.hint((5, hint(1, 3))), (5, hint(1, 3)));
}

/// A VM and its disk, as a VMM has it.
struct Machine {
    vm: Vm,
    disk: Disk,
    /// What the guest sees.
    content: Vec<u8>,
}

fn opened(open: &OpenSnapshot, writable: Option<File>) -> Disk {
    let file = &open.disks[0];
    let layer = |l: &crate::OpenLayer| LayerSpec {
        data: l.data.try_clone().unwrap().into(),
        map: l.map.try_clone().unwrap().into(),
    };
    Disk::open(DiskSpec {
        size_bytes: file.size_bytes,
        base: file.base.try_clone().unwrap().into(),
        layers: file.layers.iter().map(layer).collect(),
        writable: writable.map(Into::into),
    })
    .unwrap()
}

fn read(disk: &Disk) -> Vec<u8> {
    let mut all = vec![0; BLOCKS * PAGE];
    disk.read(0, &IoList::of(&mut all)).unwrap();
    all
}

impl Machine {
    fn boot(store: &Store) -> Self {
        let vm = Vm::boot(store);
        let base = store.image(&name(IMAGE)).unwrap().disk.into();
        let writable = Some(store.open_vm_layer(&vm.writable, true).unwrap().into());
        let size_bytes = (BLOCKS * PAGE) as u64;
        let disk = Disk::open(DiskSpec { size_bytes, base, layers: Vec::new(), writable }).unwrap();
        Self { vm, disk, content: image(1) }
    }

    fn clone_of(store: &Store, from: &str, content: &[u8]) -> Self {
        let vm = Vm::clone_of(store, from);
        let writable = store.open_vm_layer(&vm.writable, true).unwrap();
        let disk = opened(&store.open_snapshot(&name(from)).unwrap(), Some(writable));
        Self { vm, disk, content: content.to_owned() }
    }

    fn write(&mut self, random: &mut u64) {
        for _ in 0..3 {
            *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
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

    /// Saves and commits; RAM is what the disk holds, with hints from every layer there is. With `told`, the VMM learns of the new chain.
    fn snapshot(&mut self, store: &Store, to: &str, told: bool) {
        let mut writer = store.snapshot_writer(&name(to)).unwrap();
        let freeze = writer.freeze(&self.vm.writable).unwrap();
        self.disk.prepare_freeze(freeze.map.as_fd(), freeze.next_data.as_fd()).unwrap();
        self.disk.freeze(freeze.next_data.into());
        writer.state().write_all_at(&[1; 300], 0).unwrap();
        crate::sparse::copy(&mut self.content.as_slice(), writer.memory(), self.content.len() as u64)
            .unwrap();
        self.vm.chain.push(freeze.frozen);
        let top = store.open_vm_layer(&self.vm.writable, false).unwrap();
        self.vm.writable = freeze.next;
        let layers = self.disk.frozen_layers() as u8;
        let blocks = (0..BLOCKS as u32).flat_map(|block| (0..=layers).map(move |layer| (block, layer)));
        let hints: Vec<_> =
            blocks.map(|(block, layer)| (block, BlockHint { disk: 0, layer, block })).collect();
        let tenant = name("one");
        let pages = PagedSpec { tenant: &tenant, known: Known { hints: &hints, ..Known::default() } };
        let spec = SnapshotSpec { memory_bytes: self.content.len() as u64, ..self.vm.spec(1, None) };
        let committed = writer.saved().merging(merge).commit_paged(&spec, &pages).unwrap();
        let stored = &committed.manifest.disks[0].layers;
        assert!(stored.len() <= MOST);
        assert!(self.vm.chain.len() > MOST || stored.len() == self.vm.chain.len());
        if told && stored.len() < self.vm.chain.len() {
            let open = store.open_layers(stored, "a test").unwrap().into_iter();
            let layers = open.map(|l| LayerSpec { data: l.data.into(), map: l.map.into() }).collect();
            self.disk.rebase(top.as_fd(), layers).unwrap();
            assert_eq!(self.disk.frozen_layers(), stored.len());
        }
        self.vm.chain = stored.iter().copied().map(ChainLayer::Stored).collect();
        assert_eq!(read(&self.disk), self.content);
    }
}

/// That a clone of the snapshot sees this disk, and this RAM.
fn assert_holds(store: &Store, snapshot: &str, content: &[u8]) {
    let open = store.open_snapshot(&name(snapshot)).unwrap();
    assert!(open.disks[0].layers.len() <= MOST);
    assert!(read(&opened(&open, None)) == content, "{snapshot}: the disk");
    assert!(bytes(&open.memory) == content, "{snapshot}: RAM");
    let pages = store.open_snapshot_pages(&name("one"), &name(snapshot)).unwrap();
    // All of its RAM is on its disk, wherever that is by now.
    assert!(!pages.table.runs().iter().any(|run| matches!(run.kind, Kind::Page { .. })), "{snapshot}");
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
        // A VMM that does not learn of it for a while goes on all the same.
        machine.snapshot(&store, &to, n % 30 > 20);
        all.push((to, machine.content.clone()));
    }
    for (to, content) in &all {
        assert_holds(&store, to, content);
    }
    // A chain of clones, from one in the middle.
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
    // Layers go when the last that stands on them goes, and no other does.
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
    assert_eq!(std::fs::read_dir(root.path().join("layers")).unwrap().count(), 0, "layers are left");
}

#[test]
fn a_map_that_nobody_can_read_leaves_the_chain_as_long_as_it_is() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    let lies: [Merge; 4] = [
        |_| Err("no".into()),
        |_| Ok(Merged { map: vec![1], runs: Box::new(std::iter::once((9, 0..4096))) }),
        |_| Ok(Merged { map: vec![1], runs: Box::new([(0, 4096..8192), (0, 0..4096)].into_iter()) }),
        |_| Ok(Merged { map: vec![1], runs: Box::new(std::iter::once((0, 4096..u64::MAX))) }),
    ];
    for n in 0..8_u8 {
        vm.write(&store, n + 1);
        let mut writer = store.snapshot_writer(&name(&format!("s{n}"))).unwrap();
        let freeze = writer.freeze(&vm.writable).unwrap();
        freeze.map.write_all_at(&[n; 200], 0).unwrap();
        vm.chain.push(freeze.frozen);
        vm.writable = freeze.next;
        let saved = writer.saved().merging(lies[usize::from(n) % 4]);
        let committed = saved.commit(&vm.spec(n, None)).unwrap();
        let layers = &committed.manifest.disks[0].layers;
        assert_eq!(layers.len(), usize::from(n) + 1);
        vm.chain = layers.iter().copied().map(ChainLayer::Stored).collect();
        assert!(store.staged().unwrap().is_empty());
        store.open_snapshot(&name(&format!("s{n}"))).unwrap();
    }
}

impl Machine {
    /// Freezes as a fork does, and keeps the layers: no snapshot is made.
    fn freeze(&mut self, store: &Store) {
        let mut freezing = store.freezing();
        let freeze = freezing.freeze(&self.vm.writable).unwrap();
        self.disk.prepare_freeze(freeze.map.as_fd(), freeze.next_data.as_fd()).unwrap();
        self.disk.freeze(freeze.next_data.into());
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

/// The disk that stands on layers that VMs have frozen.
fn standing_on(store: &Store, layers: &[VmLayer]) -> Disk {
    let layer = |layer: &VmLayer| {
        let (data, map) = store.open_frozen_layer(layer).unwrap();
        LayerSpec { data: data.into(), map: map.into() }
    };
    let base = store.image(&name(IMAGE)).unwrap().disk.into();
    let layers = layers.iter().map(layer).collect();
    Disk::open(DiskSpec { size_bytes: (BLOCKS * PAGE) as u64, base, layers, writable: None }).unwrap()
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
        let borrowed = frozen(&parent.vm.chain);
        let pin = store.pin("a child", &[], &[], &borrowed).unwrap();
        let takes = || store.vm_disk_bytes(child, &borrowed).unwrap();
        assert_eq!(takes(), 0, "both stand on them");
        children.push((child, borrowed.clone(), parent.content.clone(), pin));
        if parent.vm.chain.len() > MOST {
            let old = frozen(&parent.vm.chain);
            let size = (BLOCKS * PAGE) as u64;
            let one = store.merge_vm_layers(parent.vm.id, &old, size, merge).unwrap().unwrap();
            assert_eq!(read(&standing_on(&store, &[one])), parent.content);
            old.iter().for_each(|layer| store.remove_vm_layer(layer).unwrap());
            parent.vm.chain = vec![ChainLayer::Frozen(one)];
            assert_ne!(one.number, parent.vm.writable.number);
            // Of the one that was frozen last only this child knows.
            assert!(takes() >= 4096);
        }
    }
    // A child's own: what it borrowed and what it froze are one, and the former stays for the others.
    let (child, borrowed, content, _pin) = children.last().unwrap();
    store.create_vm_layer(*child, 0).unwrap();
    let size = (BLOCKS * PAGE) as u64;
    let one = store.merge_vm_layers(*child, borrowed, size, merge).unwrap().unwrap();
    assert_eq!((one.vm, one.number), (*child, 1));
    assert_eq!(read(&standing_on(&store, &[one])), *content);
    store.remove_vm(*child).unwrap();
    store.remove_vm(parent.vm.id).unwrap();
    assert_eq!(store.held_vms(), [parent.vm.id]);
    for (child, layers, content, _pin) in children {
        assert_eq!(read(&standing_on(&store, &layers)), content, "{child}");
    }
    assert_eq!((store.held_vms(), store.vm_folders().unwrap()), (vec![], vec![]));
}

#[test]
fn layers_that_cannot_be_merged_stay_and_nothing_else_does() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut parent = Machine::boot(&store);
    let mut random = 3;
    for _ in 0..3 {
        parent.write(&mut random);
        parent.freeze(&store);
    }
    let layers = frozen(&parent.vm.chain);
    let size = (BLOCKS * PAGE) as u64;
    let files = || {
        let folder = root.path().join(format!("vms/{}", parent.vm.id));
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = files();
    let no = store.merge_vm_layers(parent.vm.id, &layers, size, |_| Err("no".into())).unwrap_err();
    assert!(matches!(no, FlattenError::Maps(_)), "{no}");
    let short = store.merge_vm_layers(parent.vm.id, &layers, 4096, merge).unwrap_err();
    assert!(matches!(short, FlattenError::Run { end: 4096, .. }), "{short}");
    assert_eq!(store.merge_vm_layers(parent.vm.id, &[], size, merge).unwrap(), None);
    let gone = VmLayer { number: 77, ..layers[0] };
    let with_gone = store.merge_vm_layers(parent.vm.id, &[layers[0], gone], size, merge);
    assert!(matches!(with_gone, Err(FlattenError::Io(_))));
    let missing = store.pin("a child", &[], &[], &[layers[0], gone]);
    assert!(matches!(missing, Err(crate::PinError::Damage(crate::Damage::Missing { .. }))));
    assert_eq!(store.held_vms(), [], "nothing is held");
    assert_eq!(files(), before);
    assert_eq!(read(&standing_on(&store, &layers)), parent.content);
}
