use super::*;
use crate::fixture::{name, store};
use crate::fixture_pages::{PAGE, bake_paged, bytes, file, image_block, page, ram, restored, used};
use crate::{CommitError, Digest, PagedSpec, PagesError, Scope, Store};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

fn spec(memory: &File) -> MemorySpec<'_> {
    MemorySpec { memory, known: Known::default(), disks: &[] }
}

#[test]
fn ram_comes_back_and_zero_and_free_frames_are_holes() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&name("one")).unwrap();
    let mut expected = ram((0..600).map(|n| n % 250));
    let memory = file(&expected);
    let put = {
        let known = Known { free: &[100..300, 590..9000], ..Known::default() };
        tenant.put_memory(&MemorySpec { known, ..spec(&memory) }).unwrap()
    };
    expected[100 * PAGE..300 * PAGE].fill(0);
    expected[590 * PAGE..].fill(0);
    let to = tempfile::tempfile().unwrap();
    let done = tenant.materialise(&put.table, &[], &to).unwrap();
    assert!(bytes(&to) == expected);
    assert_eq!(done.pages * 4096, put.table.ram.data_bytes);
    assert_eq!(done.zero + done.pages, 600);
    assert!(to.metadata().unwrap().blocks() * 512 <= put.table.ram.data_bytes);
    assert_eq!(crate::sparse::digest(&to).unwrap().digest, put.table.ram.digest);
    assert!(
        matches!(tenant.materialise(&put.table, &[], &to), Err(PagesError::Invalid { .. })),
        "not empty"
    );
    let path = std::path::Path::new("table");
    assert_eq!(Table::decode(path, &put.table.encode()).unwrap(), put.table);
}

/// Frame 0 is in the image and 1 in the layer. 2 is hinted, 3 hinted wrongly, 4 a page, and 5
/// hinted out of range.
#[test]
fn frames_that_equal_blocks_are_references_and_hints_are_compared_first() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&name("one")).unwrap();
    let (a, b) = (file(&ram([1, 2, 3, 2])), file(&ram([7, 10, 11])));
    let memory = file(&ram([3, 11, 2, 1, 50, 51]));
    let digest = |file: &File| crate::sparse::digest(file).unwrap().digest;
    let disks = [vec![
        DiskLayer { file: &a, digest: digest(&a) },
        DiskLayer { file: &b, digest: digest(&b) },
    ]];
    let at = |disk, layer, block| BlockHint { disk, layer, block };
    let hints = [
        (2, at(0, 0, 3)),
        (3, at(0, 1, 1)),
        (5, at(0, 9, 0)),
        (5, at(7, 0, 0)),
        (5, at(0, 0, u32::MAX)),
    ];
    let put = tenant
        .put_memory(&MemorySpec {
            known: Known { hints: &hints, ..Known::default() },
            disks: &disks,
            ..spec(&memory)
        })
        .unwrap();
    let kinds: Vec<Kind> = (0..6).map(|n| put.table.from_frame(n).unwrap().kind).collect();
    let block = |layer, block| Kind::Disk { disk: 0, layer, block };
    assert_eq!(kinds[..4], [block(0, 2), block(1, 2), block(0, 3), block(0, 0)]);
    assert_eq!(kinds[4..], [Kind::Page { hash: 0 }, Kind::Page { hash: 1 }]);
    assert_eq!((put.hints, put.stats.new_pages), ((1, 4), 2));
    let to = tempfile::tempfile().unwrap();
    assert_eq!(
        tenant.materialise(&put.table, &disks, &to).unwrap(),
        Materialised { pages: 2, disk: 4, zero: 0 }
    );
    assert!(bytes(&to) == ram([3, 11, 2, 1, 50, 51]));
    // A disk that changed under its digest is noticed, and a different disk too.
    a.write_all_at(&page(4), 3 * PAGE as u64).unwrap();
    let to = tempfile::tempfile().unwrap();
    let text = tenant.materialise(&put.table, &disks, &to).unwrap_err().to_string();
    assert!(text.contains("digest of the frames as written: expected"), "{text}");
    let swapped = [vec![disks[0][1], disks[0][0]]];
    let text = tenant
        .materialise(&put.table, &swapped, &tempfile::tempfile().unwrap())
        .unwrap_err()
        .to_string();
    assert!(text.starts_with("disks of the table: expected"), "{text}");
}

