//! Writing a tar stream into a folder, and nowhere else.
//!
//! The stream is hostile until shown otherwise. A name with `..` or a leading `/` is refused; every folder on the way
//! is opened with `openat2(RESOLVE_BENEATH)`, so a link that leads out of the target, whether it was there before or
//! came with the stream, is refused by the kernel at the moment of use. Into `/` itself nothing can escape, and
//! absolute links (`/var/run`) resolve there as usual. Extension headers are read by us with a cap: the tar crate's own
//! handling takes as much memory as the stream asks for. Files appear by rename, whole, or not at all.

use super::code_of;
use dayfly_api::agent::{Failure, FailureCode};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, chownat, fchmod,
    fchown, futimens, linkat, mkdirat, mknodat, openat2, renameat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use tar::{Archive, EntryType, Header, PaxExtensions};

/// The longest extension header (a long name, or PAX records) that is read.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// Folders whose time of change is set at the end, when nothing more is put in them.
const MAX_FOLDER_TIMES: usize = 1 << 16;

/// Why a stream was not unpacked. What came before the entry named is there.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The target is no folder, or not absolute.
    #[error("write archive: folder {path}: {errno}")]
    Target {
        /// Which.
        path: PathBuf,
        /// Why.
        errno: Errno,
    },
    /// The stream broke off or is no archive.
    #[error("write archive: stream: {0}")]
    Stream(io::Error),
    /// An entry's name leads out of the folder.
    #[error("write archive: entry {path:?}: expected a relative path without '..', got this one")]
    Name {
        /// The name.
        path: PathBuf,
    },
    /// A link on an entry's way leads out of the folder.
    #[error("write archive: entry {path:?}: a link on its way leads out of the folder")]
    Escape {
        /// The name.
        path: PathBuf,
    },
    /// An entry that cannot be unpacked here.
    #[error("write archive: entry {path:?}: expected {expected}, got {got}")]
    Entry {
        /// The name.
        path: PathBuf,
        /// What could be unpacked.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// The system refused.
    #[error("write archive: entry {path:?}: {what}: {errno}")]
    Write {
        /// The name.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
}

impl From<&UnpackError> for Failure {
    fn from(error: &UnpackError) -> Self {
        let code = match error {
            UnpackError::Target { errno, .. } | UnpackError::Write { errno, .. } => code_of(*errno),
            UnpackError::Stream(_)
            | UnpackError::Name { .. }
            | UnpackError::Escape { .. }
            | UnpackError::Entry { .. } => FailureCode::Invalid,
        };
        Self { code, message: error.to_string() }
    }
}

/// The folder that is unpacked into, open.
pub(super) struct Target {
    folder: OwnedFd,
    path: PathBuf,
    resolve: ResolveFlags,
}

impl Target {
    pub(super) fn open(path: &Path) -> Result<Self, UnpackError> {
        let failed = |errno| UnpackError::Target { path: path.to_owned(), errno };
        if !path.is_absolute() {
            return Err(failed(Errno::INVAL));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
        let (here, root) = (rustix::fs::fstat(&folder), rustix::fs::stat("/"));
        let is_root = matches!((here, root), (Ok(a), Ok(b)) if a.st_dev == b.st_dev && a.st_ino == b.st_ino);
        let within = if is_root { ResolveFlags::IN_ROOT } else { ResolveFlags::BENEATH };
        let resolve = within | ResolveFlags::NO_MAGICLINKS;
        Ok(Self { folder, path: path.to_owned(), resolve })
    }

    /// Waits until everything is on disk.
    pub(super) fn sync(&self) -> Result<(), UnpackError> {
        let failed = |errno| UnpackError::Write { path: self.path.clone(), what: "sync", errno };
        rustix::fs::syncfs(&self.folder).map_err(failed)
    }

    /// Opens a folder below, making what is missing.
    fn folder(&self, path: &Path, entry: &Path) -> Result<OwnedFd, UnpackError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &Path| {
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            // AGAIN: something below was renamed during the walk.
            loop {
                match openat2(&self.folder, path, flags, Mode::empty(), self.resolve) {
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    other => return other,
                }
            }
        };
        match open(path) {
            Ok(folder) => return Ok(folder),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(refused(entry, "open its folder", errno)),
        }
        let mut so_far = PathBuf::new();
        let mut at = open(&so_far).map_err(|e| refused(entry, "open the target", e))?;
        for part in path.components() {
            so_far.push(part);
            at = match open(&so_far) {
                Err(Errno::NOENT) => {
                    mkdirat(&at, part.as_os_str(), Mode::from_raw_mode(0o755))
                        .map_err(|e| refused(entry, "make its folder", e))?;
                    open(&so_far)
                }
                other => other,
            }
            .map_err(|e| refused(entry, "open its folder", e))?;
        }
        Ok(at)
    }
}

fn refused(path: &Path, what: &'static str, errno: Errno) -> UnpackError {
    match errno {
        Errno::XDEV => UnpackError::Escape { path: path.to_owned() },
        errno => UnpackError::Write { path: path.to_owned(), what, errno },
    }
}

/// Unpacks `stream` into the folder `path`.
///
/// # Errors
/// [`UnpackError`].
pub fn unpack(path: &Path, stream: &mut dyn Read) -> Result<(), UnpackError> {
    unpack_into(&Target::open(path)?, stream)
}

/// What extension headers say about the entry that follows them.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<Timespec>,
}

