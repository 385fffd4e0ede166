//! Sparse files: their digest, which does not depend on where the holes are, and copies that keep pages of zeroes as holes.
//!
//! The **sparse digest** is BLAKE3 over, for every 4 KiB page that is not all zero, in order: its index as u64
//! little-endian, then its bytes (fewer than 4096 in a last, partial page); and at the end the file's length as u64 little-endian. A page of zeroes counts the same
//! as a hole. Two files with the same bytes have the same digest, and the other way round.

use crate::digest::Digest;
use dayfly_units::PAGE_SIZE;
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

pub(crate) const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);
static ZERO: [u8; PAGE] = [0; PAGE];

/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes collected before they are hashed: BLAKE3 uses its widest vectors only on long inputs, and a page alone is short.
const BATCH_BYTES: usize = 256 << 10;

/// Whether a page has nothing but zeroes in it.
pub(crate) fn is_zero(page: &[u8]) -> bool {
    ZERO.get(..page.len()) == Some(page)
}

/// Computes a sparse digest from pieces in order.
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
    /// The bytes at `offset`, a multiple of 4096, which lies behind all bytes given before. A length that is no multiple of 4096 may
    /// only come last. What is left out counts as zeroes.
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

/// What a sparse file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sparse {
    /// Its sparse digest.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
    /// Bytes in pages that are not all zero.
    pub data_bytes: u64,
}

/// The sparse digest of `file`, reading only what is not a hole. Moves the file's offset; nothing may write to the file meanwhile.
///
/// # Errors
/// The file cannot be read, or becomes shorter while it is.
pub fn digest(file: &File) -> io::Result<Sparse> {
    digest_with(file, &|_| Ok(()))
}

/// As [`digest`]; calls `on` with the bytes of each piece that was read, and ends with its error.
pub(crate) fn digest_with(file: &File, on: &dyn Fn(u64) -> io::Result<()>) -> io::Result<Sparse> {
    let len = file.metadata()?.len();
    let mut hasher = SparseHasher::default();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while let Some((start, end)) = next_data(file, at, len)? {
        // The edges of data are the file system's blocks, which may be smaller than a page: whole pages, then.
        let (start, end) = (start - start % PAGE_SIZE, end.next_multiple_of(PAGE_SIZE).min(len));
        at = start.max(at);
        while at < end {
            let n = usize::try_from(end - at).map_or(CHUNK_BYTES, |n| n.min(CHUNK_BYTES));
            let piece = &mut buffer[..n];
            file.read_exact_at(piece, at)?;
            hasher.update(at, piece);
            at += n as u64;
            on(n as u64)?;
        }
    }
    Ok(hasher.finish(len))
}

/// The next stretch of data at or after `at`; a file system that knows no holes tells all of the file.
pub(crate) fn next_data(file: &File, at: u64, len: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= len {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < len => start,
        // Nothing but a hole to the end.
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
    /// The source ended early.
    #[error("at byte {got}: expected {expected} bytes, the stream ended")]
    Short {
        /// Bytes that were announced.
        expected: u64,
        /// Bytes that came.
        got: u64,
    },
    /// The source failed.
    #[error("reading at byte {at}")]
    Read {
        /// Bytes that had come.
        at: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file could not be written.
    #[error("writing at byte {at}")]
    Write {
        /// Where.
        at: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Reads exactly `len` bytes into the empty file `to`, pages of zeroes becoming holes, and gives their digest. Bytes that `from` has after them stay unread.
///
/// # Errors
/// [`CopyError`]; `to` has any content then.
pub fn copy(from: &mut dyn Read, to: &File, len: u64) -> Result<Sparse, CopyError> {
    to.set_len(len).map_err(|source| CopyError::Write { at: len, source })?;
    let mut hasher = SparseHasher::default();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < len {
        let want = usize::try_from(len - at).map_or(CHUNK_BYTES, |n| n.min(CHUNK_BYTES));
        let got = fill(from, &mut buffer[..want]).map_err(|source| CopyError::Read { at, source })?;
        if got < want {
            return Err(CopyError::Short { expected: len, got: at + got as u64 });
        }
        let piece = &buffer[..want];
        hasher.update(at, piece);
        write_data(to, at, piece).map_err(|source| CopyError::Write { at, source })?;
        at += want as u64;
    }
    Ok(hasher.finish(len))
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

/// Writes each run of pages that are not all zero.
fn write_data(to: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
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

#[cfg(test)]
#[path = "sparse_tests.rs"]
mod tests;
