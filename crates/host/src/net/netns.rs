//! Network namespaces (network_namespaces(7)) that a bind mount keeps alive.

use super::error::{NetError, call, file};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// The namespace of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace and the path of its bind mount.
#[derive(Debug)]
pub struct Netns {
    file: File,
    pin: PathBuf,
}

impl Netns {
    /// Creates a namespace and mounts it on a new file at `pin`.
    ///
    /// # Errors
    /// A file exists at `pin`, or the host refuses.
    pub fn create(pin: &Path) -> Result<Self, NetError> {
        File::options().write(true).create_new(true).open(pin).map_err(file("making", pin))?;
        let made = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: NEWNET changes only the network namespace of this short-lived thread, and
                // nothing that it shares with other threads.
                unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
                    .map_err(call("unshare(CLONE_NEWNET)"))?;
                mount_bind(OWN, pin)
                    .map_err(io::Error::from)
                    .map_err(file("mounting a network namespace on", pin))
            });
            thread
                .join()
                .unwrap_or_else(|_| Err(NetError::Call("a thread", io::ErrorKind::Other.into())))
        });
        // A private mount, because copies in other mount namespaces would keep the namespace alive.
        let made = made.and_then(|()| {
            mount_change(pin, MountPropagationFlags::PRIVATE)
                .map_err(io::Error::from)
                .map_err(file("making private", pin))
        });
        made.and_then(|()| Self::open(pin)).inspect_err(|_| {
            let _ = remove(pin);
        })
    }

    /// Opens the namespace that is mounted at `pin`.
    ///
    /// # Errors
    /// No namespace is mounted there.
    pub fn open(pin: &Path) -> Result<Self, NetError> {
        /// NSFS_MAGIC of linux/magic.h.
        const NSFS: i64 = 0x6e73_6673;
        let opened = File::open(pin).map_err(file("opening", pin))?;
        let kind = rustix::fs::fstatfs(&opened)
            .map_err(io::Error::from)
            .map_err(file("looking at", pin))?
            .f_type;
        if kind != NSFS {
            return Err(file("opening the network namespace", pin)(io::ErrorKind::NotFound.into()));
        }
        Ok(Self { file: opened, pin: pin.to_owned() })
    }

    /// Runs `act` in a new thread that has entered the namespace.
    ///
    /// # Errors
    /// The thread cannot be created, or may not enter the namespace.
    pub fn run<R: Send>(&self, act: impl FnOnce() -> R + Send) -> Result<R, NetError> {
        std::thread::scope(|scope| {
            let inside = || {
                move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))
                    .map_err(call("setns(CLONE_NEWNET)"))?;
                Ok(act())
            };
            let thread = std::thread::Builder::new().spawn_scoped(scope, inside);
            let thread = thread.map_err(|e| NetError::Call("making a thread", e))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Removes the mount. The namespace ends with the last socket and thread in it.
    ///
    /// # Errors
    /// The mount or the file cannot be removed.
    pub fn remove(&self) -> Result<(), NetError> {
        remove(&self.pin)
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Removes the mount at `pin`, if there is one, and the file.
pub(super) fn remove(pin: &Path) -> Result<(), NetError> {
    use rustix::io::Errno;
    match unmount(pin, UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(e) => return Err(file("unmounting", pin)(e.into())),
    }
    match std::fs::remove_file(pin) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(file("removing", pin)(e)),
        _ => Ok(()),
    }
}
