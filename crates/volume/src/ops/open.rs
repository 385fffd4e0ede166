//! Opening and closing.

use super::Call;
use super::names::permissions;
use crate::handles::{Listing, Open, Place};
use crate::nodes::{Node, Stamp, find, kind, resolve, stat};
use crate::wire::{CreateIn, FSYNC_DATA, FsyncIn, KEEP_CACHE, OpenIn, OpenOut, ReleaseIn};
use dayfly_units::sync::lock;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, fdatasync, fsync};
use rustix::io::Errno;
use std::ffi::CStr;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// How the guest wants to use a file. Nothing else of its flags is passed on: O_APPEND is applied
/// to each write, and O_SYNC and O_DIRECT are the guest's own concern.
fn access(flags: u32) -> Result<OFlags, Errno> {
    match flags & OFlags::ACCMODE.bits() {
        0 => Ok(OFlags::RDONLY),
        1 => Ok(OFlags::WRONLY),
        2 => Ok(OFlags::RDWR),
        _ => Err(Errno::INVAL),
    }
}

impl Call<'_> {
    pub(super) fn open(&mut self) -> Result<(), Errno> {
        let asked: OpenIn = self.message.body().take()?;
        let access = access(asked.flags)?;
        if self.volume.options.read_only && access != OFlags::RDONLY {
            return Err(Errno::ROFS);
        }
        let node = self.volume.nodes.get(self.message.header.nodeid)?;
        // A FIFO would wait, a device would act.
        match node.kind {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        let place = self.volume.handles.reserve()?;
        let file = self.volume.own.reopen(&node.fd, access)?;
        let open_flags = if unchanged(&node, &file)? { KEEP_CACHE } else { 0 };
        let fh = place.fill(node, Open::File(file));
        self.reply.push(&OpenOut { fh, open_flags, padding: 0 });
        Ok(())
    }

    pub(super) fn create(&mut self) -> Result<(), Errno> {
        let parent = self.volume.nodes.folder(self.message.header.nodeid)?;
        let mut body = self.message.body();
        let asked: CreateIn = body.take()?;
        let name = body.name()?;
        let access = access(asked.flags)?;
        let place = self.volume.handles.reserve()?;
        let flags = access | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = permissions(asked.mode, FileType::RegularFile)?;
        let file = match resolve(&parent.fd, name, flags, mode) {
            Err(Errno::EXIST) if asked.flags & OFlags::EXCL.bits() == 0 => {
                self.existing(&parent, name, access, asked.flags)?
            }
            other => other?,
        };
        self.answer_open(&parent, name, file, place)
    }

    /// Opens the regular file that has the name already.
    fn existing(
        &self,
        parent: &Node,
        name: &CStr,
        access: OFlags,
        flags: u32,
    ) -> Result<OwnedFd, Errno> {
        let (fd, found) = find(&parent.fd, name)?;
        if kind(&found) != FileType::RegularFile {
            return Err(Errno::EXIST);
        }
        let truncate = flags & OFlags::TRUNC.bits() != 0 && access != OFlags::RDONLY;
        let truncate = if truncate { OFlags::TRUNC } else { OFlags::empty() };
        self.volume.own.reopen(&fd, access | truncate)
    }

    pub(super) fn tmpfile(&mut self) -> Result<(), Errno> {
        let parent = self.volume.nodes.folder(self.message.header.nodeid)?;
        let asked: CreateIn = self.message.body().take()?;
        let access = access(asked.flags)?;
        if access == OFlags::RDONLY {
            return Err(Errno::INVAL);
        }
        let place = self.volume.handles.reserve()?;
        let keep = OFlags::from_bits_retain(asked.flags) & OFlags::EXCL;
        let flags = access | OFlags::TMPFILE | keep;
        let mode = permissions(asked.mode, FileType::RegularFile)?;
        let file = resolve(&parent.fd, c".", flags, mode)?;
        self.answer_open(&parent, c".", file, place)
    }

    /// Answers with a file that is open, not with what now has its name.
    fn answer_open(
        &mut self,
        parent: &Node,
        name: &CStr,
        file: OwnedFd,
        place: Place<'_>,
    ) -> Result<(), Errno> {
        let fd = self.volume.own.reopen(&file, OFlags::PATH)?;
        let found = stat(&fd)?;
        let (entry, node) = self.enter((fd, found), parent.id, name)?;
        let fh = place.fill(node, Open::File(file));
        self.reply.push(&entry);
        self.reply.push(&OpenOut { fh, open_flags: 0, padding: 0 });
        Ok(())
    }

    pub(super) fn opendir(&mut self) -> Result<(), Errno> {
        let node = self.volume.nodes.folder(self.message.header.nodeid)?;
        let place = self.volume.handles.reserve()?;
        let fd = resolve(&node.fd, c".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let fh = place.fill(node, Open::Folder(Mutex::new(Listing::new(fd))));
        self.reply.push(&OpenOut { fh, open_flags: 0, padding: 0 });
        Ok(())
    }

    pub(super) fn release(&mut self) -> Result<(), Errno> {
        let asked: ReleaseIn = self.message.body().take()?;
        self.volume.handles.release(asked.fh, self.message.header.nodeid)
    }

    pub(super) fn fsync(&mut self) -> Result<(), Errno> {
        let asked: FsyncIn = self.message.body().take()?;
        let handle = self.volume.handles.get(asked.fh, self.message.header.nodeid)?;
        let sync = |fd| if asked.flags & FSYNC_DATA == 0 { fsync(fd) } else { fdatasync(fd) };
        match &handle.open {
            Open::File(fd) => sync(fd),
            // Not under the lock, because fsync(2) may take long.
            Open::Folder(_) => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY;
                sync(&resolve(&handle.node.fd, c".", flags, Mode::empty())?)
            }
        }
    }
}

/// Whether the file is as it was when it was last opened.
fn unchanged(node: &Node, file: &OwnedFd) -> Result<bool, Errno> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let stamp = Stamp::of(&stat(file)?, i64::try_from(now).unwrap_or(0));
    let before = std::mem::replace(&mut *lock(&node.opened), stamp);
    Ok(stamp.is_some() && before == stamp)
}
