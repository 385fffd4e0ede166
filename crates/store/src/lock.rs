//! The lock of a store: one process has it open.
//!
//! Two flock(2) locks are taken. The one of the file `lock` also excludes daemons of earlier
//! versions, which take no other. The one of the folder itself cannot be lost: if a person removes
//! `lock` while a daemon runs, the next daemon locks a new file, but finds the folder locked.

use crate::blob::Dir;
use crate::errors::IoError;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FILE: &str = "lock";
/// How long to retry: from fork(2) to execve(2), a child of the previous owner still has the locked
/// descriptor.
const WAIT: Duration = Duration::from_millis(500);
const AGAIN: Duration = Duration::from_millis(5);

/// Why a store was not locked.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another process has the store open: the lock file, and the process id in it.
    Taken(PathBuf, String),
    Io(IoError),
}

impl From<IoError> for LockError {
    fn from(e: IoError) -> Self {
        Self::Io(e)
    }
}

/// The locks of a store, released on drop.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
    _folder: OwnedFd,
}

impl Lock {
    /// Locks the store at `root`, and writes this process's id into the file.
    pub(crate) fn take(root: &Dir) -> Result<Self, LockError> {
        let path = root.path().join(FILE);
        let until = Instant::now() + WAIT;
        let mut file = loop {
            let file = root.open_or_create(FILE)?;
            if !locked(&file, until).map_err(|e| IoError::new("locking", &path)(e.into()))? {
                return Err(taken(&file, &path));
            }
            // Another process may have replaced the file before it was locked.
            if root.is_at(FILE, &file)? {
                break file;
            }
        };
        let folder = root.sub(".")?.into_fd();
        if !locked(&folder, until).map_err(|e| IoError::new("locking", root.path())(e.into()))? {
            return Err(taken(&file, &path));
        }
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(IoError::new("writing", &path))?;
        Ok(Self { _file: file, _folder: folder })
    }
}

/// Locks an open file or folder. Returns whether that succeeded before `until`.
fn locked(fd: impl AsFd, until: Instant) -> Result<bool, Errno> {
    loop {
        match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(AGAIN),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// The error of a store that another process has open. Its id is in the file, unless the file was
/// removed meanwhile.
fn taken(file: &File, path: &Path) -> LockError {
    let mut holder = String::new();
    let _shown_as_unknown = file.take(32).read_to_string(&mut holder);
    let holder = holder.trim();
    let holder = if holder.is_empty() { "unknown" } else { holder };
    LockError::Taken(path.to_owned(), holder.to_owned())
}

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