#[test]
fn blocks_of_a_snapshots_own_disks_are_not_stored_again() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    let (_, block) = image_block();
    let memory = [block, vec![5; PAGE], page(1), page(2)].concat();
    // The layer of seed 5 has a page of fives at block 3.
    bake_paged(&store, "base", 5, &memory, &PagedSpec::of(&one)).unwrap();
    assert!(restored(&store, &one, "base") == memory);
    let used = used(&store, &one, "base");
    let frames = |bytes: u64| bytes / PAGE as u64;
    assert_eq!(
        (
            frames(used.memory.disk_bytes),
            used.own_pages,
            frames(used.memory.own_bytes),
            used.shared_pages
        ),
        (2, 2, 2, 0)
    );
    let open = store.open_snapshot_pages(&one, &name("base")).unwrap();
    let all: Vec<u8> = (0..4).flat_map(|n| open.frame(n).unwrap()).collect();
    assert!(all == memory);
    assert!(open.frame(4).is_err());
    assert!(!root.path().join("snapshots/base/memory").exists());
}

#[test]
fn pages_lie_by_working_set_then_colour_then_frame() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&name("one")).unwrap();
    let memory = file(&ram([1, 2, 3, 4, 5, 6]));
    let put = tenant
        .put_memory(&MemorySpec {
            known: Known { order: &[4, 77, 2], colours: &[9, 1, 1, 1, 1], ..Known::default() },
            ..spec(&memory)
        })
        .unwrap();
    let group = tenant.group(&Digest::of(&page(1))).unwrap();
    // Frame 5 has no colour, which counts as 0.
    let expected: Vec<Digest> = [5, 3, 6, 2, 4, 1].map(|n| Digest::of(&page(n))).to_vec();
    assert_eq!(group.hashes, expected);
    let colours: Vec<(u32, u8)> =
        put.table.runs().iter().map(|run| (run.frames, run.colour)).collect();
    assert_eq!(colours, [(1, 9), (4, 1), (1, 0)]);
}

/// A chain: each snapshot has most pages of the one before.
#[test]
fn snapshots_share_pages_and_a_removed_one_takes_only_its_own() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    let rams: Vec<Vec<u8>> =
        (0..4_u64).map(|n| ram((n * 40..n * 40 + 400).map(|p| p + 1))).collect();
    for (n, memory) in rams.iter().enumerate() {
        bake_paged(&store, &format!("s{n}"), 5, memory, &PagedSpec::of(&one)).unwrap();
    }
    let stats = store.pages_stats().unwrap()[0].1;
    assert!(stats.dedup_ratio() > 2.5, "{stats:?}");
    let used = used(&store, &one, "s0");
    assert_eq!(used.own_pages, (1..=40_u64).filter(|n| n % 7 != 0).count() as u64);
    store.remove_snapshot(&name("s0")).unwrap();
    store.remove_snapshot(&name("s2")).unwrap();
    let report = store.gc_pages().unwrap();
    assert_eq!(report.damage, []);
    for n in [1, 3] {
        assert!(restored(&store, &one, &format!("s{n}")) == rams[n]);
    }
    assert_eq!(store.verify(&Scope::All, &crate::Meter::default()).unwrap().damage, []);
}

