use super::*;
use crate::fixture::{IMAGE, Vm, assert_is, bake, name, put_image, store, tree};
use crate::fixture_pages::golden;
use crate::{
    CommitError, GcError, GcPagesError, KernelSpec, PutError, RemoveError, Store, StoreError,
};
use dayfly_units::Digest;
use std::fs;

fn sealed_as(format: &serde_json::Value) -> Vec<u8> {
    sealed::seal(&MAGIC, VERSION, format.to_string().as_bytes())
}

fn with(incompat: &[&str], ro_compat: &[&str], compat: &[&str]) -> Vec<u8> {
    sealed_as(&serde_json::json!({
        "incompat": incompat,
        "ro_compat": ro_compat,
        "compat": compat,
        "written_by": "9.0.0",
        "a field of version 9": { "x": 1 },
    }))
}

fn set(root: &Path, bytes: &[u8]) {
    let path = root.join(FILE);
    let _absent = fs::remove_file(&path);
    fs::write(path, bytes).unwrap();
}

/// A closed store with the snapshot `base`.
fn closed() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    bake(&store(root.path()), "base", 5).unwrap();
    root
}

fn refusal(root: &Path) -> String {
    let before = tree(root);
    let error = Store::open(root).unwrap_err();
    assert!(matches!(error, StoreError::Format(_)), "{error}");
    assert_eq!(tree(root), before, "something was changed");
    let text = error.to_string();
    assert!(text.starts_with(&format!("{}: ", root.join(FILE).display())), "{text}");
    text
}

#[test]
fn the_bytes_of_version_1_are_frozen() {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let format = Format {
        incompat: names(&["a", "b-1"]),
        ro_compat: names(&["c_2"]),
        compat: names(&["d"]),
        written_by: "0.1.0".to_owned(),
    };
    let now = format.encode().unwrap();
    let frozen = golden("format-1", &now);
    assert!(frozen == now);
    assert_eq!(Format::decode(Path::new("/store/format"), &frozen).unwrap(), format);
}

#[test]
fn a_store_of_before_gets_a_format_once() {
    let root = closed();
    let path = root.path().join(FILE);
    assert_eq!(Format::read(&Dir::root(root.path()).unwrap()).unwrap(), Some(Format::current()));
    // As an earlier version left it.
    fs::remove_file(&path).unwrap();
    assert_is(&Store::open(root.path()).unwrap(), "base", 5);
    let bytes = fs::read(&path).unwrap();
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let made = inode(&path);
    drop(Store::open(root.path()).unwrap());
    assert_eq!((inode(&path), fs::read(&path).unwrap()), (made, bytes), "it was written again");
}

#[test]
fn a_store_with_an_unknown_incompat_feature_is_not_opened() {
    let root = closed();
    set(root.path(), &with(&["tree-hashes", "zones"], &["x"], &["y"]));
    fs::create_dir(root.path().join("staging/left")).unwrap();
    let text = refusal(root.path());
    assert!(text.contains("incompat: expected only features that dayfly"), "{text}");
    assert!(text.contains("(none), got tree-hashes, zones; start a dayflyd of"), "{text}");
    let newer = sealed::seal(&MAGIC, 2, b"\xff");
    set(root.path(), &newer);
    let text = refusal(root.path());
    assert!(text.contains("version at byte 40: expected 1 to 1, got 2; start a dayflyd"), "{text}");
}

