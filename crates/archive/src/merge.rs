//! Moves a stage into place: folders are merged, and everything else replaces what exists.

use crate::folder::{INSIDE, open_folder};
use crate::place::dress;
use crate::policy::{Links, UnpackError};
use crate::unpack::{Stage, Target};
use crate::xattr;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, chownat, fchmod,
    fchown, futimens, mkdirat, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

impl Stage<'_> {
    /// Moves everything into the target. All conflicts are detected before anything is moved.
    ///
    /// # Errors
    /// [`UnpackError::Conflict`] if nothing was moved. [`UnpackError::Write`] if the system refused
    /// during the move.
    pub fn commit(mut self) -> Result<(), UnpackError> {
        // The sort is stable, because the last entry that describes a folder counts.
        self.folders.sort_by_key(|(inode, _)| *inode);
        let merge = Merge {
            stage: &self,
            target: self.target,
            how: self.target.resolve(self.policy.links),
        };
        let way = Way {
            staged: self.tree.as_fd(),
            there: self.target.folder.as_fd(),
            path: Path::new(""),
        };
        each(way.staged, way.path, |name| merge.check(way, name))?;
        each(way.staged, way.path, |name| merge.one(way, name))
    }
}

/// Calls `act` with each name in a folder. `act` may move the entry away. The names are not
/// collected, because there may be millions.
fn each(
    folder: impl AsFd,
    path: &Path,
    mut act: impl FnMut(&OsStr) -> Result<(), UnpackError>,
) -> Result<(), UnpackError> {
    for entry in Dir::read_from(folder).map_err(failed(path, "list it"))? {
        let entry = entry.map_err(failed(path, "list it"))?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            act(name)?;
        }
    }
    Ok(())
}

/// A staged folder and its destination.
#[derive(Clone, Copy)]
struct Way<'a> {
    staged: BorrowedFd<'a>,
    there: BorrowedFd<'a>,
    /// Path of `there` below the target; symbolic links in it are not resolved.
    path: &'a Path,
}

struct Merge<'a> {
    stage: &'a Stage<'a>,
    target: &'a Target,
    how: ResolveFlags,
}

