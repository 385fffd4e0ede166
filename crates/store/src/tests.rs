use super::*;
use crate::fixture::{
    IMAGE, assert_is, bake, disk, image_spec, name, put_image, reopen, store, tree,
};
use crate::objects::tree::CheckedFile;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

fn compressed(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

#[test]
fn one_process_at_a_time_has_a_store_open() {
    let root = tempfile::tempdir().unwrap();
    let first = Store::open(root.path()).unwrap();
    match Store::open(root.path()) {
        Err(StoreError::Locked { holder, .. }) => {
            assert_eq!(holder, std::process::id().to_string())
        }
        other => panic!("{other:?}"),
    }
    let clone = first.clone();
    drop(first);
    assert!(Store::open(root.path()).is_err());
    drop(clone);
    Store::open(root.path()).unwrap();
}

/// Like a process that forks and is killed before its child calls execve(2).
#[test]
fn a_lock_that_goes_at_once_is_waited_for() {
    let root = tempfile::tempdir().unwrap();
    drop(store(root.path()));
    let waited = || {
        let file = File::open(root.path().join("lock")).unwrap();
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        let goes = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(file);
        });
        let opened = Store::open(root.path());
        goes.join().unwrap();
        opened.is_ok()
    };
    // On a busy host the thread may keep the lock for longer than it is waited for.
    assert!((0..60).any(|_| waited()), "it was not waited for");
}

#[test]
fn what_is_left_in_staging_is_swept_at_open() {
    let root = tempfile::tempdir().unwrap();
    drop(store(root.path()));
    std::fs::create_dir_all(root.path().join("staging/1-2/image")).unwrap();
    std::fs::write(root.path().join("staging/1-2/image/disk"), "x").unwrap();
    let store = reopen(root.path());
    assert_eq!(store.staged().unwrap(), Vec::<PathBuf>::new());
    store.image(&name(IMAGE)).unwrap();
}

#[test]
fn an_image_is_uploaded_opened_listed_and_removed() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let bytes = disk(9);
    let spec = image_spec(&bytes);
    let put = store.put_image(&name("a"), &spec, &mut compressed(&bytes).as_slice()).unwrap();
    assert_eq!((put.disk.bytes, put.disk.data_bytes), (16 * 4096, 2 * 4096));
    let mut image = store.image(&name("a")).unwrap();
    assert_eq!(image.manifest, put);
    let mut back = Vec::new();
    image.disk.read_to_end(&mut back).unwrap();
    assert_eq!(back, bytes);
    assert_eq!(store.images().unwrap().items, [put]);
    assert!(matches!(
        store.remove_image(&name("a")),
        Err(RemoveError::InUse { by, .. }) if by == ["image a"]
    ));
    drop(image);
    store.remove_image(&name("a")).unwrap();
    assert!(matches!(store.remove_image(&name("a")), Err(RemoveError::NotFound { .. })));
    assert!(matches!(store.image(&name("a")), Err(OpenError::NotFound { .. })));
    assert_eq!(tree(root.path()).len(), 8, "{:?}", tree(root.path()));
}

#[test]
fn uploads_that_are_not_as_announced_are_refused_and_leave_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let before = tree(root.path());
    let bytes = disk(9);
    let spec = image_spec(&bytes);
    let whole = compressed(&bytes);
    let put = |spec: &ImageSpec, body: &[u8]| {
        store.put_image(&name("new"), spec, &mut &body[..]).unwrap_err()
    };
    for len in 0..whole.len() {
        let error = put(&spec, &whole[..len]);
        assert!(matches!(error, PutError::Stream { what: "disk", .. }), "{len}: {error:?}");
    }
    let followed = [&whole[..], b"x"].concat();
    assert!(matches!(put(&spec, &followed), PutError::Longer { announced: 65536 }));
    let two_frames = [&whole[..], &whole[..]].concat();
    assert!(matches!(put(&spec, &two_frames), PutError::Longer { .. }));
    let shorter = ImageSpec { size_bytes: 15 * 4096, ..spec.clone() };
    assert!(matches!(put(&shorter, &whole), PutError::Longer { .. }));
    let longer = ImageSpec { size_bytes: 17 * 4096, ..spec.clone() };
    assert!(matches!(
        put(&longer, &whole),
        PutError::Stream { source: sparse::CopyError::Short { .. }, .. }
    ));
    // A small zstd bomb. A terabyte of announced zeroes is refused, and content beyond the
    // announced length is not decoded.
    let huge = ImageSpec { size_bytes: (1 << 40) + 4096, ..spec.clone() };
    assert!(matches!(put(&huge, &whole), PutError::TooLarge { .. }));
    for size_bytes in [0, 1, 4095, 4097] {
        assert!(matches!(
            put(&ImageSpec { size_bytes, ..spec.clone() }, &whole),
            PutError::Invalid { .. }
        ));
    }
    let other = ImageSpec { digest: Digest([0; 32]), ..spec };
    assert!(matches!(put(&other, &whole), PutError::Digest { .. }));
    assert_eq!(tree(root.path()), before);
}

