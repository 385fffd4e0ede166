//! Whether the host has room for the writable layers of a VM to grow.
//!
//! Each VM has a guaranteed share of the host's file system. The daemon writes the [`Limits`] of
//! its VMs to one small file, which every VMM has open for reading. The VMM compares them with the
//! free space of the file system, so it needs no daemon:
//!
//! ```text
//! used + new > quota                       it waits
//! used + new ≤ share                       it may grow: this space is kept free for it
//! free − new ≥ floor + over / 8            it may grow; over is used + new − share
//! else                                     it waits
//! ```
//!
//! `floor` is the space that is kept free: the unused part of all shares, and a reserve. A VM that
//! is further over its share needs more free space, so the one furthest over waits first (dynamic
//! thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6:2, 1998).

use super::iolist::IoList;
use crate::config::MAX_DISKS;
use dayfly_units::sealed::{self, HEADER_BYTES};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Why a disk waits for space of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoSpace {
    /// The file system is full (ENOSPC), or its quota for the user is used up (EDQUOT).
    Full,
    /// The VM has more than its share, and what is free is kept for the shares of others.
    Shares,
    /// The VM has as much as a VM may have.
    Quota,
    /// A reason that a later version of the protocol adds.
    #[serde(other)]
    Other,
}

/// Limits on the growth of the writable layers of each VM, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The guaranteed share of each VM.
    pub share_bytes: u64,
    /// The most that the layers of a VM may have; `u64::MAX`: no limit.
    pub quota_bytes: u64,
    /// Free space that only VMs within their share may use.
    pub floor_bytes: u64,
}

/// The kind of the file of [`Limits`].
const MAGIC: sealed::Magic = *b"DFSpace\n";
const VERSION: u32 = 1;
const PAYLOAD_BYTES: usize = 24;
/// Bytes of the file of [`Limits`].
pub const LIMITS_BYTES: usize = HEADER_BYTES + PAYLOAD_BYTES;
/// A VM may be over its share by at most this many times the space that is free for all.
const OVER_TIMES: u64 = 8;
/// Most bytes that a VM writes before it looks at the free space again.
const MOST_UNCHECKED_BYTES: u64 = 1 << 20;
/// The part of the free space that a VM writes before it looks again: many VMs write at once.
const UNCHECKED_PART: u64 = 1024;
/// How often a file that is being rewritten is read again.
const READS: usize = 8;

impl Limits {
    /// The content of the file: share, quota and floor, little-endian, sealed.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let numbers = [self.share_bytes, self.quota_bytes, self.floor_bytes];
        sealed::seal(&MAGIC, VERSION, numbers.map(u64::to_le_bytes).as_flattened())
    }

    /// The limits in a file; `None` if it is damaged, or is being rewritten.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let cap = PAYLOAD_BYTES as u64;
        let (_, payload) = sealed::open(&MAGIC, VERSION..=VERSION, cap, bytes).ok()?;
        let numbers = payload.as_chunks::<8>().0;
        let [share, quota, floor] = numbers else { return None };
        let [share_bytes, quota_bytes, floor_bytes] =
            [share, quota, floor].map(|number| u64::from_le_bytes(*number));
        Some(Self { share_bytes, quota_bytes, floor_bytes })
    }

    /// The free space with which a VM that has `used` bytes may go on.
    #[must_use]
    pub const fn needs_free(&self, used: u64) -> u64 {
        match used.checked_sub(self.share_bytes) {
            None | Some(0) => 0,
            Some(over) => self.floor_bytes.saturating_add(over / OVER_TIMES),
        }
    }

    /// Whether a VM that has `used` bytes may have `new` more while `free` bytes are free. Returns
    /// how many further bytes it may write before it has to ask again.
    ///
    /// # Errors
    /// Why it has to wait.
    pub fn allow(&self, used: u64, new: u64, free: u64) -> Result<u64, NoSpace> {
        let after = used.saturating_add(new);
        let most = self.quota_bytes.checked_sub(after).ok_or(NoSpace::Quota)?;
        let unchecked = match self.share_bytes.checked_sub(after) {
            Some(left) => left,
            None => {
                let left = free.checked_sub(new).ok_or(NoSpace::Shares)?;
                let unused = left.checked_sub(self.needs_free(after)).ok_or(NoSpace::Shares)?;
                unused / UNCHECKED_PART
            }
        };
        Ok(unchecked.min(most).min(MOST_UNCHECKED_BYTES))
    }
}

