//! The data of files. Offsets and lengths are the guest's: the kernel takes no negative ones, and
//! copies are done in parts.

use super::Call;
use crate::handles::Handle;
use crate::wire::{CopyIn, FallocateIn, LseekIn, LseekOut, MAX_DATA_BYTES, WRITE_CACHE};
use crate::wire::{ReadIn, WriteIn, WriteOut};
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::{Errno, IoSlice, ReadWriteFlags, pread, pwrite, pwritev2};
use std::sync::Arc;

/// The most bytes that one message copies. The guest asks again for the rest.
const MAX_COPY_BYTES: u64 = 32 << 20;
/// Bytes of a copy between two looks at whether the guest has given it up.
const COPY_STEP_BYTES: u64 = 4 << 20;

/// The end of a range, if it is one that a file can have.
fn end(offset: u64, count: u64) -> Result<u64, Errno> {
    let end = offset.checked_add(count).ok_or(Errno::FBIG)?;
    i64::try_from(end).map_err(|_| Errno::FBIG)?;
    Ok(end)
}

impl Call<'_> {
    fn handle(&self, id: u64) -> Result<Arc<Handle>, Errno> {
        self.volume.handles.get(id, self.message.header.nodeid)
    }

    pub(super) fn read(&mut self) -> Result<(), Errno> {
        let asked: ReadIn = self.message.body().take()?;
        let size = usize::try_from(asked.size).map_err(|_| Errno::INVAL)?;
        if size > MAX_DATA_BYTES {
            return Err(Errno::INVAL);
        }
        i64::try_from(asked.offset).map_err(|_| Errno::INVAL)?;
        let handle = self.handle(asked.fh)?;
        let (file, mut done) = (handle.file()?, 0);
        let space = self.reply.space(size);
        // A short answer is the end of the file for the guest.
        while done < size {
            let offset = asked.offset.saturating_add(done as u64);
            match pread(file, &mut space[done..], offset) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        self.reply.grow(done);
        Ok(())
    }

    pub(super) fn write(&mut self) -> Result<(), Errno> {
        let mut body = self.message.body();
        let asked: WriteIn = body.take()?;
        let size = usize::try_from(asked.size).map_err(|_| Errno::INVAL)?;
        if size > MAX_DATA_BYTES {
            return Err(Errno::INVAL);
        }
        let data = body.bytes(size)?;
        end(asked.offset, asked.size.into())?;
        let handle = self.handle(asked.fh)?;
        // Pages of the guest's cache have a place; only a write(2) is appended.
        let append = asked.flags & OFlags::APPEND.bits() != 0;
        let append = append && asked.write_flags & WRITE_CACHE == 0;
        let done = write_all(handle.file()?, data, asked.offset, append)?;
        let size = u32::try_from(done).map_err(|_| Errno::IO)?;
        self.reply.push(&WriteOut { size, padding: 0 });
        Ok(())
    }

    pub(super) fn fallocate(&mut self) -> Result<(), Errno> {
        let asked: FallocateIn = self.message.body().take()?;
        let keep = FallocateFlags::KEEP_SIZE;
        let allowed = [
            FallocateFlags::empty(),
            keep,
            FallocateFlags::PUNCH_HOLE | keep,
            FallocateFlags::ZERO_RANGE,
            FallocateFlags::ZERO_RANGE | keep,
        ];
        let mode = allowed.into_iter().find(|mode| mode.bits() == asked.mode);
        let mode = mode.ok_or(Errno::OPNOTSUPP)?;
        end(asked.offset, asked.length)?;
        let handle = self.handle(asked.fh)?;
        rustix::fs::fallocate(handle.file()?, mode, asked.offset, asked.length)
    }

    pub(super) fn lseek(&mut self) -> Result<(), Errno> {
        let asked: LseekIn = self.message.body().take()?;
        i64::try_from(asked.offset).map_err(|_| Errno::INVAL)?;
        // The others are the guest's own concern.
        let to = match asked.whence.cast_signed() {
            libc::SEEK_DATA => SeekFrom::Data(asked.offset),
            libc::SEEK_HOLE => SeekFrom::Hole(asked.offset),
            _ => return Err(Errno::INVAL),
        };
        let handle = self.handle(asked.fh)?;
        let offset = rustix::fs::seek(handle.file()?, to)?;
        self.reply.push(&LseekOut { offset });
        Ok(())
    }

    pub(super) fn copy(&mut self) -> Result<(), Errno> {
        let asked: CopyIn = self.message.body().take()?;
        if asked.flags != 0 {
            return Err(Errno::INVAL);
        }
        let from = self.handle(asked.fh_in)?;
        let to = self.volume.handles.get(asked.fh_out, asked.nodeid_out)?;
        let len = asked.len.min(MAX_COPY_BYTES);
        end(asked.off_in, len)?;
        end(asked.off_out, len)?;
        let mut done = 0;
        while done < len {
            let step = usize::try_from((len - done).min(COPY_STEP_BYTES)).unwrap_or(0);
            let (mut read_at, mut write_at) = (asked.off_in + done, asked.off_out + done);
            let result = self.interrupted.check().and_then(|()| {
                let (from, to) = (from.file()?, to.file()?);
                rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), step)
            });
            match result {
                // The end of the file, which may have grown by this copy.
                Ok(count) if count < step => {
                    done += count as u64;
                    break;
                }
                Ok(count) => done += count as u64,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        let size = u32::try_from(done).map_err(|_| Errno::IO)?;
        self.reply.push(&WriteOut { size, padding: 0 });
        Ok(())
    }
}

/// Writes as much as possible. Fails only if nothing was written.
fn write_all(file: &OwnedFd, data: &[u8], offset: u64, append: bool) -> Result<usize, Errno> {
    let mut done = 0;
    while done < data.len() {
        let (rest, at) = (&data[done..], offset + done as u64);
        let result = if append {
            pwritev2(file, &[IoSlice::new(rest)], at, ReadWriteFlags::APPEND)
        } else {
            pwrite(file, rest, at)
        };
        match result {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}
