//! The only module that changes the disk. It addresses folders by descriptor and files by single
//! names in them, and follows no symbolic link.
//!
//! Every change goes through a [`Dir`]. It first passes [`fault::step`], where tests make it fail.
//! A change that succeeded is reported to [`watch::made`], from which tests build every disk that a
//! crash may leave.

#[cfg(test)]
pub(crate) mod disk;
pub(crate) mod fault;
pub(crate) mod interleave;
pub(crate) mod lock_work;
pub(crate) mod probe;
pub(crate) mod watch;

use crate::errors::{IoError, IoResult};
use crate::sparse;
use dayfly_sys::writers::enable_verity;
use dayfly_units::sync::lock;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RawDir, RenameFlags, fallocate, fchmod,
    linkat, mkdirat, openat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use watch::Change;

const DIR: OFlags =
    OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
/// A file gets fs-verity if at least one page in four is data.
const DENSE: u64 = 4;
const FILE: OFlags =
    OFlags::CLOEXEC.union(OFlags::NOFOLLOW).union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

/// An open folder. A `name` parameter is a single path component that dayfly generated or validated
/// ([`dayfly_units::Name`], ids).
#[derive(Debug)]
pub(crate) struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// What [`Dir::rename`] does if the new name exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IfTaken {
    /// Fail with `AlreadyExists`.
    Refuse,
    /// Exchange the two entries atomically. Fails with `NotFound` if the new name does not exist.
    Exchange,
}

