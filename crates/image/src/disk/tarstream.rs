//! Reading a tar stream entry by entry, with every length capped before it is believed.
//!
//! Header fields and pax records are decoded by the `tar` crate; the loop is our own because a hostile archive must be
//! refused with the place it was found at, extension records must be capped before they are read into memory, and pax
//! sparse files must keep their holes.

use super::tree::{Refusal, refuse};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use tar::{EntryType, GnuExtSparseHeader, Header, PaxExtensions};

const BLOCK: u64 = 512;
/// Most bytes of a long name or of one set of pax records (as Go's archive/tar).
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// Most data runs of a sparse file.
const MAX_SPARSE_RUNS: usize = 1 << 20;
/// Largest file an entry may claim: what ext4 can hold with 4 KiB blocks.
const MAX_FILE_BYTES: u64 = 16 << 40;

/// A data run of a sparse file: offset in the file, bytes.
type Run = (u64, u64);

/// An entry of an archive, its extension records folded in.
#[derive(Debug)]
pub struct Entry {
    /// Where its own header begins, in bytes of the uncompressed archive.
    pub at: u64,
    /// Its name as written.
    pub path: Vec<u8>,
    /// Target of a link.
    pub link: Vec<u8>,
    /// What it is.
    pub kind: EntryType,
    /// Permission bits as written.
    pub mode: u32,
    /// Owner.
    pub uid: u64,
    /// Group.
    pub gid: u64,
    /// Seconds since 1970.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// Device numbers.
    pub device: (u32, u32),
    /// Extended attributes (pax `SCHILY.xattr.`).
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Length of the file, holes included.
    pub size_bytes: u64,
    /// Bytes of data in the archive.
    stored_bytes: u64,
    /// Data runs of a sparse file; `None`: the map is at the start of the data (pax 1.0).
    sparse: Sparse,
}

#[derive(Debug)]
enum Sparse {
    No,
    Runs(Vec<Run>),
    InData,
}

/// Why an archive cannot be read on.
#[derive(Debug)]
pub enum TarError {
    /// The stream below failed or ended early.
    Io(io::Error),
    /// What is written there is not acceptable.
    Refused {
        /// The entry's name as far as it is known.
        entry: Vec<u8>,
        /// Where its header begins.
        at: u64,
        /// Why.
        why: Refusal,
    },
}

impl From<io::Error> for TarError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A tar stream.
pub struct TarStream<R> {
    inner: R,
    at: u64,
    /// Bytes of the current entry's data that were not read.
    rest: u64,
    /// And of the padding after it.
    pad: u64,
}

/// Long names and pax records gathered before the entry they belong to.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    pax: Vec<u8>,
}