/// Owner, mode and time of an entry.
#[derive(Clone, Copy)]
struct Meta {
    uid: Uid,
    gid: Gid,
    mode: Mode,
    time: Timespec,
}

impl Meta {
    const fn times(&self) -> Timestamps {
        Timestamps { last_access: self.time, last_modification: self.time }
    }
}

pub(super) fn unpack_into(target: &Target, stream: &mut dyn Read) -> Result<(), UnpackError> {
    let mut archive = Archive::new(stream);
    let entries = archive.entries().map_err(UnpackError::Stream)?.raw(true);
    let mut unpacker = Unpacker { target, folder_times: Vec::new() };
    let mut extension = Extension::default();
    for entry in entries {
        let mut entry = entry.map_err(UnpackError::Stream)?;
        let header = entry.header().clone();
        match header.entry_type() {
            EntryType::GNULongName => extension.path = Some(long_name(&mut entry)?),
            EntryType::GNULongLink => extension.link = Some(long_name(&mut entry)?),
            EntryType::XHeader => {
                let records = read_extension(&mut entry)?;
                extension.take(&records)?;
            }
            // Records for all entries that follow; in practice a comment (git archive).
            EntryType::XGlobalHeader => drop(read_extension(&mut entry)?),
            _ => unpacker.entry(&header, &std::mem::take(&mut extension), &mut entry)?,
        }
    }
    unpacker.finish();
    Ok(())
}

fn read_extension(entry: &mut impl Read) -> Result<Vec<u8>, UnpackError> {
    let mut bytes = Vec::new();
    entry.take(MAX_EXTENSION_BYTES + 1).read_to_end(&mut bytes).map_err(UnpackError::Stream)?;
    if bytes.len() as u64 > MAX_EXTENSION_BYTES {
        let text = format!("extension header: expected at most {MAX_EXTENSION_BYTES} bytes, got more");
        return Err(UnpackError::Stream(io::Error::new(io::ErrorKind::InvalidData, text)));
    }
    Ok(bytes)
}

fn long_name(entry: &mut impl Read) -> Result<Vec<u8>, UnpackError> {
    let mut bytes = read_extension(entry)?;
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    Ok(bytes)
}

impl Extension {
    fn take(&mut self, records: &[u8]) -> Result<(), UnpackError> {
        for record in PaxExtensions::new(records) {
            let record = record.map_err(UnpackError::Stream)?;
            let value = record.value_bytes();
            let number = || std::str::from_utf8(value).ok().and_then(|t| t.parse::<u64>().ok());
            match record.key_bytes() {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = number(),
                b"uid" => self.uid = number(),
                b"gid" => self.gid = number(),
                b"mtime" => self.mtime = std::str::from_utf8(value).ok().and_then(pax_time),
                _ => {}
            }
        }
        Ok(())
    }
}

/// `seconds[.fraction]`; times before 1970 are taken as 1970.
fn pax_time(text: &str) -> Option<Timespec> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    if seconds.starts_with('-') {
        return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    Some(Timespec { tv_sec: seconds.parse().ok()?, tv_nsec: digits.parse().ok().filter(|n| *n >= 0)? })
}

/// The components of an entry's name; none for the target itself.
fn clean(name: &[u8]) -> Result<PathBuf, UnpackError> {
    let path = Path::new(OsStr::from_bytes(name));
    let refuse = || UnpackError::Name { path: path.to_owned() };
    if name.is_empty() || name.contains(&0) {
        return Err(refuse());
    }
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => out.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(refuse()),
        }
    }
    Ok(out)
}

