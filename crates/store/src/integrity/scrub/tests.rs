use super::*;
use crate::fixture::{bake, name, reopen, store};
use crate::fixture_pages::{bake_paged, flip, image_block, ram};
use crate::{KernelSpec, Meter, PagedSpec};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};

/// A store with:
///
/// - an image and a kernel;
/// - two snapshots in pages on one layer, and a snapshot with a memory file on another layer;
/// - an unreferenced layer, and block indexes.
fn filled(root: &Path) -> Store {
    let store = store(root);
    let one = name("one");
    let files = [b"vmlinux".as_slice(), b"initrd"].concat();
    let spec = KernelSpec {
        release: "6.12".to_owned(),
        vmlinux_bytes: 7,
        initrd_bytes: 6,
        digest: Digest::of(&files),
        modules: None,
    };
    store
        .put_kernel(&name("6.12"), &spec, &mut zstd::encode_all(&files[..], 1).unwrap().as_slice())
        .unwrap();
    let memory = [ram(1..120), image_block().1].concat();
    bake_paged(&store, "base", 5, &memory, &PagedSpec::of(&one)).unwrap();
    bake_paged(&store, "next", 5, &ram(60..200), &PagedSpec::of(&one)).unwrap();
    bake(&store, "raw", 7).unwrap();
    bake(&store, "gone", 9).unwrap();
    store.remove_snapshot(&name("gone")).unwrap();
    let record = dayfly_units::sealed::seal(b"DFwset\r\n", 1, b"record");
    std::fs::write(root.join("snapshots/base/working-set"), &record).unwrap();
    store
}

fn all(store: &Store) -> VerifyReport {
    store.verify(&Scope::All, &Meter::default()).unwrap()
}

fn of(store: &Store, tenant: &str, snapshots: &[&str]) -> Result<VerifyReport, SearchError> {
    let snapshots = snapshots.iter().map(|text| name(text)).collect();
    store.verify(&Scope::Tenant { tenant: name(tenant), snapshots }, &Meter::default())
}

/// Every file below `folder`.
fn files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path, into) } else { into.push(path) }
    }
}

/// Copies a folder with its holes. Not with cp(1), because from its fork(2) to its execve(2) it has
/// the locks and the descriptors of all tests.
fn copied(from: &Path, to: &Path) {
    let meta = fs::symlink_metadata(from).unwrap();
    if meta.is_dir() {
        fs::create_dir(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let name = entry.unwrap().file_name();
            copied(&from.join(&name), &to.join(&name));
        }
    } else {
        let (bytes, file) = (fs::read(from).unwrap(), File::create_new(to).unwrap());
        file.set_len(bytes.len() as u64).unwrap();
        for (at, page) in (0_u64..).step_by(4096).zip(bytes.chunks(4096)) {
            if page.iter().any(|byte| *byte != 0) {
                file.write_all_at(page, at).unwrap();
            }
        }
    }
    fs::set_permissions(to, meta.permissions()).unwrap();
}

#[test]
fn what_is_sound_is_read_to_the_last_byte_and_found_so() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let meter = Meter::default();
    let report = store.verify(&Scope::All, &meter).unwrap();
    assert_eq!(report.damage, []);
    let VerifyReport { images, kernels, layers, snapshots, packs, block_indexes, .. } = report;
    assert_eq!((images, kernels, layers, snapshots, packs, block_indexes), (1, 1, 3, 3, 2, 2));
    let reading = meter.reading();
    assert!(reading.total > 0 && reading.done == reading.total, "{reading:?}");
    let meter = Meter::default();
    let one = Scope::Tenant { tenant: name("one"), snapshots: vec![name("next"), name("next")] };
    let report = store.verify(&one, &meter).unwrap();
    assert_eq!(
        (report.kernels, report.layers, report.snapshots, report.damage.len()),
        (0, 1, 1, 0)
    );
    assert_eq!(meter.reading().done, meter.reading().total);
}

