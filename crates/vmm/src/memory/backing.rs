//! The backing of RAM: a snapshot's memory file, and other memory files that hold some of its
//! pages.
//!
//! Pages that two templates have in common take the host's memory once. Clones of one template map
//! long runs of such pages from the other's memory file (Kaleidoscope, section 5.2). The store has
//! the hashes for the comparison anyway. A page of a memfd cannot be in two files, so each row
//! costs a mapping; clones copy the shortest rows instead.
//!
//! A sealed list names these pages. Its payload, all little-endian, has for each row: u32 first
//! page of RAM, u32 count of pages, u32 number of the file, u32 first page in that file. Rows
//! ascend and do not overlap.

use super::length::file_bytes;
use dayfly_units::PAGE_SIZE;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic, SealError};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

const MAGIC: Magic = *b"DFshare\n";
const VERSION: u32 = 1;
const ROW_BYTES: usize = 16;
/// The most rows of a list; the kernel allows a process 65,530 mappings.
pub const MAX_ROWS: usize = 4096;
/// The most files besides the snapshot's own file.
pub const MAX_FILES: usize = 16;
/// The longest row that a clone copies instead of mapping, and the most pages of all such rows: see
/// [`Backing::parted`].
const SHORT_PAGES: u32 = 4;
const MOST_COPIED: u32 = 64;
/// The longest list file, in bytes.
const MAX_BYTES: u64 = (MAX_ROWS * ROW_BYTES + HEADER_BYTES) as u64;

/// Consecutive pages of RAM that are also consecutive in another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The first page, counted from the start of a memory file.
    pub first: u32,
    /// The number of pages.
    pub pages: u32,
    /// The number of the other file, from 0.
    pub file: u32,
    /// The first page in that file.
    pub from: u32,
}

/// Why a list of rows, or its files, were refused.
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    /// The list, or a file's length, could not be read.
    #[error("list of shared pages")]
    Read(#[source] io::Error),
    /// The list exceeds `MAX_BYTES`.
    #[error("list of shared pages: expected at most {MAX_BYTES} bytes, got {0}")]
    Length(u64),
    /// The list is damaged or of another format.
    #[error("list of shared pages")]
    Seal(#[from] SealError),
    /// The payload is not a whole number of rows.
    #[error("list of shared pages: expected rows of {ROW_BYTES} bytes, got {0} bytes")]
    Rows(usize),
    /// More than [`MAX_FILES`] files.
    #[error("files of shared pages: expected at most {MAX_FILES}, got {0}")]
    Files(usize),
    /// A row that is out of order, or outside RAM or its file.
    #[error(
        "list of shared pages: row {number} at byte {at}: {what}: expected {expected}, got {row:?}"
    )]
    Row {
        /// The row's number, from 0.
        number: usize,
        /// Its offset in the list, in bytes.
        at: usize,
        /// The field that is wrong.
        what: &'static str,
        /// The allowed values.
        expected: String,
        /// The row.
        row: Row,
    },
}

/// Decodes the rows of a sealed list.
///
/// # Errors
/// [`BackingError`]. [`check`] verifies the rows themselves.
pub fn decode(list: &File) -> Result<Vec<Row>, BackingError> {
    let got = file_bytes(list).map_err(BackingError::Read)?;
    if got > MAX_BYTES {
        return Err(BackingError::Length(got));
    }
    let mut bytes = vec![0; usize::try_from(got).unwrap_or(0)];
    list.read_exact_at(&mut bytes, 0).map_err(BackingError::Read)?;
    let (_, payload) = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, &bytes)?;
    let (chunks, rest) = payload.as_chunks::<ROW_BYTES>();
    if !rest.is_empty() {
        return Err(BackingError::Rows(payload.len()));
    }
    let row = |chunk: &[u8; ROW_BYTES]| {
        let word = |n: usize| u32::from_le_bytes(std::array::from_fn(|i| chunk[4 * n + i]));
        Row { first: word(0), pages: word(1), file: word(2), from: word(3) }
    };
    Ok(chunks.iter().map(row).collect())
}

