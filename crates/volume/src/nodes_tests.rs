use super::*;
use rustix::fs::{CWD, openat};
use std::ffi::CString;
use std::path::Path;
use tempfile::TempDir;

fn open(path: &Path) -> OwnedFd {
    openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// A folder and its nodes.
struct World {
    folder: TempDir,
    nodes: Nodes,
}

impl World {
    fn new(known: usize, open_nodes: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nodes = Nodes::new(open(folder.path()), Bounds { known, open: open_nodes }).unwrap();
        Self { folder, nodes }
    }

    fn make(&self, name: &str) {
        std::fs::write(self.folder.path().join(name), "").unwrap();
    }

    fn make_folder(&self, name: &str) {
        std::fs::create_dir(self.folder.path().join(name)).unwrap();
    }

    /// Looks a name up in a folder of the guest.
    fn find(&self, parent: u64, name: &str) -> Result<u64, Errno> {
        let (parent, name) = (self.nodes.folder(parent)?, CString::new(name).unwrap());
        let (fd, stat) = find(&parent.fd, &name)?;
        self.nodes.found(fd, &stat, (parent.id, &name)).map(|node| node.id)
    }

    fn made(&self, name: &str) -> u64 {
        self.make(name);
        self.find(ROOT, name).unwrap()
    }

    fn inode(&self, id: u64) -> Result<u64, Errno> {
        Ok(stat(&self.nodes.get(id)?.fd)?.stx_ino)
    }
}

#[test]
fn one_file_has_one_number_until_it_is_forgotten_as_often_as_found() {
    let w = World::new(4, 3);
    let id = w.made("a");
    std::fs::hard_link(w.folder.path().join("a"), w.folder.path().join("b")).unwrap();
    assert_eq!(w.find(ROOT, "b"), Ok(id));
    w.nodes.forget(id, 1);
    assert!(w.nodes.get(id).is_ok());
    w.nodes.forget(id, u64::MAX);
    assert_eq!(w.nodes.get(id).err(), Some(Errno::STALE));
    w.nodes.forget(id, 1);
    assert_ne!(w.find(ROOT, "a"), Ok(id));
    w.nodes.forget(ROOT, u64::MAX);
    assert!(w.nodes.folder(ROOT).is_ok());
    assert_eq!(w.nodes.count(), (2, 2));
}

#[test]
fn nodes_beyond_the_bound_of_descriptors_are_closed_and_found_again() {
    let w = World::new(100, 4);
    w.make_folder("d");
    w.make_folder("d/e");
    let d = w.find(ROOT, "d").unwrap();
    let e = w.find(d, "e").unwrap();
    w.make("d/e/f");
    let f = w.find(e, "f").unwrap();
    let inode = w.inode(f).unwrap();
    let others: Vec<u64> = (0..20).map(|n| w.made(&n.to_string())).collect();
    assert_eq!(w.nodes.count(), (24, 4));
    // The file and both folders above it are closed.
    for id in [d, e, f] {
        assert!(lock(&w.nodes.table).slots[&id].node.is_none());
    }
    assert_eq!(w.inode(f), Ok(inode));
    assert!(others.iter().all(|id| w.inode(*id).is_ok()));
    assert_eq!(w.nodes.count(), (24, 4));
    // What an operation uses stays open, and if all are used there is no other.
    let held: Vec<_> = others[..3].iter().map(|id| w.nodes.get(*id).unwrap()).collect();
    assert_eq!(w.inode(others[5]), Err(Errno::NFILE));
    assert!(held.iter().all(|node| stat(&node.fd).is_ok()));
    drop(held);
    assert!(w.inode(others[5]).is_ok());
}

#[test]
fn a_closed_node_that_is_not_where_it_was_is_stale_until_it_is_found() {
    let w = World::new(100, 2);
    let path = |name: &str| w.folder.path().join(name);
    let (gone, replaced, moved, noted) = (w.made("gone"), w.made("b"), w.made("c"), w.made("d"));
    let inode = w.inode(moved).unwrap();
    let known = stat(&open(&path("d"))).unwrap();
    w.made("other");
    std::fs::remove_file(path("gone")).unwrap();
    std::fs::write(path("new"), "").unwrap();
    std::fs::rename(path("new"), path("b")).unwrap();
    std::fs::rename(path("c"), path("c2")).unwrap();
    std::fs::rename(path("d"), path("d2")).unwrap();
    w.nodes.moved(&known, (ROOT, c"d2"));
    for id in [gone, replaced, moved] {
        assert_eq!(w.inode(id), Err(Errno::STALE));
    }
    assert_eq!(w.inode(noted), Ok(known.stx_ino));
    assert_eq!(w.find(ROOT, "c2"), Ok(moved), "one file, one number");
    assert_ne!(w.find(ROOT, "b"), Ok(replaced));
    w.made("other2");
    w.made("other3");
    assert_eq!(w.inode(moved), Ok(inode), "where it was last found");
}

/// An inode's number that is used again is no file that the guest knows.
#[test]
fn a_file_that_gets_the_inode_of_a_closed_one_is_another_file() {
    let w = World::new(100, 2);
    let path = w.folder.path().join("a");
    let first = w.made("a");
    let made = |path: &Path| stat(&open(path)).unwrap().stx_btime;
    let of_first = made(&path);
    // The clock of the file system goes on.
    let probe = w.folder.path().join("probe");
    loop {
        std::fs::write(&probe, "").unwrap();
        let of_probe = made(&probe);
        std::fs::remove_file(&probe).unwrap();
        if (of_probe.tv_sec, of_probe.tv_nsec) != (of_first.tv_sec, of_first.tv_nsec) {
            break;
        }
    }
    w.made("other");
    for _ in 0..100 {
        std::fs::remove_file(&path).unwrap();
        let second = w.made("a");
        assert_ne!(second, first);
        assert_eq!(w.nodes.get(first).err(), Some(Errno::STALE));
        w.nodes.forget(second, 1);
    }
}

#[test]
fn folders_that_lie_in_each_other_are_stale() {
    let w = World::new(100, 3);
    w.make_folder("a");
    w.make_folder("a/b");
    let a = w.find(ROOT, "a").unwrap();
    let b = w.find(a, "b").unwrap();
    w.made("other");
    w.made("another");
    let of_a = stat(&open(&w.folder.path().join("a"))).unwrap();
    w.nodes.moved(&of_a, (b, c"a"));
    assert_eq!(w.nodes.get(a).err(), Some(Errno::STALE));
}

#[test]
fn the_oldest_closed_files_become_unknown_before_folders() {
    let w = World::new(8, 3);
    w.make_folder("d");
    let d = w.find(ROOT, "d").unwrap();
    let ids: Vec<u64> = (0..20).map(|n| w.made(&n.to_string())).collect();
    assert_eq!(w.nodes.count(), (8, 3));
    assert!(w.nodes.folder(d).is_ok());
    assert!(w.inode(ids[19]).is_ok());
    assert_eq!(w.nodes.get(ids[0]).err(), Some(Errno::STALE));
    // The guest forgets it later, which is no error.
    w.nodes.forget(ids[0], 1);
    let again = w.find(ROOT, "0").unwrap();
    assert!(again > ids[19] && w.inode(again).is_ok());
    for n in 0..20 {
        w.make_folder(&format!("d{n}"));
        w.find(ROOT, &format!("d{n}")).unwrap();
    }
    assert_eq!(w.nodes.count(), (8, 3));
}

#[test]
fn the_list_of_open_nodes_does_not_grow_with_what_is_forgotten() {
    let w = World::new(100, 4);
    w.make("a");
    for _ in 0..1000 {
        let id = w.find(ROOT, "a").unwrap();
        w.nodes.forget(id, 1);
    }
    assert_eq!(w.nodes.count(), (1, 1));
    assert!(lock(&w.nodes.table).open.len() < 10);
}

/// Many open nodes in a row are passed over.
#[test]
fn a_guest_finds_any_number_of_files() {
    let w = World::new(6000, 4000);
    for n in 0..30_000 {
        w.make(&(n % 10_000).to_string());
        w.find(ROOT, &(n % 10_000).to_string()).unwrap();
    }
    assert_eq!(w.nodes.count(), (6000, 4000));
}

/// On overlayfs the time at which a file was made changes when it is written for the first time.
#[test]
fn an_open_file_stays_the_same_whenever_it_was_made() {
    let w = World::new(100, 2);
    let id = w.made("a");
    let born_later = |seconds: i64| {
        let (fd, mut stat) = find(&w.nodes.folder(ROOT).unwrap().fd, c"a").unwrap();
        stat.stx_mask |= StatxFlags::BTIME.bits();
        stat.stx_btime.tv_sec = seconds;
        w.nodes.found(fd, &stat, (ROOT, c"a")).unwrap().id
    };
    assert_eq!(born_later(1), id);
    w.made("b");
    w.made("c");
    // It is closed now, and its inode is that of another file.
    assert_ne!(born_later(2), id);
    assert_eq!(w.nodes.get(id).err(), Some(Errno::STALE));
}

#[test]
fn no_folder_becomes_unknown_while_a_file_can() {
    let w = World::new(4000, 10);
    let folders: Vec<u64> = (0..2500)
        .map(|n| {
            w.make_folder(&format!("d{n}"));
            w.find(ROOT, &format!("d{n}")).unwrap()
        })
        .collect();
    for n in 0..4000 {
        w.made(&n.to_string());
    }
    assert_eq!(w.nodes.count().0, 4000);
    assert!(folders.iter().all(|id| w.nodes.folder(*id).is_ok()));
}