#[test]
fn a_damaged_format_is_refused_before_anything_is_opened() {
    let root = closed();
    let whole = with(&[], &[], &[]);
    for length in 0..whole.len() {
        set(root.path(), &whole[..length]);
        assert!(refusal(root.path()).contains("expected"));
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        set(root.path(), &flipped);
        refusal(root.path());
    }
    let long = "x".repeat(65);
    for name in ["", "A", "a b", "\u{1b}[2J", "ä", &long] {
        set(root.path(), &with(&[], &[name], &[]));
        let text = refusal(root.path());
        assert!(text.contains("ro_compat: expected names of at most 64"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }
    set(root.path(), &sealed_as(&serde_json::json!({ "incompat": [] })));
    assert!(refusal(root.path()).contains("expected the JSON of a format, got missing field"));
    set(root.path(), &sealed::seal(&MAGIC, 1, &vec![b' '; (64 << 10) + 1]));
    assert!(refusal(root.path()).contains("payload length"));
    set(root.path(), &with(&[], &[], &[]));
    assert_is(&Store::open(root.path()).unwrap(), "base", 5);
}

#[test]
fn an_unknown_compat_feature_is_ignored_and_kept() {
    let root = closed();
    let bytes = with(&[], &[], &["hints"]);
    set(root.path(), &bytes);
    let store = Store::open(root.path()).unwrap();
    assert_eq!(store.unknown_features(), <[String; 0]>::default());
    bake(&store, "other", 6).unwrap();
    store.remove_snapshot(&name("other")).unwrap();
    store.gc().unwrap();
    drop(store);
    assert_eq!(fs::read(root.path().join(FILE)).unwrap(), bytes);
}

/// Objects below the store's root, without staged files and VMs.
fn objects(root: &Path) -> Vec<String> {
    let mut all = tree(root);
    all.retain(|path| !path.starts_with("vms") && !path.starts_with("staging/"));
    all
}

#[test]
fn with_an_unknown_ro_compat_feature_objects_are_read_and_vms_run() {
    let root = closed();
    // A layer and pages that nothing references.
    {
        let store = Store::open(root.path()).unwrap();
        bake(&store, "gone", 6).unwrap();
        store.remove_snapshot(&name("gone")).unwrap();
        let tenant = store.tenant(&name("one")).unwrap();
        drop(tenant.put(&crate::fixture_pages::file(&[7; 4096]), &[]).unwrap());
    }
    fs::create_dir(root.path().join("staging/left")).unwrap();
    set(root.path(), &with(&[], &["counted-pages"], &[]));
    let before = tree(root.path());
    let store = Store::open(root.path()).unwrap();
    assert_eq!(store.unknown_features(), ["counted-pages"]);
    assert_eq!(tree(root.path()), before, "opening changed something");
    let before = objects(root.path());
    assert_is(&store, "base", 5);

    let refused = |error: &dyn std::error::Error| {
        let text = dayfly_units::error::chain(error);
        assert!(text.contains("ro_compat: expected only features that"), "{text}");
        assert!(text.contains("got counted-pages, so this dayflyd only reads"), "{text}");
        true
    };
    let put = put_image(&store, "new", 9).unwrap_err();
    assert!(matches!(put, PutError::Io(_)) && refused(&put));
    let spec = KernelSpec {
        release: String::new(),
        vmlinux_bytes: 0,
        initrd_bytes: 0,
        digest: Digest::of(b""),
        modules: None,
    };
    assert!(refused(&store.put_kernel(&name("k"), &spec, &mut &b""[..]).unwrap_err()));
    let removed = store.remove_snapshot(&name("base")).unwrap_err();
    assert!(matches!(removed, RemoveError::Io(_)) && refused(&removed));
    assert!(matches!(store.gc(), Err(GcError::Io(e)) if e.is_read_only() && refused(&e)));
    assert!(matches!(store.gc_pages(), Err(GcPagesError::Io(e)) if refused(&e)));
    assert!(refused(
        &store.gc_pages_of(&name("one"), &[].into(), &crate::Meter::default()).unwrap_err()
    ));
    assert!(refused(&store.gc_staging().unwrap_err()));
    let tenant = store.tenant(&name("one")).unwrap();
    assert!(refused(&tenant.put(&crate::fixture_pages::file(&[8; 4096]), &[]).unwrap_err()));

    // A VM can be cloned, freezes its layers, and can be removed; it cannot be saved.
    let mut vm = Vm::clone_of(&store, "base");
    vm.write(&store, 7);
    let saved = vm.snapshot(&store, "s", 7).unwrap_err();
    assert!(matches!(saved, CommitError::Io(_)) && refused(&saved));
    let layer = crate::fixture_pages::grow_frozen(&store, &mut vm, 3);
    drop(store.open_frozen_layer(&layer).unwrap());
    store.remove_vm(vm.id).unwrap();
    assert_eq!(objects(root.path()), before);
    drop((tenant, store));

    // The version that knows the feature goes on.
    set(root.path(), &with(&[], &[], &[]));
    let store = Store::open(root.path()).unwrap();
    assert_eq!(store.gc().unwrap().layers.len(), 1);
    assert!(store.image(&name(IMAGE)).is_ok() && store.staged().unwrap().is_empty());
}