#[test]
fn another_tenant_sees_nothing_by_existence_statistics_or_reference() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (one, two) = (name("one"), name("two"));
    let memory = ram(1..60);
    bake_paged(&store, "base", 5, &memory, &PagedSpec::of(&one)).unwrap();
    let (a, b) = (store.tenant(&one).unwrap(), store.tenant(&two).unwrap());
    let hash = Digest::of(&page(5));
    // A tenant learns nothing from whether a page exists.
    assert!(a.has(&hash).unwrap() && !b.has(&hash).unwrap());
    assert!(a.fetch(&hash).is_ok() && b.fetch(&hash).is_err() && b.group(&hash).is_err());
    assert!(b.fetch_many(&[hash], &|_, _| panic!("given")).is_err());
    // Nor from statistics: pages that the second tenant puts are new to it, and count as its own.
    assert_eq!(b.stats().unwrap(), dayfly_units::Pages::default());
    let before = a.stats().unwrap();
    let put = b.put(&file(&memory), &[]).unwrap();
    assert_eq!(put.stats.new_pages, put.stats.pages);
    assert_eq!(a.stats().unwrap(), before);
    drop(put);
    assert_eq!(store.usage(&two).unwrap(), crate::Usage::default());
    // Nor by reference: neither from another tenant's table, nor from a forged table that names
    // another tenant's page.
    assert!(
        store
            .open_snapshot_pages(&two, &name("base"))
            .unwrap_err()
            .to_string()
            .contains("tenant: expected two, got one")
    );
    let theirs = store.open_snapshot_pages(&one, &name("base")).unwrap();
    let to = tempfile::tempfile().unwrap();
    let error = b.materialise(&theirs.table, &[], &to).unwrap_err().to_string();
    assert_eq!(error, "tenant of the table: expected two, got one");
    store.gc_pages().unwrap();
    let forged = Table { tenant: two.clone(), disks: Vec::new(), ..theirs.table.clone() };
    let error = b.materialise(&forged, &[], &to).unwrap_err().to_string();
    assert!(error.contains("of tenant two, which who asks needs, is missing"), "{error}");
    assert_eq!(to.metadata().unwrap().blocks(), 0);
    // A pack copied into another tenant's folder is refused.
    let pack = std::fs::read_dir(root.path().join("pages/one")).unwrap().next().unwrap().unwrap();
    std::fs::copy(pack.path(), root.path().join("pages/two").join(pack.file_name())).unwrap();
    drop((a, b, theirs, store));
    let store = Store::open(root.path()).unwrap();
    assert!(!store.tenant(&two).unwrap().has(&hash).unwrap());
    let damage = store.verify(&Scope::All, &crate::Meter::default()).unwrap().damage;
    assert!(
        matches!(
            &damage[..],
            [only] if only.to_string().contains("tenant: expected two, got \\x03one")
        ),
        "{damage:?}"
    );
}

/// A table with other RAM or other disks than its manifest is refused before anything is read for
/// it.
#[test]
fn a_table_that_is_not_of_its_manifest_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    let memory = ram(1..20);
    bake_paged(&store, "base", 5, &memory, &PagedSpec::of(&one)).unwrap();
    let path = root.path().join("snapshots/base/table");
    let good = store.open_snapshot_pages(&one, &name("base")).unwrap().table;
    let refused = |table: &Table| {
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, table.encode()).unwrap();
        let text = store.open_snapshot_pages(&one, &name("base")).unwrap_err().to_string();
        assert_eq!(store.open_snapshot(&name("base")).unwrap_err().to_string(), text);
        text
    };
    let mut other = good.clone();
    other.disks[0][1] = Digest([9; 32]);
    assert!(refused(&other).contains("files of the disks, as the manifest has them: expected"));
    let mut other = good.clone();
    other.disks[0].push(Digest([9; 32]));
    assert!(refused(&other).contains("files of the disks, as the manifest has them: expected"));
    let mut other = good.clone();
    other.ram.digest = Digest([9; 32]);
    assert!(refused(&other).contains("RAM, as the manifest has it: expected"));
    let mut other = good;
    other.frames_digest = Digest([9; 32]);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, other.encode()).unwrap();
    let open = store.open_snapshot_pages(&one, &name("base")).unwrap();
    assert!(open.materialise(&tempfile::tempfile().unwrap()).is_err());
}

#[test]
fn a_name_that_is_taken_and_odd_ram_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    bake_paged(&store, "base", 5, &ram(1..5), &PagedSpec::of(&one)).unwrap();
    let taken = bake_paged(&store, "base", 6, &ram(1..5), &PagedSpec::of(&one));
    assert!(matches!(taken, Err(CommitError::Exists { .. })));
    let odd = bake_paged(&store, "odd", 6, &[1; 5000], &PagedSpec::of(&one));
    assert!(matches!(odd, Err(CommitError::Invalid { .. })), "{odd:?}");
}