#[test]
fn an_image_is_replaced_unless_other_content_is_in_use() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    put_image(&store, IMAGE, 2).unwrap();
    put_image(&store, IMAGE, 1).unwrap();
    bake(&store, "base", 5).unwrap();
    put_image(&store, IMAGE, 1).unwrap();
    match put_image(&store, IMAGE, 2) {
        Err(PutError::InUse { by, .. }) => assert_eq!(by, ["snapshot base"]),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        store.remove_image(&name(IMAGE)),
        Err(RemoveError::InUse { by, .. }) if by == ["snapshot base"]
    ));
    assert_is(&store, "base", 5);
    store.remove_snapshot(&name("base")).unwrap();
    put_image(&store, IMAGE, 2).unwrap();
    store.remove_image(&name(IMAGE)).unwrap();
}

#[test]
fn a_damaged_image_is_refused_and_replaced() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let path = root.path().join("images/debian/disk");
    let file = File::options().write(true).open(&path);
    let file = file.unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xaa], 4097).unwrap();
    let read = || {
        let Image { disk, tree, .. } = store.image(&name(IMAGE)).unwrap();
        let checked = CheckedFile::new(DiskFile { file: disk, tree }).unwrap();
        checked.read(3 * 4096, &mut [0; 4096])
    };
    let text = read().unwrap_err().to_string();
    assert!(text.starts_with("bytes 0 to 65536: expected hash "), "{text}");
    // Without its tree the whole image is read when it is opened.
    let tree = root.path().join("images/debian/tree");
    std::fs::remove_file(&tree).unwrap();
    let text = store.image(&name(IMAGE)).unwrap_err().to_string();
    assert!(
        text.starts_with(&format!("{}: digest of the content: expected ", path.display())),
        "{text}"
    );
    assert!(!tree.exists(), "a damaged image has got a tree");
    put_image(&store, IMAGE, 1).unwrap();
    read().unwrap();
}

#[test]
fn a_kernel_is_uploaded_opened_and_removed() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let (vmlinux, initrd) = (vec![1; 5000], vec![2; 70_000]);
    let both = [vmlinux.clone(), initrd.clone()].concat();
    let spec = KernelSpec {
        release: "6.12.0".to_owned(),
        vmlinux_bytes: 5000,
        initrd_bytes: 70_000,
        digest: Digest::of(&both),
        modules: None,
    };
    let body = compressed(&both);
    store.put_kernel(&name("6.12"), &spec, &mut body.as_slice()).unwrap();
    let mut kernel = store.kernel(&name("6.12")).unwrap();
    let (mut a, mut b) = (Vec::new(), Vec::new());
    kernel.vmlinux.read_to_end(&mut a).unwrap();
    kernel.initrd.read_to_end(&mut b).unwrap();
    assert_eq!((a, b), (vmlinux, initrd));
    assert_eq!(kernel.reference().digest, spec.digest);
    let before = tree(root.path());
    let shifted = KernelSpec { vmlinux_bytes: 5001, ..spec.clone() };
    assert!(matches!(
        store.put_kernel(&name("x"), &shifted, &mut body.as_slice()),
        Err(PutError::Stream { what: "initrd", .. })
    ));
    let other = KernelSpec { digest: Digest([0; 32]), ..spec.clone() };
    assert!(matches!(
        store.put_kernel(&name("x"), &other, &mut body.as_slice()),
        Err(PutError::Digest { .. })
    ));
    let huge = KernelSpec { initrd_bytes: u64::MAX, ..spec.clone() };
    assert!(matches!(
        store.put_kernel(&name("x"), &huge, &mut body.as_slice()),
        Err(PutError::TooLarge { what: "initrd", .. })
    ));
    assert_eq!(tree(root.path()), before);
    store.put_kernel(&name("6.12"), &spec, &mut body.as_slice()).unwrap();
    assert_eq!(store.kernels().unwrap().items.len(), 1);
    store.remove_kernel(&name("6.12")).unwrap();
    assert!(matches!(store.kernel(&name("6.12")), Err(OpenError::NotFound { .. })));
}