impl Dir {
    /// Opens the folder at `path`, and creates it and its parents if needed. Symbolic links in
    /// `path` are followed, because the administrator chose the path.
    pub(crate) fn root(path: &Path) -> IoResult<Self> {
        std::fs::create_dir_all(path).map_err(IoError::new("making folder", path))?;
        let fd = openat(CWD, path, DIR.difference(OFlags::NOFOLLOW), Mode::empty());
        let fd = fd.map_err(|e| IoError::new("opening folder", path)(e.into()))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn fail(&self, doing: &'static str, name: &str) -> impl FnOnce(Errno) -> IoError {
        let path = self.path.join(name);
        move |e| IoError { doing, path, source: e.into() }
    }

    fn step(&self, doing: &'static str, name: &str) -> IoResult<()> {
        lock_work::operation();
        fault::step(doing, &self.path.join(name))
            .map_err(IoError::new(doing, &self.path.join(name)))
    }

    fn read_step(&self, doing: &'static str, name: &str) -> IoResult<()> {
        lock_work::operation();
        let path = self.path.join(name);
        fault::read(&path).map_err(IoError::new(doing, &path))
    }

    /// The folder's descriptor.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Whether the entry `name` is the open `file`.
    pub(crate) fn is_at(&self, name: &str, file: &File) -> IoResult<bool> {
        let path = self.path.join(name);
        let open = file.metadata().map_err(IoError::new("looking at", &path))?;
        match statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok((stat.st_dev, stat.st_ino) == (open.dev(), open.ino())),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.fail("looking at", name)(e)),
        }
    }

    /// Whether this folder is still at its path.
    pub(crate) fn is_in_place(&self) -> IoResult<bool> {
        let open = rustix::fs::fstat(&self.fd).map_err(self.fail("looking at", ""))?;
        match statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok((stat.st_dev, stat.st_ino) == (open.st_dev, open.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.fail("looking at", "")(e)),
        }
    }

    /// Opens a subfolder.
    pub(crate) fn sub(&self, name: &str) -> IoResult<Self> {
        self.read_step("opening folder", name)?;
        let fd = openat(&self.fd, name, DIR, Mode::empty())
            .map_err(self.fail("opening folder", name))?;
        Ok(Self { fd, path: self.path.join(name) })
    }

    /// Creates a subfolder, which must not exist.
    pub(crate) fn make(&self, name: &str) -> IoResult<Self> {
        self.step("making folder", name)?;
        mkdirat(&self.fd, name, Mode::from_raw_mode(0o700))
            .map_err(self.fail("making folder", name))?;
        watch::made(&Change::Folder(&self.path.join(name)));
        self.sub(name)
    }

    pub(crate) fn make_or_open(&self, name: &str) -> IoResult<Self> {
        match self.make(name) {
            Err(e) if e.source.kind() == io::ErrorKind::AlreadyExists => self.sub(name),
            other => other,
        }
    }

    /// Creates an empty file, open for reading and writing; the name must not exist.
    pub(crate) fn create(&self, name: &str) -> IoResult<File> {
        self.step("creating", name)?;
        let flags = FILE | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let fd = openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))
            .map_err(self.fail("creating", name))?;
        watch::made(&Change::File(&self.path.join(name)));
        Ok(File::from(fd))
    }

    /// Opens a file for reading and writing, and creates it if needed.
    pub(crate) fn open_or_create(&self, name: &str) -> IoResult<File> {
        let flags = FILE | OFlags::RDWR | OFlags::CREATE;
        let fd = openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))
            .map_err(self.fail("opening", name))?;
        self.regular(name, File::from(fd))
    }

    /// Opens an existing file for reading.
    pub(crate) fn open(&self, name: &str) -> IoResult<File> {
        self.read_step("opening", name)?;
        let fd = openat(&self.fd, name, FILE | OFlags::RDONLY, Mode::empty())
            .map_err(self.fail("opening", name))?;
        self.regular(name, File::from(fd))
    }

    /// Opens an existing file for reading and writing.
    pub(crate) fn open_rw(&self, name: &str) -> IoResult<File> {
        let fd = openat(&self.fd, name, FILE | OFlags::RDWR, Mode::empty())
            .map_err(self.fail("opening", name))?;
        self.regular(name, File::from(fd))
    }

    /// Refuses everything but regular files: dayfly makes no pipes or devices.
    fn regular(&self, name: &str, file: File) -> IoResult<File> {
        let path = self.path.join(name);
        let meta = file.metadata().map_err(IoError::new("looking at", &path))?;
        if meta.is_file() {
            return Ok(file);
        }
        let source = io::Error::new(io::ErrorKind::InvalidData, "expected a regular file");
        Err(IoError { doing: "opening", path, source })
    }

    /// Creates a read-only file with these bytes, and `fsync`s it.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> IoResult<()> {
        let file = self.create(name)?;
        self.write_at(name, &file, bytes, 0)?;
        self.finish(name, &file)
    }

    /// Writes `bytes` at byte `at` of `file`, which [`Self::create`] returned for `name`.
    pub(crate) fn write_at(&self, name: &str, file: &File, bytes: &[u8], at: u64) -> IoResult<()> {
        self.step("writing", name)?;
        let path = self.path.join(name);
        file.write_all_at(bytes, at).map_err(IoError::new("writing", &path))?;
        watch::made(&Change::Write { path: &path, at, bytes });
        Ok(())
    }

    /// Copies the file `from`, holes included, to a new file. Blocks are shared if the file system
    /// can do that.
    pub(crate) fn copy(&self, name: &str, from: &File) -> IoResult<()> {
        let file = self.create(name)?;
        self.step("copying to", name)?;
        sparse::copy_file(from, &file).map_err(IoError::new("copying to", &self.path.join(name)))
    }

    /// Creates a file of `bytes` whose blocks are allocated. After an error there is no file.
    pub(crate) fn allocate(&self, name: &str, bytes: u64) -> IoResult<()> {
        let file = self.create(name)?;
        let allocated = self.step("allocating", name).and_then(|()| {
            fallocate(&file, FallocateFlags::empty(), 0, bytes)
                .map_err(self.fail("allocating", name))
        });
        allocated.inspect_err(|_| {
            let _best_effort = self.unlink(name);
        })
    }

    /// Makes a file with its final content read-only, and `fsync`s it.
    pub(crate) fn finish(&self, name: &str, file: &File) -> IoResult<()> {
        self.step("making read-only", name)?;
        fchmod(file, Mode::from_raw_mode(0o400)).map_err(self.fail("making read-only", name))?;
        self.step("syncing", name)?;
        let path = self.path.join(name);
        file.sync_all().map_err(IoError::new("syncing", &path))?;
        watch::made(&Change::SyncFile { path: &path, file });
        Ok(())
    }

    /// Has the kernel refuse every later write to a finished file, and verify what is read of it
    /// (fs-verity), if the file system can. The kernel hashes holes too. So a file that is mostly
    /// holes, such as the data of most layers, stays as it is.
    pub(crate) fn protect(&self, name: &str, file: &File, data_bytes: u64) -> IoResult<()> {
        let path = self.path.join(name);
        let bytes = file.metadata().map_err(IoError::new("looking at", &path))?.len();
        if data_bytes < bytes / DENSE {
            return Ok(());
        }
        match enable_verity(file) {
            // A process can write to the file after all.
            Err(e) if e.kind() == io::ErrorKind::ExecutableFileBusy => {
                Err(IoError::new("protecting", &path)(e))
            }
            Err(error) => {
                tracing::debug!(%error, "no fs-verity for {}", path.display());
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// `fsync`s this folder, which makes its names durable.
    pub(crate) fn sync(&self) -> IoResult<()> {
        self.step("syncing folder", "")?;
        rustix::fs::fsync(&self.fd).map_err(self.fail("syncing folder", ""))?;
        watch::made(&Change::SyncFolder(&self.path));
        Ok(())
    }

    /// Renames `name` to `to`/`new`, atomically.
    pub(crate) fn rename(
        &self,
        name: &str,
        to: &Self,
        new: &str,
        if_taken: IfTaken,
    ) -> IoResult<()> {
        let flags = match if_taken {
            IfTaken::Refuse => RenameFlags::NOREPLACE,
            IfTaken::Exchange => RenameFlags::EXCHANGE,
        };
        to.step("renaming to", new)?;
        renameat_with(&self.fd, name, &to.fd, new, flags).map_err(to.fail("renaming to", new))?;
        let (from, to) = (&self.path.join(name), &to.path.join(new));
        watch::made(&Change::Rename { from, to, exchange: if_taken == IfTaken::Exchange });
        Ok(())
    }

    /// Makes `to`/`new` a hard link to the file `name`.
    pub(crate) fn link(&self, name: &str, to: &Self, new: &str) -> IoResult<()> {
        to.step("linking", new)?;
        linkat(&self.fd, name, &to.fd, new, AtFlags::empty()).map_err(to.fail("linking", new))?;
        watch::made(&Change::Link { from: &self.path.join(name), to: &to.path.join(new) });
        Ok(())
    }

    /// Unlinks a file; a missing file is no error.
    pub(crate) fn unlink(&self, name: &str) -> IoResult<()> {
        self.step("removing", name)?;
        self.unlinkat(name, AtFlags::empty())
    }

    fn unlinkat(&self, name: impl Arg + Copy, flags: AtFlags) -> IoResult<()> {
        let removed = unlinkat(&self.fd, name, flags);
        let path = || self.path.join(&*name.to_string_lossy());
        match removed {
            Ok(()) => watch::made(&Change::Remove(&path())),
            Err(Errno::NOENT) => {}
            Err(e) => return Err(IoError::new("removing", &path())(e.into())),
        }
        Ok(())
    }

    /// Removes a file, or a folder with its content; a missing entry is no error.
    pub(crate) fn remove(&self, name: &str) -> IoResult<()> {
        let raw = CString::new(name)
            .map_err(|e| IoError::new("removing", &self.path.join(name))(e.into()))?;
        self.remove_raw(&raw)
    }

    /// As [`Self::remove`], for a name that need not be UTF-8.
    pub(crate) fn remove_raw(&self, raw: &CStr) -> IoResult<()> {
        let name = &*raw.to_string_lossy();
        let folder = match statat(&self.fd, raw, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(self.fail("looking at", name)(e)),
            Ok(stat) => FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
        };
        if folder {
            let fd = openat(&self.fd, raw, DIR, Mode::empty())
                .map_err(self.fail("opening folder", name))?;
            let folder = Self { fd, path: self.path.join(OsStr::from_bytes(raw.to_bytes())) };
            folder.names()?.iter().try_for_each(|inner| folder.remove_raw(inner))?;
        }
        self.step("removing", name)?;
        self.unlinkat(raw, if folder { AtFlags::REMOVEDIR } else { AtFlags::empty() })
    }

    /// Removes an empty folder; a folder with content or a missing one is no error.
    pub(crate) fn remove_if_empty(&self, name: &str) -> IoResult<()> {
        self.step("removing", name)?;
        match self.unlinkat(name, AtFlags::REMOVEDIR) {
            Err(e) if e.source.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed,
        }
    }

    /// Whether an entry has that name.
    pub(crate) fn has(&self, name: &str) -> IoResult<bool> {
        lock_work::operation();
        match statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.fail("looking at", name)(e)),
        }
    }

    /// The names in this folder, sorted. Names that are not UTF-8 are not ours, and are left out
    /// ([`Self::foreign`]).
    pub(crate) fn entries(&self) -> IoResult<Vec<String>> {
        let names = self.names()?.into_iter().filter_map(|name| name.into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort();
        Ok(names)
    }

    /// The names in this folder that are not UTF-8, with the bad bytes escaped.
    pub(crate) fn foreign(&self) -> IoResult<Vec<String>> {
        let mut names = self.names()?;
        names.retain(|name| name.to_str().is_err());
        Ok(names.iter().map(|name| name.to_bytes().escape_ascii().to_string()).collect())
    }

    /// All names in this folder, in no order.
    pub(crate) fn names(&self) -> IoResult<Vec<CString>> {
        // A new descriptor, because the position of a listing belongs to the open file description:
        // each listing starts at the beginning and disturbs no other.
        let fd = openat(&self.fd, ".", DIR, Mode::empty()).map_err(self.fail("listing", ""))?;
        let mut buffer = [MaybeUninit::uninit(); 8192];
        let mut list = RawDir::new(fd, &mut buffer);
        let mut names = Vec::new();
        while let Some(entry) = list.next() {
            lock_work::operation();
            let name = entry.map_err(self.fail("listing", ""))?.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(name);
            }
        }
        Ok(names)
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A folder in `staging/`, removed with its content when dropped. Entries that were renamed out of
/// it stay.
#[derive(Debug)]
pub(crate) struct Stage {
    dir: Dir,
    parent: OwnedFd,
    parent_path: PathBuf,
    name: String,
    /// Dropped after the folder is removed.
    _in_use: Option<InUse>,
}

/// The names of the stages in use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stages(Arc<Mutex<BTreeSet<String>>>);

/// A registered name in [`Stages`], released on drop. Take it before you create the stage.
#[derive(Debug)]
pub(crate) struct InUse {
    stages: Stages,
    name: String,
}

impl Stages {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.0)
    }

    pub(crate) fn take(&self, name: &str) -> InUse {
        self.lock().insert(name.to_owned());
        InUse { stages: self.clone(), name: name.to_owned() }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.lock().contains(name)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.stages.lock().remove(&self.name);
    }
}

impl Stage {
    /// Creates a stage whose name is in `stages` until the stage is dropped.
    pub(crate) fn listed(staging: &Dir, name: &str, stages: &Stages) -> IoResult<Self> {
        let in_use = stages.take(name);
        let mut stage = Self::new(staging, name)?;
        stage._in_use = Some(in_use);
        Ok(stage)
    }

    pub(crate) fn new(staging: &Dir, name: &str) -> IoResult<Self> {
        let path = staging.path();
        let parent =
            staging.fd.try_clone().map_err(IoError::new("duplicating the descriptor of", path))?;
        Ok(Self {
            dir: staging.make(name)?,
            parent,
            parent_path: path.to_owned(),
            name: name.to_owned(),
            _in_use: None,
        })
    }
}

impl std::ops::Deref for Stage {
    type Target = Dir;
    fn deref(&self) -> &Dir {
        &self.dir
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let Ok(fd) = self.parent.try_clone() else { return };
        let parent = Dir { fd, path: self.parent_path.clone() };
        if let Err(error) = parent.remove(&self.name) {
            // The next open of the store removes the folder.
            tracing::warn!(%error, cause = %error.source, "leaving something in staging");
        }
    }
}

#[cfg(test)]
mod tests;
