//! Sparse files: a digest that does not depend on the holes, and copies that turn pages of zeroes
//! into holes.
//!
//! The **sparse digest** is BLAKE3 over every 4 KiB page that is not all zero, in order, and then
//! the file's length as u64 little-endian. A page is hashed as its index (u64 little-endian) and
//! its bytes, fewer than 4096 in a last, partial page. A page of zeroes counts the same as a hole,
//! so two files have the same digest exactly if they have the same bytes.

use crate::digest::Digest;
use crate::pages::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// Bytes of a page.
pub const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);
static ZERO: [u8; PAGE] = [0; PAGE];

/// Bytes per read.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes collected before they are hashed: BLAKE3 uses its widest vectors only on long inputs, and
/// one page is too short.
const BATCH_BYTES: usize = 256 << 10;

/// Whether a page of at most 4096 bytes is all zero.
#[must_use]
#[inline]
pub fn is_zero(page: &[u8]) -> bool {
    ZERO.get(..page.len()) == Some(page)
}

/// Computes a sparse digest from pieces given in ascending order.
#[derive(Debug)]
pub struct SparseHasher {
    hasher: blake3::Hasher,
    batch: Vec<u8>,
    data_bytes: u64,
}

impl Default for SparseHasher {
    fn default() -> Self {
        Self {
            hasher: blake3::Hasher::new(),
            batch: Vec::with_capacity(BATCH_BYTES + PAGE + 8),
            data_bytes: 0,
        }
    }
}

impl SparseHasher {
    /// Adds the bytes at `offset`, a multiple of 4096 behind all bytes given before. Only the last
    /// piece may have a length that is not a multiple of 4096. Ranges left out count as zeroes.
    pub fn update(&mut self, offset: u64, bytes: &[u8]) {
        for (index, page) in (offset / PAGE_SIZE..).zip(bytes.chunks(PAGE)) {
            if !is_zero(page) {
                self.batch.extend_from_slice(&index.to_le_bytes());
                self.batch.extend_from_slice(page);
                self.data_bytes += page.len() as u64;
                if self.batch.len() >= BATCH_BYTES {
                    self.hasher.update(&self.batch);
                    self.batch.clear();
                }
            }
        }
    }

    /// The digest of a file of `len` bytes.
    #[must_use]
    pub fn finish(mut self, len: u64) -> Sparse {
        self.batch.extend_from_slice(&len.to_le_bytes());
        self.hasher.update(&self.batch);
        Sparse { digest: self.hasher.finalize().into(), bytes: len, data_bytes: self.data_bytes }
    }
}

/// Digest and sizes of a sparse file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sparse {
    /// Its sparse digest.
    pub digest: Digest,
    /// Its length, holes included.
    pub bytes: u64,
    /// Bytes in pages that are not all zero.
    pub data_bytes: u64,
}

/// The sparse digest of `file`; holes are skipped, not read. Moves the file's offset; nothing may
/// write to the file meanwhile.
///
/// # Errors
/// The file cannot be read, or becomes shorter meanwhile.
pub fn digest(file: &File) -> io::Result<Sparse> {
    digest_with(file, &mut |_, _| Ok(()))
}

/// As [`digest`]; calls `on` with the offset and the bytes of each piece read, and stops with its
/// error.
///
/// # Errors
/// As [`digest`], or the error of `on`.
pub fn digest_with(file: &File, on: Piece<'_>) -> io::Result<Sparse> {
    let mut hasher = SparseHasher::default();
    let len = for_each_data(file, |at, piece| {
        hasher.update(at, piece);
        on(at, piece)
    })?;
    Ok(hasher.finish(len))
}

/// Gets the offset and the bytes of a piece of a file.
pub type Piece<'a> = &'a mut dyn FnMut(u64, &[u8]) -> io::Result<()>;

/// Calls `each` with the offset and the bytes of every part of `file` that is not a hole, in
/// ascending order, and returns the file's length. Offsets are multiples of 4096, and so are all
/// lengths but the last one. Moves the file's offset.
///
/// # Errors
/// The file cannot be read, or becomes shorter meanwhile; or the error of `each`.
pub fn for_each_data(
    file: &File,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let len = file.metadata()?.len();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while let Some((start, end)) = next_data(file, at, len)? {
        // The file system reports data in its own blocks, which may be smaller than a page; widen
        // to whole pages.
        let (start, end) = (start - start % PAGE_SIZE, end.next_multiple_of(PAGE_SIZE).min(len));
        at = start.max(at);
        while at < end {
            let n = usize::try_from(end - at).map_or(CHUNK_BYTES, |n| n.min(CHUNK_BYTES));
            let piece = &mut buffer[..n];
            file.read_exact_at(piece, at)?;
            each(at, piece)?;
            at += n as u64;
        }
    }
    Ok(len)
}

