//! Files that the guest knows, by number.
//!
//! A node is an O_PATH descriptor, not a path: it stays right when a file is renamed or unlinked.
//! One file has one node, whatever its names. A node lives until the guest has forgotten it as
//! often as it was found. Numbers are never used again, so their generation is always 0.

use dayfly_units::sync::lock;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex};

use crate::wire::ROOT;

/// What a file is known by on the host: device and inode. Its number cannot be given to another
/// file while a descriptor of it is open.
type Key = (u32, u32, u64);

/// When a file was changed, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    changed: (i64, u32),
    modified: (i64, u32),
    bytes: u64,
}

impl Stamp {
    /// A file's stamp. `None` if the file has changed a moment ago: it may change again without
    /// another time.
    #[must_use]
    pub fn of(stat: &Statx, now_s: i64) -> Option<Self> {
        let changed = (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec);
        let modified = (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec);
        let settled = changed.0.max(modified.0).saturating_add(1) < now_s;
        settled.then_some(Self { changed, modified, bytes: stat.stx_size })
    }
}

/// A file that the guest knows.
#[derive(Debug)]
pub struct Node {
    /// Its number.
    pub id: u64,
    /// Opened with O_PATH.
    pub fd: OwnedFd,
    /// What it is; that never changes.
    pub kind: FileType,
    key: Key,
    /// The file when it was last opened.
    pub opened: Mutex<Option<Stamp>>,
}

/// Attributes of an open file.
///
/// # Errors
/// The file system's.
pub fn stat(fd: &OwnedFd) -> Result<Statx, Errno> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// The type in a file's mode.
#[must_use]
pub fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn key(stat: &Statx) -> Key {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}

/// A node and what the guest holds of it.
#[derive(Debug)]
struct Slot {
    node: Arc<Node>,
    lookups: u64,
    /// A folder and a name where the file was once found.
    seen: (u64, Box<CStr>),
}

#[derive(Debug, Default)]
struct Table {
    slots: BTreeMap<u64, Slot>,
    by_key: HashMap<Key, u64>,
    last: u64,
    /// The node up to which [`Nodes::idle`] has looked.
    looked: u64,
}

/// All nodes of a volume.
#[derive(Debug)]
pub struct Nodes {
    table: Mutex<Table>,
    most: usize,
}

impl Nodes {
    /// A table with the root only.
    ///
    /// # Errors
    /// The folder cannot be looked at, or is none.
    pub fn new(root: OwnedFd, most: usize) -> Result<Self, Errno> {
        let found = stat(&root)?;
        if kind(&found) != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        let nodes = Self { table: Mutex::default(), most };
        nodes.found(root, &found, (ROOT, c"."))?;
        Ok(nodes)
    }

    /// The node of a number.
    ///
    /// # Errors
    /// ESTALE: the guest has forgotten it, or never knew it.
    pub fn get(&self, id: u64) -> Result<Arc<Node>, Errno> {
        let table = lock(&self.table);
        table.slots.get(&id).map(|slot| slot.node.clone()).ok_or(Errno::STALE)
    }

