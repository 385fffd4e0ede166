//! Files that the guest knows, by number.
//!
//! A node stays right when a file is renamed or unlinked, because its descriptor is of the file.
//! One file has one node, whatever its names. A node lives until the guest has forgotten it as
//! often as it was found. Numbers are never used again, so their generation is always 0.
//!
//! A guest may know more files than the server may have descriptors for:
//!
//! ```text
//!  open ──(too many are open: the least recently used that no operation uses)──▶ closed
//!    ◀──(used again: its folder is opened, then its name, and it is still that file)──┘
//!  closed ──(too many are known: the oldest, rather a file than a folder)──▶ unknown: ESTALE
//! ```
//!
//! A closed node is found again by the folder and the name under which the guest has last found
//! it. If that is another file now, the answer is ESTALE. The guest's kernel then looks the path up
//! from its start and tries again (`retry_estale` in linux/namei.h), so its programs see no error,
//! unless they use a descriptor instead of a path.

use crate::wire::ROOT;
use dayfly_units::sync::lock;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat2};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::CStr;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex};

/// The most folders above a node that are opened for it: more than a path of PATH_MAX bytes has.
const MAX_DEPTH: usize = 2048;
/// Nodes among which a file becomes unknown rather than a folder.
const MAX_STEP: usize = 1024;

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

/// What a file is known by on the host as long as a descriptor of it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    device: (u32, u32),
    inode: u64,
    kind: u32,
}

/// When a file was made; zeros on file systems that do not say it. While no descriptor of a file is
/// open, its inode's number may be given to another file, which was made at another time. It is no
/// part of the [`Key`], because on overlayfs it changes when a file is written for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Made(i64, u32);

impl Made {
    fn of(stat: &Statx) -> Self {
        if stat.stx_mask & StatxFlags::BTIME.bits() == 0 {
            return Self(0, 0);
        }
        Self(stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)
    }
}

impl Key {
    fn of(stat: &Statx) -> Self {
        Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            kind: u32::from(stat.stx_mode) & libc::S_IFMT,
        }
    }
}

/// A file that the guest knows, with its descriptor.
#[derive(Debug)]
pub struct Node {
    /// Its number.
    pub id: u64,
    /// Opened with O_PATH.
    pub fd: OwnedFd,
    /// What it is; that never changes.
    pub kind: FileType,
    /// The file when it was last opened.
    pub opened: Mutex<Option<Stamp>>,
}

/// Attributes of an open file.
///
/// # Errors
/// The file system's.
pub fn stat(fd: &OwnedFd) -> Result<Statx, Errno> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, wanted)
}

/// The type in a file's mode.
#[must_use]
pub fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Opens one name in a folder. Nothing outside of the folder is reached, no link is followed, and
/// no other file system is entered (openat2(2)).
pub(crate) fn resolve(
    folder: &OwnedFd,
    name: &CStr,
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_XDEV;
    openat2(folder, name, flags | OFlags::CLOEXEC, mode, resolve)
}

/// The file of a name in a folder, if it is on the folder's file system; a link is not followed.
pub(crate) fn find(folder: &OwnedFd, name: &CStr) -> Result<(OwnedFd, Statx), Errno> {
    let fd = resolve(folder, name, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())?;
    let stat = stat(&fd)?;
    Ok((fd, stat))
}

/// A node and what the guest holds of it.
#[derive(Debug)]
struct Slot {
    /// `None` if it is closed.
    node: Option<Arc<Node>>,
    key: Key,
    made: Made,
    lookups: u64,
    /// The folder and the name where the file was last found.
    seen: (u64, Box<CStr>),
    /// [`Node::opened`] of a closed node.
    opened: Option<Stamp>,
    /// It was used since [`Table::make_room`] has looked at it.
    used: bool,
}

#[derive(Debug, Default)]
struct Table {
    slots: BTreeMap<u64, Slot>,
    by_key: HashMap<Key, u64>,
    last: u64,
    /// Numbers of open nodes, about in the order of their use. Those of forgotten nodes may be
    /// among them.
    open: VecDeque<u64>,
    /// Nodes that are open.
    open_count: usize,
    /// The node up to which [`Table::oldest_closed`] has looked.
    looked: u64,
}

