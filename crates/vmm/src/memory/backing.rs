//! The files that RAM is mapped from: a snapshot's memory file, and over parts of it other files that hold the same pages.
//!
//! Two templates that have a page in common need it in the host's memory once: where enough of them lie in a row, clones of the one map them from the
//! other's memory file (Kaleidoscope, section 5.2, with the hashes that the store has anyway). A page of a memfd cannot be in two, so each row costs a
//! mapping; a clone copies the shortest.
//!
//! Which pages those are is told in a sealed list. Payload, all little-endian: for each row u32 first page of RAM, u32 count of pages, u32 number of
//! the file, u32 first page in that file; rows ascend and do not overlap.

use dayfly_units::PAGE_SIZE;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic, SealError};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

const MAGIC: Magic = *b"DFshare\n";
const VERSION: u32 = 1;
const ROW_BYTES: usize = 16;
/// The most rows; the kernel allows a process 65,530 mappings.
pub const MAX_ROWS: usize = 4096;
/// The most files besides the first.
pub const MAX_FILES: usize = 16;
/// The longest row that a clone copies rather than maps, and the most pages of all such rows: see [`Backing::parted`].
const SHORT_PAGES: u32 = 4;
const MOST_COPIED: u32 = 64;
/// The longest list, in bytes of its file.
const MAX_BYTES: u64 = (MAX_ROWS * ROW_BYTES + HEADER_BYTES) as u64;

/// Pages of RAM in a row that lie in a row in another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The first, counted from the start of RAM as a memory file has it.
    pub first: u32,
    /// How many.
    pub pages: u32,
    /// In which of the other files, from 0.
    pub file: u32,
    /// The first page of that file.
    pub from: u32,
}

