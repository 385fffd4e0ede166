//! How a new process enters a control group (cgroups(7)).
//!
//! Moving a process that runs takes the kernel's `cgroup_threadgroup_rwsem` for writing. That waits
//! for an RCU grace period (10 to 15 ms), and every fork(2) of the host waits too. Two ways do not
//! take it: cgroup v2 makes the process in the group (CLONE_INTO_CGROUP, clone3(2)). In cgroup v1 a
//! process with one thread writes `0` to the file `tasks` of the group, which moves that thread
//! (`__cgroup1_procs_write` in kernel/cgroup/cgroup-v1.c).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The descriptors by which a new process enters its group.
#[derive(Debug)]
pub enum Entry {
    /// The folder of a cgroup v2, for [`crate::clone3::CloneArgs::with_cgroup`].
    Folder(OwnedFd),
    /// The open files `tasks` of a cgroup v1, one for each hierarchy, for [`enter_alone`].
    Tasks(Vec<OwnedFd>),
}

impl Entry {
    /// The folder for clone3(2); `None` in cgroup v1.
    #[must_use]
    pub fn folder(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Folder(folder) => Some(folder.as_fd()),
            Self::Tasks(_) => None,
        }
    }

    /// The files that the new process writes itself; empty in cgroup v2.
    #[must_use]
    pub fn tasks(&self) -> &[OwnedFd] {
        match self {
            Self::Folder(_) => &[],
            Self::Tasks(tasks) => tasks,
        }
    }

    /// All descriptors, in order.
    #[must_use]
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.folder().into_iter().chain(self.tasks().iter().map(AsFd::as_fd)).collect()
    }
}

/// Moves the calling thread, which is the only one of its process, into the groups of `tasks`.
/// The kernel checks the rights of the process that opened the files.
///
/// # Errors
/// The kernel refuses, for example because a group was removed.
pub fn enter_alone(tasks: &[OwnedFd]) -> io::Result<()> {
    tasks.iter().try_for_each(|file| enter(file.as_raw_fd()))
}

/// As [`enter_alone`], for one file. Makes one system call, allocates nothing and takes no lock.
///
/// # Errors
/// As [`enter_alone`].
pub fn enter(tasks: i32) -> io::Result<()> {
    // SAFETY: writes one byte of a static; the kernel checks the descriptor.
    let written = unsafe { libc::write(tasks, c"0".as_ptr().cast(), 1) };
    if written == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
