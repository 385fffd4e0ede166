//! The server's own descriptors by name: `/proc/self/fd`.
//!
//! A node's descriptor is O_PATH. Opening the file, and calls that take a path only, go by the link
//! that the kernel has for each descriptor. That link leads to the file itself, whatever its name
//! is now. In the jail this folder is the working folder, and the only thing outside of the volume
//! that has a name.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use std::ffi::CString;

/// The folder of the links.
#[derive(Debug)]
pub struct OwnFds {
    folder: OwnedFd,
    prefix: &'static str,
}

impl OwnFds {
    /// The folder of /proc, for a process without a jail.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn by_path() -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, c"/proc/self/fd", flags, Mode::empty())?;
        Ok(Self { folder, prefix: "/proc/self/fd/" })
    }

    /// `folder` is also the working folder of the process.
    #[must_use]
    pub const fn in_working_folder(folder: OwnedFd) -> Self {
        Self { folder, prefix: "" }
    }

    fn text(prefix: &str, fd: &OwnedFd) -> CString {
        CString::new(format!("{prefix}{}", fd.as_raw_fd())).unwrap_or_default()
    }

    /// The link of a descriptor: a folder and a name in it.
    #[must_use]
    pub fn name(&self, fd: &OwnedFd) -> (BorrowedFd<'_>, CString) {
        (self.folder.as_fd(), Self::text("", fd))
    }

    /// The link of a descriptor as a path, for calls that take no folder.
    #[must_use]
    pub fn path(&self, fd: &OwnedFd) -> CString {
        Self::text(self.prefix, fd)
    }

    /// Opens the file of an O_PATH descriptor. Does not wait: neither for the other end of a FIFO,
    /// nor for a program of the host that has a lease of the file (EAGAIN).
    ///
    /// # Errors
    /// The file system's.
    pub fn reopen(&self, fd: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
        let (folder, name) = self.name(fd);
        let more = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        openat(folder, &name, flags | more, Mode::empty())
    }
}