/// In a fresh store each time: a flipped bit in any file is found, and the finding names that file.
/// Every file is tried.
#[test]
fn a_flipped_bit_in_any_file_is_found() {
    let root = tempfile::tempdir().unwrap();
    let sound = root.path().join("sound");
    drop(filled(&sound));
    let mut paths = Vec::new();
    ["images", "kernels", "layers", "snapshots", "pages", "blocks"]
        .iter()
        .for_each(|folder| files(&sound.join(folder), &mut paths));
    assert!(paths.len() > 20, "{paths:?}");
    for (n, path) in paths.iter().enumerate() {
        let length = fs::metadata(path).unwrap().len();
        let sparse = path.ends_with("disk") || path.ends_with("data") || path.ends_with("memory");
        for at in
            if sparse { vec![length / 3 / 4096 * 4096] } else { vec![0, length / 2, length - 1] }
        {
            for opened_before in [false, true] {
                let copy = root.path().join(format!("{n}-{at}-{opened_before}"));
                copied(&sound, &copy);
                let hurt = copy.join(path.strip_prefix(&sound).unwrap());
                let store = if opened_before {
                    let store = reopen(&copy);
                    assert_eq!(all(&store).damage, []);
                    ["base", "next", "raw"]
                        .iter()
                        .for_each(|s| drop(store.open_snapshot(&name(s)).unwrap()));
                    flip(&hurt, at);
                    store
                } else {
                    flip(&hurt, at);
                    reopen(&copy)
                };
                let report = all(&store);
                let shown = hurt.display().to_string();
                let folder = hurt.parent().unwrap().display().to_string();
                let named = |f: &Finding| f.text.contains(&shown) || f.text.contains(&folder);
                assert!(report.damage.iter().any(named), "{shown} at {at}: {:?}", report.damage);
                drop(store);
                fs::remove_dir_all(&copy).unwrap();
            }
        }
    }
}

#[test]
fn a_damaged_page_is_reported_with_the_snapshots_that_need_it() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let found = store
        .0
        .space(&name("one"))
        .unwrap()
        .find(&Digest::of(&crate::fixture_pages::page(61)))
        .unwrap();
    let path = found.unwrap().pack.path.clone();
    let group_of_page_1 = 30;
    flip(&path, group_of_page_1);
    let report = all(&store);
    assert_eq!(report.damage.len(), 16, "{:?}", report.damage);
    assert!(
        report.damage.iter().all(|f| f.object == Object::Pack && f.snapshots == ["base"]),
        "{:?}",
        report.damage
    );
    // A page that the other snapshot also has.
    let end = fs::metadata(&path).unwrap().len();
    flip(&path, end - 10);
    let report = all(&store);
    assert_eq!(report.damage.len(), 1, "{:?}", report.damage);
    assert_eq!(report.damage[0].snapshots, ["base", "next"]);
    assert_eq!(of(&store, "one", &["raw"]).unwrap().damage, []);
    assert_eq!(of(&store, "one", &["next"]).unwrap().damage.len(), 1);
    // A pack that is damaged when the store opens hides its pages; the snapshots that miss them
    // report it.
    drop(store);
    let store = reopen(root.path());
    let report = all(&store);
    let objects: Vec<(Object, &str)> =
        report.damage.iter().map(|f| (f.object, f.name.as_str())).collect();
    let pack = path.file_name().unwrap().to_str().unwrap();
    assert_eq!(
        objects,
        [(Object::Pack, pack), (Object::Snapshot, "base"), (Object::Snapshot, "next")]
    );
    assert!(
        report.damage[1].text.contains("102 of 102 pages of tenant one, the first of them"),
        "{report:?}"
    );
    // A gc leaves the pack alone, and reports it.
    let gc = store.gc_pages_of(&name("one"), &[].into(), &Meter::default()).unwrap();
    assert!(matches!(&gc.damage[..], [damage] if damage.to_string().contains(pack)), "{gc:?}");
}

