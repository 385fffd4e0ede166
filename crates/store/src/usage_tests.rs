use super::*;
use crate::fixture::{bake, name, reopen, store};
use crate::fixture_pages::{bake_paged, image_block, ram, used};
use crate::{Known as KnownOf, PagedSpec};
use std::fs;

/// Frames that are zero, free, of a disk, shared and own, in bytes.
fn kinds([zero, free, disk, shared, own]: [u64; 5]) -> MemoryKinds {
    MemoryKinds {
        zero_bytes: zero * PAGE_SIZE,
        free_bytes: free * PAGE_SIZE,
        disk_bytes: disk * PAGE_SIZE,
        shared_bytes: shared * PAGE_SIZE,
        own_bytes: own * PAGE_SIZE,
    }
}

/// Two snapshots that share pages 1 to 50; those divisible by 7 are zeroes.
#[test]
fn the_frames_of_a_snapshot_are_counted_by_kind_and_add_up_to_its_ram() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    #[expect(clippy::single_range_in_vec_init, reason = "one range of frames")]
    let free = [95_u32..100];
    let a = [ram(1..90), image_block().1, ram(200..210)].concat();
    let known = KnownOf { free: &free, ..KnownOf::default() };
    bake_paged(&store, "a", 5, &a, &PagedSpec { known, ..PagedSpec::of(&one) }).unwrap();
    bake_paged(&store, "b", 6, &ram(1..51), &PagedSpec::of(&one)).unwrap();
    let data = |range: std::ops::Range<u64>| range.filter(|n| n % 7 != 0).count() as u64;
    let (a, b) = (used(&store, &one, "a"), used(&store, &one, "b"));
    // 203 is divisible by 7; 205 to 209 are free.
    let own = data(51..90) + 4;
    assert_eq!(a.memory, kinds([12 + 1, 5, 1, data(1..51), own]));
    assert_eq!(a.memory_bytes, 100 * 4096);
    assert_eq!(b.memory, kinds([7, 0, 0, 43, 0]));
    assert_eq!((b.own_pages, b.own_page_bytes), (0, 0));
    assert!(a.own_page_bytes > 0 && a.own_page_bytes < a.own_pages * 4096);
    // Each snapshot has one layer, with another seed, which no other snapshot uses.
    assert!(
        b.layers.count == 1 && b.own_layer_bytes > 0 && b.own_layer_bytes == b.layers.disk_bytes
    );
    let stats = store.stats(&one).unwrap();
    assert_eq!(stats.memory, kinds([20, 5, 1, 86, own]));
    assert_eq!(stats.pages.referring_frames, 86 + own);
    assert_eq!(stats.pages.unique, 43 + own);
    assert_eq!(
        (stats.images.count, stats.layers.count, stats.snapshots.count, stats.kernels.count),
        (1, 2, 2, 0)
    );
    assert!(stats.pages.index_disk_bytes > 0 && stats.compression_ratio > 1.0);
}

#[test]
fn what_a_snapshot_alone_keeps_is_what_its_removal_gives_back() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    bake_paged(&store, "base", 5, &ram(1..200), &PagedSpec::of(&one)).unwrap();
    // The same layer, and own pages in an own pack.
    bake_paged(&store, "next", 5, &ram(1..400), &PagedSpec::of(&one)).unwrap();
    let next = used(&store, &one, "next");
    assert_eq!(next.own_layer_bytes, 0, "base depends on it too");
    let before = store.stats(&one).unwrap();
    store.remove_snapshot(&name("next")).unwrap();
    let report = store.gc_pages_of(&one, &[].into(), &crate::Meter::default()).unwrap();
    let after = store.stats(&one).unwrap();
    let gone = before.pages.stored_bytes - after.pages.stored_bytes;
    assert!(next.own_page_bytes.abs_diff(gone) < next.own_pages, "{next:?}, {gone}");
    assert_eq!(report.dropped_pages, next.own_pages);
    assert_eq!(
        before.snapshots.disk_bytes - after.snapshots.disk_bytes,
        next.own_file_bytes - folder_bytes(root.path())
    );
    // Now only `base` uses the layer.
    assert!(used(&store, &one, "base").own_layer_bytes > 0);
}

/// Bytes of disk that a folder itself takes on this file system.
fn folder_bytes(root: &Path) -> u64 {
    crate::gc::allocated(&root.join("snapshots/base"))
}

#[test]
fn others_see_nothing_and_what_cannot_be_read_is_listed() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (one, two) = (name("one"), name("two"));
    bake_paged(&store, "base", 5, &ram(1..50), &PagedSpec::of(&one)).unwrap();
    let stats = store.stats(&two).unwrap();
    assert_eq!((stats.snapshots.count, stats.layers.count, stats.pages.unique), (0, 0, 0));
    assert_eq!(store.usage(&two).unwrap(), Usage::default());
    // A snapshot with RAM in a file counts for every tenant.
    bake(&store, "raw", 7).unwrap();
    let raw = used(&store, &two, "raw");
    assert_eq!(raw.memory, kinds([62, 0, 0, 0, 2]));
    drop(store);
    fs::remove_file(root.path().join("snapshots/base/table")).unwrap();
    fs::write(root.path().join("snapshots/base/table"), "x").unwrap();
    let store = reopen(root.path());
    let usage = store.usage(&one).unwrap();
    assert_eq!(usage.snapshots.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["raw"]);
    assert!(
        matches!(
            &usage.unreadable[..],
            [Unreadable { name, message }] if name == "base" && message.contains("table")
        ),
        "{usage:?}"
    );
    assert_eq!(store.stats(&one).unwrap().unreadable, 1);
}

#[test]
fn staging_is_emptied_of_what_no_operation_uses() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    // An entry in use: the prepared first layer of the next VM.
    store.prepare_vm_layers(1).unwrap();
    let staging = root.path().join("staging");
    fs::create_dir_all(staging.join("77-1/retired")).unwrap();
    fs::write(staging.join("77-1/retired/data"), vec![1; 100_000]).unwrap();
    assert_eq!(store.staged().unwrap().len(), 2);
    let report = store.gc_staging().unwrap();
    assert_eq!(report.entries, 1);
    assert!(report.freed_bytes >= 100_000, "{report:?}");
    assert_eq!(store.staged().unwrap().len(), 1);
    let vm = dayfly_units::VmId::random();
    store.create_vm_layer(vm, 0).unwrap();
    assert!(
        root.path().join(format!("vms/{vm}/disk0.0.data")).exists(),
        "the layer made ahead is still there"
    );
}
