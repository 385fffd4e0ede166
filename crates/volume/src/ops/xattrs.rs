//! Extended attributes: those of users (`user.*`) of files and folders.
//!
//! `security.*`, `trusted.*` and `system.*` act on the host, so the guest has none of them.

use super::Call;
use crate::nodes::Node;
use crate::wire::{GetxattrIn, GetxattrOut, SetxattrIn};
use rustix::fs::{FileType, XattrFlags, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::sync::Arc;

/// The longest value, and the longest list (linux/limits.h).
const MAX_BYTES: usize = 64 << 10;
/// The longest name.
const MAX_NAME_BYTES: usize = 255;
const PREFIX: &[u8] = b"user.";

fn checked(name: &CStr) -> Result<&CStr, Errno> {
    let bytes = name.to_bytes();
    if bytes.len() > MAX_NAME_BYTES {
        return Err(Errno::RANGE);
    }
    if !bytes.starts_with(PREFIX) {
        return Err(Errno::OPNOTSUPP);
    }
    if bytes.len() == PREFIX.len() { Err(Errno::INVAL) } else { Ok(name) }
}

impl Call<'_> {
    /// The file and its path. Only files and folders have attributes of users.
    fn bearer(&self, other: Errno) -> Result<(Arc<Node>, CString), Errno> {
        let node = self.volume.nodes.get(self.message.header.nodeid)?;
        if !matches!(node.kind, FileType::RegularFile | FileType::Directory) {
            return Err(other);
        }
        let path = self.volume.own.path(&node.fd);
        Ok((node, path))
    }

    pub(super) fn setxattr(&mut self) -> Result<(), Errno> {
        let mut body = self.message.body();
        let asked: SetxattrIn = body.take()?;
        let name = checked(body.text()?)?;
        let size = usize::try_from(asked.size).map_err(|_| Errno::TOOBIG)?;
        if size > MAX_BYTES {
            return Err(Errno::TOOBIG);
        }
        let value = body.bytes(size)?;
        let flags = XattrFlags::from_bits(asked.flags).ok_or(Errno::INVAL)?;
        let (_node, path) = self.bearer(Errno::PERM)?;
        setxattr(&path, name, value, flags)
    }

    pub(super) fn getxattr(&mut self) -> Result<(), Errno> {
        let mut body = self.message.body();
        let asked: GetxattrIn = body.take()?;
        let name = checked(body.text()?)?;
        let (_node, path) = self.bearer(Errno::NODATA)?;
        let mut value = vec![0; MAX_BYTES];
        let count = getxattr(&path, name, &mut value)?;
        self.answer_sized(asked.size, value.get(..count).ok_or(Errno::IO)?)
    }

    pub(super) fn listxattr(&mut self) -> Result<(), Errno> {
        let asked: GetxattrIn = self.message.body().take()?;
        let node = self.volume.nodes.get(self.message.header.nodeid)?;
        if !matches!(node.kind, FileType::RegularFile | FileType::Directory) {
            return self.answer_sized(asked.size, &[]);
        }
        let mut names = vec![0; MAX_BYTES];
        let count = listxattr(self.volume.own.path(&node.fd), &mut names)?;
        let names = names.get(..count).ok_or(Errno::IO)?;
        let shown =
            names.split_inclusive(|byte| *byte == 0).filter(|name| name.starts_with(PREFIX));
        self.answer_sized(asked.size, &shown.collect::<Vec<_>>().concat())
    }

    pub(super) fn removexattr(&mut self) -> Result<(), Errno> {
        let name = checked(self.message.body().text()?)?;
        let (_node, path) = self.bearer(Errno::PERM)?;
        removexattr(&path, name)
    }

    /// Answers with `value`, or with its length if the guest has no room at all.
    fn answer_sized(&mut self, room: u32, value: &[u8]) -> Result<(), Errno> {
        let size = u32::try_from(value.len()).map_err(|_| Errno::IO)?;
        if room == 0 {
            self.reply.push(&GetxattrOut { size, padding: 0 });
        } else if size > room {
            return Err(Errno::RANGE);
        } else {
            self.reply.extend(value);
        }
        Ok(())
    }
}