    /// As [`Self::get`], of a folder.
    ///
    /// # Errors
    /// ESTALE, ENOTDIR.
    pub fn folder(&self, id: u64) -> Result<Arc<Node>, Errno> {
        let node = self.get(id)?;
        if node.kind == FileType::Directory { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    /// The guest has found a file, `seen` in a folder by a name: counts that, and returns its
    /// number.
    ///
    /// # Errors
    /// ENFILE: the guest knows too many files.
    pub fn found(&self, fd: OwnedFd, stat: &Statx, seen: (u64, &CStr)) -> Result<u64, Errno> {
        let (key, mut table) = (key(stat), lock(&self.table));
        let table = &mut *table;
        if let Some(&id) = table.by_key.get(&key)
            && let Some(slot) = table.slots.get_mut(&id)
        {
            slot.lookups = slot.lookups.saturating_add(1);
            return Ok(id);
        }
        if table.slots.len() >= self.most {
            return Err(Errno::NFILE);
        }
        table.last += 1;
        let (id, kind) = (table.last, kind(stat));
        let node = Arc::new(Node { id, fd, kind, key, opened: Mutex::default() });
        table.slots.insert(id, Slot { node, lookups: 1, seen: (seen.0, seen.1.into()) });
        table.by_key.insert(key, id);
        Ok(id)
    }

    /// The guest forgets a file as often as it has found it `count` times. A count that is too
    /// high is a forgotten file; the root stays.
    pub fn forget(&self, id: u64, count: u64) {
        let mut table = lock(&self.table);
        let Some(slot) = table.slots.get_mut(&id) else { return };
        slot.lookups = slot.lookups.saturating_sub(count);
        if slot.lookups > 0 || id == ROOT {
            return;
        }
        let removed = table.slots.remove(&id);
        if let Some(slot) = &removed {
            table.by_key.remove(&slot.node.key);
        }
        // Closing a descriptor may take long; others need not wait for it.
        drop(table);
        drop(removed);
    }

    /// How many files the guest knows.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.table).slots.len()
    }

    /// Up to `most` files that are not open and no folders, if the table is nearly full: the guest
    /// may be asked to forget them. Successive calls go through all nodes, the oldest first.
    pub fn idle(&self, most: usize) -> Vec<(u64, Box<CStr>)> {
        let mut table = lock(&self.table);
        let full = table.slots.len() >= self.most - self.most / 4;
        if !full {
            return Vec::new();
        }
        let idle = |slot: &Slot| {
            slot.node.kind != FileType::Directory && Arc::strong_count(&slot.node) == 1
        };
        // A bounded step, because the lock is held.
        let step = table.slots.range((Excluded(table.looked), Unbounded)).take(4 * most);
        let (mut looked, mut found) = (0, Vec::new());
        for (&id, slot) in step {
            looked = id;
            if idle(slot) {
                found.push(slot.seen.clone());
            }
            if found.len() == most {
                break;
            }
        }
        table.looked = looked; // 0 at the end: the next call begins again.
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, OFlags, openat};

    fn open(path: &std::path::Path) -> (OwnedFd, Statx) {
        let fd = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let stat = stat(&fd).unwrap();
        (fd, stat)
    }

    #[test]
    fn one_file_has_one_number_until_it_is_forgotten_as_often_as_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("a"), "").unwrap();
        std::fs::hard_link(path("a"), path("b")).unwrap();
        let nodes = Nodes::new(open(folder.path()).0, 3).unwrap();
        let find = |name: &str| {
            let (fd, stat) = open(&path(name));
            nodes.found(fd, &stat, (ROOT, c"a"))
        };
        let id = find("a").unwrap();
        assert_eq!(find("b"), Ok(id));
        nodes.forget(id, 1);
        assert!(nodes.get(id).is_ok());
        nodes.forget(id, u64::MAX);
        assert_eq!(nodes.get(id).err(), Some(Errno::STALE));
        nodes.forget(id, 1);
        assert_ne!(find("a"), Ok(id));
        nodes.forget(ROOT, u64::MAX);
        assert!(nodes.folder(ROOT).is_ok());
    }

    #[test]
    fn the_table_has_a_bound_and_names_what_may_go_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let nodes = Nodes::new(open(folder.path()).0, 4).unwrap();
        let find = |name: &str| {
            std::fs::write(folder.path().join(name), "").unwrap();
            let (fd, stat) = open(&folder.path().join(name));
            let name = std::ffi::CString::new(name).unwrap();
            nodes.found(fd, &stat, (ROOT, &name))
        };
        find("a").unwrap();
        assert!(nodes.idle(8).is_empty());
        find("b").unwrap();
        let held = nodes.get(2).unwrap();
        assert_eq!(nodes.idle(8), [(ROOT, c"b".into())]);
        drop(held);
        assert!(nodes.idle(8).is_empty(), "at the end of the table");
        assert_eq!(nodes.idle(1), [(ROOT, c"a".into())]);
        find("c").unwrap();
        assert_eq!(find("d"), Err(Errno::NFILE));
        assert_eq!(nodes.count(), 4);
    }
}
