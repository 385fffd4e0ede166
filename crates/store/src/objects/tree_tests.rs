use super::*;
use crate::fixture::{
    IMAGE, Vm, bake, disk, name, put_image, reopen, store, tree as tree_of_store,
};
use crate::fixture_pages::{bake_paged, image_block, ram, restored};
use crate::integrity::verify::Stamp;
use crate::objects::manifest::{Manifest, SnapshotManifest};
use crate::{Meter, PagedSpec, Scope, Store};
use dayfly_units::sealed;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;

/// Bytes that this thread has read with read(2), pread(2) and their like.
fn read_bytes() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = text.lines().find(|line| line.starts_with("rchar: ")).unwrap();
    line["rchar: ".len()..].parse().unwrap()
}

/// Bytes that `run` reads, without those of looking.
fn read_by<T>(run: impl FnOnce() -> T) -> (T, u64) {
    let looking = {
        let before = read_bytes();
        read_bytes() - before
    };
    let before = read_bytes();
    let done = run();
    (done, read_bytes() - before - looking)
}

/// A store with a snapshot whose layer has `bytes` bytes: a page of data in each 8 MiB.
fn with_large_layer(root: &Path, bytes: u64) {
    let store = store(root);
    let mut vm = Vm::boot(&store);
    let data = store.open_vm_layer(&vm.writable, true).unwrap();
    data.set_len(bytes).unwrap();
    for at in (0..bytes).step_by(8 << 20) {
        data.write_all_at(&[7; 4096], at).unwrap();
    }
    drop(data);
    vm.snapshot(&store, "large", 7).unwrap();
    store.remove_vm(vm.id).unwrap();
}

/// Waits until the times of all files show each later write. A younger file is read again.
fn settle(root: &Path) {
    for path in tree_of_store(root) {
        while !Stamp::at(&root.join(&path)).unwrap().is_settled() {
            std::thread::yield_now();
        }
    }
}

/// A new daemon opens a snapshot of 20 GiB for the price of one of 256 MiB, whatever the data.
#[test]
fn what_an_opening_reads_does_not_depend_on_the_size_of_the_disk() {
    let opening = |bytes: u64| {
        let root = tempfile::tempdir().unwrap();
        with_large_layer(root.path(), bytes);
        settle(root.path());
        let store = reopen(root.path());
        let (open, read) = read_by(|| store.open_snapshot(&name("large")).unwrap());
        assert!(open.disks[0].layers[0].tree.is_some());
        assert_eq!(open.disks[0].layers[0].data.metadata().unwrap().len(), bytes);
        let (_, again) = read_by(|| store.open_snapshot(&name("large")).unwrap());
        // The data, as it was read before there were trees.
        (read, again, bytes / (8 << 20) * 4096)
    };
    let (small, again, _) = opening(256 << 20);
    let (large, _, data) = opening(20 << 30);
    println!("256 MiB: {small} bytes, then {again}; 20 GiB: {large} bytes of {data} and more");
    assert!(large <= 2 * small && large < data / 50, "{small} and {large} of {data}");
    assert!(again < small, "{again} of {small}");
}

fn flip(path: &Path, at: u64) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

/// A disk of four leaves of which the third is a hole, put as the image `big`.
fn put_big(store: &Store) -> Vec<u8> {
    let mut bytes = vec![0; 4 * 65536];
    for (n, page) in (1_u8..).zip(bytes.chunks_mut(4096)) {
        page.fill(n);
    }
    bytes[2 * 65536..3 * 65536].fill(0);
    let spec = crate::fixture::image_spec(&bytes);
    store.put_image_raw(&name("big"), &spec, &mut bytes.as_slice()).unwrap();
    bytes
}

fn checked(store: &Store, image: &str) -> CheckedFile {
    let crate::Image { disk, tree, .. } = store.image(&name(image)).unwrap();
    CheckedFile::new(DiskFile { file: disk, tree }).unwrap()
}

