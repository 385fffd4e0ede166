//! Writes entries as a POSIX (pax) archive.

use crate::block::BLOCK;
use crate::header::{Fields, Kind, octal_limit};
use crate::pax;
use crate::sparse::{self, Run};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};

/// Name, kind and attributes of an entry: everything except its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The name as written; [`crate::EntryPath`] interprets it.
    pub path: Vec<u8>,
    /// The target of a symbolic or hard link; empty for other kinds.
    pub link: Vec<u8>,
    /// The entry's kind.
    pub kind: Kind,
    /// The lower twelve bits of the mode.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u64,
    /// Group id of the owner.
    pub gid: u64,
    /// Time of change: seconds since 1970.
    pub mtime_s: i64,
    /// Time of change: nanoseconds after that second.
    pub mtime_ns: u32,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Extended attributes; names and values are as the system calls return them.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Head {
    /// An entry that root owns, with these permissions and the time 0.
    #[must_use]
    pub fn new(path: impl Into<Vec<u8>>, kind: Kind, mode: u32) -> Self {
        Self {
            path: path.into(),
            link: Vec::new(),
            kind,
            mode,
            uid: 0,
            gid: 0,
            mtime_s: 0,
            mtime_ns: 0,
            device: (0, 0),
            xattrs: BTreeMap::new(),
        }
    }
}

/// A writer of an archive.
///
/// ```
/// use dayfly_archive::{Head, Kind, Limits, Reader, Writer};
/// let mut writer = Writer::new(Vec::new());
/// writer.file(&Head::new("dir/a", Kind::File, 0o644), 5, &mut &b"hello"[..])?;
/// let archive = writer.finish()?;
/// let mut reader = Reader::new(&archive[..], Limits::NONE);
/// assert_eq!(reader.next_entry().unwrap().unwrap().head.path, b"dir/a");
/// # std::io::Result::Ok(())
/// ```
pub struct Writer<W> {
    out: W,
}

impl<W: Write> Writer<W> {
    /// Writes to `out`. Writes are small, so `out` should be buffered.
    pub fn new(out: W) -> Self {
        Self { out }
    }

    /// Writes an entry without data, so not a file.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn entry(&mut self, head: &Head) -> io::Result<()> {
        self.header(head, 0, None)
    }

    /// Writes a file with exactly `bytes` bytes of `data`.
    ///
    /// # Errors
    /// The errors of `data` and `out`, and an early end of `data`. The archive is broken
    /// afterwards.
    pub fn file(&mut self, head: &Head, bytes: u64, data: &mut dyn Read) -> io::Result<()> {
        self.header(head, bytes, None)?;
        self.data(bytes, data)
    }

    /// Writes a sparse file of `length` bytes. `data` yields the bytes of the runs in order. The
    /// runs must be in order and inside the file.
    ///
    /// # Errors
    /// As for [`Self::file`].
    pub fn sparse_file(
        &mut self,
        head: &Head,
        length: u64,
        runs: &[Run],
        data: &mut dyn Read,
    ) -> io::Result<()> {
        let map = sparse::map_text(runs, length);
        let bytes: u64 = runs.iter().map(|(_, bytes)| bytes).sum();
        self.header(head, bytes + map.len() as u64, Some(length))?;
        self.out.write_all(&map)?;
        self.data(bytes, data)
    }

    /// Ends the archive, flushes the stream and returns it.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn data(&mut self, bytes: u64, data: &mut dyn Read) -> io::Result<()> {
        let copied = io::copy(&mut data.take(bytes), &mut self.out)?;
        if copied < bytes {
            let text = format!("expected {bytes} bytes of data, got {copied}");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        self.pad(bytes)
    }

    fn pad(&mut self, bytes: u64) -> io::Result<()> {
        let rest = usize::try_from(bytes.wrapping_neg() % BLOCK as u64).unwrap_or(0);
        self.out.write_all(&[0; BLOCK][..rest])
    }

    /// Writes the header of an entry with `stored` bytes of data. pax records come before it if
    /// they are needed.
    fn header(&mut self, head: &Head, stored: u64, length: Option<u64>) -> io::Result<()> {
        let mut path = Cow::Borrowed(head.path.as_slice());
        if head.kind == Kind::Folder && !path.ends_with(b"/") {
            path.to_mut().push(b'/');
        }
        let records = records(head, &path, stored, length);
        if !records.is_empty() {
            let bytes = records.len() as u64;
            self.out.write_all(&self.fields(head, b"PaxHeaders/x", b"", b'x', bytes))?;
            self.out.write_all(&records)?;
            self.pad(bytes)?;
        }
        // The name shows a reader without pax that the data is not the plain file.
        let name = if length.is_some() { &b"GNUSparseFile.0/x"[..] } else { &path };
        let block = self.fields(head, name, &head.link, head.kind.byte(), stored);
        self.out.write_all(&block)
    }

    fn fields(&self, head: &Head, name: &[u8], link: &[u8], kind: u8, size: u64) -> [u8; BLOCK] {
        Fields {
            name,
            link,
            kind,
            mode: head.mode,
            owner: (head.uid, head.gid),
            size,
            mtime_s: head.mtime_s,
            device: head.device,
        }
        .block()
    }
}

/// The pax records for values that do not fit into the header.
fn records(head: &Head, path: &[u8], stored: u64, length: Option<u64>) -> Vec<u8> {
    const NAME_BYTES: usize = 100;
    let mut out = Vec::new();
    match length {
        Some(length) => {
            pax::push(&mut out, b"GNU.sparse.major", b"1");
            pax::push(&mut out, b"GNU.sparse.minor", b"0");
            pax::push(&mut out, b"GNU.sparse.name", path);
            pax::push(&mut out, b"GNU.sparse.realsize", length.to_string().as_bytes());
        }
        None if path.len() > NAME_BYTES => pax::push(&mut out, b"path", path),
        None => {}
    }
    if head.link.len() > NAME_BYTES {
        pax::push(&mut out, b"linkpath", &head.link);
    }
    for (key, value, digits) in [("size", stored, 11), ("uid", head.uid, 7), ("gid", head.gid, 7)] {
        if value > octal_limit(digits) {
            pax::push(&mut out, key.as_bytes(), value.to_string().as_bytes());
        }
    }
    let fits = u64::try_from(head.mtime_s).is_ok_and(|seconds| seconds <= octal_limit(11));
    if head.mtime_ns != 0 || !fits {
        pax::push(&mut out, b"mtime", pax::time_value(head.mtime_s, head.mtime_ns).as_bytes());
    }
    for (name, value) in &head.xattrs {
        pax::push(&mut out, &[pax::XATTR, name].concat(), value);
    }
    out
}
