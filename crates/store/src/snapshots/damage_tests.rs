//! Every file of a snapshot, truncated at every length and flipped at every bit, is refused, and
//! the error names that file.

use crate::fixture::{assert_is, bake, name, reopen, store};
use crate::fixture_pages::{bake_paged, ram};
use crate::objects::tree::{CheckedFile, trouble};
use crate::{Known, OpenError, PagedSpec, Store};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A store with the snapshot `base`, and its files: manifest, state, memory, data and map of its
/// layer, disk and manifest of its image. Not the hash trees, without which it can be opened.
fn sample(root: &Path) -> (Store, Vec<PathBuf>) {
    let store = store(root);
    bake(&store, "base", 5).unwrap();
    let layer =
        root.join("layers").join(store.snapshot(&name("base")).unwrap().layer_ids()[0].to_string());
    let (snapshot, image) = (root.join("snapshots/base"), root.join("images/debian"));
    let mut files: Vec<_> =
        ["manifest", "state", "memory"].iter().map(|f| snapshot.join(f)).collect();
    files.extend(["data", "map"].iter().map(|f| layer.join(f)));
    files.extend(["disk", "manifest"].iter().map(|f| image.join(f)));
    (store, files)
}

/// Opens the snapshot and reads all of its disks' files, as a pager does.
fn opened(store: &Store) -> Result<(), OpenError> {
    let open = store.open_snapshot(&name("base"))?;
    let disk = &open.disks[0];
    let folders = [
        (store.root().join("images/debian"), "disk"),
        (store.root().join("layers").join(disk.layers[0].layer.id.to_string()), "data"),
    ];
    for (layer, (folder, file)) in (0..).zip(folders) {
        let checked = CheckedFile::new(disk.file(layer).unwrap().unwrap()).unwrap();
        let mut bytes = vec![0; 16 * 4096];
        checked.read(0, &mut bytes).map_err(|error| trouble(&folder, file, error))?;
    }
    Ok(())
}

/// The damage that a process finds that has verified nothing yet.
fn refusal(store: &Store, file: &Path) -> String {
    store.0.verifier.forget(store.root());
    match opened(store) {
        Err(OpenError::Damage(damage)) => {
            let text = damage.to_string();
            assert!(
                text.starts_with(&format!("{}: ", file.display())),
                "{}: {text}",
                file.display()
            );
            text
        }
        other => panic!("{}: {other:?}", file.display()),
    }
}

fn writable(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// All positions of a small file; a sample of a larger one, with its edges.
fn positions(len: u64) -> impl Iterator<Item = u64> {
    let step = (len / 400).max(1);
    (0..len).filter(move |&n| n % step == 0 || n + 2 > len || n % 4096 < 2 && n % 16384 < 2)
}

#[test]
fn every_truncation_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (store, files) = sample(root.path());
    for path in &files {
        let whole = fs::read(path).unwrap();
        let len = whole.len() as u64;
        for cut in positions(len) {
            writable(path).set_len(cut).unwrap();
            let text = refusal(&store, path);
            assert!(text.contains("expected") || text.contains("header says"), "{text}");
            let file = writable(path);
            file.set_len(0).unwrap();
            file.write_all_at(&whole, 0).unwrap();
        }
        let longer = writable(path);
        longer.set_len(len + 1).unwrap();
        refusal(&store, path);
        longer.set_len(len).unwrap();
    }
    assert_is(&store, "base", 5);
}

#[test]
fn every_flipped_bit_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (store, files) = sample(root.path());
    for path in &files {
        let file = writable(path);
        let len = file.metadata().unwrap().len();
        for at in positions(len) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            let bit = u8::try_from(at % 8).unwrap();
            file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
            refusal(&store, path);
            file.write_all_at(&byte, at).unwrap();
        }
    }
    assert_is(&store, "base", 5);
}

#[test]
fn a_flip_is_seen_by_a_process_that_verified_before() {
    let root = tempfile::tempdir().unwrap();
    let (store, files) = sample(root.path());
    opened(&store).unwrap();
    // The kernel's file timestamps have ticks of up to 10 ms.
    std::thread::sleep(std::time::Duration::from_millis(30));
    for path in &files {
        let file = writable(path);
        let mut byte = [0];
        file.read_exact_at(&mut byte, 120).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 120).unwrap();
        assert!(matches!(opened(&store), Err(OpenError::Damage(_))), "{}", path.display());
        file.write_all_at(&byte, 120).unwrap();
        opened(&store).unwrap();
    }
}

