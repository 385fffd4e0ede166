use super::FILE;
use crate::fixture::{name, store};
use crate::fixture_pages::{bake_paged, ram, restored};
use crate::{PagedSpec, Store};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::fs;
use std::path::Path;

/// A small file system, on which writes fail with ENOSPC. The tests run as root.
struct Small(tempfile::TempDir);

impl Small {
    fn new(bytes: u64) -> Self {
        let root = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        mount("tmpfs", root.path(), "tmpfs", MountFlags::empty(), Some(options.as_c_str()))
            .expect("this test mounts a tmpfs, as root");
        Self(root)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        unmount(self.path(), UnmountFlags::DETACH).unwrap();
    }
}

/// Writes until nothing fits any more.
fn fill(root: &Path) {
    let mut n = 0;
    let mut bytes = 1 << 16;
    while bytes >= 4096 {
        if fs::write(root.join(format!("fill{n}")), vec![1; bytes]).is_err() {
            let _ = fs::remove_file(root.join(format!("fill{n}")));
            bytes /= 2;
        }
        n += 1;
    }
}

fn bake(store: &Store, to: &str, pages: std::ops::Range<u64>) {
    bake_paged(store, to, 5, &ram(pages), &PagedSpec::of(&name("one"))).unwrap();
}

/// Eight packs that are mostly unused, and one that is not used at all if asked for, on a disk that
/// is full.
fn full(root: &Path, reserve: u64, unused: bool) -> Store {
    let store = store(root);
    store.keep_reserve_of(reserve).unwrap();
    for n in 0..8_u64 {
        let at = 1000 * (n + 1);
        bake(&store, &format!("all{n}"), at..at + 150);
        bake(&store, &format!("some{n}"), at..at + 20);
    }
    for n in 0..8 {
        store.remove_snapshot(&name(&format!("all{n}"))).unwrap();
    }
    if unused {
        bake(&store, "unused", 20_000..20_150);
        store.remove_snapshot(&name("unused")).unwrap();
    }
    fill(root);
    assert!(fs::write(root.join("one-more"), [1; 8192]).is_err(), "it is full");
    let _ = fs::remove_file(root.join("one-more"));
    store
}

fn all_there(store: &Store) {
    for n in 0..8_u64 {
        let at = 1000 * (n + 1);
        assert!(restored(store, &name("one"), &format!("some{n}")) == ram(at..at + 20), "{n}");
    }
}

fn bytes_of_packs(root: &Path) -> u64 {
    let all = fs::read_dir(root.join("pages/one")).unwrap();
    all.map(|e| e.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn a_gc_on_a_full_disk_frees_unused_packs_first_and_then_one_after_the_other() {
    let root = Small::new(6 << 20);
    let store = full(root.path(), 0, true);
    let before = bytes_of_packs(root.path());
    let report = store.gc_pages().unwrap();
    assert_eq!((report.no_space, report.packs), (None, 9));
    assert!(bytes_of_packs(root.path()) < before / 4);
    all_there(&store);
}

#[test]
fn a_gc_that_has_no_unused_pack_to_begin_with_spends_its_reserve_and_makes_it_anew() {
    for reserve in [256 << 10, 0] {
        let root = Small::new(6 << 20);
        let store = full(root.path(), reserve, false);
        let before = bytes_of_packs(root.path());
        let report = store.gc_pages().unwrap();
        let there = root.path().join(FILE).metadata().map(|meta| meta.len()).ok();
        if reserve > 0 {
            assert_eq!((report.no_space, report.packs), (None, 8));
            assert!(bytes_of_packs(root.path()) < before / 4);
            assert_eq!(there, Some(reserve));
        } else {
            let error = report.no_space.expect("there is no way on");
            assert!(error.contains("os error 28"), "{error}");
            assert_eq!((report.packs, bytes_of_packs(root.path()), there), (0, before, None));
            // The next one finds space.
            fs::remove_file(root.path().join("fill0")).unwrap();
            assert_eq!(store.gc_pages().unwrap().packs, 8);
        }
        all_there(&store);
    }
}

#[test]
fn a_snapshot_is_removed_from_a_disk_without_an_inode_left() {
    let root = Small::new(6 << 20);
    let store = store(root.path());
    store.keep_reserve_of(64 << 10).unwrap();
    bake(&store, "a", 1..40);
    let mut n = 0;
    while fs::write(root.path().join(format!("fill{n}")), [1; 4096]).is_ok() {
        n += 1;
    }
    store.remove_snapshot(&name("a")).unwrap();
    store.gc_pages().unwrap();
    assert!(root.path().join(FILE).exists());
}
