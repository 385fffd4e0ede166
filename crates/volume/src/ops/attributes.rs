//! Attributes of files.

use super::Call;
use super::names::permissions;
use crate::attr::{VALID_S, shown};
use crate::handles::Handle;
use crate::nodes::{Node, stat};
use crate::wire::{AccessIn, AttrOut, GETATTR_FH, GetattrIn, SetattrIn, valid};
use rustix::fd::OwnedFd;
use rustix::fs::{Access, AtFlags, FileType, Gid, OFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::fs::{UTIME_OMIT, Uid, accessat, chmodat, chownat, ftruncate, utimensat};
use rustix::io::Errno;
use std::sync::Arc;

const NANOSECONDS: u32 = 1_000_000_000;

/// The user and the group to set, of which one may stay.
type Owner = (Option<Uid>, Option<Gid>);

impl Call<'_> {
    pub(super) fn getattr(&mut self) -> Result<(), Errno> {
        let asked: GetattrIn = self.message.body().take()?;
        let id = self.message.header.nodeid;
        let node = self.volume.nodes.get(id)?;
        let handle = (asked.flags & GETATTR_FH != 0).then(|| self.volume.handles.get(asked.fh, id));
        // A handle is of the same file, so it adds nothing, but a wrong one is refused.
        handle.transpose()?;
        self.answer_attributes(&node.fd)
    }

    fn answer_attributes(&mut self, fd: &OwnedFd) -> Result<(), Errno> {
        let attr = shown(&stat(fd)?, self.volume.options.user, self.volume.options.group);
        self.reply.push(&AttrOut { attr_valid: VALID_S, attr, ..AttrOut::default() });
        Ok(())
    }

    pub(super) fn access(&mut self) -> Result<(), Errno> {
        let AccessIn { mask, .. } = self.message.body().take()?;
        let mask = Access::from_bits(mask).ok_or(Errno::INVAL)?;
        let node = self.volume.nodes.get(self.message.header.nodeid)?;
        let (own, name) = self.volume.own.name(&node.fd);
        accessat(own, &name, mask, AtFlags::empty())
    }

    pub(super) fn setattr(&mut self) -> Result<(), Errno> {
        let asked: SetattrIn = self.message.body().take()?;
        let id = self.message.header.nodeid;
        let node = self.volume.nodes.get(id)?;
        let has = |bit| asked.valid & bit != 0;
        let handle = has(valid::FH).then(|| self.volume.handles.get(asked.fh, id)).transpose()?;
        // Everything is checked before anything is changed.
        let times = times(&asked)?;
        let size = i64::try_from(asked.size).map_err(|_| Errno::FBIG);
        let size = has(valid::SIZE).then_some(size).transpose()?;
        let mode = has(valid::MODE).then(|| permissions(asked.mode, node.kind)).transpose()?;
        let owner = self.owner(&asked, &node)?;
        let (own, name) = self.volume.own.name(&node.fd);
        if let Some(mode) = mode {
            if node.kind == FileType::Symlink {
                return Err(Errno::OPNOTSUPP);
            }
            chmodat(own, &name, mode, AtFlags::empty())?;
        }
        if let Some((user, group)) = owner {
            chownat(own, &name, user, group, AtFlags::empty())?;
        }
        if let Some(size) = size {
            self.truncate(&node, handle.as_ref(), size.unsigned_abs())?;
        }
        if let Some(times) = times {
            utimensat(own, &name, &times, AtFlags::empty())?;
        }
        self.answer_attributes(&node.fd)
    }

    /// The owner to set. What the guest is shown already needs no change, so that a program that
    /// copies owners does not fail.
    fn owner(&self, asked: &SetattrIn, node: &Node) -> Result<Option<Owner>, Errno> {
        let options = &self.volume.options;
        if asked.valid & (valid::UID | valid::GID) == 0 {
            return Ok(None);
        }
        let found = stat(&node.fd)?;
        let change = |bit, id: crate::owner::Id, guest: u32, host: u32| {
            if asked.valid & bit == 0 || id.shown(host) == guest {
                return Ok(None);
            }
            id.given(guest).map(Some).ok_or(Errno::PERM)
        };
        let user = change(valid::UID, options.user, asked.uid, found.stx_uid)?;
        let group = change(valid::GID, options.group, asked.gid, found.stx_gid)?;
        // The kernel takes this number as "no change".
        if user == Some(u32::MAX) || group == Some(u32::MAX) {
            return Err(Errno::INVAL);
        }
        Ok((user.is_some() || group.is_some())
            .then(|| (user.map(Uid::from_raw), group.map(Gid::from_raw))))
    }

    fn truncate(&self, node: &Node, handle: Option<&Arc<Handle>>, size: u64) -> Result<(), Errno> {
        if node.kind != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        match handle {
            Some(handle) => ftruncate(handle.file()?, size),
            None => ftruncate(self.volume.own.reopen(&node.fd, OFlags::WRONLY)?, size),
        }
    }
}

/// The times to set.
fn times(asked: &SetattrIn) -> Result<Option<Timestamps>, Errno> {
    let time = |bit, now, seconds: u64, nanoseconds: u32| {
        let special = |nanoseconds| Ok(Timespec { tv_sec: 0, tv_nsec: nanoseconds });
        if asked.valid & now != 0 {
            return special(UTIME_NOW);
        }
        if asked.valid & bit == 0 {
            return special(UTIME_OMIT);
        }
        if nanoseconds >= NANOSECONDS {
            return Err(Errno::INVAL);
        }
        // Times before 1970 are negative.
        Ok(Timespec { tv_sec: seconds.cast_signed(), tv_nsec: nanoseconds.into() })
    };
    let any = valid::ATIME | valid::MTIME | valid::ATIME_NOW | valid::MTIME_NOW;
    if asked.valid & any == 0 {
        return Ok(None);
    }
    Ok(Some(Timestamps {
        last_access: time(valid::ATIME, valid::ATIME_NOW, asked.atime, asked.atimensec)?,
        last_modification: time(valid::MTIME, valid::MTIME_NOW, asked.mtime, asked.mtimensec)?,
    }))
}
