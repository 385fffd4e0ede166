//! Zeroes and discarded blocks.
//!
//! Which blocks a used writable layer has follows from its file ([`Disk::open_again`]): those with
//! data. A hole reads as the layers below. So blocks become holes only where no layer below has
//! data; elsewhere zeroes are written.

use super::cow::{BLOCK, Disk};
use super::iolist::IoList;
use super::room::NoSpace;
use super::span::length;
use crate::config::DISK_BLOCK_BYTES;
use dayfly_units::sparse::next_data;
use std::io;
use std::ops::Range;

/// The most searches for data in files (lseek(2)) of one range.
const MOST_SEARCHES: u32 = 1 << 16;
/// The most bytes of zeroes that a discard writes. Beyond them it changes nothing, which virtio 1.2
/// allows (section 5.2.6: a discard is a hint).
const MOST_DISCARDED_BYTES: u64 = 64 << 20;
/// The most blocks of zeroes that need room at once. What was written before there is no
/// room stays, so a request that is tried again goes on there.
const MOST_ASKED_BLOCKS: u64 = 256;
/// Bytes of one write of zeroes.
const PIECE_BYTES: usize = 64 << 10;

/// Why zeroes were not written.
#[derive(Debug, thiserror::Error)]
pub enum ZeroError {
    /// The host has no room for them.
    #[error("the host has no room: {0:?}")]
    NoSpace(NoSpace),
    /// The host's error.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Searches the files below the writable layer for data.
struct Below {
    left: u32,
}

impl Below {
    /// Whether a file below `disk`'s writable layer may have data in the first of `blocks`, and the
    /// block, at most `blocks.end`, up to which the answer is the same. After too many searches,
    /// all blocks may have data.
    fn next(&mut self, disk: &Disk, blocks: &Range<u64>) -> io::Result<(bool, u64)> {
        let (at, mut data, mut hole) = (blocks.start * DISK_BLOCK_BYTES, blocks.start, blocks.end);
        for (file, bytes) in disk.below() {
            let Some(left) = self.left.checked_sub(1) else { return Ok((true, blocks.end)) };
            self.left = left;
            let Some((start, end)) = next_data(file, at, bytes)? else { continue };
            let start = start / DISK_BLOCK_BYTES;
            if start <= blocks.start {
                data = data.max(end.div_ceil(DISK_BLOCK_BYTES));
            } else {
                hole = hole.min(start);
            }
        }
        if data > blocks.start { Ok((true, data.min(blocks.end))) } else { Ok((false, hole)) }
    }
}

impl Disk {
    /// Makes a range of bytes read as zero.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.zero_if(offset, len, |_, _, _| Ok(())).map_err(|e| match e {
            ZeroError::Host(e) => e,
            ZeroError::NoSpace(_) => io::ErrorKind::StorageFull.into(),
        })
    }

    /// As [`Self::zero`]. Calls `room` with an offset and a length before these bytes are written,
    /// except for whole blocks that the writable layer has. Whole blocks below which there is no
    /// data become holes.
    ///
    /// # Errors
    /// That of `room`; else as [`Self::write`]. Part of the range may be zero then.
    pub fn zero_if(
        &mut self,
        offset: u64,
        len: u64,
        mut room: impl FnMut(&Self, u64, u64) -> Result<(), NoSpace>,
    ) -> Result<(), ZeroError> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let end = self.end(offset, usize::try_from(len).map_err(invalid)?)?;
        self.writable()?;
        let inner = offset.next_multiple_of(DISK_BLOCK_BYTES)..end - end % DISK_BLOCK_BYTES;
        let (first, last) = if inner.start < inner.end {
            (offset..inner.start, inner.end..end)
        } else {
            // The range lies within one block, or across the border of two.
            let border = inner.start.min(end);
            (offset..border, border..end)
        };
        for part in [first, last].into_iter().filter(|part| !part.is_empty()) {
            let bytes = part.end - part.start;
            room(self, part.start, bytes).map_err(ZeroError::NoSpace)?;
            self.write(part.start, &IoList::of(&mut [0; BLOCK][..length(bytes)]))?;
        }
        let mut blocks = inner.start / DISK_BLOCK_BYTES..inner.end / DISK_BLOCK_BYTES;
        let mut below = Below { left: MOST_SEARCHES };
        while !blocks.is_empty() {
            let (data, end) = below.next(self, &blocks)?;
            if !data {
                self.punch(&(blocks.start..end))?;
                blocks.start = end;
            }
            while blocks.start < end {
                let (layer, same) = self.run(blocks.start, end);
                let part = blocks.start..same.min(blocks.start + MOST_ASKED_BLOCKS);
                if layer != self.writable_number() {
                    let bytes = (part.end - part.start) * DISK_BLOCK_BYTES;
                    room(self, part.start * DISK_BLOCK_BYTES, bytes).map_err(ZeroError::NoSpace)?;
                }
                self.write_zeroes(&part)?;
                blocks.start = part.end;
            }
        }
        Ok(())
    }

    /// Makes the whole blocks in a range of bytes read as zero and frees their space. Partial
    /// blocks are unchanged.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.discard_if(offset, len, |_, _, _| true)
    }

    /// As [`Self::discard`]. Blocks below which there is data become zeroes if `room` agrees, which
    /// gets an offset and a length; at most 64 MiB of them. Others are unchanged.
    ///
    /// # Errors
    /// As [`Self::write`], but not for want of space.
    pub fn discard_if(
        &mut self,
        offset: u64,
        len: u64,
        mut room: impl FnMut(&Self, u64, u64) -> bool,
    ) -> io::Result<()> {
        let end =
            self.end(offset, usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?)?;
        self.writable()?;
        let mut blocks = offset.div_ceil(DISK_BLOCK_BYTES)..end / DISK_BLOCK_BYTES;
        let mut below = Below { left: MOST_SEARCHES };
        let mut left = MOST_DISCARDED_BYTES / DISK_BLOCK_BYTES;
        while !blocks.is_empty() {
            let (data, end) = below.next(self, &blocks)?;
            if data {
                let run = blocks.start..end.min(blocks.start + left);
                let bytes = (run.end - run.start) * DISK_BLOCK_BYTES;
                if bytes > 0 && room(self, run.start * DISK_BLOCK_BYTES, bytes) {
                    left -= run.end - run.start;
                    match self.write_zeroes(&run) {
                        Err(e) if is_full(&e) => left = 0,
                        written => written?,
                    }
                }
            } else {
                self.punch(&(blocks.start..end))?;
            }
            blocks.start = end;
        }
        Ok(())
    }

    /// Writes zeroes to whole blocks.
    fn write_zeroes(&mut self, blocks: &Range<u64>) -> io::Result<()> {
        let all = length((blocks.end - blocks.start) * DISK_BLOCK_BYTES);
        let mut zeroes = vec![0; all.min(PIECE_BYTES)];
        let mut at = blocks.start;
        while at < blocks.end {
            let end = blocks.end.min(at + (PIECE_BYTES / BLOCK) as u64);
            let bytes = length((end - at) * DISK_BLOCK_BYTES);
            let list = IoList::of(&mut zeroes[..bytes]);
            let written = list.write_at(self.writable()?, at * DISK_BLOCK_BYTES);
            if written.is_err() {
                self.forget(&(at..end));
                return written;
            }
            self.note_written(&(at..end));
            at = end;
        }
        Ok(())
    }

    /// Frees what a failed write has left in blocks that the writable layer does not have. If that
    /// fails too, a disk that is opened again has part of the write there.
    pub(super) fn forget(&self, blocks: &Range<u64>) {
        use rustix::fs::FallocateFlags;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let Ok(file) = self.writable() else { return };
        let mut at = blocks.start;
        while at < blocks.end {
            let (layer, end) = self.run(at, blocks.end);
            if layer != self.writable_number() {
                let (start, bytes) = (at * DISK_BLOCK_BYTES, (end - at) * DISK_BLOCK_BYTES);
                let _ = rustix::fs::fallocate(file, flags, start, bytes);
            }
            at = end;
        }
    }

    /// Makes whole blocks holes. Writes zeroes if the file system cannot punch holes.
    fn punch(&mut self, blocks: &Range<u64>) -> io::Result<()> {
        use rustix::fs::FallocateFlags;
        use rustix::io::Errno;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let start = blocks.start * DISK_BLOCK_BYTES;
        let bytes = blocks.end * DISK_BLOCK_BYTES - start;
        match rustix::fs::fallocate(self.writable()?, flags, start, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return self.write_zeroes(blocks),
            punched => punched?,
        }
        self.note_written(blocks);
        Ok(())
    }
}

/// Whether the error is that of a full file system or quota.
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}
