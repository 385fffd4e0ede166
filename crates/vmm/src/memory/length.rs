//! The length of a file.

use std::fs::File;
use std::io;

/// The length of `file` in bytes, by fstat(2): the seccomp filters forbid statx(2), by which the
/// standard library asks, because it takes a path.
///
/// # Errors
/// The error of fstat(2).
pub fn file_bytes(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    u64::try_from(stat.st_size).map_err(io::Error::other)
}
