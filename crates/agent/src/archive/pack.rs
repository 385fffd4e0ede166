//! Reading a file or a folder into a tar stream.

use super::{code_of, errno_of};
use dayfly_api::agent::{Failure, FailureCode};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, openat2};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// The deepest folder that is read.
const MAX_DEPTH: usize = 512;

/// Why it could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Not an absolute path.
    #[error("read archive: path: expected an absolute one, got {0:?}")]
    Path(String),
    /// A file or folder cannot be read.
    #[error("read archive: {path}: {what}: {errno}")]
    Read {
        /// Which.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// Deeper than 512 folders.
    #[error("read archive: {path}: expected at most {MAX_DEPTH} folders, got more")]
    Deep {
        /// Where.
        path: PathBuf,
    },
    /// The archive cannot be written out.
    #[error("read archive: {path}: write: {source}")]
    Write {
        /// At which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl From<&PackError> for Failure {
    fn from(error: &PackError) -> Self {
        let code = match error {
            PackError::Path(_) | PackError::Deep { .. } => FailureCode::Invalid,
            PackError::Read { errno, .. } => code_of(*errno),
            PackError::Write { .. } => FailureCode::Io,
        };
        Self { code, message: error.to_string() }
    }
}

/// What is to be read: open, so that it cannot become something else.
pub(super) struct Source {
    parent: OwnedFd,
    /// Name below `parent`.
    name: PathBuf,
    /// First component of the names in the archive.
    shown: PathBuf,
    device: u64,
}

fn failed(path: &Path, what: &'static str) -> impl Fn(Errno) -> PackError {
    let path = path.to_owned();
    move |errno| PackError::Read { path: path.clone(), what, errno }
}

impl Source {
    /// Opens the folder that `path` is in; follows links in it, but not one at its end.
    pub(super) fn open(path: &str) -> Result<Self, PackError> {
        let whole = Path::new(path);
        if !whole.is_absolute() || path.contains('\0') {
            return Err(PackError::Path(path.chars().take(200).collect()));
        }
        // `/a/b/..` has no last name of its own: take what it resolves to.
        let whole = match whole.file_name() {
            Some(_) => whole.to_owned(),
            None => std::fs::canonicalize(whole).map_err(|e| failed(whole, "open")(errno_of(&e)))?,
        };
        let (folder, name) = match (whole.parent(), whole.file_name()) {
            (Some(folder), Some(name)) => (folder.to_owned(), PathBuf::from(name)),
            _ => (PathBuf::from("/"), PathBuf::from(".")),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent =
            rustix::fs::openat(CWD, &folder, flags, Mode::empty()).map_err(failed(&folder, "open"))?;
        let stat = rustix::fs::statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed(&whole, "look at"))?;
        Ok(Self { parent, shown: name.clone(), name, device: stat.st_dev })
    }
}

/// Writes `path` to `out` as a tar stream, whole with its end.
///
/// # Errors
/// [`PackError`]; what was written so far is then no archive.
pub fn pack(path: &str, out: &mut dyn Write) -> Result<(), PackError> {
    pack_source(&Source::open(path)?, out)
}

pub(super) fn pack_source(source: &Source, out: &mut dyn Write) -> Result<(), PackError> {
    let mut packer = Packer { tar: Builder::new(out), device: source.device };
    packer.entry(source.parent.as_fd(), &source.name, &source.shown, 0)?;
    packer.tar.finish().map_err(|e| PackError::Write { path: source.shown.clone(), source: e })
}

struct Packer<W: Write> {
    tar: Builder<W>,
    device: u64,
}

impl<W: Write> Packer<W> {
    fn header(stat: &Stat, kind: EntryType) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid(u64::from(stat.st_uid));
        header.set_gid(u64::from(stat.st_gid));
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(0);
        header
    }

    fn put(&mut self, mut header: Header, shown: &Path, data: impl Read) -> Result<(), PackError> {
        self.tar
            .append_data(&mut header, shown, data)
            .map_err(|source| PackError::Write { path: shown.to_owned(), source })
    }

    fn entry(
        &mut self,
        parent: std::os::fd::BorrowedFd<'_>,
        name: &Path,
        shown: &Path,
        depth: usize,
    ) -> Result<(), PackError> {
        if depth > MAX_DEPTH {
            return Err(PackError::Deep { path: shown.to_owned() });
        }
        let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // Removed since its folder was listed.
            Err(Errno::NOENT) if depth > 0 => return Ok(()),
            Err(errno) => return Err(failed(shown, "look at")(errno)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.file(parent, name, shown, depth),
            FileType::Directory => self.folder(parent, name, shown, &stat, depth),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new())
                    .map_err(failed(shown, "read the link"))?;
                let target = Path::new(OsStr::from_bytes(target.as_bytes())).to_owned();
                let mut header = Self::header(&stat, EntryType::Symlink);
                self.tar
                    .append_link(&mut header, shown, &target)
                    .map_err(|source| PackError::Write { path: shown.to_owned(), source })
            }
            FileType::Fifo => self.put(Self::header(&stat, EntryType::Fifo), shown, io::empty()),
            kind @ (FileType::CharacterDevice | FileType::BlockDevice) => {
                let block = kind == FileType::BlockDevice;
                let mut header = Self::header(&stat, if block { EntryType::Block } else { EntryType::Char });
                let numbers = header
                    .set_device_major(rustix::fs::major(stat.st_rdev))
                    .and_then(|()| header.set_device_minor(rustix::fs::minor(stat.st_rdev)));
                numbers.map_err(|source| PackError::Write { path: shown.to_owned(), source })?;
                self.put(header, shown, io::empty())
            }
            _ => Ok(()),
        }
    }

    fn file(
        &mut self,
        parent: std::os::fd::BorrowedFd<'_>,
        name: &Path,
        shown: &Path,
        depth: usize,
    ) -> Result<(), PackError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) if depth > 0 => return Ok(()),
            Err(errno) => return Err(failed(shown, "open")(errno)),
        };
        let stat = rustix::fs::fstat(&file).map_err(failed(shown, "look at"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = Self::header(&stat, EntryType::Regular);
        header.set_size(size);
        let mut data = Exactly { file: std::fs::File::from(file), left: size, failed: None };
        let put = self.put(header, shown, &mut data);
        match data.failed {
            Some(errno) => Err(failed(shown, "read")(errno)),
            None => put,
        }
    }

    fn folder(
        &mut self,
        parent: std::os::fd::BorrowedFd<'_>,
        name: &Path,
        shown: &Path,
        stat: &Stat,
        depth: usize,
    ) -> Result<(), PackError> {
        self.put(Self::header(stat, EntryType::Directory), &shown.join(""), io::empty())?;
        if stat.st_dev != self.device {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            Ok(folder) => folder,
            Err(Errno::NOENT) if depth > 0 => return Ok(()),
            Err(errno) => return Err(failed(shown, "open")(errno)),
        };
        let mut names = Vec::new();
        let mut list = Dir::read_from(&folder).map_err(failed(shown, "list"))?;
        while let Some(entry) = list.read() {
            let entry = entry.map_err(failed(shown, "list"))?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(PathBuf::from(name));
            }
        }
        drop(list);
        names.sort();
        names.iter().try_for_each(|name| self.entry(folder.as_fd(), name, &shown.join(name), depth + 1))
    }
}

/// A file's bytes, exactly as many as its header says: a file that shrinks meanwhile is filled up with zeros, one that
/// grows is cut, so that the stream stays an archive.
struct Exactly {
    file: std::fs::File,
    left: u64,
    failed: Option<Errno>,
}

impl Read for Exactly {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let into = &mut into[..most];
        if into.is_empty() {
            return Ok(0);
        }
        let n = match self.file.read(into) {
            Ok(0) => {
                into.fill(0);
                into.len()
            }
            Ok(n) => n,
            Err(error) => {
                self.failed = Some(errno_of(&error));
                return Err(error);
            }
        };
        self.left = self.left.saturating_sub(n as u64);
        Ok(n)
    }
}
