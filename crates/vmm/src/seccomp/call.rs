//! An allowed system call.

use super::bound::Bound;

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// Runs a vCPU.
    Vcpu,
    /// Serves all devices but the disks.
    Devices,
    /// Serves the disks.
    Disks,
    /// Serves the control socket, restores and saves.
    Main,
    /// Gives pages to a clone whose working set is recorded.
    Recorder,
}

/// How far a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// No guest has run yet.
    SetUp,
    /// A guest may have taken over the process.
    Guest,
}

/// An allowed system call.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Its number.
    pub number: i64,
    /// Its name.
    pub name: &'static str,
    /// The threads that may make it.
    pub threads: &'static [Thread],
    /// The last stage in which they may make it.
    pub until: Stage,
    /// Lists of bounds, of which one must hold; none: any arguments.
    pub within: &'static [&'static [Bound]],
    /// The bounds in words.
    pub bounds: &'static str,
    /// Why the call is needed.
    pub reason: &'static str,
}

impl Call {
    /// Whether `thread` may make this call in `stage`.
    #[must_use]
    pub fn is_for(&self, thread: Thread, stage: Stage) -> bool {
        (self.until == stage || self.until == Stage::Guest) && self.threads.contains(&thread)
    }
}

pub(super) const fn call(
    (number, name): (i64, &'static str),
    threads: &'static [Thread],
    until: Stage,
    (within, bounds): (&'static [&'static [Bound]], &'static str),
    reason: &'static str,
) -> Call {
    Call { number, name, threads, until, within, bounds, reason }
}

/// The number and the name of a call.
macro_rules! named {
    ($number:ident) => {
        (libc::$number, stringify!($number).split_at("SYS_".len()).1)
    };
}
pub(super) use named;

pub(super) const fn ioctl(
    threads: &'static [Thread],
    until: Stage,
    within: (&'static [&'static [Bound]], &'static str),
    reason: &'static str,
) -> Call {
    call(named!(SYS_ioctl), threads, until, within, reason)
}

/// Any arguments.
pub(super) const EVERY: (&[&[Bound]], &str) = (&[], "");

// Arguments: linux/mman.h, linux/falloc.h, linux/net.h, linux/socket.h, linux/futex.h,
// linux/io_uring.h, linux/fs.h.
pub(super) const MAP_ANONYMOUS: u64 = 0x22; // MAP_PRIVATE | MAP_ANONYMOUS
pub(super) const MAP_OVER: u64 = 0x4012; // MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
pub(super) const READ_WRITE: u64 = 3; // PROT_READ | PROT_WRITE
pub(super) const PUNCH_HOLE: u32 = 3; // FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
pub(super) const SOCKET_FLAGS: u32 = 0o2_004_000; // SOCK_CLOEXEC | SOCK_NONBLOCK
pub(super) const DONTWAIT: u32 = 0x40; // MSG_DONTWAIT
pub(super) const GETEVENTS: u32 = 1; // IORING_ENTER_GETEVENTS
pub(super) const NOWAIT: u32 = 8; // RWF_NOWAIT
pub(super) const PEEK: u32 = 2; // MSG_PEEK
pub(super) const NOSIGNAL: u32 = 0x4000; // MSG_NOSIGNAL
pub(super) const CMSG_CLOEXEC: u32 = 0x4000_0000; // MSG_CMSG_CLOEXEC
/// The signal that interrupts KVM_RUN: SIGRTMIN of glibc.
pub(super) const KICK: u32 = 34;
/// FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
pub(super) const FUTEX_FLAGS: u32 = 128 | 256;
/// Lengths above 2 TiB: disks have at most 1 TiB.
pub(super) const LONG: u64 = !((1 << 41) - 1);