/// Why a list of rows was refused.
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    /// It could not be read.
    #[error("list of shared pages")]
    Read(#[source] io::Error),
    /// It is too long.
    #[error("list of shared pages: expected at most {MAX_BYTES} bytes, got {0}")]
    Length(u64),
    /// It is not what was written.
    #[error("list of shared pages")]
    Seal(#[from] SealError),
    /// Its payload is no whole number of rows.
    #[error("list of shared pages: expected rows of {ROW_BYTES} bytes, got {0} bytes")]
    Rows(usize),
    /// Too many files.
    #[error("files of shared pages: expected at most {MAX_FILES}, got {0}")]
    Files(usize),
    /// A row that cannot be.
    #[error("list of shared pages: row {number} at byte {at}: {what}: expected {expected}, got {row:?}")]
    Row {
        /// Which, from 0.
        number: usize,
        /// Where in the list.
        at: usize,
        /// What of it.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What is there.
        row: Row,
    },
}

/// The rows of a sealed list.
///
/// # Errors
/// [`BackingError`]; whether such rows can be is not looked at.
pub fn decode(list: &File) -> Result<Vec<Row>, BackingError> {
    let got = list.metadata().map_err(BackingError::Read)?.len();
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

/// Whether files of so many pages can have `rows` of RAM of `pages`.
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

/// `above`, and of `beneath` what these leave. Both ascend and do not overlap.
#[must_use]
pub fn laid_over(beneath: &[Row], above: &[Row]) -> Vec<Row> {
    let end = |row: &Row| row.first.saturating_add(row.pages);
    let mut rows = Vec::with_capacity(beneath.len() + above.len());
    let mut next = 0;
    for row in beneath {
        let part = |first: u32, until: u32| Row {
            first,
            pages: until - first,
            file: row.file,
            from: row.from.saturating_add(first - row.first),
        };
        let mut at = row.first;
        // One that reaches beyond this row is looked at again for the next.
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

/// What RAM is mapped from.
#[derive(Debug)]
pub struct Backing {
    file: File,
    others: Vec<File>,
    rows: Vec<Row>,
}

/// A part of RAM that lies in one file.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Where it lies in RAM, in bytes from the start of a memory file.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its file.
    pub file: &'a File,
    /// Where it lies there.
    pub at: u64,
    /// Whether that is the snapshot's own.
    pub own: bool,
}

/// The sealed list of `rows`.
#[must_use]
pub fn encode(rows: &[Row]) -> Vec<u8> {
    let words = rows.iter().flat_map(|row| [row.first, row.pages, row.file, row.from]);
    sealed::seal(&MAGIC, VERSION, &words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
}

impl Backing {
    /// A memory file that has everything itself.
    #[must_use]
    pub const fn of(file: File) -> Self {
        Self { file, others: Vec::new(), rows: Vec::new() }
    }

    /// With the rows of `list` in `others`.
    ///
    /// # Errors
    /// [`BackingError`] where these files cannot have those rows.
    pub fn sharing(file: File, list: &File, others: Vec<File>) -> Result<Self, BackingError> {
        if others.len() > MAX_FILES {
            return Err(BackingError::Files(others.len()));
        }
        let rows = decode(list)?;
        let pages = |file: &File| {
            Ok::<_, BackingError>(file.metadata().map_err(BackingError::Read)?.len() / PAGE_SIZE)
        };
        check(&rows, pages(&file)?, &others.iter().map(pages).collect::<Result<Vec<_>, _>>()?)?;
        Ok(Self { file, others, rows })
    }

    /// The snapshot's own file.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// The rows of other files.
    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The rows that are worth a mapping, and those whose pages a clone better copies.
    ///
    /// A row in the middle of another mapping is two mappings more, 9 us of each clone, and a page in it that the clone writes, as most of those are that its
    /// parent wrote by themselves (stacks, page tables), is a fault and a flush of other CPUs' TLBs besides. Copying takes 1 us a page
    /// (`perf record` over 100 children in `dayfly-bench fork`). They then count as written by the clone, whose own clones get them anew.
    pub(super) fn parted(&self) -> (Vec<Row>, Vec<Row>) {
        let mut short: Vec<&Row> = self.rows.iter().filter(|row| row.pages <= SHORT_PAGES).collect();
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

    /// The parts of RAM between two places, in order.
    pub fn pieces(&self, within: Range<u64>) -> impl Iterator<Item = Piece<'_>> {
        self.pieces_with(&self.rows, within)
    }

    /// The same with only some of its rows.
    pub(super) fn pieces_with<'a>(
        &'a self,
        rows: &'a [Row],
        within: Range<u64>,
    ) -> impl Iterator<Item = Piece<'a>> {
        let page = |number: u32| u64::from(number) * PAGE_SIZE;
        let mut next = rows.partition_point(|row| page(row.first) + page(row.pages) <= within.start);
        let mut at = within.start;
        std::iter::from_fn(move || {
            let offset = at;
            if offset >= within.end {
                return None;
            }
            let row = rows.get(next).filter(|row| page(row.first) < within.end);
            let (end, piece) = match row {
                Some(row) if page(row.first) <= offset => {
                    next += 1;
                    let end = (page(row.first) + page(row.pages)).min(within.end);
                    // Rows are of files that are there, as `sharing` has seen.
                    let file = self.others.get(row.file as usize)?;
                    let at = page(row.from) + offset - page(row.first);
                    (end, Piece { offset, len: 0, file, at, own: false })
                }
                _ => {
                    let end = row.map_or(within.end, |row| page(row.first));
                    (end, Piece { offset, len: 0, file: &self.file, at: offset, own: true })
                }
            };
            at = end;
            Some(Piece { len: end - offset, ..piece })
        })
    }

    /// Reads a page of RAM.
    ///
    /// # Errors
    /// Its file cannot be read.
    pub fn read_page(&self, page: u32, into: &mut [u8]) -> io::Result<()> {
        let offset = u64::from(page) * PAGE_SIZE;
        let piece = self.pieces(offset..offset + PAGE_SIZE).next();
        let piece = piece.ok_or(io::ErrorKind::UnexpectedEof)?;
        piece.file.read_exact_at(into, piece.at)
    }

    /// The same, through descriptors of its own.
    ///
    /// # Errors
    /// The process has too many.
    pub fn try_clone(&self) -> io::Result<Self> {
        let others = self.others.iter().map(File::try_clone).collect::<io::Result<_>>()?;
        Ok(Self { file: self.file.try_clone()?, others, rows: self.rows.clone() })
    }
}

#[cfg(test)]
#[path = "backing_tests.rs"]
mod tests;
