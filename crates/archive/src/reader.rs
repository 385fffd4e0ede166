//! Reads an archive as a sequence of entries.
//!
//! Memory is bounded whatever the archive contains. Extension headers before an entry take at most
//! 1 MiB together, and a sparse map at most 8 MiB. Data passes through a buffer of 128 KiB. A
//! length is checked against its limit before use, and memory grows with the bytes that have
//! arrived, not with a claimed length.
//!
//! Global pax headers (`g`) are skipped, as in Go's `archive/tar` and in container runtimes, so
//! they cannot rename later entries.

use crate::block::{BLOCK, BLOCK_BYTES};
use crate::error::{ArchiveError, Refusal};
use crate::extension::Extensions;
use crate::header::{self, Header, Kind};
use crate::sparse::{self, MAX_FILE_BYTES, MAX_RUNS, MapReader, Run};
use crate::writer::Head;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// Longest piece of data that is copied at once, in bytes.
const PIECE_BYTES: usize = 128 << 10;
const PAGE_BYTES: usize = 4096;

/// Resource limits for an archive. An archive that exceeds one is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Upper limit for the number of entries.
    pub max_entries: u64,
    /// Upper limit for the data of all entries together, in bytes as stored in the archive.
    pub max_bytes: u64,
}

impl Limits {
    /// No limits except those on each entry.
    pub const NONE: Self = Self { max_entries: u64::MAX, max_bytes: u64::MAX };
}

/// An entry, with its extension headers applied.
#[derive(Debug)]
pub struct Entry {
    /// Name, kind, attributes.
    pub head: Head,
    /// Byte offset of the entry's own header in the archive.
    pub at: u64,
    /// Length of the file in bytes, holes included.
    pub size_bytes: u64,
    stored_bytes: u64,
    sparse: Sparse,
}

impl Entry {
    /// The number of bytes after the header, if they are the file's content without a sparse map.
    #[must_use]
    pub fn plain_bytes(&self) -> Option<u64> {
        matches!(self.sparse, Sparse::No).then_some(self.stored_bytes)
    }

    /// Makes an error about this entry.
    #[must_use]
    pub fn refused(&self, why: Refusal) -> ArchiveError {
        ArchiveError::Refused { entry: self.head.path.clone(), at: self.at, why }
    }
}

#[derive(Debug)]
enum Sparse {
    No,
    Runs(Vec<Run>),
    /// The map is at the start of the data (format 1.0).
    InData,
}

/// Options of [`Reader::copy_data`].
#[derive(Debug, Clone, Copy)]
pub struct CopyOptions {
    /// Whether zero pages become holes, in addition to the archive's holes.
    pub zeroes_are_holes: bool,
    /// Upper limit for the bytes of pages that are written.
    pub room: u64,
}

/// A reader of an archive in a stream.
pub struct Reader<R> {
    inner: R,
    limits: Limits,
    at: u64,
    /// Unread bytes of the current entry's data.
    rest: u64,
    /// Bytes of padding after that data.
    pad: u64,
    entries: u64,
    bytes: u64,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    NotYet,
    /// The stream ended between two entries.
    OfStream,
    /// A block of zeroes ended the archive.
    Mark,
}

impl<R: Read> Reader<R> {
    /// Reads from `inner`, which starts at the archive's beginning. Reads are small, so `inner`
    /// should be buffered.
    pub fn new(inner: R, limits: Limits) -> Self {
        Self { inner, limits, at: 0, rest: 0, pad: 0, entries: 0, bytes: 0, end: End::NotYet }
    }