#[test]
fn a_damaged_leaf_is_not_served_and_every_other_is() {
    let root = tempfile::tempdir().unwrap();
    let bytes = {
        let store = Store::open(root.path()).unwrap();
        put_big(&store)
    };
    let path = root.path().join("images/big/disk");
    for (at, first) in [(65536 + 5000, 65536), (2 * 65536 + 9, 2 * 65536), (262_143, 3 * 65536)] {
        flip(&path, at);
        let store = reopen(root.path());
        let disk = checked(&store, "big");
        let mut page = vec![0; 4096];
        for (n, right) in (0_u64..).zip(bytes.chunks(4096)) {
            let read = disk.read(n * 4096, &mut page);
            if n * 4096 / 65536 == first / 65536 {
                let text = read.unwrap_err().to_string();
                let named = format!("bytes {first} to {}: expected hash ", first + 65536);
                assert!(text.starts_with(&named), "{text}");
            } else {
                read.unwrap();
                assert!(page == right, "page {n}");
            }
        }
        let report = store.verify(&Scope::All, &Meter::default()).unwrap();
        assert_eq!(report.damage.len(), 1, "{:?}", report.damage);
        let text = &report.damage[0].text;
        let place = format!(
            "{}: hash of bytes {first} to {} (damaged parts of 64 KiB in all: 1): expected ",
            path.display(),
            first + 65536
        );
        assert!(text.starts_with(&place), "{text}");
        flip(&path, at);
    }
    let report = reopen(root.path()).verify(&Scope::All, &Meter::default()).unwrap();
    assert_eq!(report.damage, []);
}

/// A store of the version before: no trees, and a manifest without their roots.
fn make_older(root: &Path, snapshot: &str) -> Vec<PathBuf> {
    let folder = root.join("snapshots").join(snapshot);
    let path = folder.join("manifest");
    let bytes = fs::read(&path).unwrap();
    let mut now: serde_json::Value =
        serde_json::from_slice(&bytes[sealed::HEADER_BYTES..]).unwrap();
    let trees = now.as_object_mut().unwrap().remove("trees").unwrap();
    assert_eq!(trees.as_object().unwrap().len(), 2);
    fs::remove_file(&path).unwrap();
    let json = serde_json::to_vec(&now).unwrap();
    fs::write(&path, sealed::seal(&SnapshotManifest::MAGIC, 3, &json)).unwrap();
    let mut gone = Vec::new();
    for folder in ["images", "layers"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let tree = entry.unwrap().path().join(TREE);
            fs::remove_file(&tree).unwrap();
            gone.push(tree);
        }
    }
    gone
}

#[test]
fn files_of_the_version_before_are_read_whole_once_and_then_have_trees() {
    let root = tempfile::tempdir().unwrap();
    let (trees, memory) = {
        let store = store(root.path());
        let memory = [ram(1..40), image_block().1].concat();
        bake_paged(&store, "s", 5, &memory, &PagedSpec::of(&name("one"))).unwrap();
        (make_older(root.path(), "s"), memory)
    };
    let before: Vec<Vec<u8>> = {
        let store = reopen(root.path());
        // A damaged file is found, as before, and gets no tree.
        let disk = root.path().join("images/debian/disk");
        flip(&disk, 5000);
        let text = store.open_snapshot(&name("s")).unwrap_err().to_string();
        assert!(text.contains("digest of the content"), "{text}");
        flip(&disk, 5000);
        assert!(
            !trees.iter().any(|tree| tree.starts_with(disk.parent().unwrap()) && tree.exists())
        );
        assert!(restored(&store, &name("one"), "s") == memory);
        assert_eq!(store.staged().unwrap(), Vec::<PathBuf>::new());
        trees.iter().map(|tree| fs::read(tree).unwrap()).collect()
    };
    let store = reopen(root.path());
    let open = store.open_snapshot(&name("s")).unwrap();
    assert!(open.disks[0].tree.is_some() && open.disks[0].layers[0].tree.is_some());
    // They are those that an upload or a commit makes.
    put_image(&store, IMAGE, 1).unwrap();
    store.remove_snapshot(&name("s")).unwrap();
    drop(open);
    store.gc().unwrap();
    bake_paged(&store, "s", 5, &memory, &PagedSpec::of(&name("one"))).unwrap();
    for (tree, before) in trees.iter().zip(before) {
        assert!(fs::read(tree).unwrap() == before, "{}", tree.display());
    }
}