impl Table {
    /// Opens a slot.
    fn open(&mut self, id: u64, fd: OwnedFd) -> Result<Arc<Node>, Errno> {
        let slot = self.slots.get_mut(&id).ok_or(Errno::STALE)?;
        let kind = FileType::from_raw_mode(slot.key.kind);
        let node = Arc::new(Node { id, fd, kind, opened: Mutex::new(slot.opened.take()) });
        slot.node = Some(node.clone());
        slot.used = true;
        self.open.push_back(id);
        self.open_count += 1;
        Ok(node)
    }

    /// Closes the least recently used node that no operation uses, if `most` are open. The caller
    /// drops it without the lock, because closing a descriptor may take long.
    ///
    /// # Errors
    /// ENFILE: operations use all of them.
    fn make_room(&mut self, most: usize) -> Result<Option<Arc<Node>>, Errno> {
        if self.open.len() > 2 * most {
            // More than half are forgotten.
            let slots = &self.slots;
            self.open.retain(|id| slots.contains_key(id));
        }
        if self.open_count < most {
            return Ok(None);
        }
        // Each gets a second chance.
        for _ in 0..2 * self.open.len() {
            let Some(id) = self.open.pop_front() else { break };
            let Some(slot) = self.slots.get_mut(&id) else { continue };
            match slot.node.take_if(|node| id != ROOT && !slot.used && Arc::strong_count(node) == 1)
            {
                Some(node) => {
                    slot.opened = *lock(&node.opened);
                    self.open_count -= 1;
                    return Ok(Some(node));
                }
                None => {
                    slot.used = false;
                    self.open.push_back(id);
                }
            }
        }
        Err(Errno::NFILE)
    }

    /// The oldest closed file of the next [`MAX_STEP`] nodes, and the oldest closed folder before
    /// it.
    fn oldest_closed(&mut self) -> (Option<u64>, Option<u64>) {
        let (mut folder, mut file, mut looked, mut count) = (None, None, 0, 0);
        let step = self.slots.range((Excluded(self.looked), Unbounded)).take(MAX_STEP);
        for (&id, slot) in step {
            (looked, count) = (id, count + 1);
            let is_folder = slot.key.kind == libc::S_IFDIR;
            match &slot.node {
                Some(_) => {}
                None if is_folder => folder = folder.or(Some(id)),
                None => {
                    file = Some(id);
                    break;
                }
            }
        }
        // At the end the next call begins again.
        self.looked = if file.is_none() && count < MAX_STEP { 0 } else { looked };
        (file, folder)
    }

    fn remove_by(&mut self, key: &Key) {
        if let Some(&id) = self.by_key.get(key) {
            self.remove(id);
        }
    }

    fn remove(&mut self, id: u64) -> Option<Slot> {
        let slot = self.slots.remove(&id)?;
        self.by_key.remove(&slot.key);
        self.open_count -= usize::from(slot.node.is_some());
        Some(slot)
    }

    /// Makes a closed node unknown, if `most` are known.
    ///
    /// # Errors
    /// ENFILE: there is none.
    fn make_unknown(&mut self, most: usize) -> Result<(), Errno> {
        if self.slots.len() < most {
            return Ok(());
        }
        // All of them, from where the last call ended. Open nodes follow each other, so only one
        // call of many passes over them.
        let steps = self.slots.len() / MAX_STEP + 2;
        let mut folder = None;
        let file = (0..steps).find_map(|_| {
            let (file, other) = self.oldest_closed();
            folder = folder.or(other);
            file
        });
        // A folder only if there is no file: a program may be in it, or a mount on it.
        self.remove(file.or(folder).ok_or(Errno::NFILE)?);
        Ok(())
    }
}

/// Bounds of [`Nodes`].
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// The most nodes.
    pub known: usize,
    /// The most of them with a descriptor.
    pub open: usize,
}

/// All nodes of a volume.
#[derive(Debug)]
pub struct Nodes {
    table: Mutex<Table>,
    most: Bounds,
}

