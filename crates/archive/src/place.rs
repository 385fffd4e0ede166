//! Creates one staged file, link or device under its name, with its attributes.

use crate::error::{Refusal, refuse};
use crate::header::Kind;
use crate::policy::{Policy, UnpackError, write_error};
use crate::reader::{CopyOptions, Entry, Reader};
use crate::writer::Head;
use crate::xattr;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, chownat, fchmod, fchown,
    futimens, mknodat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

/// Attributes of a file or folder. A folder gets them after its last entry.
#[derive(Debug, Clone, Copy)]
pub struct Attributes {
    uid: u32,
    gid: u32,
    mode: u32,
    mtime_ns: u32,
    mtime_s: i64,
}

impl Attributes {
    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.mtime_s, tv_nsec: self.mtime_ns.into() };
        Timestamps { last_access: time, last_modification: time }
    }
}

pub fn attributes(head: &Head, mask: u32) -> Result<Attributes, Refusal> {
    let id = |what: &str, id: u64| {
        // For system calls, 2^32-1 means "no owner".
        let id32 = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
        id32.map_or_else(|| refuse(format!("a {what} below 4294967295"), id.to_string()), Ok)
    };
    Ok(Attributes {
        uid: id("user id", head.uid)?,
        gid: id("group id", head.gid)?,
        mode: head.mode & mask,
        mtime_s: head.mtime_s,
        mtime_ns: head.mtime_ns,
    })
}

/// Sets owner, mode and time of an open file or folder. The owner comes first, because changing it
/// clears set-user-id bits.
pub fn dress(file: impl AsFd, with: Attributes, owners: bool) -> Result<(), (&'static str, Errno)> {
    let file = file.as_fd();
    if owners {
        let (uid, gid) = (Uid::from_raw(with.uid), Gid::from_raw(with.gid));
        fchown(file, Some(uid), Some(gid)).map_err(|e| ("set its owner", e))?;
    }
    fchmod(file, Mode::from_raw_mode(with.mode)).map_err(|e| ("set its mode", e))?;
    futimens(file, &with.times()).map_err(|e| ("set its time", e))
}

/// The place of a staged entry: an open folder and a name in it.
pub struct Place<'a> {
    pub parent: BorrowedFd<'a>,
    pub name: &'a OsStr,
    pub entry: &'a Entry,
    pub policy: Policy,
}

impl Place<'_> {
    fn failed(&self, what: &'static str) -> impl Fn(Errno) -> UnpackError {
        move |errno| write_error(self.entry, what, errno)
    }

    /// Calls `make`. If an earlier entry has the same name, that entry is removed first, unless it
    /// is a folder.
    pub fn make<T>(&self, make: impl Fn() -> Result<T, Errno>) -> Result<T, UnpackError> {
        let made = match make() {
            Err(Errno::EXIST) => {
                unlinkat(self.parent, self.name, AtFlags::empty())
                    .map_err(self.failed("replace it"))?;
                make()
            }
            other => other,
        };
        made.map_err(self.failed("make it"))
    }

    pub fn file<R: Read>(
        &self,
        attributes: Attributes,
        reader: &mut Reader<R>,
    ) -> Result<(), UnpackError> {
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let file =
            File::from(self.make(|| rustix::fs::openat(self.parent, self.name, flags, mode))?);
        let how = CopyOptions { zeroes_are_holes: false, room: u64::MAX };
        reader.copy_data(self.entry, &file, how)?;
        // Attributes come before the mode, which may forbid setting them. They come after the
        // owner, because changing the owner removes capabilities.
        if self.policy.owners {
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            fchown(&file, Some(uid), Some(gid)).map_err(self.failed("set its owner"))?;
        }
        let xattrs = &self.entry.head.xattrs;
        xattr::write(&file, xattrs, self.policy.xattrs)
            .map_err(self.failed("set its attributes"))?;
        dress(&file, attributes, false)
            .map_err(|(what, errno)| write_error(self.entry, what, errno))
    }

    pub fn symlink(&self, attributes: Attributes) -> Result<(), UnpackError> {
        let target = &self.entry.head.link;
        if target.is_empty() || target.contains(&0) || target.len() > crate::path::MAX_PATH_BYTES {
            let expected = format!("a link's target of 1 to {} bytes", crate::path::MAX_PATH_BYTES);
            let got = format!("{} bytes", target.len());
            return Err(self.entry.refused(Refusal { expected, got }).into());
        }
        self.make(|| symlinkat(OsStr::from_bytes(target), self.parent, self.name))?;
        self.dress_unopened(attributes)
    }

    pub fn node(&self, attributes: Attributes) -> Result<(), UnpackError> {
        let (major, minor) = self.entry.head.device;
        let (kind, device) = match self.entry.head.kind {
            Kind::Char => (FileType::CharacterDevice, rustix::fs::makedev(major, minor)),
            Kind::Block => (FileType::BlockDevice, rustix::fs::makedev(major, minor)),
            _ => (FileType::Fifo, 0),
        };
        self.make(|| mknodat(self.parent, self.name, kind, Mode::from_raw_mode(0o600), device))?;
        self.dress_unopened(attributes)?;
        let mode = Mode::from_raw_mode(attributes.mode);
        rustix::fs::chmodat(self.parent, self.name, mode, AtFlags::empty())
            .map_err(self.failed("set its mode"))
    }

    /// Sets owner and time of a file that cannot be opened for it.
    fn dress_unopened(&self, attributes: Attributes) -> Result<(), UnpackError> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        if self.policy.owners {
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            chownat(self.parent, self.name, Some(uid), Some(gid), flags)
                .map_err(self.failed("set its owner"))?;
        }
        utimensat(self.parent, self.name, &attributes.times(), flags)
            .map_err(self.failed("set its time"))
    }
}