    /// Number of bytes that were read.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Returns the stream, for reading after the archive's end.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn stream(&self, cause: io::Error) -> ArchiveError {
        ArchiveError::Stream { at: self.at, cause }
    }

    fn ended(&self, wanted: u64) -> ArchiveError {
        let text = format!("expected {wanted} more bytes, got the stream's end");
        self.stream(io::Error::new(io::ErrorKind::UnexpectedEof, text))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ArchiveError> {
        match self.fill_some(buffer)? {
            have if have == buffer.len() => Ok(()),
            have => Err(self.ended((buffer.len() - have) as u64)),
        }
    }

    /// Fills `buffer` until the stream ends. Returns the number of bytes.
    fn fill_some(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let mut have = 0;
        while have < buffer.len() {
            match self.inner.read(&mut buffer[have..]) {
                Ok(0) => break,
                Ok(n) => {
                    have += n;
                    self.at += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.stream(error)),
            }
        }
        Ok(have)
    }

    fn skip(&mut self, bytes: u64) -> Result<u64, ArchiveError> {
        let copied = io::copy(&mut (&mut self.inner).take(bytes), &mut io::sink());
        let skipped = copied.map_err(|e| self.stream(e))?;
        self.at += skipped;
        Ok(skipped)
    }

    /// Skips the rest of an entry. Returns `false` if the stream ends in the padding, which some
    /// writers omit at the archive's end. umoci does, and Go's reader accepts it as the end too.
    fn skip_rest(&mut self) -> Result<bool, ArchiveError> {
        let skipped = self.skip(self.rest)?;
        if skipped < self.rest {
            return Err(self.ended(self.rest - skipped));
        }
        let whole = self.skip(self.pad)? == self.pad;
        (self.rest, self.pad) = (0, 0);
        Ok(whole)
    }

    fn begin_data(&mut self, bytes: u64) {
        (self.rest, self.pad) = (bytes, bytes.wrapping_neg() % BLOCK_BYTES);
    }

    /// The next block; `None` at a clean end of the stream.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, ArchiveError> {
        let mut block = [0; BLOCK];
        match self.fill_some(&mut block)? {
            0 => Ok(None),
            BLOCK => Ok(Some(block)),
            have => Err(self.ended((BLOCK - have) as u64)),
        }
    }

    /// Reads the next entry, and skips unread data of the previous one. Returns `None` at the
    /// archive's end: two blocks of zeroes, or the stream's end between entries.
    ///
    /// # Errors
    /// [`ArchiveError`].
    pub fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let mut before = Extensions::default();
        while self.end == End::NotYet {
            let whole = self.skip_rest()?;
            let at = self.at;
            let block = if whole { self.block()? } else { None };
            let Some(block) = block.filter(|block| block.iter().any(|b| *b != 0)) else {
                if before.of_entry {
                    // An extended header has no entry after it.
                    return Err(self.ended(BLOCK_BYTES));
                }
                self.end = if block.is_some() { End::Mark } else { End::OfStream };
                if self.end == End::Mark {
                    self.end_mark(at)?;
                }
                break;
            };
            let refused = |entry: Vec<u8>, why| ArchiveError::Refused { entry, at, why };
            let header = Header::checked(block).map_err(|(name, why)| refused(name, why))?;
            let bad = |why| refused(header.name(), why);
            let stored = header.size().map_err(bad)?;
            match header.type_byte() {
                kind @ (b'L' | b'K' | b'x' | b'g') => {
                    before.check(stored).map_err(bad)?;
                    if kind == b'g' {
                        self.begin_data(stored);
                        continue;
                    }
                    let data = self.extension(stored)?;
                    before.take(kind, data).map_err(bad)?;
                }
                _ => {
                    self.entries += 1;
                    if self.entries > self.limits.max_entries {
                        let expected = format!("at most {} entries", self.limits.max_entries);
                        return Err(bad(Refusal { expected, got: "more".to_owned() }));
                    }
                    return self.entry(at, &header, stored, before).map(Some);
                }
            }
        }
        Ok(None)
    }

    /// Reads on after the first block of zeroes, which must be followed by another or by the
    /// stream's end.
    fn end_mark(&mut self, at: u64) -> Result<(), ArchiveError> {
        match self.block()? {
            Some(block) if block.iter().any(|b| *b != 0) => {
                let why = Refusal {
                    expected: "two blocks of zeroes at the archive's end".to_owned(),
                    got: "one, and then data".to_owned(),
                };
                Err(ArchiveError::Refused { entry: Vec::new(), at, why })
            }
            _ => Ok(()),
        }
    }

    /// Reads to the stream's end after the last entry. Only padding of at most `most` zeroes may
    /// follow.
    ///
    /// # Errors
    /// [`ArchiveError`] if the archive has no end mark, or if other bytes follow the mark.
    pub fn finish(&mut self, most: u64) -> Result<(), ArchiveError> {
        let at = self.at;
        let refused = |expected: String, got: &str| {
            let why = Refusal { expected, got: got.to_owned() };
            Err(ArchiveError::Refused { entry: Vec::new(), at, why })
        };
        if self.end != End::Mark {
            return refused(
                "a block of zeroes at the archive's end".to_owned(),
                "the stream's end",
            );
        }
        let mut buffer = [0; 8 << 10];
        loop {
            let have = self.fill_some(&mut buffer)?;
            if buffer[..have].iter().any(|b| *b != 0) {
                return refused("nothing but zeroes after the archive's end".to_owned(), "data");
            }
            if self.at - at > most {
                return refused(format!("at most {most} bytes after the archive's end"), "more");
            }
            if have < buffer.len() {
                return Ok(());
            }
        }
    }

    /// Reads the data of an extension header, whose length the caller has checked.
    fn extension(&mut self, bytes: u64) -> Result<Vec<u8>, ArchiveError> {
        let mut data = Vec::new();
        let result = (&mut self.inner).take(bytes).read_to_end(&mut data);
        let have = result.map_err(|e| self.stream(e))? as u64;
        self.at += have;
        if have < bytes {
            return Err(self.ended(bytes - have));
        }
        self.pad = bytes.wrapping_neg() % BLOCK_BYTES;
        Ok(data)
    }

    fn entry(
        &mut self,
        at: u64,
        header: &Header,
        stored: u64,
        before: Extensions,
    ) -> Result<Entry, ArchiveError> {
        let Extensions { path, link, records, .. } = before;
        let sparse = records.sparse;
        // A sparse file's own name takes precedence, then pax, then GNU's long name.
        let path = sparse.name.or(records.path).or(path).unwrap_or_else(|| header.name());
        let refused = |why| ArchiveError::Refused { entry: path.clone(), at, why };
        let (uid, gid) = header.owner().map_err(refused)?;
        let (mtime_s, mtime_ns) = match records.mtime {
            Some(time) => time,
            None => (header.mtime().map_err(refused)?, 0),
        };
        let kind = kind_of(header.type_byte(), &path);
        let device = match kind {
            Kind::Char | Kind::Block => header.device().map_err(refused)?,
            _ => (0, 0),
        };
        // Only files have data, whatever the size field contains (as in Go's archive/tar).
        let stored = match kind {
            Kind::File | Kind::Other(_) => records.size.unwrap_or(stored),
            _ => 0,
        };
        let mode = header.mode().map_err(refused)?;
        let (mut size, mut map) = (stored, Sparse::No);
        if header.type_byte() == b'S' {
            let (runs, length) = self.gnu_map(header, at, &path)?;
            (size, map) = (length, Sparse::Runs(runs));
        } else if kind == Kind::File && (sparse.in_data || sparse.runs.is_some()) {
            let Some(length) = sparse.length else {
                return Err(refused(Refusal {
                    expected: "the length of a sparse file in a pax record".to_owned(),
                    got: "none".to_owned(),
                }));
            };
            let runs = if sparse.in_data { None } else { sparse.runs };
            (size, map) = (length, runs.map_or(Sparse::InData, Sparse::Runs));
        }
        self.bytes = self.bytes.saturating_add(stored);
        for (limit, claimed) in
            [(MAX_FILE_BYTES, size.max(stored)), (self.limits.max_bytes, self.bytes)]
        {
            if claimed > limit {
                let expected = format!("at most {limit} bytes");
                return Err(refused(Refusal { expected, got: claimed.to_string() }));
            }
        }
        self.begin_data(stored);
        let head = Head {
            link: records.link.or(link).unwrap_or_else(|| header.link()),
            kind,
            mode,
            uid: records.uid.unwrap_or(uid),
            gid: records.gid.unwrap_or(gid),
            mtime_s,
            mtime_ns,
            device,
            xattrs: records.xattrs,
            path,
        };
        Ok(Entry { head, at, size_bytes: size, stored_bytes: stored, sparse: map })
    }

    /// Reads the map of a GNU sparse entry: four runs in the header, more in the following blocks.
    fn gnu_map(
        &mut self,
        header: &Header,
        at: u64,
        path: &[u8],
    ) -> Result<(Vec<Run>, u64), ArchiveError> {
        let refused = |why| ArchiveError::Refused { entry: path.to_vec(), at, why };
        let (mut runs, mut more, length) = header.gnu_sparse().map_err(refused)?;
        while more {
            let mut block = [0; BLOCK];
            self.fill(&mut block)?;
            let (next, again) = header::gnu_continuation(&block).map_err(refused)?;
            // A block without runs makes no progress, and an archive may have any number of them.
            if next.is_empty() || runs.len() + next.len() > MAX_RUNS {
                let expected = format!("1 to {MAX_RUNS} runs in a sparse map");
                return Err(refused(Refusal { expected, got: "none, or more".to_owned() }));
            }
            runs.extend(next);
            more = again;
        }
        Ok((runs, length))
    }

    /// Reads the map at the start of a sparse file's data (format 1.0). Returns the map and its
    /// length in bytes.
    fn data_map(&mut self, entry: &Entry) -> Result<(Vec<Run>, u64), ArchiveError> {
        let mut map = MapReader::default();
        let mut used = 0;
        loop {
            if used + BLOCK_BYTES > entry.stored_bytes {
                let expected = "a sparse map of decimal lines".to_owned();
                let got = "the end of the data".to_owned();
                return Err(entry.refused(Refusal { expected, got }));
            }
            let mut block = [0; BLOCK];
            self.fill(&mut block)?;
            used += BLOCK_BYTES;
            for byte in block {
                if map.take(byte).map_err(|why| entry.refused(why))? {
                    return Ok((map.runs, used));
                }
            }
        }
    }

    /// Writes the data of the last entry from [`Self::next_entry`] into the empty `file`, without
    /// holes. Returns the bytes of the pages that were written.
    ///
    /// # Errors
    /// [`ArchiveError`]; the bytes written before the error stay in `file`.
    pub fn copy_data(
        &mut self,
        entry: &Entry,
        file: &File,
        how: CopyOptions,
    ) -> Result<u64, ArchiveError> {
        let mut stored = entry.stored_bytes;
        let in_data;
        let whole = [(0, stored)];
        let runs = match &entry.sparse {
            Sparse::No => &whole[..],
            Sparse::Runs(runs) => runs,
            Sparse::InData => {
                let (runs, used) = self.data_map(entry)?;
                self.rest -= used;
                stored -= used;
                in_data = runs;
                &in_data
            }
        };
        sparse::check(runs, entry.size_bytes, stored).map_err(|why| entry.refused(why))?;
        let failed = |cause| ArchiveError::Write { entry: entry.head.path.clone(), cause };
        file.set_len(entry.size_bytes).map_err(failed)?;
        let mut written = 0;
        let most = usize::try_from(stored).unwrap_or(usize::MAX).min(PIECE_BYTES);
        let mut buffer = vec![0; most.next_multiple_of(PAGE_BYTES)];
        for (offset, bytes) in runs {
            let (mut offset, end) = (*offset, offset + bytes);
            while offset < end {
                // A piece ends at a page boundary of the file, so that whole zero pages can be
                // recognised.
                let in_page = usize::try_from(offset % PAGE_BYTES as u64).unwrap_or(0);
                let left = usize::try_from(end - offset).unwrap_or(usize::MAX);
                let data = &mut buffer[in_page..];
                let chunk = data.len().min(left);
                self.fill(&mut data[..chunk])?;
                self.rest -= chunk as u64;
                let data = &buffer[in_page..in_page + chunk];
                let pages = page_runs(data, in_page, how.zeroes_are_holes);
                for (start, piece) in pages {
                    file.write_all_at(piece, offset + start as u64).map_err(failed)?;
                    written += piece.len().next_multiple_of(PAGE_BYTES) as u64;
                }
                if written > how.room {
                    let expected = "content within the limit".to_owned();
                    return Err(entry.refused(Refusal { expected, got: "more".to_owned() }));
                }
                offset += chunk as u64;
            }
        }
        Ok(written)
    }
}

