//! Files and folders that the guest has open.

use crate::nodes::Node;
use dayfly_units::sync::lock;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, RawDir, SeekFrom, seek};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

/// Bytes of entries that are read of a folder at once.
const FOLDER_BYTES: usize = 32 << 10;

/// An entry of a folder.
#[derive(Debug)]
pub struct Entry {
    /// Its name.
    pub name: CString,
    /// The inode.
    pub ino: u64,
    /// What it is, if the file system says so.
    pub kind: FileType,
    /// Where the next entry begins.
    pub next: u64,
}

/// A folder that is being read.
#[derive(Debug)]
pub struct Listing {
    fd: OwnedFd,
    /// Entries that were read and not given to the guest yet.
    ahead: VecDeque<Entry>,
    /// Where the first of them begins.
    at: u64,
}

impl Listing {
    /// A listing from the start.
    #[must_use]
    pub const fn new(fd: OwnedFd) -> Self {
        Self { fd, ahead: VecDeque::new(), at: 0 }
    }

    /// Continues at a place that an entry has named, or at 0.
    ///
    /// # Errors
    /// The file system's: it does not know the place.
    pub fn go_to(&mut self, at: u64) -> Result<(), Errno> {
        // What is read ahead is used for the next part only: a new start sees changes.
        if at != self.at || at == 0 {
            self.ahead.clear();
            i64::try_from(at).map_err(|_| Errno::INVAL)?;
            seek(&self.fd, SeekFrom::Start(at))?;
            self.at = at;
        }
        Ok(())
    }

    /// The next entry, which stays the next one until [`Self::advance`]. `None` at the end.
    ///
    /// # Errors
    /// The file system's.
    pub fn peek(&mut self) -> Result<Option<&Entry>, Errno> {
        if self.ahead.is_empty() {
            let mut buffer = [MaybeUninit::uninit(); FOLDER_BYTES];
            let mut entries = RawDir::new(&self.fd, &mut buffer);
            while let Some(entry) = entries.next() {
                let entry = entry?;
                self.ahead.push_back(Entry {
                    name: entry.file_name().to_owned(),
                    ino: entry.ino(),
                    kind: entry.file_type(),
                    next: entry.next_entry_cookie(),
                });
                if entries.is_buffer_empty() {
                    break;
                }
            }
        }
        Ok(self.ahead.front())
    }

    /// Passes the next entry.
    pub fn advance(&mut self) {
        if let Some(entry) = self.ahead.pop_front() {
            self.at = entry.next;
        }
    }
}

/// What a handle is for.
#[derive(Debug)]
pub enum Open {
    /// A regular file.
    File(OwnedFd),
    /// A folder.
    Folder(Mutex<Listing>),
}

/// An open file or folder.
#[derive(Debug)]
pub struct Handle {
    /// What it is a handle of.
    pub node: Arc<Node>,
    /// The open file.
    pub open: Open,
}

impl Handle {
    /// The file.
    ///
    /// # Errors
    /// EBADF: it is a folder.
    pub const fn file(&self) -> Result<&OwnedFd, Errno> {
        match &self.open {
            Open::File(fd) => Ok(fd),
            Open::Folder(_) => Err(Errno::BADF),
        }
    }

    /// The folder.
    ///
    /// # Errors
    /// EBADF: it is a file.
    pub const fn folder(&self) -> Result<&Mutex<Listing>, Errno> {
        match &self.open {
            Open::File(_) => Err(Errno::BADF),
            Open::Folder(listing) => Ok(listing),
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    handles: HashMap<u64, Arc<Handle>>,
    last: u64,
    /// Places that [`Handles::reserve`] has given and that are not used yet.
    reserved: usize,
}

/// All handles of a volume.
#[derive(Debug)]
pub struct Handles {
    table: Mutex<Table>,
    most: usize,
}

/// A place for a handle, taken before a file is opened or made.
#[derive(Debug)]
pub struct Place<'a>(&'a Handles);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(&self.0.table).reserved -= 1;
    }
}

impl Place<'_> {
    /// Fills the place, and returns the handle's number.
    #[must_use]
    pub fn fill(self, node: Arc<Node>, open: Open) -> u64 {
        let mut table = lock(&self.0.table);
        table.last += 1;
        let id = table.last;
        table.handles.insert(id, Arc::new(Handle { node, open }));
        id
    }
}

impl Handles {
    /// No handles yet.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { table: Mutex::default(), most }
    }

    /// Takes a place for one more.
    ///
    /// # Errors
    /// ENFILE: the guest has too many files open.
    pub fn reserve(&self) -> Result<Place<'_>, Errno> {
        let mut table = lock(&self.table);
        if table.handles.len() + table.reserved >= self.most {
            return Err(Errno::NFILE);
        }
        table.reserved += 1;
        Ok(Place(self))
    }

    /// The handle of a number, if it is one of this node.
    ///
    /// # Errors
    /// EBADF.
    pub fn get(&self, id: u64, node: u64) -> Result<Arc<Handle>, Errno> {
        let table = lock(&self.table);
        let handle = table.handles.get(&id).ok_or(Errno::BADF)?;
        if handle.node.id == node { Ok(handle.clone()) } else { Err(Errno::BADF) }
    }

    /// Closes a handle, when the last operation on it has ended.
    ///
    /// # Errors
    /// EBADF.
    pub fn release(&self, id: u64, node: u64) -> Result<(), Errno> {
        drop(self.get(id, node)?);
        // Not dropped under the lock, because closing a file may take long.
        let removed = lock(&self.table).handles.remove(&id);
        drop(removed);
        Ok(())
    }

    /// Open handles.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.table).handles.len()
    }
}