impl<R: Read> TarStream<R> {
    /// Reads from `inner`, from the archive's beginning.
    pub fn new(inner: R) -> Self {
        Self { inner, at: 0, rest: 0, pad: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// The reader below, for reading what follows the archive's end.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        self.inner.read_exact(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                io::Error::new(error.kind(), format!("expected {} more bytes, got its end", buffer.len()))
            }
            _ => error,
        })?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    /// Skips what is left of an entry; `false` where the stream ends in its padding, which some writers leave out at
    /// the archive's end (umoci; Go's reader takes it for the end as well).
    fn skip_rest(&mut self) -> io::Result<bool> {
        let skipped = io::copy(&mut (&mut self.inner).take(self.rest), &mut io::sink())?;
        self.at += skipped;
        if skipped < self.rest {
            let text = format!("expected {} more bytes of data, got its end", self.rest - skipped);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        let padding = io::copy(&mut (&mut self.inner).take(self.pad), &mut io::sink())?;
        self.at += padding;
        let whole = padding == self.pad;
        (self.rest, self.pad) = (0, 0);
        Ok(whole)
    }

    fn begin_data(&mut self, bytes: u64) {
        (self.rest, self.pad) = (bytes, bytes.wrapping_neg() % BLOCK);
    }

    /// The next 512-byte block; `None` at a clean end of the stream.
    fn block(&mut self) -> io::Result<Option<[u8; 512]>> {
        let mut block = [0; 512];
        let mut have = 0;
        while have < block.len() {
            match self.inner.read(&mut block[have..]) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => {
                    let text = format!("expected a header of {BLOCK} bytes, got {have}");
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                }
                Ok(n) => have += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.at += BLOCK;
        Ok(Some(block))
    }

    /// The next entry; what was not read of the one before is skipped.
    pub fn next(&mut self) -> Result<Option<Entry>, TarError> {
        let mut ext = Extensions::default();
        loop {
            if !self.skip_rest()? {
                return Ok(None);
            }
            let at = self.at;
            let Some(block) = self.block()? else { return Ok(None) };
            if block.iter().all(|b| *b == 0) {
                return self.end(at);
            }
            let header = Header::from_byte_slice(&block);
            let refused = |entry: &[u8], why: Refusal| TarError::Refused { entry: entry.to_vec(), at, why };
            let bad = |expected: &str, got: String| {
                refused(&header.path_bytes(), Refusal { expected: expected.to_owned(), got })
            };
            check_sum(&block).map_err(|why| refused(&header.path_bytes(), why))?;
            let stored =
                header.entry_size().map_err(|e| bad("a size in octal or base 256", e.to_string()))?;
            match header.entry_type() {
                kind @ (EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader) => {
                    let have = (ext.pax.len() + ext.path.as_ref().map_or(0, Vec::len)) as u64;
                    if stored.saturating_add(have) > MAX_EXTENSION_BYTES {
                        let expected = format!("at most {MAX_EXTENSION_BYTES} bytes of extended header");
                        return Err(bad(&expected, stored.to_string()));
                    }
                    let mut data = self.extension(stored)?;
                    if kind == EntryType::XHeader {
                        ext.pax.extend_from_slice(&data);
                    } else {
                        data.truncate(data.iter().position(|b| *b == 0).unwrap_or(data.len()));
                        let place =
                            if kind == EntryType::GNULongName { &mut ext.path } else { &mut ext.link };
                        *place = Some(data);
                    }
                }
                // Global records (git's comment, for instance) describe no file: skipped, as container runtimes do.
                EntryType::XGlobalHeader => self.begin_data(stored),
                _ => {
                    let entry = self.entry(at, header, stored, ext)?;
                    return Ok(Some(entry));
                }
            }
        }
    }

    /// An archive ends with two blocks of zeroes, or where the stream does.
    fn end(&mut self, at: u64) -> Result<Option<Entry>, TarError> {
        match self.block()? {
            Some(block) if block.iter().any(|b| *b != 0) => {
                let why = Refusal {
                    expected: "two blocks of zeroes at the archive's end".to_owned(),
                    got: "one, and then data".to_owned(),
                };
                Err(TarError::Refused { entry: Vec::new(), at, why })
            }
            _ => Ok(None),
        }
    }

    /// Reads the data of an extension record; the caller has checked its length.
    fn extension(&mut self, bytes: u64) -> io::Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
        self.fill(&mut data)?;
        self.pad = bytes.wrapping_neg() % BLOCK;
        Ok(data)
    }

    fn entry(&mut self, at: u64, header: &Header, stored: u64, ext: Extensions) -> Result<Entry, TarError> {
        let mut path = ext.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let mut link =
            ext.link.or_else(|| header.link_name_bytes().map(|l| l.into_owned())).unwrap_or_default();
        let refused = |path: &[u8], expected: &str, got: String| TarError::Refused {
            entry: path.to_vec(),
            at,
            why: Refusal { expected: expected.to_owned(), got },
        };
        let named = path.clone();
        let number = |what: &str, value: io::Result<u64>| {
            value.map_err(|e| refused(&named, &format!("a number as {what}"), e.to_string()))
        };
        let old = header.as_old();
        let mut entry = Entry {
            at,
            path: Vec::new(),
            link: Vec::new(),
            kind: header.entry_type(),
            mode: u32::try_from(number("mode", or_blank(&old.mode, header.mode().map(u64::from)))?)
                .unwrap_or(0),
            uid: number("owner", or_blank(&old.uid, header.uid()))?,
            gid: number("group", or_blank(&old.gid, header.gid()))?,
            mtime_s: i64::try_from(number("time", or_blank(&old.mtime, header.mtime()))?).unwrap_or(0),
            mtime_ns: 0,
            device: (0, 0),
            xattrs: BTreeMap::new(),
            size_bytes: stored,
            stored_bytes: stored,
            sparse: Sparse::No,
        };
        if matches!(entry.kind, EntryType::Char | EntryType::Block) {
            let part = |value: io::Result<Option<u32>>| value.ok().flatten().unwrap_or(0);
            entry.device = (part(header.device_major()), part(header.device_minor()));
        }
        let mut real_size = None;
        for record in PaxExtensions::new(&ext.pax) {
            let record = record.map_err(|e| refused(&path, "well-formed pax records", e.to_string()))?;
            let (key, value) = (record.key_bytes(), record.value_bytes());
            let text = || String::from_utf8_lossy(value).into_owned();
            let int = || {
                text().parse::<u64>().map_err(|_| {
                    refused(
                        &path,
                        &format!("a number in pax record {:?}", String::from_utf8_lossy(key)),
                        text(),
                    )
                })
            };
            match key {
                b"path" if !matches!(entry.sparse, Sparse::InData) => path = value.to_vec(),
                b"linkpath" => link = value.to_vec(),
                b"size" => entry.stored_bytes = int()?,
                b"uid" => entry.uid = int()?,
                b"gid" => entry.gid = int()?,
                b"mtime" => (entry.mtime_s, entry.mtime_ns) = pax_time(&text()),
                b"GNU.sparse.major" if value == b"1" => entry.sparse = Sparse::InData,
                b"GNU.sparse.name" => path = value.to_vec(),
                b"GNU.sparse.realsize" => real_size = Some(int()?),
                b"GNU.sparse.map" | b"GNU.sparse.offset" | b"GNU.sparse.major" => {
                    return Err(refused(
                        &path,
                        "sparse files in pax format 1.0",
                        "an older format".to_owned(),
                    ));
                }
                _ => {
                    if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                        entry.xattrs.insert(name.to_vec(), value.to_vec());
                    }
                }
            }
        }
        // These carry no data, whatever their size field says (as Go's archive/tar reads them).
        if matches!(
            entry.kind,
            EntryType::Link
                | EntryType::Symlink
                | EntryType::Char
                | EntryType::Block
                | EntryType::Directory
                | EntryType::Fifo
        ) {
            entry.stored_bytes = 0;
        }
        entry.size_bytes = entry.stored_bytes;
        if entry.kind == EntryType::GNUSparse {
            let (runs, size) = self.gnu_sparse(header).map_err(|e| match e {
                TarError::Refused { why, .. } => TarError::Refused { entry: path.clone(), at, why },
                other => other,
            })?;
            (entry.sparse, entry.size_bytes) = (Sparse::Runs(runs), size);
        } else if matches!(entry.sparse, Sparse::InData) {
            entry.size_bytes = real_size
                .ok_or_else(|| refused(&path, "GNU.sparse.realsize of a sparse file", "none".to_owned()))?;
        }
        if entry.size_bytes.max(entry.stored_bytes) > MAX_FILE_BYTES {
            let got = format!("{} bytes", entry.size_bytes.max(entry.stored_bytes));
            return Err(refused(&path, &format!("a file of at most {MAX_FILE_BYTES} bytes"), got));
        }
        self.begin_data(entry.stored_bytes);
        (entry.path, entry.link) = (path, link);
        Ok(entry)
    }

    /// The map of a GNU sparse entry ('S'): four runs in the header, more in the blocks that follow it.
    fn gnu_sparse(&mut self, header: &Header) -> Result<(Vec<Run>, u64), TarError> {
        let bad = |expected: &str, got: String| TarError::Refused {
            entry: Vec::new(),
            at: 0,
            why: Refusal { expected: expected.to_owned(), got },
        };
        let Some(gnu) = header.as_gnu() else {
            return Err(bad("a GNU header of a sparse file", "another".to_owned()));
        };
        let number =
            |value: io::Result<u64>| value.map_err(|e| bad("a sparse map of numbers", e.to_string()));
        let size = number(gnu.real_size())?;
        let mut runs = Vec::new();
        for part in gnu.sparse.iter().filter(|p| !p.is_empty()) {
            runs.push((number(part.offset())?, number(part.length())?));
        }
        let mut more = gnu.is_extended();
        while more {
            let mut next = GnuExtSparseHeader::new();
            self.fill(next.as_mut_bytes())?;
            for part in next.sparse.iter().filter(|p| !p.is_empty()) {
                runs.push((number(part.offset())?, number(part.length())?));
            }
            if runs.len() > MAX_SPARSE_RUNS {
                return Err(bad(&format!("at most {MAX_SPARSE_RUNS} sparse runs"), "more".to_owned()));
            }
            more = next.is_extended();
        }
        Ok((runs, size))
    }

    /// The map at the start of a pax 1.0 sparse file's data: decimal lines, padded to a block.
    fn pax_sparse(&mut self, entry: &Entry) -> Result<(Vec<Run>, u64), TarError> {
        let bad = |got: String| TarError::Refused {
            entry: entry.path.clone(),
            at: entry.at,
            why: Refusal { expected: "a sparse map of decimal lines".to_owned(), got },
        };
        let (mut used, mut numbers, mut line) = (0u64, Vec::new(), Vec::new());
        let mut want = 1usize;
        while numbers.len() < want {
            if used + BLOCK > entry.stored_bytes {
                return Err(bad("the end of the data".to_owned()));
            }
            let mut block = [0; 512];
            self.fill(&mut block)?;
            used += BLOCK;
            for byte in block {
                if byte != b'\n' {
                    if line.len() >= 20 {
                        return Err(bad("a line of more than 20 bytes".to_owned()));
                    }
                    line.push(byte);
                    continue;
                }
                let text = String::from_utf8_lossy(&line).into_owned();
                let value: u64 = text.parse().map_err(|_| bad(format!("{text:?}")))?;
                line.clear();
                if numbers.is_empty() {
                    let runs = usize::try_from(value).ok().filter(|n| *n <= MAX_SPARSE_RUNS);
                    want = 1 + 2 * runs.ok_or_else(|| bad(format!("{value} runs")))?;
                }
                numbers.push(value);
                if numbers.len() == want {
                    break;
                }
            }
        }
        let runs = numbers[1..].as_chunks::<2>().0.iter().map(|[a, b]| (*a, *b)).collect();
        Ok((runs, used))
    }

    /// Writes the data of the entry that [`Self::next`] gave last into the empty `file`, holes left out. Gives the
    /// bytes of the pages that were written; refuses more than `room` of them.
    pub fn copy_data(&mut self, entry: &Entry, file: &File, room: u64) -> Result<u64, TarError> {
        let refused = |why: Refusal| TarError::Refused { entry: entry.path.clone(), at: entry.at, why };
        let mut stored = entry.stored_bytes;
        let runs = match &entry.sparse {
            Sparse::No => vec![(0, stored)],
            Sparse::Runs(runs) => runs.clone(),
            Sparse::InData => {
                let (runs, used) = self.pax_sparse(entry)?;
                self.rest -= used;
                stored -= used;
                runs
            }
        };
        check_runs(&runs, entry.size_bytes, stored).map_err(refused)?;
        file.set_len(entry.size_bytes)?;
        let mut written = 0;
        let mut buffer = vec![0; 128 << 10];
        for (mut offset, mut left) in runs {
            while left > 0 {
                // Up to the next page boundary of the file first, so that whole pages can be told to be zero.
                let chunk = (buffer.len() as u64 - offset % 4096).min(left);
                let data = &mut buffer[..usize::try_from(chunk).map_err(io::Error::other)?];
                self.inner.read_exact(data)?;
                self.at += chunk;
                self.rest -= chunk;
                let head = usize::try_from((4096 - offset % 4096) % 4096).map_err(io::Error::other)?;
                let (first, pages) = data.split_at(head.min(data.len()));
                let mut at = offset;
                for page in std::iter::once(first).chain(pages.chunks(4096)) {
                    if !crate::sparse::is_zero(page) {
                        file.write_all_at(page, at)?;
                        written += 4096;
                    }
                    at += page.len() as u64;
                }
                if written > room {
                    let expected = "an image within the limit on content".to_owned();
                    return Err(refused(Refusal { expected, got: "more".to_owned() }));
                }
                offset += chunk;
                left -= chunk;
            }
        }
        Ok(written)
    }
}