#[test]
fn every_missing_file_is_named_with_who_needs_it() {
    let root = tempfile::tempdir().unwrap();
    let (store, files) = sample(root.path());
    for path in files.iter().filter(|p| !p.ends_with("manifest")) {
        let aside = path.with_extension("aside");
        fs::rename(path, &aside).unwrap();
        let text = refusal(&store, path);
        assert!(text.contains("snapshot base needs, is missing"), "{text}");
        fs::rename(&aside, path).unwrap();
    }
    for (folder, what) in [("layers", "layer "), ("images", "image debian")] {
        let parent = root.path().join(folder);
        let path = fs::read_dir(&parent).unwrap().next().unwrap().unwrap().path();
        let aside = root.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        let text = refusal(&store, &path);
        assert!(
            text.contains(what) && text.ends_with("which snapshot base needs, is missing"),
            "{text}"
        );
        fs::rename(&aside, &path).unwrap();
    }
    assert_is(&store, "base", 5);
}

#[test]
fn a_snapshot_under_another_name_and_links_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let (store, files) = sample(root.path());
    fs::rename(root.path().join("snapshots/base"), root.path().join("snapshots/other")).unwrap();
    let text = store.open_snapshot(&name("other")).unwrap_err().to_string();
    assert!(text.ends_with("manifest: name: expected other, got base"), "{text}");
    fs::rename(root.path().join("snapshots/other"), root.path().join("snapshots/base")).unwrap();
    // A link is refused, even if its target has the right content.
    let elsewhere = root.path().join("elsewhere");
    fs::rename(&files[2], &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &files[2]).unwrap();
    assert!(
        matches!(store.open_snapshot(&name("base")), Err(OpenError::Io(e)) if e.path == files[2])
    );
}

#[test]
fn an_image_of_the_same_name_with_other_content_is_not_it() {
    let root = tempfile::tempdir().unwrap();
    let (store, files) = sample(root.path());
    drop(store);
    let other = tempfile::tempdir().unwrap();
    let donor = Store::open(other.path()).unwrap();
    crate::fixture::put_image(&donor, "debian", 99).unwrap();
    fs::remove_dir_all(root.path().join("images/debian")).unwrap();
    fs::rename(other.path().join("images/debian"), root.path().join("images/debian")).unwrap();
    let text = refusal(&reopen(root.path()), &files[6]);
    assert!(text.contains("digest of image debian, which snapshot base needs: expected"), "{text}");
}

/// An open compares open files with stamps; an open during a change must not record the changed
/// file as verified. Each change is a rename, because a write sets a file's times before its bytes,
/// so that an open between the two sees neither change; `verify_tests` has writes.
#[test]
fn what_is_changed_while_it_is_opened_is_not_taken_for_what_was_read() {
    const ROUNDS: u64 = 40;
    let root = tempfile::tempdir().unwrap();
    let (store, tenant) = (store(root.path()), name("one"));
    let pages = PagedSpec { tenant: &tenant, known: Known::default() };
    bake_paged(&store, "base", 3, &ram(0..200), &pages).unwrap();
    let layer = root
        .path()
        .join("layers")
        .join(store.snapshot(&name("base")).unwrap().layer_ids()[0].to_string());
    let (snapshot, image) = (root.path().join("snapshots/base"), root.path().join("images/debian"));
    let files = [
        snapshot.join("manifest"),
        snapshot.join("state"),
        snapshot.join("table"),
        image.join("manifest"),
    ];
    let (good, next) = (root.path().join("good"), root.path().join("next"));
    for path in files.iter().chain(&[layer.join("data"), layer.join("map")]) {
        fs::rename(path, &good).unwrap();
        fs::hard_link(&good, path).unwrap();
        for round in 0..ROUNDS {
            fs::copy(&good, &next).unwrap();
            let mut byte = [0];
            let damaged = writable(&next);
            damaged.read_exact_at(&mut byte, 120).unwrap();
            damaged.write_all_at(&[byte[0] ^ 1], 120).unwrap();
            store.0.verifier.forget(store.root());
            let opened = std::thread::scope(|scope| {
                let opening = scope.spawn(|| store.open_snapshot(&name("base")));
                let begun = std::time::Instant::now();
                while begun.elapsed() < std::time::Duration::from_micros(round * 20) {
                    std::hint::spin_loop();
                }
                fs::rename(&next, path).unwrap();
                opening.join().unwrap()
            });
            // Data with a hash tree is not read by an open: its readers refuse the change.
            if let Some(open) = opened.ok().filter(crate::OpenSnapshot::is_current) {
                let data = CheckedFile::new(open.disks[0].file(1).unwrap().unwrap()).unwrap();
                let is_refused = data.read(0, &mut [0; 4096]).is_err();
                assert!(path.ends_with("data") && is_refused, "round {round}: {}", path.display());
            }
            fs::hard_link(&good, &next).unwrap();
            fs::rename(&next, path).unwrap();
        }
        fs::remove_file(&good).unwrap();
    }
}
