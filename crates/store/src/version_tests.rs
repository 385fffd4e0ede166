//! A store with objects that a newer version of dayfly made, next to those of this one. Nothing
//! that they may need is removed, however they are encoded.

use crate::fixture::{IMAGE, bake, name, put_image, store, tree};
use crate::fixture_pages::{bake_paged, ram};
use crate::objects::manifest::Manifest;
use crate::{
    GcError, GcPagesError, ImageManifest, PagedSpec, PutError, RemoveError, SnapshotManifest, Store,
};
use dayfly_units::sealed;
use std::fs;
use std::path::Path;

/// Gives the snapshot `of` a manifest of version `version` that this one cannot read, and its pages
/// another name than a table's.
fn make_newer(root: &Path, of: &str, version: u32) {
    let folder = root.join("snapshots").join(of);
    fs::remove_file(folder.join("manifest")).unwrap();
    let sealed = sealed::seal(&SnapshotManifest::MAGIC, version, b"\x01\x02");
    fs::write(folder.join("manifest"), sealed).unwrap();
    if folder.join("table").exists() {
        fs::rename(folder.join("table"), folder.join("table.v9")).unwrap();
    }
}

/// A store with the snapshot `old`, and the snapshot `new` of a newer version that has layers and
/// its own pages.
fn with_newer(root: &Path) -> Store {
    let (store, one) = (store(root), name("one"));
    bake_paged(&store, "old", 5, &ram(1..40), &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "new", 6, &ram(100..400), &PagedSpec::of(&one)).unwrap();
    make_newer(root, "new", SnapshotManifest::VERSION + 1);
    store
}

#[test]
fn gc_removes_nothing_while_a_snapshot_is_of_another_version() {
    for version in [0, SnapshotManifest::VERSION + 1, u32::MAX] {
        let root = tempfile::tempdir().unwrap();
        let store = with_newer(root.path());
        make_newer(root.path(), "new", version);
        // A damaged one does not hide it.
        bake(&store, "bad", 7).unwrap();
        fs::remove_file(root.path().join("snapshots/bad/manifest")).unwrap();
        let before = tree(root.path());
        let error = store.gc().unwrap_err();
        assert!(
            matches!(&error, GcError::Version { snapshot, .. } if snapshot == "new"),
            "{error}"
        );
        let text = dayfly_units::error::chain(&error);
        assert!(text.contains("start that version, or remove the snapshot"), "{text}");
        let known = SnapshotManifest::VERSION;
        assert!(text.contains(&format!("expected 1 to {known}, got {version}")), "{text}");
        for error in [
            store.gc_pages().unwrap_err(),
            store.gc_pages_of(&name("one"), &[].into(), &crate::Meter::default()).unwrap_err(),
        ] {
            let GcPagesError::Version { snapshot, .. } = &error else { panic!("{error}") };
            assert_eq!(snapshot, "new");
        }
        assert_eq!(tree(root.path()), before);
        // Until it is removed.
        store.remove_snapshot(&name("new")).unwrap();
        assert!(store.gc_pages().unwrap().packs > 0);
        store.remove_snapshot(&name("bad")).unwrap();
        assert_eq!(store.gc().unwrap().layers.len(), 2);
        crate::fixture_pages::restored(&store, &name("one"), "old");
    }
}

#[test]
fn a_table_of_another_version_stops_gc_of_pages() {
    let root = tempfile::tempdir().unwrap();
    let (store, one) = (store(root.path()), name("one"));
    bake_paged(&store, "new", 6, &ram(100..400), &PagedSpec::of(&one)).unwrap();
    let table = root.path().join("snapshots/new/table");
    fs::remove_file(&table).unwrap();
    fs::write(&table, sealed::seal(b"DFtable\n", 2, b"\x01")).unwrap();
    assert!(matches!(store.gc_pages(), Err(GcPagesError::Version { .. })));
    // A damaged one is another error, with another next step.
    fs::write(&table, b"").unwrap();
    assert!(matches!(store.gc_pages(), Err(GcPagesError::Unreadable { .. })));
}

#[test]
fn an_image_that_a_newer_snapshot_may_use_is_neither_removed_nor_replaced() {
    let root = tempfile::tempdir().unwrap();
    let store = with_newer(root.path());
    store.remove_snapshot(&name("old")).unwrap();
    let in_use = |by: &[String]| by == ["snapshot new (perhaps: another version made it)"];
    let refused = |store: &Store| {
        let removed = store.remove_image(&name(IMAGE)).unwrap_err();
        assert!(matches!(&removed, RemoveError::InUse { by, .. } if in_use(by)), "{removed}");
        let put = put_image(store, IMAGE, 2).unwrap_err();
        assert!(matches!(&put, PutError::InUse { by, .. } if in_use(by)), "{put}");
    };
    refused(&store);
    // The image is of the newer version too.
    let manifest = root.path().join("images").join(IMAGE).join("manifest");
    fs::remove_file(&manifest).unwrap();
    fs::write(&manifest, sealed::seal(&ImageManifest::MAGIC, 2, b"\x01")).unwrap();
    refused(&store);
    store.remove_snapshot(&name("new")).unwrap();
    store.remove_image(&name(IMAGE)).unwrap();
}

#[test]
fn block_indexes_of_a_newer_image_stay() {
    let root = tempfile::tempdir().unwrap();
    let (store, one) = (store(root.path()), name("one"));
    bake_paged(&store, "s", 6, &ram(100..140), &PagedSpec::of(&one)).unwrap();
    let indexes = || fs::read_dir(root.path().join("blocks")).unwrap().count();
    assert_eq!(indexes(), 2);
    store.remove_snapshot(&name("s")).unwrap();
    let manifest = root.path().join("images").join(IMAGE).join("manifest");
    let whole = fs::read(&manifest).unwrap();
    fs::remove_file(&manifest).unwrap();
    fs::write(&manifest, sealed::seal(&ImageManifest::MAGIC, 2, b"\x01")).unwrap();
    assert_eq!(store.gc_pages().unwrap().block_indexes, 0);
    fs::write(&manifest, whole).unwrap();
    assert_eq!(store.gc_pages().unwrap().block_indexes, 1);
    assert_eq!(indexes(), 1);
}

#[test]
fn entries_with_names_of_other_encodings_are_left_out_and_reported() {
    use std::os::unix::ffi::OsStrExt;
    let root = tempfile::tempdir().unwrap();
    let store = with_newer(root.path());
    store.remove_snapshot(&name("new")).unwrap();
    let bad = |folder: &str| root.path().join(folder).join(std::ffi::OsStr::from_bytes(b"b\xffd"));
    for folder in ["images", "kernels", "layers", "snapshots", "staging", "vms"] {
        fs::create_dir_all(bad(folder).join(std::ffi::OsStr::from_bytes(b"\xfe"))).unwrap();
    }
    assert_eq!(store.images().unwrap().items.len(), 1);
    let snapshots = store.snapshots().unwrap();
    assert_eq!((snapshots.items.len(), snapshots.damaged.len()), (1, 0));
    store.gc().unwrap();
    store.gc_pages().unwrap();
    let report = store.verify(&crate::Scope::All, &crate::Meter::default()).unwrap();
    let texts: Vec<_> = report.damage.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 4, "{texts:?}");
    assert!(texts.iter().all(|t| t.contains(r"expected names in UTF-8, got b\xffd, which")));
    drop(store);
    let store = Store::open(root.path()).unwrap();
    assert!(!bad("staging").exists() && bad("snapshots").exists());
    drop(store);
}
