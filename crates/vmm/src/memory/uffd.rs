//! userfaultfd(2): who touches a page that is missing waits until somebody has made it.
//!
//! The descriptor is made before the jail is entered: faults in the kernel (KVM's own) need CAP_SYS_PTRACE at that moment. It
//! is never closed while the VM lives: a page missing then would read as zero.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

// linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
pub(super) const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`
const UFFDIO_API: u64 = 0xc018_aa3f;
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`
pub(crate) const UFFDIO_REGISTER: u64 = 0xc020_aa00;
/// `_IOR(0xaa, 0x02, struct uffdio_range)`
pub(crate) const UFFDIO_WAKE: u64 = 0x8010_aa02;
/// `_IOWR(0xaa, 0x03, struct uffdio_copy)`
pub(crate) const UFFDIO_COPY: u64 = 0xc028_aa03;
/// `struct uffd_msg`: the event at 0, the address of a fault at 16.
pub(super) const MESSAGE_BYTES: usize = 32;

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
pub(super) struct UffdioRange {
    pub(super) start: u64,
    pub(super) len: u64,
}

#[repr(C)]
pub(super) struct UffdioCopy {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) copy: i64,
}

pub(super) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A userfaultfd that also sees the kernel's faults. Before the jail is entered.
///
/// # Errors
/// Without CAP_SYS_PTRACE, or where the kernel has none.
pub fn open() -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor; the flags are integers.
    let fd = check(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) })?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it, and nobody else knows it.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = UffdioApi { api: UFFD_API, features: 0, ioctls: 0 };
    // SAFETY: the ioctl reads and writes one struct uffdio_api, which `api` is laid out as.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) }.into())?;
    Ok(uffd)
}

/// From now on, who touches a page that is missing in the mapping at `start` waits.
pub(super) fn register(uffd: &impl AsFd, start: u64, len: u64) -> io::Result<()> {
    let mut register = UffdioRegister { start, len, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
    // SAFETY: the ioctl reads and writes one struct uffdio_register. The range is guest memory, which keeps its content.
    check(unsafe { libc::ioctl(uffd.as_fd().as_raw_fd(), UFFDIO_REGISTER, &raw mut register) }.into())
        .map(drop)
}
