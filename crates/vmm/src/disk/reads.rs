//! How the thread of the disks reads: its ring, the eventfd that ends a wait of the ring, and what
//! the files' systems can do.

use super::uring::Uring;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// Most requests of a turn of the only disk of a VM, while reads are in flight. Each thread that
/// wants the disk's lock asks for it (`virtio::turns`), and that ends the turn. So this number
/// delays no other thread.
const MAX_TURN: usize = 4096;

/// How a VM's disks are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskReads {
    /// Whether reads that would wait are in flight together (io_uring).
    pub io_uring: bool,
    /// The error with which the kernel refused a ring; `None`: it was not asked, or made one.
    pub errno: Option<i32>,
}

/// Whether a file's system can read without waiting for the host's disk (`RWF_NOWAIT`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Nowait {
    /// No read of the file has said.
    #[default]
    Unknown,
    /// It can.
    Supported,
    /// It cannot.
    Unsupported,
}

/// How the thread of the disks reads: its ring, and the eventfd that ends a wait of the ring.
#[derive(Debug, Default)]
pub struct Reads {
    pub(super) ring: Option<Uring>,
    pub(super) refused: Option<i32>,
    /// Readable if a queue may have more requests.
    pub(super) kick: Option<Arc<EventFd>>,
    /// The eventfd was emptied here, so any disk may have requests.
    pub(super) kicked: bool,
    /// The disks that the thread serves.
    pub(super) disks: usize,
    /// Every read goes to the ring, whatever the file system can do.
    pub(super) always: bool,
}

impl Reads {
    /// With a ring for the calling thread, if the kernel makes one; else synchronous. Called before
    /// the thread's seccomp filter is installed.
    #[must_use]
    pub fn new() -> Self {
        match Uring::new() {
            Ok(ring) => Self { ring: Some(ring), ..Self::default() },
            Err(e) => Self { refused: e.raw_os_error(), ..Self::default() },
        }
    }

    /// As [`Self::new`]; every read goes to the ring, so that reads in flight can be tested on any
    /// file system.
    #[must_use]
    pub fn always() -> Self {
        Self { always: true, ..Self::new() }
    }

    /// Lets a wait for reads end when `kick` is readable, which says that any of this many `disks`
    /// may have requests. Only the calling thread reads it.
    pub fn watch(&mut self, kick: &Arc<EventFd>, disks: usize) {
        (self.kick, self.disks) = (Some(Arc::clone(kick)), disks);
    }

    /// Whether the eventfd was emptied since the last call. The caller looks at every disk then,
    /// because no other thread will see that kick.
    pub const fn take_kicked(&mut self) -> bool {
        std::mem::replace(&mut self.kicked, false)
    }

    /// Empties the eventfd after a wait for it. The wait may have ended because of a kick that was
    /// read since, so the eventfd may be empty: a read that blocks would never return.
    pub(super) fn empty_kick(&mut self) {
        self.kicked = true;
        let Some(kick) = &self.kick else { return };
        let mut count = 0_u64;
        let iovec = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
        // SAFETY: the kernel writes 8 bytes to `count`, or returns at once with EAGAIN. The offset
        // of -1 is that of a file without positions.
        let read =
            unsafe { libc::preadv2(kick.as_raw_fd(), &raw const iovec, 1, -1, libc::RWF_NOWAIT) };
        let known = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        if read < 0 && !known.contains(&io::Error::last_os_error().kind()) {
            // It stays readable, so that each wait for it would end at once.
            self.kick = None;
        }
    }

    /// How many requests a turn takes while reads are in flight: `least`, if other disks wait for
    /// their turn meanwhile.
    #[must_use]
    pub const fn turn(&self, least: usize) -> usize {
        if self.disks > 1 { least } else { MAX_TURN }
    }

    /// What the kernel has granted.
    #[must_use]
    pub const fn kind(&self) -> DiskReads {
        DiskReads { io_uring: self.ring.is_some(), errno: self.refused }
    }

    /// How often io_uring_enter(2) was called.
    #[must_use]
    pub fn enters(&self) -> u64 {
        self.ring.as_ref().map_or(0, Uring::enters)
    }
}

/// What an attempt to read cached data says about the file's system; `None`: nothing.
pub(super) fn learnt(read: &io::Result<usize>) -> Option<Nowait> {
    let Err(error) = read else { return Some(Nowait::Supported) };
    match error.raw_os_error()? {
        libc::EAGAIN => Some(Nowait::Supported),
        // EINVAL: from a file system that does not know the flag.
        libc::EOPNOTSUPP | libc::EINVAL => Some(Nowait::Unsupported),
        _ => None,
    }
}
