//! RAM saved into a memfd (memfd_create(2)) instead of a file: a VMM writes it once, the store
//! reads it, and then it serves as a template's memory.
//!
//! A guest may have taken over the VMM that writes RAM, so the length is sealed before the VMM gets
//! the memfd. Without this seal, a VMM could shrink the file, and a process that maps it would get
//! SIGBUS. After the VMM's answer the content is sealed too; this fails if the VMM still has a
//! writable mapping.

use super::error::CommitError;
use crate::errors::IoError;
use crate::objects::manifest::SnapshotManifest;
use dayfly_units::PAGE_SIZE;
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The memfd's name in errors.
const PATH: &str = "RAM that is saved (memfd)";
/// The name of the memfd of the state in errors.
const STATE_PATH: &str = "state that is saved (memfd)";

/// How long sealing is retried while the memfd seems to be in use, and the pause between attempts.
const SEAL_WITHIN: Duration = Duration::from_secs(1);
const SEAL_AGAIN: Duration = Duration::from_millis(10);

/// An empty memfd of `bytes`, with its length sealed.
pub(super) fn create(bytes: u64) -> Result<File, IoError> {
    let failed = IoError::new("making", Path::new(PATH));
    let make = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("ram", flags)?);
        file.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file)
    };
    make().map_err(failed)
}

/// An empty memfd for the state, which the store copies.
pub(super) fn create_state() -> Result<File, IoError> {
    let made = rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC);
    made.map(File::from).map_err(|e| IoError::new("making", Path::new(STATE_PATH))(e.into()))
}

/// Whether the file is a memfd made by [`create`].
fn is_in_memory(file: &File) -> bool {
    rustix::fs::fcntl_get_seals(file)
        .is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW))
}

/// Frees the `free` frames and seals the content. Does nothing if RAM is a file on disk.
///
/// # Errors
/// `Invalid`: a process has a writable mapping.
pub(super) fn seal(file: &File, free: &[Range<u32>]) -> Result<(), CommitError> {
    if !is_in_memory(file) {
        return Ok(());
    }
    let failed = |e: Errno| IoError::new("sealing", Path::new(PATH))(e.into());
    let length = file.metadata().map_err(IoError::new("looking at", Path::new(PATH)))?.len();
    for range in free {
        let end = (u64::from(range.end) * PAGE_SIZE).min(length);
        let start = u64::from(range.start) * PAGE_SIZE;
        if start < end {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, punch, start, end - start).map_err(failed)?;
        }
    }
    match seal_content(file) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(CommitError::Invalid {
            place: PATH.to_owned(),
            expected: "no mapping to write once the VMM has answered".to_owned(),
            got: "one".to_owned(),
        }),
        Err(e) => Err(failed(e).into()),
    }
}

/// Seals a memfd against writes, changes of length and further seals. Blocks for up to 1 s.
///
/// # Errors
/// `EBUSY`: a process has a writable mapping. The kernel also returns it while it holds extra
/// references to a page. The kernel waits 0.15 s for those, which is too short in 1 of 1,200 forks;
/// hence the retries.
pub fn seal_content(file: &File) -> Result<(), Errno> {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let until = Instant::now() + SEAL_WITHIN;
    loop {
        match rustix::fs::fcntl_add_seals(file, seals) {
            Err(Errno::BUSY) if Instant::now() < until => std::thread::sleep(SEAL_AGAIN),
            result => return result,
        }
    }
}

/// A read-only descriptor of the same memory.
pub(super) fn to_read(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())?.into())
}

/// RAM of a snapshot that is in the host's memory: a sealed memfd. [`crate::Store::open_resident`]
/// takes it.
#[derive(Debug)]
pub struct Resident {
    /// Read-only descriptor.
    pub(super) file: File,
    /// The snapshot. The digest of its RAM does not identify it, because another process may have
    /// reported it ([`crate::RamWork`]).
    pub(super) of: Box<SnapshotManifest>,
    /// As [`super::OpenSnapshot::is_proven`].
    pub(super) is_proven: bool,
}

impl Resident {
    /// A new description of `file`, for reading, if it is a memfd.
    pub(super) fn file(file: &File) -> io::Result<Option<File>> {
        is_in_memory(file).then(|| to_read(file)).transpose()
    }

    /// Bytes of the host's memory that it takes, as the kernel counts them.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.file.metadata().map_or(self.of.memory.bytes, |meta| meta.blocks() * 512)
    }
}

#[cfg(test)]
#[path = "ram_tests.rs"]
mod tests;