#[test]
fn the_modules_of_a_kernel_are_removed_when_it_is() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let put_modules = |as_name: &str, seed| {
        let disk = disk(seed);
        let source = format!("{}6.12", dayfly_units::MODULES_SOURCE);
        let spec = ImageSpec { source, ..image_spec(&disk) };
        store.put_image_raw(&name(as_name), &spec, &mut disk.as_slice()).unwrap();
    };
    let put = |modules: Option<&str>| {
        let spec = KernelSpec {
            modules: modules.map(name),
            release: "6.12.0".to_owned(),
            vmlinux_bytes: 5000,
            initrd_bytes: 0,
            digest: Digest::of(&[1; 5000]),
        };
        store.put_kernel(&name("6.12"), &spec, &mut compressed(&[1; 5000]).as_slice())
    };
    let images = || {
        let items = store.images().unwrap().items;
        items.into_iter().map(|image| image.name.to_string()).collect::<Vec<_>>()
    };
    // A root disk is not taken for modules, nor is what is missing.
    put_image(&store, IMAGE, 1).unwrap();
    for other in [IMAGE, "modules-0"] {
        let refused = put(Some(other));
        assert!(matches!(refused, Err(PutError::Invalid { place: "modules", .. })), "{refused:?}");
    }
    assert_eq!(store.kernels().unwrap().items.len(), 0);
    put_modules("modules-1", 2);
    put(Some("modules-1")).unwrap();
    let kernel = store.kernel(&name("6.12")).unwrap();
    assert_eq!(kernel.modules.as_ref().unwrap().manifest.name, name("modules-1"));
    drop(kernel);
    let RemoveError::InUse { by, .. } = store.remove_image(&name("modules-1")).unwrap_err() else {
        panic!("removed, or not found");
    };
    assert_eq!(by, ["kernel 6.12"]);
    // gc keeps modules whose kernel may still come.
    put_modules("modules-2", 3);
    store.gc().unwrap();
    assert_eq!(images(), [IMAGE, "modules-1", "modules-2"]);
    put(Some("modules-2")).unwrap();
    assert_eq!(images(), [IMAGE, "modules-2"]);
    // Modules that a VM has as its disk outlive their kernel.
    let image = store.image(&name("modules-2")).unwrap();
    store.remove_kernel(&name("6.12")).unwrap();
    assert_eq!(images(), [IMAGE, "modules-2"]);
    drop(image);
    put(Some("modules-2")).unwrap();
    store.remove_kernel(&name("6.12")).unwrap();
    assert_eq!(images(), [IMAGE]);
}

#[test]
fn many_put_one_name_at_once_and_one_of_them_is_there() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let store = store.clone();
            scope.spawn(move || put_image(&store, "one", seed * 10).unwrap());
        }
    });
    drop(store);
    let store = reopen(root.path());
    let image = store.image(&name("one")).unwrap();
    assert!((0..8).any(|seed| image_spec(&disk(seed * 10)).digest == image.manifest.disk.digest));
    assert_eq!(store.staged().unwrap(), Vec::<PathBuf>::new());
}

#[test]
fn an_image_is_on_disk_before_it_is_renamed_and_its_name_after() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let (_, trace) = blob::fault::with_trace(|| put_image(&store, IMAGE, 1).unwrap());
    let steps: Vec<_> = trace
        .iter()
        .map(|(doing, path)| {
            let mut tail: Vec<_> = path
                .strip_prefix(root.path())
                .unwrap()
                .iter()
                .map(|c| c.to_str().unwrap())
                .collect();
            if tail[0] == "staging" {
                tail[1] = "*";
            }
            format!("{doing} {}", tail.join("/"))
        })
        .collect();
    let expected = [
        "making folder staging/*",
        "making folder staging/*/image",
        "creating staging/*/image/disk",
        "writing staging/*/image/disk",
        "creating staging/*/image/tree",
        "writing staging/*/image/tree",
        "making read-only staging/*/image/disk",
        "syncing staging/*/image/disk",
        "making read-only staging/*/image/tree",
        "syncing staging/*/image/tree",
        "creating staging/*/image/manifest",
        "writing staging/*/image/manifest",
        "making read-only staging/*/image/manifest",
        "syncing staging/*/image/manifest",
        "syncing folder staging/*/image",
        "syncing folder staging/*",
        "renaming to images/debian",
        "syncing folder images",
        "removing staging/*",
    ];
    assert_eq!(steps, expected);
}