/// Checks `rows` against RAM of `pages` and files of `files` pages each.
///
/// # Errors
/// [`BackingError::Row`].
pub fn check(rows: &[Row], pages: u64, files: &[u64]) -> Result<(), BackingError> {
    let mut next = 0;
    for (number, &row) in rows.iter().enumerate() {
        let at = HEADER_BYTES + number * ROW_BYTES;
        let wrong = |what, expected: String| BackingError::Row { number, at, what, expected, row };
        let (start, end) = (u64::from(row.first), u64::from(row.first) + u64::from(row.pages));
        if row.pages == 0 || start < next || end > pages {
            return Err(wrong("pages of RAM", format!("some of {next} to {pages}")));
        }
        let Some(there) = files.get(row.file as usize) else {
            return Err(wrong("file", format!("below {}", files.len())));
        };
        if u64::from(row.from) + u64::from(row.pages) > *there {
            return Err(wrong("pages of the file", format!("below {there}")));
        }
        next = end;
    }
    Ok(())
}

/// The rows of `above`, and the parts of `below` that `above` leaves uncovered. Both lists ascend
/// and do not overlap.
#[must_use]
pub fn overlay(below: &[Row], above: &[Row]) -> Vec<Row> {
    let end = |row: &Row| row.first.saturating_add(row.pages);
    let mut rows = Vec::with_capacity(below.len() + above.len());
    let mut next = 0;
    for row in below {
        let part = |first: u32, until: u32| Row {
            first,
            pages: until - first,
            file: row.file,
            from: row.from.saturating_add(first - row.first),
        };
        let mut at = row.first;
        // A row of `above` that ends behind this row is considered again for the next.
        while let Some(over) = above.get(next).filter(|over| over.first < end(row)) {
            if over.first > at {
                rows.push(part(at, over.first));
            }
            at = at.max(end(over));
            if end(over) > end(row) {
                break;
            }
            next += 1;
        }
        if at < end(row) {
            rows.push(part(at, end(row)));
        }
    }
    rows.extend_from_slice(above);
    rows.sort_unstable_by_key(|row| row.first);
    rows
}

/// The files from which RAM is mapped.
#[derive(Debug)]
pub struct Backing {
    file: File,
    others: Vec<File>,
    rows: Vec<Row>,
}

/// A part of RAM that lies in one file.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Its offset in RAM, in bytes from the start of a memory file.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The file in which it lies.
    pub file: &'a File,
    /// Its offset in that file, in bytes.
    pub at: u64,
    /// Whether that file is the snapshot's own.
    pub own: bool,
}

/// Encodes and seals `rows`.
#[must_use]
pub fn encode(rows: &[Row]) -> Vec<u8> {
    let words = rows.iter().flat_map(|row| [row.first, row.pages, row.file, row.from]);
    sealed::seal(&MAGIC, VERSION, &words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
}

const fn page_bytes(number: u32) -> u64 {
    number as u64 * PAGE_SIZE
}

/// The byte range `within` of RAM in parts, in order, each with its row; `None` where the
/// snapshot's own file is mapped.
fn split(rows: &[Row], within: Range<u64>) -> impl Iterator<Item = (Range<u64>, Option<&Row>)> {
    let end = |row: &Row| page_bytes(row.first) + page_bytes(row.pages);
    let mut next = rows.partition_point(|row| end(row) <= within.start);
    let mut at = within.start;
    std::iter::from_fn(move || {
        let start = at;
        if start >= within.end {
            return None;
        }
        let row = rows.get(next).filter(|row| page_bytes(row.first) < within.end);
        let part = match row {
            Some(row) if page_bytes(row.first) <= start => {
                next += 1;
                (start..end(row).min(within.end), Some(row))
            }
            _ => (start..row.map_or(within.end, |row| page_bytes(row.first)), None),
        };
        at = part.0.end;
        Some(part)
    })
}

/// The parts of the byte range `within` of RAM that may hold anything but zeroes, in order: rows,
/// and the data of `own`, the snapshot's own memory file. Both bounds are pages.
#[must_use]
pub fn data(own: &File, rows: &[Row], within: Range<u64>) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    for (part, row) in split(rows, within) {
        if row.is_some() {
            found.push(part);
            continue;
        }
        let mut at = part.start;
        while at < part.end {
            let data = match seek(own, SeekFrom::Data(at)) {
                Ok(data) => data - data % PAGE_SIZE,
                Err(Errno::NXIO) => break, // only a hole follows
                Err(_) => at,              // a file system without SEEK_DATA
            };
            if data >= part.end {
                break;
            }
            let hole = seek(own, SeekFrom::Hole(data.max(at))).unwrap_or(part.end);
            let hole = hole.next_multiple_of(PAGE_SIZE).clamp(at + PAGE_SIZE, part.end);
            found.push(data.max(at)..hole);
            at = hole;
        }
    }
    found
}

