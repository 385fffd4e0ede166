//! Packs a file or a folder of this host into an archive.
//!
//! Every file is opened relative to its folder, without following links. So nothing outside the
//! tree is read, even if names change meanwhile. The archive stays well-formed whatever happens to
//! files during the read: a file that shrinks is padded with zeroes, and one that grows is cut.

use crate::header::Kind;
use crate::sparse::{MAX_RUNS, Run};
use crate::writer::{Head, Writer};
use crate::xattr;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, SeekFrom, Stat, openat2, statat,
};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

/// Deepest folder that is read.
pub const MAX_DEPTH: usize = 512;
/// Files up to this reported length are read to their end before their length is written. Files of
/// `/proc` report 0 bytes and those of `/sys` a page, whatever they hold.
const READ_FIRST_BYTES: u64 = 64 << 10;
/// Upper limit for the bytes of a file that reports a length of 0.
const MAX_GROWN_BYTES: u64 = 16 << 20;

/// Options of [`pack`].
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Owner and group of every entry. `None` keeps those on disk.
    pub owner: Option<(u32, u32)>,
    /// Whether devices and named pipes are packed. Sockets are never packed.
    pub special: bool,
    /// Whether folders on other file systems are packed without their content.
    pub one_file_system: bool,
    /// Selects the extended attributes to pack.
    pub xattrs: fn(&[u8]) -> bool,
}

/// Why packing failed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// A file or folder cannot be read.
    #[error("{}: {what}: {errno}", crate::show(path))]
    Read {
        /// The entry's name.
        path: Vec<u8>,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        errno: Errno,
    },
    /// The folders are nested too deeply.
    #[error("{}: expected at most {MAX_DEPTH} folders, got more", crate::show(path))]
    Deep {
        /// The entry's name.
        path: Vec<u8>,
    },
    /// A file that reports a length of 0 does not end.
    #[error("{}: expected an end within {MAX_GROWN_BYTES} bytes, got more", crate::show(path))]
    Endless {
        /// The entry's name.
        path: Vec<u8>,
    },
    /// The archive cannot be written.
    #[error("{}: write: {cause}", crate::show(path))]
    Write {
        /// The entry's name.
        path: Vec<u8>,
        /// The cause.
        cause: io::Error,
    },
}

/// Packs `name` in the open folder `parent`, with everything below it, as entries called `shown`
/// and below. If `shown` is empty, `name` must be a folder, and only its content is packed. A link
/// at `name` itself is packed as a link.
///
/// # Errors
/// [`PackError`]; the incomplete output is then not a valid archive.
pub fn pack<W: Write>(
    writer: &mut Writer<W>,
    parent: BorrowedFd<'_>,
    name: &OsStr,
    shown: &[u8],
    options: Options,
) -> Result<(), PackError> {
    let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed(shown, "look at"))?;
    let mut packer = Packer { writer, options, device: stat.st_dev, names: HashMap::new() };
    packer.entry(parent, name, shown, 0)
}

fn failed(path: &[u8], what: &'static str) -> impl Fn(Errno) -> PackError {
    move |errno| PackError::Read { path: path.to_vec(), what, errno }
}

struct Packer<'a, W> {
    writer: &'a mut Writer<W>,
    options: Options,
    device: u64,
    /// Files with names that are not packed yet: device and inode, the first name, and the number
    /// of remaining names.
    names: HashMap<(u64, u64), (Vec<u8>, u64)>,
}