#[test]
fn putting_an_image_fails_or_crashes_at_any_step_and_leaves_the_old_or_the_new() {
    let digest = |seed| image_spec(&disk(seed)).digest;
    for crash in [false, true] {
        let mut steps = 0;
        loop {
            let root = tempfile::tempdir().unwrap();
            let store = store(root.path());
            let put = || put_image(&store, IMAGE, 2);
            let (result, hit) = if crash {
                blob::fault::with_crash_at(steps, put)
            } else {
                blob::fault::with_failure_at(steps, put)
            };
            if !crash {
                let now = store.image(&name(IMAGE)).unwrap().manifest.disk.digest;
                assert_eq!(now, digest(if result.is_ok() { 2 } else { 1 }), "step {steps}");
            }
            drop(store);
            let store = reopen(root.path());
            let now = store.image(&name(IMAGE)).unwrap().manifest.disk.digest;
            assert!([digest(1), digest(2)].contains(&now), "step {steps}");
            assert!(result.is_err() || now == digest(2), "step {steps}");
            assert_eq!(tree(root.path()).len(), 12, "step {steps}: {:?}", tree(root.path()));
            if !hit {
                break;
            }
            steps += 1;
        }
        assert!(steps > 10, "only {steps} steps");
    }
}

#[test]
fn a_layer_made_ahead_is_the_first_one_of_one_vm() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let ids = [(); 4].map(|()| dayfly_units::VmId::random());
    let id = |n: usize| ids[n];
    let made = || {
        let stage =
            std::fs::read_dir(folder.path().join("staging")).unwrap().next().unwrap().unwrap();
        std::fs::read_dir(stage.path()).unwrap().count()
    };
    store.prepare_vm_layers(3).unwrap();
    store.prepare_vm_layers(2).unwrap();
    assert_eq!((store.staged().unwrap().len(), made()), (1, 3));
    store.trim_vm_layers(5).unwrap();
    store.trim_vm_layers(2).unwrap();
    assert_eq!(made(), 2);
    let (second, _) = store.create_vm_layer(id(1), 1).unwrap();
    assert_eq!((second.disk, second.number), (1, 0));
    // VM 1 has a folder already, so it gets no prepared layer.
    let (first, _) = store.create_vm_layer(id(1), 0).unwrap();
    let (ahead, data) = store.create_vm_layer(id(2), 0).unwrap();
    let (next, _) = store.create_vm_layer(id(2), 0).unwrap();
    assert_eq!((first.number, ahead.number, next.number, made()), (0, 0, 1, 1));
    data.set_len(7).unwrap();
    assert_eq!(store.open_vm_layer(&ahead, true).unwrap().metadata().unwrap().len(), 7);
    let (third, data) = store.create_vm_layer(id(3), 0).unwrap();
    assert_eq!((third.vm, data.metadata().unwrap().len(), made()), (id(3), 0, 0));
    // Empty files are prepared only after the first freeze.
    let freeze = |layer: &VmLayer| {
        let mut freezing = store.freezing();
        let freeze = freezing.freeze(layer).unwrap();
        freezing.keep();
        assert_eq!(
            (freeze.map.metadata().unwrap().len(), freeze.next_data.metadata().unwrap().len()),
            (0, 0)
        );
        freeze.next_data.set_len(3).unwrap();
        freeze.next
    };
    let next = freeze(&third);
    store.prepare_vm_layers(0).unwrap();
    assert_eq!(made(), 4);
    let last = freeze(&next);
    assert_eq!((next.number, last.number, made()), (1, 2, 2));
    assert_eq!(store.open_vm_layer(&last, true).unwrap().metadata().unwrap().len(), 3);
    assert_eq!(store.open_frozen_layer(&next).unwrap().data.metadata().unwrap().len(), 3);
    store.prepare_vm_layers(0).unwrap();
    assert_eq!(made(), 4);
    drop(store);
    assert_eq!(std::fs::read_dir(folder.path().join("staging")).unwrap().count(), 0);
}

#[test]
fn the_list_of_failpoints_is_that_of_the_sources() {
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let found = dayfly_units::failpoint::in_sources(&sources).unwrap();
    let listed: std::collections::BTreeSet<String> =
        FAILPOINTS.iter().map(|&name| name.to_owned()).collect();
    assert_eq!(listed.len(), FAILPOINTS.len(), "one is listed twice");
    assert_eq!(found, listed);
}