struct Unpacker<'a> {
    target: &'a Target,
    folder_times: Vec<(PathBuf, Timestamps)>,
}

impl Unpacker<'_> {
    fn entry(
        &mut self,
        header: &Header,
        extension: &Extension,
        data: &mut dyn Read,
    ) -> Result<(), UnpackError> {
        let name = extension.path.clone().unwrap_or_else(|| header.path_bytes().into_owned());
        let path = clean(&name)?;
        let other = |expected, got: String| UnpackError::Entry { path: path.clone(), expected, got };
        let size = header.entry_size().map_err(UnpackError::Stream)?;
        if let Some(stated) = extension.size.filter(|s| *s != size) {
            // The stream was walked by the header's size: what follows would be read as headers.
            return Err(other(
                "the size in its header",
                format!("{stated} in a PAX record, {size} in the header"),
            ));
        }
        let meta = meta(header, extension).map_err(UnpackError::Stream)?;
        let link = || {
            let link = extension.link.clone().or_else(|| header.link_name_bytes().map(|b| b.into_owned()));
            link.filter(|l| !l.is_empty() && !l.contains(&0))
                .ok_or_else(|| other("a link's target", "none".into()))
        };
        let kind = header.entry_type();
        let Some(last) = path.file_name() else {
            // `./`: the target itself, which is there and stays as it is.
            return if kind.is_dir() { Ok(()) } else { Err(other("a folder", format!("{kind:?}"))) };
        };
        if kind.is_dir() {
            return self.folder(&path, meta);
        }
        let parent = self.target.folder(path.parent().unwrap_or(Path::new("")), &path)?;
        let place = Place { parent: parent.as_fd(), name: last, path: &path };
        match kind {
            EntryType::Regular | EntryType::Continuous => place.file(meta, size, data),
            EntryType::Symlink => place.symlink(meta, &link()?),
            EntryType::Link => place.hard_link(self.target, &clean(&link()?)?),
            EntryType::Fifo => place.node(meta, FileType::Fifo, 0),
            EntryType::Char | EntryType::Block => {
                let major = header.device_major().map_err(UnpackError::Stream)?.unwrap_or(0);
                let minor = header.device_minor().map_err(UnpackError::Stream)?.unwrap_or(0);
                let block = kind == EntryType::Block;
                let kind = if block { FileType::BlockDevice } else { FileType::CharacterDevice };
                place.node(meta, kind, rustix::fs::makedev(major, minor))
            }
            _ => Err(other("a file, folder, link, fifo or device", format!("{kind:?}"))),
        }
    }

    fn folder(&mut self, path: &Path, meta: Meta) -> Result<(), UnpackError> {
        // An existing folder, or a link to one within the target, is used as it is but for owner, mode and time.
        let folder = self.target.folder(path, path)?;
        let failed = |what| move |errno| refused(path, what, errno);
        fchown(&folder, Some(meta.uid), Some(meta.gid)).map_err(failed("set its owner"))?;
        fchmod(&folder, meta.mode).map_err(failed("set its mode"))?;
        if self.folder_times.len() < MAX_FOLDER_TIMES {
            self.folder_times.push((path.to_owned(), meta.times()));
        }
        Ok(())
    }

    /// Sets the folders' times, the deepest last entries first. One that is gone again needs none.
    fn finish(self) {
        for (path, times) in self.folder_times.iter().rev() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let opened = openat2(&self.target.folder, path, flags, Mode::empty(), self.target.resolve);
            if let Ok(folder) = opened {
                let _ = futimens(&folder, times);
            }
        }
    }
}

fn meta(header: &Header, extension: &Extension) -> io::Result<Meta> {
    let id = |record: Option<u64>, plain: io::Result<u64>| {
        let number = record.map_or(plain, Ok)?;
        u32::try_from(number).ok().filter(|n| *n != u32::MAX).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("owner: expected 32 bits, got {number}"))
        })
    };
    let plain = Timespec { tv_sec: i64::try_from(header.mtime()?).unwrap_or(0), tv_nsec: 0 };
    let time = extension.mtime.unwrap_or(plain);
    Ok(Meta {
        uid: Uid::from_raw(id(extension.uid, header.uid())?),
        gid: Gid::from_raw(id(extension.gid, header.gid())?),
        mode: Mode::from_raw_mode(header.mode()? & 0o7777),
        time,
    })
}