impl Backing {
    /// A backing of one memory file that has all pages.
    #[must_use]
    pub const fn of(file: File) -> Self {
        Self { file, others: Vec::new(), rows: Vec::new() }
    }

    /// A backing of `file`, with the rows of `list` in `others`.
    ///
    /// # Errors
    /// [`BackingError`] if `others` cannot have those rows.
    pub fn sharing(file: File, list: &File, others: Vec<File>) -> Result<Self, BackingError> {
        if others.len() > MAX_FILES {
            return Err(BackingError::Files(others.len()));
        }
        let rows = decode(list)?;
        let pages = |file: &File| {
            Ok::<_, BackingError>(file_bytes(file).map_err(BackingError::Read)? / PAGE_SIZE)
        };
        check(&rows, pages(&file)?, &others.iter().map(pages).collect::<Result<Vec<_>, _>>()?)?;
        Ok(Self { file, others, rows })
    }

    /// The snapshot's own memory file.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// The snapshot's own memory file, and the rows that lie in the others, which are closed.
    #[must_use]
    pub fn into_own(self) -> (File, Vec<Row>) {
        (self.file, self.rows)
    }

    /// The rows that lie in other files.
    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Splits the rows into those to map and those to copy.
    ///
    /// A row in the middle of another mapping adds two mappings: 9 us for each clone. A clone
    /// writes most pages that its parent wrote (stacks, page tables); each is a page fault and a
    /// flush of other CPUs' TLBs. Copying takes 1 us a page (`perf record` over 100 children in
    /// `dayfly-bench fork`). Copied pages count as written by the clone, so the clone's own clones
    /// get them anew.
    pub(super) fn parted(&self) -> (Vec<Row>, Vec<Row>) {
        let mut short: Vec<&Row> =
            self.rows.iter().filter(|row| row.pages <= SHORT_PAGES).collect();
        short.sort_by_key(|row| row.pages);
        let mut left = MOST_COPIED;
        let copied: BTreeSet<u32> = short
            .iter()
            .map_while(|row| {
                left = left.checked_sub(row.pages)?;
                Some(row.first)
            })
            .collect();
        self.rows.iter().partition(|row| !copied.contains(&row.first))
    }

    /// The pieces of RAM in the byte range `within`, in order.
    pub fn pieces(&self, within: Range<u64>) -> impl Iterator<Item = Piece<'_>> {
        self.pieces_with(&self.rows, within)
    }

    /// As [`Self::pieces`], with only some of the rows.
    pub(super) fn pieces_with<'a>(
        &'a self,
        rows: &'a [Row],
        within: Range<u64>,
    ) -> impl Iterator<Item = Piece<'a>> {
        split(rows, within).map_while(|(part, row)| {
            let Range { start: offset, end } = part;
            let (file, at) = match row {
                // `sharing` has checked that each row's file exists.
                Some(row) => {
                    let within_row = offset - page_bytes(row.first);
                    (self.others.get(row.file as usize)?, page_bytes(row.from) + within_row)
                }
                None => (&self.file, offset),
            };
            Some(Piece { offset, len: end - offset, file, at, own: row.is_none() })
        })
    }

    /// Reads one page of RAM.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn read_page(&self, page: u32, into: &mut [u8]) -> io::Result<()> {
        let offset = u64::from(page) * PAGE_SIZE;
        let piece = self.pieces(offset..offset + PAGE_SIZE).next();
        let piece = piece.ok_or(io::ErrorKind::UnexpectedEof)?;
        piece.file.read_exact_at(into, piece.at)
    }

    /// Duplicates the descriptors of all files.
    ///
    /// # Errors
    /// When the process has too many descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let others = self.others.iter().map(File::try_clone).collect::<io::Result<_>>()?;
        Ok(Self { file: self.file.try_clone()?, others, rows: self.rows.clone() })
    }
}

#[cfg(test)]
#[path = "backing_tests.rs"]
mod tests;
