//! RAM that is saved into memory of the host's instead of a file on its disk: written once by a VMM, read by whoever wants to know what it is,
//! and then a template's memory as it is.
//!
//! A memfd (memfd_create(2)). The VMM that writes it may have been taken over by its guest, so its length is sealed before the VMM has it: whoever maps it
//! meanwhile cannot be made to fault, and it cannot grow. When the VMM has answered, the content is sealed too; one that still has it mapped for
//! writing is found out by that.

use super::writer::CommitError;
use crate::errors::IoError;
use crate::manifest::FileRef;
use dayfly_units::PAGE_SIZE;
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// What errors call the file.
const PATH: &str = "RAM that is saved (memfd)";

/// For so long, and so often, it is tried to seal what seems to be in use.
const SEAL_WITHIN: Duration = Duration::from_secs(1);
const SEAL_AGAIN: Duration = Duration::from_millis(10);

/// An empty file of `bytes` in the host's memory, which keeps that length.
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

/// Whether [`create`] made it.
fn is_in_memory(file: &File) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW))
}

/// Gives back what is `free` and seals the content. Nothing where RAM is a file on disk.
///
/// # Errors
/// `Invalid`: somebody has it mapped and may write to it.
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

/// Nobody writes to this memory any more, and nobody seals it otherwise. Blocks.
///
/// # Errors
/// `EBUSY`: somebody has it mapped and may write to it. The kernel says the same while it holds a page of it for purposes of its own, which it gives up on
/// after 0.15 s and which lasted longer in one of 1,200 forks: it is asked for a second.
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

/// The same memory, only to be read.
pub(super) fn to_read(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())?.into())
}

/// RAM of a snapshot just made, in memory as its table has it, and nobody can write to it: [`crate::Store::open_resident`] takes it.
#[derive(Debug)]
pub struct Resident {
    /// Read-only.
    pub(super) file: File,
    /// What it was found to be.
    pub(super) ram: FileRef,
}

impl Resident {
    /// `file`, when it is sealed memory, which was found to be `ram` since.
    pub(super) fn of(file: &File, ram: FileRef) -> io::Result<Option<Self>> {
        if !is_in_memory(file) {
            return Ok(None);
        }
        Ok(Some(Self { file: to_read(file)?, ram }))
    }

    /// Bytes of the host's memory that it takes.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.ram.data_bytes
    }
}

#[cfg(test)]
#[path = "ram_tests.rs"]
mod tests;