/// Where an entry goes: an open folder within the target, and a name in it.
struct Place<'a> {
    parent: BorrowedFd<'a>,
    name: &'a OsStr,
    path: &'a Path,
}

impl Place<'_> {
    fn failed(&self, what: &'static str) -> impl Fn(Errno) -> UnpackError {
        move |errno| refused(self.path, what, errno)
    }

    /// Makes something under a temporary name and renames it to its own, so that what was there stays until then.
    fn appear(&self, make: impl FnOnce(&OsStr) -> Result<(), UnpackError>) -> Result<(), UnpackError> {
        let temporary = OsStr::new(".dayfly-unpack");
        match unlinkat(self.parent, temporary, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(refused(self.path, "make room for a temporary file", errno)),
        }
        let made = make(temporary).and_then(|()| {
            // A file does not take a folder's place: rename(2) says EISDIR.
            renameat(self.parent, temporary, self.parent, self.name)
                .map_err(self.failed("rename it into place"))
        });
        // After a rename over another name of the same file both names stay (POSIX): gone in either case.
        let _ = unlinkat(self.parent, temporary, AtFlags::empty());
        made
    }

    fn file(&self, meta: Meta, size: u64, data: &mut dyn Read) -> Result<(), UnpackError> {
        self.appear(|temporary| {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(self.parent, temporary, flags, Mode::from_raw_mode(0o600))
                .map_err(self.failed("create it"))?;
            let mut buffer = vec![0; 64 << 10];
            let mut got: u64 = 0;
            loop {
                let n = match data.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(UnpackError::Stream(e)),
                };
                got += n as u64;
                let mut rest = buffer.get(..n).unwrap_or_default();
                while !rest.is_empty() {
                    let n = rustix::io::write(&file, rest).map_err(self.failed("write"))?;
                    rest = rest.get(n..).unwrap_or_default();
                }
            }
            if got != size {
                // The stream ended within the file, which the tar crate takes for the file's end.
                let text = format!("{:?}: expected {size} bytes, got {got}", self.path);
                return Err(UnpackError::Stream(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
            }
            // The owner first: a change of owner takes set-user-id bits away.
            fchown(&file, Some(meta.uid), Some(meta.gid)).map_err(self.failed("set its owner"))?;
            fchmod(&file, meta.mode).map_err(self.failed("set its mode"))?;
            futimens(&file, &meta.times()).map_err(self.failed("set its time"))
        })
    }

    /// Owner and time of what cannot be opened to change them.
    fn dress(&self, temporary: &OsStr, meta: Meta) -> Result<(), UnpackError> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        chownat(self.parent, temporary, Some(meta.uid), Some(meta.gid), flags)
            .map_err(self.failed("set its owner"))?;
        utimensat(self.parent, temporary, &meta.times(), flags).map_err(self.failed("set its time"))
    }

    fn symlink(&self, meta: Meta, target: &[u8]) -> Result<(), UnpackError> {
        self.appear(|temporary| {
            symlinkat(OsStr::from_bytes(target), self.parent, temporary)
                .map_err(self.failed("make the link"))?;
            self.dress(temporary, meta)
        })
    }

    fn node(&self, meta: Meta, kind: FileType, device: u64) -> Result<(), UnpackError> {
        self.appear(|temporary| {
            mknodat(self.parent, temporary, kind, Mode::from_raw_mode(0o600), device)
                .map_err(self.failed("make the node"))?;
            self.dress(temporary, meta)?;
            rustix::fs::chmodat(self.parent, temporary, meta.mode, AtFlags::empty())
                .map_err(self.failed("set its mode"))
        })
    }

    fn hard_link(&self, target: &Target, to: &Path) -> Result<(), UnpackError> {
        let Some(name) = to.file_name() else {
            return Err(UnpackError::Name { path: self.path.to_owned() });
        };
        // Not `Target::folder`: a link's target must be there already, its folder is not made.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = match to.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let folder = openat2(&target.folder, parent, flags, Mode::empty(), target.resolve)
            .map_err(self.failed("open its target's folder"))?;
        let kind = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(self.failed("look at its target"))?
            .st_mode;
        if FileType::from_raw_mode(kind) == FileType::Directory {
            let (expected, got) = ("a link to a file", "a link to a folder".to_owned());
            return Err(UnpackError::Entry { path: self.path.to_owned(), expected, got });
        }
        self.appear(|temporary| {
            linkat(&folder, name, self.parent, temporary, AtFlags::empty())
                .map_err(self.failed("make the link"))
        })
    }
}
