//! What is accepted from an archive, and why an archive was not unpacked.

use crate::error::{ArchiveError, show};
use crate::reader::Entry;
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// How to treat a symbolic link among the folders of an entry's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// The link is followed inside the target. If the target is `/`, an absolute link starts there.
    Within,
    /// The archive is refused.
    Never,
}

/// What is accepted from an archive.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Treatment of symbolic links among the folders of a path.
    pub links: Links,
    /// Whether owners are set. Otherwise every file belongs to this process's user.
    pub owners: bool,
    /// Mask of the mode bits that are set.
    pub mode_mask: u32,
    /// Whether devices and pipes are created. Otherwise they are skipped.
    pub special: bool,
    /// Selects the extended attributes to set.
    pub xattrs: fn(&[u8]) -> bool,
}

/// Why an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The target cannot be opened, or no stage can be made in it.
    #[error("folder {}: {what}: {errno}", show(path.as_os_str().as_bytes()))]
    Target {
        /// Path of the target.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        errno: Errno,
    },
    /// The archive is broken or has a refused entry.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A system call failed.
    #[error("entry \"{}\": {what}: {errno}", show(entry))]
    Write {
        /// The entry's name.
        entry: Vec<u8>,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        errno: Errno,
    },
    /// The entry cannot replace an existing file or folder of the target.
    #[error("\"{}\": expected {expected} in the target, got {got}", show(entry))]
    Conflict {
        /// The name below the target.
        entry: Vec<u8>,
        /// The kinds that could be merged or replaced.
        expected: &'static str,
        /// The existing kind.
        got: &'static str,
    },
}

pub(crate) fn write_error(entry: &Entry, what: &'static str, errno: Errno) -> UnpackError {
    UnpackError::Write { entry: entry.head.path.clone(), what, errno }
}