/// The growth of one VM's writable layers.
#[derive(Debug, Default)]
pub struct Room {
    /// The file of the limits; `None`: only the file system limits the growth.
    file: Option<File>,
    /// The limits as last read.
    limits: Option<Limits>,
    /// Bytes that the writable layer of each disk has, as last seen.
    used: [u64; MAX_DISKS],
    /// Bytes that may be written without a look at the free space.
    unchecked: u64,
}

impl Room {
    /// Room within the limits in `file`.
    #[must_use]
    pub fn limited(file: File) -> Self {
        Self { file: Some(file), ..Self::default() }
    }

    /// Checks that the writable layer of disk `number` may grow by `bytes`, before they are
    /// written. `grows` returns whether the write needs any new space, and is asked only if there
    /// is none.
    ///
    /// # Errors
    /// Why the write has to wait.
    pub fn check(
        &mut self,
        number: usize,
        layer: BorrowedFd<'_>,
        bytes: u64,
        grows: impl FnOnce() -> bool,
    ) -> Result<(), NoSpace> {
        if let Some(left) = self.unchecked.checked_sub(bytes) {
            self.unchecked = left;
            return Ok(());
        }
        self.unchecked = 0;
        let Some(limits) = self.read() else { return Ok(()) };
        // If the host does not say how much there is, the write itself shows whether it fits.
        let (Ok(used), Ok(free)) = (allocated(layer), free(layer)) else { return Ok(()) };
        if let Some(place) = self.used.get_mut(number) {
            *place = used;
        }
        let used = self.used.iter().fold(0, |sum: u64, used| sum.saturating_add(*used));
        match limits.allow(used, bytes, free) {
            Ok(unchecked) => {
                self.unchecked = unchecked;
                Ok(())
            }
            Err(why) => {
                if grows() {
                    Err(why)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// The limits in the file. If it cannot be read, the limits before.
    fn read(&mut self) -> Option<Limits> {
        let file = self.file.as_ref()?;
        for _ in 0..READS {
            let mut bytes = [0; LIMITS_BYTES];
            if let Ok(LIMITS_BYTES) = IoList::of(&mut bytes).read_at(file.as_fd(), 0)
                && let Some(limits) = Limits::decode(&bytes)
            {
                self.limits = Some(limits);
                break;
            }
        }
        self.limits
    }
}

/// Bytes that a file has on its file system.
///
/// # Errors
/// The error of fstat(2).
pub fn allocated(file: BorrowedFd<'_>) -> io::Result<u64> {
    /// The unit of `st_blocks`, whatever the file system's blocks are.
    const UNIT: u64 = 512;
    let blocks = rustix::fs::fstat(file)?.st_blocks;
    Ok(u64::try_from(blocks).unwrap_or(0).saturating_mul(UNIT))
}

/// Bytes that a user without privileges may still take on the file system of `file`. A file system
/// without a size, such as a tmpfs without a limit, has `u64::MAX`.
///
/// # Errors
/// The error of fstatfs(2).
pub fn free(file: BorrowedFd<'_>) -> io::Result<u64> {
    let of = rustix::fs::fstatfs(file)?;
    if of.f_blocks == 0 {
        return Ok(u64::MAX);
    }
    let block = u64::try_from(of.f_bsize).unwrap_or(0);
    Ok(of.f_bavail.saturating_mul(block))
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;