/// The next range of data at or after `at`. A file system without support for holes reports the
/// whole file as data.
///
/// # Errors
/// The file cannot be searched, or changes meanwhile.
pub fn next_data(file: impl AsFd, at: u64, len: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= len {
        return Ok(None);
    }
    let file = file.as_fd();
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < len => start,
        // A hole reaches to the end.
        Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(len);
    if end <= start {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("byte {start} became a hole while the file was read"),
        ));
    }
    Ok(Some((start, end)))
}

/// Why [`copy`] stopped.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The source ended before `len` bytes.
    #[error("at byte {got}: expected {expected} bytes, the stream ended")]
    Short {
        /// Bytes that were announced.
        expected: u64,
        /// Bytes that were read.
        got: u64,
    },
    /// The source failed.
    #[error("reading at byte {at}")]
    Read {
        /// Bytes read before the error.
        at: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file could not be written.
    #[error("writing at byte {at}")]
    Write {
        /// Offset of the write.
        at: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Reads exactly `len` bytes into the empty file `to` and returns their digest; pages of zeroes
/// become holes. Bytes after `len` stay unread in `from`.
///
/// # Errors
/// [`CopyError`]; the content of `to` is undefined then.
pub fn copy(from: &mut dyn Read, to: &File, len: u64) -> Result<Sparse, CopyError> {
    copy_with(from, to, len, &mut |_, _| Ok(()))
}

/// As [`copy`]; calls `on` with the offset and the bytes of each piece copied.
///
/// # Errors
/// As [`copy`]; an error of `on` counts as one of writing.
pub fn copy_with(
    from: &mut dyn Read,
    to: &File,
    len: u64,
    on: Piece<'_>,
) -> Result<Sparse, CopyError> {
    to.set_len(len).map_err(|source| CopyError::Write { at: len, source })?;
    let mut hasher = SparseHasher::default();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < len {
        let want = usize::try_from(len - at).map_or(CHUNK_BYTES, |n| n.min(CHUNK_BYTES));
        let got =
            fill(from, &mut buffer[..want]).map_err(|source| CopyError::Read { at, source })?;
        if got < want {
            return Err(CopyError::Short { expected: len, got: at + got as u64 });
        }
        let piece = &buffer[..want];
        hasher.update(at, piece);
        let written = write_data(to, at, piece).and_then(|()| on(at, piece));
        written.map_err(|source| CopyError::Write { at, source })?;
        at += want as u64;
    }
    Ok(hasher.finish(len))
}

/// Copies the file `from` into the empty file `to`: by sharing its blocks if the file system can,
/// else each range of data. Pages of zeroes become holes. Moves the offset of `from`.
///
/// # Errors
/// A file cannot be read or written, or `from` becomes shorter meanwhile.
pub fn copy_file(from: &File, to: &File) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let len = for_each_data(from, |at, piece| write_data(to, at, piece))?;
    to.set_len(len)
}

/// Reads until the buffer is full or the source ends.
fn fill(from: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

/// Writes each run of pages that are not all zero to `offset` on in `to`.
///
/// # Errors
/// The file cannot be written.
pub fn write_data(to: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let mut run = 0..0;
    for page in bytes.chunks(PAGE) {
        let end = run.end + page.len();
        if is_zero(page) {
            to.write_all_at(&bytes[run.clone()], offset + run.start as u64)?;
            run = end..end;
        } else {
            run.end = end;
        }
    }
    to.write_all_at(&bytes[run.clone()], offset + run.start as u64)
}

/// Turns everything in `file` that is not data into holes: written zeroes, and space that was
/// allocated and never written.
///
/// # Errors
/// The file cannot be read, or the file system has no holes.
pub fn punch_zeroes(file: &File) -> io::Result<()> {
    let mut holes: Vec<(u64, u64)> = Vec::new();
    let mut end = 0;
    let len = for_each_data(file, |offset, bytes| {
        for (at, page) in (offset..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
            if !is_zero(page) {
                if at > end {
                    holes.push((end, at - end));
                }
                end = at + PAGE_SIZE;
            }
        }
        Ok(())
    })?;
    if len > end {
        holes.push((end, len - end));
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (start, length) in holes {
        rustix::fs::fallocate(file, flags, start, length)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "sparse_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "sparse_golden.rs"]
mod golden;