impl<W: Write> Packer<'_, W> {
    fn head(&self, stat: &Stat, kind: Kind, path: &[u8]) -> Head {
        let (uid, gid) = self.options.owner.unwrap_or((stat.st_uid, stat.st_gid));
        Head {
            uid: u64::from(uid),
            gid: u64::from(gid),
            mtime_s: stat.st_mtime,
            mtime_ns: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
            ..Head::new(path, kind, stat.st_mode & 0o7777)
        }
    }

    fn put(&mut self, head: &Head) -> Result<(), PackError> {
        self.writer.entry(head).map_err(|cause| PackError::Write { path: head.path.clone(), cause })
    }

    fn entry(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        shown: &[u8],
        depth: usize,
    ) -> Result<(), PackError> {
        if depth > MAX_DEPTH {
            return Err(PackError::Deep { path: shown.to_vec() });
        }
        let stat = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // The file was removed after its folder was listed.
            Err(Errno::NOENT) if depth > 0 => return Ok(()),
            Err(errno) => return Err(failed(shown, "look at")(errno)),
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        let special =
            matches!(kind, FileType::Fifo | FileType::CharacterDevice | FileType::BlockDevice);
        if kind == FileType::Socket || (special && !self.options.special) {
            return Ok(());
        }
        let linked = kind != FileType::Directory && stat.st_nlink > 1;
        if linked && self.hard_link(&stat, shown)? {
            return Ok(());
        }
        match kind {
            FileType::RegularFile if !self.file(parent, name, shown, depth)? => return Ok(()),
            FileType::RegularFile => Ok(()),
            FileType::Directory => self.folder(parent, name, shown, &stat, depth),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new())
                    .map_err(failed(shown, "read the link"))?;
                let head = self.head(&stat, Kind::Symlink, shown);
                self.put(&Head { link: target.into_bytes(), ..head })
            }
            FileType::Fifo => self.put(&self.head(&stat, Kind::Fifo, shown)),
            FileType::CharacterDevice | FileType::BlockDevice => {
                let kind = if kind == FileType::BlockDevice { Kind::Block } else { Kind::Char };
                let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
                self.put(&Head { device, ..self.head(&stat, kind, shown) })
            }
            _ => Ok(()),
        }?;
        if linked {
            self.names.insert((stat.st_dev, stat.st_ino), (shown.to_vec(), stat.st_nlink - 1));
        }
        Ok(())
    }

    /// Writes a further name of a packed file. Returns `false` if this is its first name.
    fn hard_link(&mut self, stat: &Stat, shown: &[u8]) -> Result<bool, PackError> {
        let key = (stat.st_dev, stat.st_ino);
        let Some((first, left)) = self.names.get_mut(&key) else { return Ok(false) };
        let link = first.clone();
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.names.remove(&key);
        }
        let head = self.head(stat, Kind::HardLink, shown);
        self.put(&Head { link, ..head })?;
        Ok(true)
    }

    /// Writes a regular file. Returns `false` if the file has vanished.
    fn file(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        shown: &[u8],
        depth: usize,
    ) -> Result<bool, PackError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) if depth > 0 => return Ok(false),
            Err(errno) => return Err(failed(shown, "open")(errno)),
        };
        let stat = rustix::fs::fstat(&file).map_err(failed(shown, "look at"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(false);
        }
        let head =
            Head { xattrs: self.attributes(&file, shown)?, ..self.head(&stat, Kind::File, shown) };
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        let read = failed(shown, "read");
        if size <= READ_FIRST_BYTES {
            let mut bytes = Vec::new();
            let most = if size == 0 { MAX_GROWN_BYTES } else { READ_FIRST_BYTES };
            let result = (&file).take(most + 1).read_to_end(&mut bytes);
            result.map_err(|e| read(errno_of(&e)))?;
            if bytes.len() as u64 > most {
                if size == 0 {
                    return Err(PackError::Endless { path: shown.to_vec() });
                }
                // The file grows while it is read, so it is cut to its first length.
                bytes.truncate(usize::try_from(size).unwrap_or(0));
            }
            let done = self.writer.file(&head, bytes.len() as u64, &mut bytes.as_slice());
            return done
                .map(|()| true)
                .map_err(|cause| PackError::Write { path: shown.to_vec(), cause });
        }
        let runs = match blocks.saturating_mul(512) < size {
            true => data_runs(&file, size).map_err(&read)?,
            false => None,
        };
        let dense = [(0, size)];
        let mut data = Runs::new(&file, runs.as_deref().unwrap_or(&dense));
        let put = match &runs {
            Some(runs) => self.writer.sparse_file(&head, size, runs, &mut data),
            None => self.writer.file(&head, size, &mut data),
        };
        match data.failed {
            Some(errno) => Err(read(errno)),
            None => {
                put.map(|()| true).map_err(|cause| PackError::Write { path: shown.to_vec(), cause })
            }
        }
    }

    fn attributes(
        &self,
        file: &File,
        shown: &[u8],
    ) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, PackError> {
        xattr::read(file, self.options.xattrs).map_err(failed(shown, "read its attributes"))
    }

    fn folder(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        shown: &[u8],
        stat: &Stat,
        depth: usize,
    ) -> Result<(), PackError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            Ok(folder) => File::from(folder),
            Err(Errno::NOENT) if depth > 0 => return Ok(()),
            Err(errno) => return Err(failed(shown, "open")(errno)),
        };
        if !shown.is_empty() {
            let xattrs = self.attributes(&folder, shown)?;
            self.put(&Head { xattrs, ..self.head(stat, Kind::Folder, shown) })?;
        }
        if self.options.one_file_system && stat.st_dev != self.device {
            return Ok(());
        }
        for name in names(&folder).map_err(failed(shown, "list"))? {
            let separator: &[u8] =
                if shown.is_empty() || shown.ends_with(b"/") { b"" } else { b"/" };
            let below = [shown, separator, name.as_bytes()].concat();
            self.entry(folder.as_fd(), &name, &below, depth + 1)?;
        }
        Ok(())
    }
}

/// The names in an open folder, sorted.
fn names(folder: impl AsFd) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The data runs of a file; `None` if it has no holes, or too many runs for an archive.
fn data_runs(file: &File, size: u64) -> Result<Option<Vec<Run>>, Errno> {
    let mut runs = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // The file system has no support for holes.
            Err(Errno::INVAL) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        at = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        if start < at {
            runs.push((start, at - start));
        }
        // The map may get one more run, for a hole at the end.
        if runs.len() >= MAX_RUNS {
            return Ok(None);
        }
    }
    let dense = runs == [(0, size)];
    Ok((!dense).then_some(runs))
}

/// Reads the bytes of a file's runs, exactly as many as the runs state.
struct Runs<'a> {
    file: &'a File,
    runs: std::slice::Iter<'a, Run>,
    at: u64,
    left: u64,
    failed: Option<Errno>,
}

impl<'a> Runs<'a> {
    fn new(file: &'a File, runs: &'a [Run]) -> Self {
        Self { file, runs: runs.iter(), at: 0, left: 0, failed: None }
    }
}

impl Read for Runs<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.left == 0 {
            let Some((offset, bytes)) = self.runs.next() else { return Ok(0) };
            (self.at, self.left) = (*offset, *bytes);
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let into = &mut into[..most];
        let n = match self.file.read_at(into, self.at) {
            // The file has shrunk.
            Ok(0) => {
                into.fill(0);
                into.len()
            }
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            Err(error) => {
                self.failed = Some(errno_of(&error));
                return Err(error);
            }
        };
        self.at += n as u64;
        self.left -= n as u64;
        Ok(n)
    }
}
