use super::*;
use crate::fixture::{Vm, name, store};
use crate::fixture_pages::{bytes, grow_frozen, merge};
use crate::{ChainLayer, FrozenLayer};
use proptest::prelude::*;

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
    // Bytes copied by 100 snapshots of one VM that writes 1 MiB before each.
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

#[test]
fn an_unreadable_map_leaves_the_chain_as_long_as_it_is() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut vm = Vm::boot(&store);
    let lies: [Merge; 4] = [
        |_| Err("no".into()),
        |_| Ok(Merged { map: vec![1], runs: Box::new(std::iter::once((9, 0..4096))) }),
        |_| {
            Ok(Merged { map: vec![1], runs: Box::new([(0, 4096..8192), (0, 0..4096)].into_iter()) })
        },
        |_| Ok(Merged { map: vec![1], runs: Box::new(std::iter::once((0, 4096..u64::MAX))) }),
    ];
    for n in 0..8_u8 {
        vm.write(&store, n + 1);
        let mut writer = store.snapshot_writer(&name(&format!("s{n}"))).unwrap();
        let freeze = writer.freeze(&vm.writable).unwrap();
        freeze.map.write_all_at(&[n; 200], 0).unwrap();
        drop((freeze.map, freeze.next_data));
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

#[test]
fn layers_that_cannot_be_merged_stay_and_nothing_else_does() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut parent = Vm::boot(&store);
    let layers = [1, 2, 3].map(|seed| grow_frozen(&store, &mut parent, seed));
    let contents =
        || layers.each_ref().map(|layer| bytes(&store.open_frozen_layer(layer).unwrap().data));
    let (size, content) = (16 * 4096, contents());
    let files = || {
        let folder = root.path().join(format!("vms/{}", parent.id));
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = files();
    let no = store.merge_vm_layers(parent.id, &layers, size, |_| Err("no".into())).unwrap_err();
    assert!(matches!(no, FlattenError::Maps(_)), "{no}");
    let short = store.merge_vm_layers(parent.id, &layers, 4096, merge).unwrap_err();
    assert!(matches!(short, FlattenError::Run { end: 4096, .. }), "{short}");
    assert_eq!(store.merge_vm_layers(parent.id, &[], size, merge).unwrap(), None);
    let gone = VmLayer { number: 77, ..layers[0] };
    let with_gone = store.merge_vm_layers(parent.id, &[layers[0], gone], size, merge);
    assert!(matches!(with_gone, Err(FlattenError::Io(_))));
    let missing = store.pin("a child", &[], &[], &[layers[0], gone]);
    assert!(matches!(missing, Err(crate::PinError::Damage(crate::Damage::Missing { .. }))));
    assert_eq!(store.shared_layer_owners(), [], "nothing is retained");
    assert_eq!(files(), before);
    assert!(contents() == content);
}

#[test]
fn a_merged_layer_has_the_top_block_of_each_and_the_sources_stay() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut parent = Vm::boot(&store);
    // The third layer has the same block as the first.
    let layers = [1, 2, 17].map(|seed| grow_frozen(&store, &mut parent, seed));
    let one = store.merge_vm_layers(parent.id, &layers, 16 * 4096, merge).unwrap().unwrap();
    assert_eq!((one.vm, one.number), (parent.id, parent.writable.number + 1));
    let FrozenLayer { data, map, replaced } = store.open_frozen_layer(&one).unwrap();
    assert!(replaced.is_none());
    let mut expected = vec![0; 16 * 4096];
    expected[4096..2 * 4096].fill(17);
    expected[2 * 4096..3 * 4096].fill(2);
    assert!(bytes(&data) == expected);
    assert_eq!(bytes(&map), 0b110_u16.to_le_bytes());
    assert!(layers.iter().all(|layer| store.open_frozen_layer(layer).is_ok()));
}