impl Merge<'_> {
    /// The entry with this name in the target: `None` if there is none. If the entry is a folder or
    /// a link to one, the folder is opened.
    fn there(&self, way: Way<'_>, name: &OsStr) -> Result<Option<There>, UnpackError> {
        let stat = match statat(way.there, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            other => other.map_err(failed(&way.path.join(name), "look at it"))?,
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        let follow = kind == FileType::Symlink && self.stage.policy.links == Links::Within;
        let folder = match kind == FileType::Directory || follow {
            true => open_folder(&self.target.folder, &way.path.join(name), self.how).ok(),
            false => None,
        };
        Ok(Some(There { kind, folder }))
    }

    /// Refuses a folder that would replace something else, and something else that would replace a
    /// folder.
    fn check(&self, way: Way<'_>, name: &OsStr) -> Result<(), UnpackError> {
        let Some(there) = self.there(way, name)? else { return Ok(()) };
        let path = way.path.join(name);
        let conflict = |expected| UnpackError::Conflict {
            entry: path.as_os_str().as_bytes().to_vec(),
            expected,
            got: words(there.kind),
        };
        let stat = statat(way.staged, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed(&path, "look at what came"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return match there.kind {
                FileType::Directory => Err(conflict("anything but a folder")),
                _ => Ok(()),
            };
        }
        let Some(folder) = &there.folder else { return Err(conflict("a folder, or nothing")) };
        let staged = open_folder(way.staged, Path::new(name), INSIDE)
            .map_err(failed(&path, "open what came"))?;
        let way = Way { staged: staged.as_fd(), there: folder.as_fd(), path: &path };
        each(staged.as_fd(), way.path, |name| self.check(way, name))
    }

    fn one(&self, way: Way<'_>, name: &OsStr) -> Result<(), UnpackError> {
        let path = way.path.join(name);
        let stat = statat(way.staged, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed(&path, "look at what came"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return match renameat(way.staged, name, way.there, name) {
                Err(Errno::XDEV) => copy(way, name).map_err(failed(&path, "copy it into place")),
                other => other.map_err(failed(&path, "move it into place")),
            };
        }
        let staged = open_folder(way.staged, Path::new(name), INSIDE)
            .map_err(failed(&path, "open what came"))?;
        if self.there(way, name)?.is_none() {
            match renameat(way.staged, name, way.there, name) {
                Ok(()) => return self.settle(&staged, &path),
                // Into another file system the folder cannot be moved, so it is made there.
                Err(Errno::XDEV) => {
                    let mode = Mode::from_raw_mode(0o755);
                    mkdirat(way.there, name, mode).map_err(failed(&path, "make it"))?;
                }
                // Another copy has made the folder.
                Err(Errno::EXIST | Errno::NOTEMPTY) => {}
                Err(errno) => return Err(failed(&path, "move it into place")(errno)),
            }
        }
        let Some(folder) = self.there(way, name)?.and_then(|there| there.folder) else {
            return Err(failed(&path, "open it")(Errno::NOTDIR));
        };
        let below = Way { staged: staged.as_fd(), there: folder.as_fd(), path: &path };
        each(&staged, &path, |name| self.one(below, name))?;
        let xattrs = xattr::read(&staged, self.stage.policy.xattrs);
        let set =
            xattrs.and_then(|xattrs| xattr::write(&folder, &xattrs, self.stage.policy.xattrs));
        set.map_err(failed(&path, "set its attributes"))?;
        self.describe(&staged, &folder, &path)
    }

    /// Sets the attributes of a folder that was moved as a whole, and of the folders in it,
    /// innermost first.
    fn settle(&self, folder: &OwnedFd, path: &Path) -> Result<(), UnpackError> {
        each(folder, path, |name| {
            let below = path.join(name);
            let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
            let kind = FileType::from_raw_mode(stat.map_err(failed(&below, "look at it"))?.st_mode);
            if kind != FileType::Directory {
                return Ok(());
            }
            let inner =
                open_folder(folder, Path::new(name), INSIDE).map_err(failed(&below, "open it"))?;
            self.settle(&inner, &below)
        })?;
        self.describe(folder, folder, path)
    }

    /// Sets the attributes of `folder` that an entry gave for `staged`, if one did.
    fn describe(&self, staged: &OwnedFd, folder: &OwnedFd, path: &Path) -> Result<(), UnpackError> {
        let inode = rustix::fs::fstat(staged).map_err(failed(path, "look at it"))?.st_ino;
        let after = self.stage.folders.partition_point(|(at, _)| *at <= inode);
        let Some((_, attributes)) =
            after.checked_sub(1).map(|at| self.stage.folders[at]).filter(|f| f.0 == inode)
        else {
            return Ok(());
        };
        let owners = self.stage.policy.owners;
        dress(folder, attributes, owners).map_err(|(what, errno)| failed(path, what)(errno))
    }
}

struct There {
    kind: FileType,
    folder: Option<OwnedFd>,
}

fn words(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a folder",
        FileType::Symlink => "a symbolic link",
        FileType::RegularFile => "a file",
        _ => "a device, pipe or socket",
    }
}

fn failed<'p>(path: &'p Path, what: &'static str) -> impl Fn(Errno) -> UnpackError + 'p {
    move |errno| UnpackError::Write { entry: path.as_os_str().as_bytes().to_vec(), what, errno }
}

/// Copies a staged file or link to another file system, completely or not at all. Devices and pipes
/// are not copied.
fn copy(way: Way<'_>, name: &OsStr) -> Result<(), Errno> {
    let mut temporary = name.to_owned();
    temporary.push(".dayfly-cp");
    let stat = statat(way.staged, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let (uid, gid) =
        (rustix::fs::Uid::from_raw(stat.st_uid), rustix::fs::Gid::from_raw(stat.st_gid));
    let make = || match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(way.staged, name, Vec::new())?;
            symlinkat(target, way.there, &temporary)?;
            chownat(way.there, &temporary, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        }
        FileType::RegularFile => {
            let read = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let write =
                OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut source = File::from(rustix::fs::openat(way.staged, name, read, Mode::empty())?);
            let mode = Mode::from_raw_mode(0o600);
            let mut file = File::from(rustix::fs::openat(way.there, &temporary, write, mode)?);
            std::io::copy(&mut source, &mut file)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
            fchown(&file, Some(uid), Some(gid))?;
            xattr::write(&file, &xattr::read(&source, xattr::portable)?, xattr::portable)?;
            fchmod(&file, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
            let time =
                Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec.cast_signed() };
            futimens(&file, &Timestamps { last_access: time, last_modification: time })
        }
        _ => Err(Errno::XDEV),
    };
    let done = make().and_then(|()| renameat(way.there, &temporary, way.there, name));
    if done.is_err() {
        let _ = unlinkat(way.there, &temporary, AtFlags::empty());
    }
    done
}
