//! The operations: each takes a message of the guest and appends to an answer.

mod attributes;
mod data;
mod folders;
mod names;
mod open;
mod xattrs;

use crate::attr::{VALID_S, shown};
use crate::handles::Handles;
use crate::message::{Message, Reply};
use crate::nodes::{Bounds, Node, Nodes};
use crate::options::{Options, StartError};
use crate::own::OwnFds;
use crate::wire::{EntryOut, ForgetIn, ForgetOne, InitIn, InitOut, StatfsOut, op};
use crate::wire::{LEAST_MINOR, MAJOR, MAX_DATA_BYTES, MINOR, feature};
use rustix::fd::OwnedFd;
use rustix::fs::Statx;
use rustix::io::Errno;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages of 4 KiB in a message.
const MAX_PAGES: u16 = 256;
/// Requests that the guest's kernel makes ahead (max_background), and from when on it lets its
/// callers wait.
const BACKGROUND: (u16, u16) = (32, 24);

/// Set when a program of the guest that waits for an operation has got a signal (FUSE_INTERRUPT),
/// or when the server ends.
///
/// Short operations ignore it: a program whose stat(2) fails with EINTR because a child has ended
/// would be surprised. Copies end early.
#[derive(Debug, Default)]
pub struct Interrupted(pub AtomicBool);

impl Interrupted {
    /// Fails if the guest has given up the operation.
    ///
    /// # Errors
    /// EINTR.
    pub fn check(&self) -> Result<(), Errno> {
        if self.0.load(Ordering::Relaxed) { Err(Errno::INTR) } else { Ok(()) }
    }
}

/// A folder that is served, and what its guest knows of it.
#[derive(Debug)]
pub struct Volume {
    nodes: Nodes,
    handles: Handles,
    own: OwnFds,
    options: Options,
    begun: AtomicBool,
}

/// What an operation works with.
struct Call<'a> {
    volume: &'a Volume,
    message: Message<'a>,
    reply: &'a mut Reply,
    interrupted: &'a Interrupted,
}

impl Volume {
    /// Serves a folder.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn new(folder: OwnedFd, own: OwnFds, options: Options) -> Result<Self, StartError> {
        crate::options::check_folder(&folder)?;
        let most = Bounds { known: options.max_nodes, open: options.max_open_nodes };
        let nodes = Nodes::new(folder, most).map_err(StartError::Folder)?;
        let handles = Handles::new(options.max_handles);
        Ok(Self { nodes, handles, own, options, begun: AtomicBool::new(false) })
    }

    /// How many files the guest knows, how many of them have a descriptor, and how many it has
    /// open.
    #[must_use]
    pub fn counts(&self) -> (usize, usize, usize) {
        let (known, open) = self.nodes.count();
        (known, open, self.handles.count())
    }

    /// Does what a message asks for, and returns the answer. `None`: the message has no answer.
    pub fn handle<'r>(
        &self,
        message: Message<'_>,
        reply: &'r mut Reply,
        interrupted: &Interrupted,
    ) -> Option<&'r [u8]> {
        reply.clear();
        let unique = message.header.unique;
        let result = match message.header.opcode {
            op::FORGET | op::BATCH_FORGET => {
                self.forget(message);
                return None;
            }
            op::INTERRUPT => return None,
            op::INIT => self.init(message, reply),
            _ if !self.begun.load(Ordering::Acquire) => Err(Errno::IO),
            _ => Call { volume: self, message, reply, interrupted }.run(),
        };
        Some(reply.finish(unique, result))
    }

    fn forget(&self, message: Message<'_>) {
        let mut body = message.body();
        if message.header.opcode == op::FORGET {
            if let Ok(ForgetIn { nlookup }) = body.take() {
                self.nodes.forget(message.header.nodeid, nlookup);
            }
            return;
        }
        // The message's own length bounds the loop, not the count that it names.
        let Ok(crate::wire::BatchForgetIn { count, .. }) = body.take() else { return };
        for _ in 0..count {
            let Ok(ForgetOne { nodeid, nlookup }) = body.take() else { return };
            self.nodes.forget(nodeid, nlookup);
        }
    }

    fn init(&self, message: Message<'_>, reply: &mut Reply) -> Result<(), Errno> {
        let asked: InitIn = message.body().take()?;
        if asked.major < MAJOR || (asked.major == MAJOR && asked.minor < LEAST_MINOR) {
            return Err(Errno::PROTO);
        }
        let mut answer = InitOut { major: MAJOR, minor: MINOR, ..InitOut::default() };
        // A newer major version: the guest tries again with the server's.
        if asked.major == MAJOR {
            if self.begun.swap(true, Ordering::AcqRel) {
                return Err(Errno::PROTO);
            }
            answer.minor = asked.minor.min(MINOR);
            answer.flags = asked.flags & feature::WANTED;
            answer.max_readahead = asked.max_readahead;
            (answer.max_background, answer.congestion_threshold) = BACKGROUND;
            answer.max_write = u32::try_from(MAX_DATA_BYTES).unwrap_or(u32::MAX);
            answer.max_pages = MAX_PAGES;
            answer.time_gran = 1;
        }
        reply.push(&answer);
        Ok(())
    }
}