impl Nodes {
    /// A table with the root only.
    ///
    /// # Errors
    /// The folder cannot be looked at, or is none.
    pub fn new(root: OwnedFd, most: Bounds) -> Result<Self, Errno> {
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
    /// ESTALE: the guest has forgotten it, or never knew it, or it is closed and not where it was.
    pub fn get(&self, id: u64) -> Result<Arc<Node>, Errno> {
        let mut closed = Vec::new();
        let mut node = {
            let mut table = lock(&self.table);
            let mut at = id;
            loop {
                let slot = table.slots.get_mut(&at).ok_or(Errno::STALE)?;
                slot.used = true;
                if let Some(node) = &slot.node {
                    break node.clone();
                }
                if closed.len() >= MAX_DEPTH {
                    return Err(Errno::STALE);
                }
                closed.push((at, slot.seen.1.clone(), (slot.key, slot.made)));
                at = slot.seen.0;
            }
        };
        // From the uppermost folder downwards.
        while let Some((id, name, key)) = closed.pop() {
            node = self.open_again(&node, id, &name, key)?;
        }
        Ok(node)
    }

    /// Opens a closed node in its folder.
    fn open_again(
        &self,
        folder: &Node,
        id: u64,
        name: &CStr,
        key: (Key, Made),
    ) -> Result<Arc<Node>, Errno> {
        let (fd, found) = find(&folder.fd, name).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV => Errno::STALE,
            other => other,
        })?;
        if (Key::of(&found), Made::of(&found)) != key {
            return Err(Errno::STALE);
        }
        let mut table = lock(&self.table);
        // Another thread may have opened it, or the guest has forgotten it.
        if let Some(node) = &table.slots.get(&id).ok_or(Errno::STALE)?.node {
            return Ok(node.clone());
        }
        let closed = table.make_room(self.most.open)?;
        let node = table.open(id, fd);
        drop(table);
        drop(closed);
        node
    }

    /// As [`Self::get`], of a folder.
    ///
    /// # Errors
    /// ESTALE, ENOTDIR.
    pub fn folder(&self, id: u64) -> Result<Arc<Node>, Errno> {
        let node = self.get(id)?;
        if node.kind == FileType::Directory { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    /// The guest has found a file, `seen` in a folder by a name: counts that, and returns its node.
    ///
    /// # Errors
    /// ENFILE: operations use all descriptors.
    pub fn found(&self, fd: OwnedFd, stat: &Statx, seen: (u64, &CStr)) -> Result<Arc<Node>, Errno> {
        let (key, made) = (Key::of(stat), Made::of(stat));
        // Dropped after the lock.
        let mut closed = None;
        let mut guard = lock(&self.table);
        let table = &mut *guard;
        let mut known = table.by_key.get(&key).copied();
        let slot = known.and_then(|id| table.slots.get(&id));
        let open = slot.and_then(|slot| slot.node.clone());
        if open.is_none() && slot.is_some_and(|slot| slot.made != made) {
            // Another file has the number of a closed one.
            known = None;
            table.remove_by(&key);
        }
        if open.is_none() {
            closed = table.make_room(self.most.open)?;
        }
        let id = match known {
            Some(id) => id,
            None => {
                table.make_unknown(self.most.known)?;
                table.last += 1;
                let seen = (seen.0, seen.1.into());
                let slot =
                    Slot { node: None, key, made, lookups: 0, seen, opened: None, used: true };
                table.slots.insert(table.last, slot);
                table.by_key.insert(key, table.last);
                table.last
            }
        };
        let node = match open {
            Some(node) => node,
            None => table.open(id, fd)?,
        };
        if let Some(slot) = table.slots.get_mut(&id) {
            slot.lookups = slot.lookups.saturating_add(1);
            (slot.used, slot.made) = (true, made);
            place(slot, seen);
        }
        drop(guard);
        drop(closed);
        Ok(node)
    }

    /// A file that the guest may know has now this name.
    pub fn moved(&self, stat: &Statx, seen: (u64, &CStr)) {
        let mut table = lock(&self.table);
        let known = table.by_key.get(&Key::of(stat)).copied();
        if let Some(slot) = known.and_then(|id| table.slots.get_mut(&id)) {
            place(slot, seen);
        }
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
        let removed = table.remove(id);
        // Closing a descriptor may take long; others need not wait for it.
        drop(table);
        drop(removed);
    }

    /// How many files the guest knows, and how many of them have a descriptor.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        let table = lock(&self.table);
        (table.slots.len(), table.open_count)
    }
}

/// Notes where a file was found.
fn place(slot: &mut Slot, seen: (u64, &CStr)) {
    if (slot.seen.0, &*slot.seen.1) != seen {
        slot.seen = (seen.0, seen.1.into());
    }
}

#[cfg(test)]
#[path = "nodes_tests.rs"]
mod tests;
