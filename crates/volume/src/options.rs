//! What a volume may do, and which folders may be one.

use crate::owner::Id;
use rustix::fd::OwnedFd;
use rustix::io::Errno;

/// The most files that the server knows of those that its guest knows: about 90 MB.
pub const MAX_NODES: usize = 262_144;
/// The most of them with a descriptor of the server, which keeps an inode in the host's memory,
/// about 1.5 KiB.
pub const MAX_OPEN_NODES: usize = 65_536;
/// The most files and folders that a guest may have open at once.
pub const MAX_HANDLES: usize = 16_384;

/// What a volume may do.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The caller's user, which the server has.
    pub user: Id,
    /// The caller's group, which the server has.
    pub group: Id,
    /// Every change fails with EROFS.
    pub read_only: bool,
    /// At most [`MAX_NODES`].
    pub max_nodes: usize,
    /// At most [`MAX_OPEN_NODES`], and more than `max_handles` and [`crate::serve::WORKERS`], whose
    /// nodes stay open.
    pub max_open_nodes: usize,
    /// At most [`MAX_HANDLES`].
    pub max_handles: usize,
}

impl Options {
    /// The ids of this process, all bounds at their highest, changes allowed.
    #[must_use]
    pub fn own() -> Self {
        Self {
            user: Id(rustix::process::geteuid().as_raw()),
            group: Id(rustix::process::getegid().as_raw()),
            read_only: false,
            max_nodes: MAX_NODES,
            max_open_nodes: MAX_OPEN_NODES,
            max_handles: MAX_HANDLES,
        }
    }
}

/// Why a folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The folder cannot be looked at, or is none.
    #[error("the shared folder: expected a folder that can be opened")]
    Folder(#[source] Errno),
    /// Files of this file system are the kernel's.
    #[error(
        "the shared folder: its file system (type {0:#x}) belongs to the kernel; share a folder \
         of files"
    )]
    Kernel(i64),
    /// A thread or a descriptor could not be had.
    #[error("starting to serve: {what}")]
    Step {
        /// The step that failed.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
}

/// File systems whose files act on the kernel or on processes (linux/magic.h): a file of /proc
/// would be the server's own memory.
const OF_KERNEL: &[i64] = &[
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x6265_6570, // configfs
    0xde5e_81e4, // efivarfs
    0x1cd1,      // devpts
    0x6165_676c, // pstore
    0x4249_4e4d, // binfmt_misc
    0xf97c_ff8c, // selinux
    0x4341_5d53, // smack
    0x6e73_6673, // nsfs
    0x1980_0202, // mqueue
];

/// Fails if the folder's file system is one of the kernel's. Other file systems below the folder
/// are never entered, so one look is enough.
pub(crate) fn check_folder(folder: &OwnedFd) -> Result<(), StartError> {
    let found = rustix::fs::fstatfs(folder).map_err(StartError::Folder)?;
    let of_kernel = OF_KERNEL.contains(&found.f_type);
    if of_kernel { Err(StartError::Kernel(found.f_type)) } else { Ok(()) }
}