/// Runs must be in order, inside the file, and add up to what is stored.
fn check_runs(runs: &[Run], size: u64, stored: u64) -> Result<(), Refusal> {
    let (mut end, mut total) = (0u64, 0u64);
    for (offset, bytes) in runs {
        let upto = offset.checked_add(*bytes);
        match upto {
            Some(upto) if *offset >= end && upto <= size => (end, total) = (upto, total + bytes),
            _ => {
                let got = format!("{bytes} bytes at {offset} of a file of {size}");
                return refuse("a sparse map in order and inside the file", got);
            }
        }
    }
    if total != stored {
        return refuse(format!("{stored} bytes of data in the sparse map"), total.to_string());
    }
    Ok(())
}

/// A numeric field; one that is left blank is zero, as Go's archive/tar reads it.
fn or_blank(field: &[u8], value: io::Result<u64>) -> io::Result<u64> {
    if field.iter().all(|b| matches!(b, 0 | b' ')) { Ok(0) } else { value }
}

/// The header's checksum: the sum of its bytes, the checksum field itself taken as spaces (POSIX ustar).
fn check_sum(block: &[u8; 512]) -> Result<(), Refusal> {
    let sum: u32 = block
        .iter()
        .enumerate()
        .map(|(i, b)| u32::from(if (148..156).contains(&i) { b' ' } else { *b }))
        .sum();
    match Header::from_byte_slice(block).cksum() {
        Ok(stated) if stated == sum => Ok(()),
        Ok(stated) => refuse(format!("a tar header with checksum {stated}"), sum.to_string()),
        Err(error) => refuse("a tar header", error.to_string()),
    }
}

/// `seconds[.fraction]`, as pax writes times; anything else is the beginning of time.
fn pax_time(text: &str) -> (i64, u32) {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let Ok(seconds) = whole.parse::<i64>() else { return (0, 0) };
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    match digits.parse::<u32>().unwrap_or(0) {
        0 => (seconds, 0),
        // A negative time with a fraction counts towards the past.
        ns if whole.starts_with('-') => (seconds - 1, 1_000_000_000 - ns),
        ns => (seconds, ns),
    }
}