/// The parts of `data` to write, each with its offset in `data`. `data` begins `in_page` bytes into
/// a page.
fn page_runs(
    data: &[u8],
    in_page: usize,
    skip_zeroes: bool,
) -> impl Iterator<Item = (usize, &[u8])> {
    let step = if skip_zeroes { PAGE_BYTES } else { PIECE_BYTES + PAGE_BYTES };
    let first = (PAGE_BYTES - in_page).min(data.len());
    let first = if skip_zeroes { first } else { data.len() };
    let (head, rest) = data.split_at(first);
    let pages = rest.chunks(step).enumerate().map(move |(i, page)| (first + i * step, page));
    let all = std::iter::once((0, head)).chain(pages);
    let skipped = move |page: &[u8]| page.is_empty() || skip_zeroes && page.iter().all(|b| *b == 0);
    all.filter(move |(_, page)| !skipped(page))
}

fn kind_of(byte: u8, path: &[u8]) -> Kind {
    match byte {
        // A regular file whose name ends in '/' is a folder (tar before POSIX).
        b'0' | 0 | b'7' if path.ends_with(b"/") => Kind::Folder,
        b'0' | 0 | b'7' | b'S' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::Char,
        b'4' => Kind::Block,
        b'5' => Kind::Folder,
        b'6' => Kind::Fifo,
        other => Kind::Other(other),
    }
}