#[test]
fn damage_found_is_not_forgotten_by_the_next_use() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let path = root.path().join("snapshots/raw/state");
    let expected = store.snapshot(&name("raw")).unwrap().state;
    flip(&path, 100);
    // As if bytes rot on disk without a change of the file's times.
    store.0.verifier.trust(&path, &File::open(&path).unwrap(), expected.digest);
    drop(store.open_snapshot(&name("raw")).unwrap());
    let report = all(&store);
    assert_eq!(report.damage.len(), 1, "{:?}", report.damage);
    assert_eq!(
        (report.damage[0].object, report.damage[0].name.as_str()),
        (Object::Snapshot, "raw")
    );
    assert!(store.open_snapshot(&name("raw")).is_err());
}

#[test]
fn what_is_missing_is_reported_with_what_needs_it() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let layer = store.snapshot(&name("raw")).unwrap().layer_ids()[0];
    fs::remove_dir_all(root.path().join(format!("layers/{layer}"))).unwrap();
    fs::remove_file(root.path().join("kernels/6.12/initrd")).unwrap();
    fs::remove_dir_all(root.path().join("images/debian")).unwrap();
    let report = all(&store);
    let texts: Vec<&str> = report.damage.iter().map(|f| f.text.as_str()).collect();
    let has = |a: &str, b: &str| texts.iter().filter(|t| t.contains(a) && t.contains(b)).count();
    assert_eq!(has("image debian", "which snapshot base needs"), 1, "{texts:?}");
    assert_eq!(has("image debian", "which snapshot next needs"), 1, "{texts:?}");
    assert_eq!(has("layer", "which snapshot raw needs"), 1, "{texts:?}");
    assert_eq!(has("initrd", "kernel 6.12"), 1, "{texts:?}");
    assert_eq!(report.damage.len(), 5, "{texts:?}");
}

#[test]
fn another_tenants_snapshots_are_not_there_and_a_wrong_name_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    bake_paged(&store, "theirs", 5, &ram(300..350), &PagedSpec::of(&name("two"))).unwrap();
    let report = of(&store, "two", &[]).unwrap();
    // Its own snapshot, and the one that belongs to every tenant.
    assert_eq!((report.snapshots, report.packs), (2, 1));
    for (tenant, snapshot) in [("two", "base"), ("one", "theirs"), ("one", "unknown")] {
        let error = of(&store, tenant, &[snapshot]).unwrap_err();
        assert!(
            matches!(&error, SearchError::NotFound { name } if name.as_str() == snapshot),
            "{error}"
        );
    }
    let pack = fs::read_dir(root.path().join("pages/two")).unwrap().next().unwrap().unwrap().path();
    flip(&pack, 5);
    assert_eq!(of(&store, "one", &[]).unwrap().damage, []);
    assert!(!of(&store, "two", &[]).unwrap().damage.is_empty());
}

#[test]
fn a_search_that_is_stopped_ends() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let meter = Meter::default();
    meter.stop();
    let error = store.verify(&Scope::All, &meter).unwrap_err();
    assert!(
        matches!(&error, SearchError::Io(e) if e.source.kind() == std::io::ErrorKind::Interrupted),
        "{error}"
    );
    assert!(meter.reading().done < meter.reading().total);
}

