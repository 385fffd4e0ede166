//! Names: finding, making, removing and renaming.

use super::Call;
use crate::message::Body;
use crate::nodes::{Node, find};
use crate::wire::{LinkIn, MkdirIn, MknodIn, Rename2In, RenameIn, op};
use rustix::fs::{AtFlags, FileType, Mode, RenameFlags, linkat, mkdirat, mknodat, readlinkat};
use rustix::fs::{renameat_with, symlinkat, unlinkat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::sync::Arc;

/// The longest target of a link (PATH_MAX, without the NUL).
const MAX_TARGET_BYTES: usize = 4095;

/// Permission bits, and the sticky bit. Set-uid and set-gid bits are refused: such a program of the
/// guest would run with the caller's rights on the host. Set-gid of a folder is harmless.
pub(super) fn permissions(mode: u32, kind: FileType) -> Result<Mode, Errno> {
    let mode = Mode::from_raw_mode(mode & 0o7777);
    let harmless = if kind == FileType::Directory { Mode::SGID } else { Mode::empty() };
    if mode.intersects((Mode::SUID | Mode::SGID).difference(harmless)) {
        return Err(Errno::PERM);
    }
    Ok(mode)
}

impl Call<'_> {
    fn parent(&self) -> Result<Arc<Node>, Errno> {
        self.volume.nodes.folder(self.message.header.nodeid)
    }

    pub(super) fn lookup(&mut self) -> Result<(), Errno> {
        let parent = self.parent()?;
        let name = self.message.body().name()?;
        self.answer_with(&parent, name)
    }

    /// Answers with the file of a name.
    fn answer_with(&mut self, parent: &Node, name: &CStr) -> Result<(), Errno> {
        let file = find(&parent.fd, name)?;
        let (entry, _) = self.enter(file, parent.id, name)?;
        self.reply.push(&entry);
        Ok(())
    }

    pub(super) fn readlink(&mut self) -> Result<(), Errno> {
        let node = self.volume.nodes.get(self.message.header.nodeid)?;
        if node.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        // The guest resolves it, in its own tree.
        let target = readlinkat(&node.fd, c"", Vec::with_capacity(256))?;
        let bytes = target.to_bytes();
        if bytes.len() > MAX_TARGET_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
        self.reply.extend(bytes);
        Ok(())
    }

    pub(super) fn symlink(&mut self) -> Result<(), Errno> {
        let (parent, mut body) = (self.parent()?, self.message.body());
        let (name, target) = (body.name()?, body.text()?);
        if target.is_empty() {
            return Err(Errno::NOENT);
        }
        if target.to_bytes().len() > MAX_TARGET_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
        symlinkat(target, &parent.fd, name)?;
        self.answer_with(&parent, name)
    }

    pub(super) fn mknod(&mut self) -> Result<(), Errno> {
        let (parent, mut body) = (self.parent()?, self.message.body());
        let asked: MknodIn = body.take()?;
        let kind = match FileType::from_raw_mode(asked.mode) {
            kind @ (FileType::RegularFile | FileType::Fifo | FileType::Socket) => kind,
            _ => return Err(Errno::PERM),
        };
        let name = body.name()?;
        mknodat(&parent.fd, name, kind, permissions(asked.mode, kind)?, 0)?;
        self.answer_with(&parent, name)
    }

    pub(super) fn mkdir(&mut self) -> Result<(), Errno> {
        let (parent, mut body) = (self.parent()?, self.message.body());
        let asked: MkdirIn = body.take()?;
        let name = body.name()?;
        mkdirat(&parent.fd, name, permissions(asked.mode, FileType::Directory)?)?;
        self.answer_with(&parent, name)
    }

    pub(super) fn unlink(&mut self) -> Result<(), Errno> {
        let is_folder = self.message.header.opcode == op::RMDIR;
        let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let parent = self.parent()?;
        unlinkat(&parent.fd, self.message.body().name()?, flags)
    }

    pub(super) fn rename(&mut self) -> Result<(), Errno> {
        let (from, mut body) = (self.parent()?, self.message.body());
        let (to, flags) = rename_to(&mut body, self.message.header.opcode)?;
        let to = self.volume.nodes.folder(to)?;
        let (old, new) = (body.name()?, body.name()?);
        renameat_with(&from.fd, old, &to.fd, new, flags)?;
        self.moved(&to, new);
        if flags == RenameFlags::EXCHANGE {
            self.moved(&from, old);
        }
        Ok(())
    }

    /// Notes the name that a file has got.
    fn moved(&self, folder: &Node, name: &CStr) {
        // If it has another name already, it is found when the guest looks that up.
        if let Ok((_, stat)) = find(&folder.fd, name) {
            self.volume.nodes.moved(&stat, (folder.id, name));
        }
    }

    pub(super) fn link(&mut self) -> Result<(), Errno> {
        let (parent, mut body) = (self.parent()?, self.message.body());
        let LinkIn { oldnodeid } = body.take()?;
        let (node, name) = (self.volume.nodes.get(oldnodeid)?, body.name()?);
        if node.kind == FileType::Directory {
            return Err(Errno::PERM);
        }
        // AT_EMPTY_PATH would need a capability. The link of the descriptor leads to the file
        // itself, also if that is a link.
        let (own, old) = self.volume.own.name(&node.fd);
        linkat(own, &old, &parent.fd, name, AtFlags::SYMLINK_FOLLOW)?;
        self.answer_with(&parent, name)
    }
}

/// The folder that a file is moved to, and how.
fn rename_to(body: &mut Body<'_>, opcode: u32) -> Result<(u64, RenameFlags), Errno> {
    if opcode == op::RENAME {
        let RenameIn { newdir } = body.take()?;
        return Ok((newdir, RenameFlags::empty()));
    }
    let asked: Rename2In = body.take()?;
    let allowed = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE];
    let flags = allowed.into_iter().find(|flags| flags.bits() == asked.flags);
    Ok((asked.newdir, flags.ok_or(Errno::INVAL)?))
}