impl Call<'_> {
    /// Whether the operation changes anything.
    fn changes(&self) -> bool {
        matches!(
            self.message.header.opcode,
            op::SETATTR
                | op::SYMLINK
                | op::MKNOD
                | op::MKDIR
                | op::UNLINK
                | op::RMDIR
                | op::RENAME
                | op::RENAME2
                | op::LINK
                | op::WRITE
                | op::SETXATTR
                | op::REMOVEXATTR
                | op::CREATE
                | op::TMPFILE
                | op::FALLOCATE
                | op::COPY_FILE_RANGE
        )
    }

    fn run(mut self) -> Result<(), Errno> {
        if self.volume.options.read_only && self.changes() {
            return Err(Errno::ROFS);
        }
        match self.message.header.opcode {
            op::LOOKUP => self.lookup(),
            op::GETATTR => self.getattr(),
            op::SETATTR => self.setattr(),
            op::READLINK => self.readlink(),
            op::SYMLINK => self.symlink(),
            op::MKNOD => self.mknod(),
            op::MKDIR => self.mkdir(),
            op::UNLINK | op::RMDIR => self.unlink(),
            op::RENAME | op::RENAME2 => self.rename(),
            op::LINK => self.link(),
            op::OPEN => self.open(),
            op::CREATE => self.create(),
            op::TMPFILE => self.tmpfile(),
            op::READ => self.read(),
            op::WRITE => self.write(),
            op::STATFS => self.statfs(),
            op::RELEASE | op::RELEASEDIR => self.release(),
            op::FSYNC | op::FSYNCDIR => self.fsync(),
            op::FLUSH | op::DESTROY => Ok(()),
            op::SETXATTR => self.setxattr(),
            op::GETXATTR => self.getxattr(),
            op::LISTXATTR => self.listxattr(),
            op::REMOVEXATTR => self.removexattr(),
            op::OPENDIR => self.opendir(),
            op::READDIR => self.readdir(false),
            op::READDIRPLUS => self.readdir(true),
            op::ACCESS => self.access(),
            op::FALLOCATE => self.fallocate(),
            op::LSEEK => self.lseek(),
            op::COPY_FILE_RANGE => self.copy(),
            _ => Err(Errno::NOSYS),
        }
    }

    /// Counts that the guest has found a file.
    fn enter(
        &self,
        file: (OwnedFd, Statx),
        parent: u64,
        name: &CStr,
    ) -> Result<(EntryOut, Arc<Node>), Errno> {
        let (fd, stat) = file;
        let node = self.volume.nodes.found(fd, &stat, (parent, name))?;
        let attr = shown(&stat, self.volume.options.user, self.volume.options.group);
        let entry = EntryOut {
            nodeid: node.id,
            entry_valid: VALID_S,
            attr_valid: VALID_S,
            attr,
            ..EntryOut::default()
        };
        Ok((entry, node))
    }

    fn statfs(&mut self) -> Result<(), Errno> {
        let node = self.volume.nodes.get(self.message.header.nodeid)?;
        let found = rustix::fs::fstatfs(&node.fd)?;
        let small = |n: i64| u32::try_from(n).unwrap_or(4096);
        self.reply.push(&StatfsOut {
            blocks: found.f_blocks,
            bfree: found.f_bfree,
            bavail: found.f_bavail,
            files: found.f_files,
            ffree: found.f_ffree,
            bsize: small(found.f_bsize),
            namelen: small(found.f_namelen),
            frsize: small(found.f_frsize),
            ..StatfsOut::default()
        });
        Ok(())
    }
}