/// Snapshots come and go, packs are rewritten, images are replaced: none of this is damage.
#[test]
fn what_changes_meanwhile_is_not_damaged() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let one = name("one");
    let done = std::sync::atomic::AtomicBool::new(false);
    let searches = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (store, one, done, searches) = (&store, &one, &done, &searches);
        scope.spawn(move || {
            for round in 0..800_u64 {
                // On a busy host the other thread may stand still for many rounds.
                if round >= 40 && searches.load(std::sync::atomic::Ordering::Relaxed) > 3 {
                    break;
                }
                let snapshot = if round % 2 == 0 { "even" } else { "odd" };
                let memory = ram(round * 11..round * 11 + 150);
                // The same seed twice: a layer is removed and comes back.
                bake_paged(
                    store,
                    snapshot,
                    u8::try_from(round % 3).unwrap(),
                    &memory,
                    &PagedSpec::of(one),
                )
                .unwrap();
                if round % 2 == 1 {
                    ["even", "odd"].iter().for_each(|s| store.remove_snapshot(&name(s)).unwrap());
                }
                let seed = u8::try_from(round % 200).unwrap();
                crate::fixture::put_image(store, "other", seed).unwrap();
                store.gc().unwrap();
                assert_eq!(store.gc_pages().unwrap().damage, []);
                store.gc_staging().unwrap();
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        while !done.load(std::sync::atomic::Ordering::Relaxed) {
            assert_eq!(all(store).damage, []);
            assert_eq!(of(store, "one", &["base"]).unwrap().damage, []);
            store.stats(one).unwrap();
            store.usage(one).unwrap();
            searches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    });
    assert!(searches.into_inner() > 3, "too few searches beside the changes");
}

#[test]
fn what_was_removed_or_replaced_while_it_was_read_is_not_reported() {
    let root = tempfile::tempdir().unwrap();
    let store = filled(root.path());
    let meter = Meter::default();
    let mut scrub = Scrub::plan(&store, &Scope::All, &meter).unwrap();
    let (folder, aside) = (root.path().join("kernels/6.12"), root.path().join("aside"));
    let dir = store.0.kernels.sub("6.12").unwrap();
    let mut judged = || {
        let wrong =
            missing(folder.join("initrd"), "file initrd".to_owned(), "kernel 6.12".to_owned());
        scrub
            .judge(Object::Kernel, "6.12", (&store.0.kernels, &dir), Err(wrong), Vec::new())
            .unwrap()
    };
    fs::rename(&folder, &aside).unwrap();
    assert!(judged(), "it has gone");
    fs::create_dir(&folder).unwrap();
    assert!(judged(), "it is another");
    fs::remove_dir(&folder).unwrap();
    fs::rename(&aside, &folder).unwrap();
    assert!(!judged(), "it is still there");
    assert_eq!(scrub.report.damage.len(), 1);
}

#[test]
fn findings_beyond_the_list_are_counted() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    bake_paged(&store, "big", 5, &ram(1..1500), &PagedSpec::of(&one)).unwrap();
    for pack in fs::read_dir(root.path().join("pages/one")).unwrap() {
        let path = pack.unwrap().path();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let found = store.0.space(&one).unwrap();
        let pack = found.read().packs.values().find(|pack| pack.path == path).cloned().unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(&vec![0; usize::try_from(pack.stored_bytes()).unwrap()], 0)
            .unwrap();
    }
    let report = all(&store);
    let pages = (1..1500).filter(|n| n % 7 != 0).count() as u64;
    assert_eq!(
        (report.damage.len(), report.more_damage),
        (MAX_FINDINGS, pages - MAX_FINDINGS as u64)
    );
}

#[test]
fn a_commit_reports_its_progress() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let one = name("one");
    let meter = Meter::default();
    let known = crate::Known { meter: Some(&meter), ..crate::Known::default() };
    bake_paged(&store, "a", 5, &ram(1..400), &PagedSpec { known, ..PagedSpec::of(&one) }).unwrap();
    let new = (1..400_u64).filter(|n| n % 7 != 0).count() as u64 * 4096;
    assert_eq!(
        meter.reading(),
        crate::Reading { part: "storing new pages", done: new, total: new }
    );
    // No page is new, so the hashing is the last part reported.
    let meter = Meter::default();
    let known = crate::Known { meter: Some(&meter), ..crate::Known::default() };
    bake_paged(&store, "b", 5, &ram(1..400), &PagedSpec { known, ..PagedSpec::of(&one) }).unwrap();
    let reading = meter.reading();
    assert!(
        reading.part == "hashing memory" && reading.done == reading.total && reading.total >= new,
        "{reading:?}"
    );
}