#[test]
fn a_damaged_tree_costs_a_reading_of_its_file_and_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    {
        let store = store(root.path());
        bake(&store, "s", 5).unwrap();
    }
    let tree = root.path().join("images/debian/tree");
    let whole = fs::read(&tree).unwrap();
    let damages: [&dyn Fn(); 4] = [
        &|| flip(&tree, 20),
        &|| flip(&tree, 4096 + 33),
        &|| File::options().write(true).open(&tree).unwrap().set_len(8191).unwrap(),
        &|| fs::remove_file(&tree).unwrap(),
    ];
    for damage in damages {
        damage();
        let store = reopen(root.path());
        let report = store.verify(&Scope::All, &Meter::default()).unwrap();
        assert_eq!(report.damage.len(), 1, "{:?}", report.damage);
        let text = &report.damage[0].text;
        assert!(text.starts_with(&tree.display().to_string()), "{text}");
        let open = store.open_snapshot(&name("s")).unwrap();
        assert!(open.disks[0].tree.is_some());
        assert!(fs::read(&tree).unwrap() == whole, "it has not been replaced");
        assert_eq!(store.verify(&Scope::All, &Meter::default()).unwrap().damage, []);
    }
    // A tree that fits together, but is not that of the file.
    {
        let store = reopen(root.path());
        put_image(&store, "other", 9).unwrap();
        fs::copy(root.path().join("images/other/tree"), &tree).unwrap();
    }
    let store = reopen(root.path());
    let text = store.verify(&Scope::All, &Meter::default()).unwrap().damage[0].text.clone();
    assert!(text.contains("tree: digest of the disk file: expected "), "{text}");
    store.open_snapshot(&name("s")).unwrap();
    assert!(fs::read(&tree).unwrap() == whole);
}

#[test]
fn a_root_that_the_manifest_does_not_have_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = store.image(&name(IMAGE)).unwrap();
    let dir = store.0.images.sub(IMAGE).unwrap();
    let root = image.tree.unwrap().root;
    assert!(store.0.open_tree(&dir, &image.manifest.disk, Some(root)).unwrap().is_some());
    let other = Some(Digest([1; 32]));
    let error = store.0.open_tree(&dir, &image.manifest.disk, other).unwrap_err().to_string();
    assert!(error.contains("root, as the snapshot's manifest has it: expected 0101"), "{error}");
    assert!(store.0.tree(&dir, &image.manifest.disk, other).is_none());
}

#[test]
fn a_tree_is_counted_and_removed_with_its_disk_file() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake(&store, "s", 5).unwrap();
    let blocks = |path: &Path| fs::metadata(path).unwrap().blocks() * 512;
    let layer = store.snapshot(&name("s")).unwrap().layer_ids()[0].to_string();
    let folder = root.path().join("layers").join(layer);
    let all = ["data", "map", "tree"].iter().map(|file| blocks(&folder.join(file))).sum::<u64>();
    assert_eq!(store.snapshot_sizes(&name("s")).unwrap().1.allocated_bytes, all);
    store.remove_snapshot(&name("s")).unwrap();
    assert_eq!(store.gc().unwrap().freed_bytes, all);
    store.remove_image(&name(IMAGE)).unwrap();
    assert!(!tree_of_store(root.path()).iter().any(|path| path.ends_with("tree")));
}

#[test]
fn a_folder_that_is_removed_meanwhile_gets_no_tree() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let dir = store.0.images.sub(IMAGE).unwrap();
    fs::remove_file(root.path().join("images/debian/tree")).unwrap();
    let image: crate::ImageManifest = crate::objects::manifest::read(&dir).unwrap();
    let file = dir.open("disk").unwrap();
    store.remove_image(&name(IMAGE)).unwrap();
    put_image(&store, IMAGE, 3).unwrap();
    let before = fs::read(root.path().join("images/debian/tree")).unwrap();
    let tree = store.0.verify_disk(&dir, "disk", &file, &image.disk, None).unwrap();
    assert!(tree.is_none());
    assert!(fs::read(root.path().join("images/debian/tree")).unwrap() == before);
    assert_eq!(disk(1).len() as u64, image.disk.bytes);
}
