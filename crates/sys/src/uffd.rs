//! userfaultfd(2): a thread that touches a missing page of a registered mapping waits until the
//! page is filled, or until the thread is woken.
//!
//! If the last copy of a descriptor is closed, missing pages read as zero.
//!
//! A descriptor that came from another process shares its flags with that process, so O_NONBLOCK
//! may disappear at any time. [`Uffd::next`] therefore does not depend on it.

use abi::{
    API, Api, COPY_DONTWAKE, Copy, EVENT_PAGEFAULT, MODE_MISSING, Range, Register,
    WRITEPROTECT_DONTWAKE, Writeprotect, Zeropage,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::{ReadWriteFlags, preadv2};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

mod abi;

pub use abi::{
    MESSAGE_BYTES, UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE,
    UFFDIO_WRITEPROTECT, UFFDIO_ZEROPAGE, USER_MODE_ONLY,
};

/// The most attempts of an operation in another process's memory. It fails with EAGAIN while that
/// process changes its mappings, and only if the process asked for events of such changes.
const TRIES: u32 = 1_000;

/// The target of a userfaultfd's link in /proc/self/fd.
const KIND: &[u8] = b"anon_inode:[userfaultfd]";

/// A descriptor of /proc/self/fd, which shows the kinds of this process's descriptors even after a
/// chroot.
#[derive(Debug)]
pub struct Descriptors(OwnedFd);

impl Descriptors {
    /// Opens /proc/self/fd.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open("/proc/self/fd", flags, Mode::empty())?))
    }

    fn kind(&self, fd: &OwnedFd) -> io::Result<Vec<u8>> {
        let shown = rustix::fs::readlinkat(&self.0, fd.as_raw_fd().to_string(), Vec::new())?;
        Ok(shown.into_bytes())
    }
}

/// A userfaultfd of this process, or one received from another process.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the error is EAGAIN: the mapping was changing.
fn again(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

/// Whether the error is EEXIST: the page is not missing.
fn is_present(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EEXIST)
}

impl From<OwnedFd> for Uffd {
    /// The descriptor must be a userfaultfd.
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Uffd {
    /// Creates a userfaultfd for this process, which does not report faults in kernel mode.
    ///
    /// # Errors
    /// The kernel does not support userfaultfd.
    pub fn own() -> io::Result<Self> {
        Self::make(libc::O_NONBLOCK | USER_MODE_ONLY)
    }

    /// Creates a userfaultfd for this process, which also reports faults in kernel mode, such as
    /// KVM's. Its reads block.
    ///
    /// # Errors
    /// The process has no CAP_SYS_PTRACE, or the kernel does not support userfaultfd.
    pub fn with_kernel_faults() -> io::Result<Self> {
        Self::make(0)
    }

    fn make(flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: makes a descriptor; the flags are integers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | libc::O_CLOEXEC) };
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        check(fd)?;
        // SAFETY: the kernel has just made the descriptor, and no other code knows it.
        let uffd = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = Api { api: API, features: 0, ioctls: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_api, which `api` is laid out as.
        check(unsafe { libc::ioctl(uffd.0.as_raw_fd(), UFFDIO_API, &raw mut api) })?;
        Ok(uffd)
    }

    /// Wraps a received descriptor, after checking that it is a userfaultfd, and makes it
    /// non-blocking. While it is blocking, poll(2) and epoll(7) report an error for it.
    ///
    /// # Errors
    /// It is another kind of file, on which a read could block forever.
    pub fn sent(fd: OwnedFd, descriptors: &Descriptors) -> io::Result<Self> {
        let shown = descriptors.kind(&fd)?;
        if shown != KIND {
            let text = format!(
                "a userfaultfd: expected {}, got {}",
                KIND.escape_ascii(),
                shown.escape_ascii()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(fd))
    }

    /// Makes the descriptor non-blocking again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_nonblocking(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.0, true)?)
    }

    /// Checks that this kernel reads a userfaultfd without waiting, whatever the descriptor's flags
    /// (Linux 6.10). No fault may be pending.
    ///
    /// # Errors
    /// The kernel does not support it.
    pub fn check_nowait(&self) -> io::Result<()> {
        self.next().map(drop).map_err(|e| {
            io::Error::new(e.kind(), format!("reading a userfaultfd without waiting: {e}"))
        })
    }

    /// The descriptor, for epoll.
    #[must_use]
    pub const fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// Registers the mapping at `start` for faults on missing pages (UFFDIO_REGISTER).
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn register(&self, start: u64, len: u64) -> io::Result<()> {
        let range = Range { start, len };
        let mut register = Register { range, mode: MODE_MISSING, ioctls: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_register.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) })
    }

    /// Unregisters the mapping: the kernel resolves its missing pages again, and waiting threads
    /// continue.
    ///
    /// UFFDIO_UNREGISTER wakes waiting threads before it prevents others from waiting. A thread
    /// that faults in between, under the lock of its mapping alone (since Linux 6.6), would wait
    /// forever. So all threads are woken once more.
    ///
    /// # Errors
    /// The process no longer has such a mapping, or has ended.
    pub fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = Range { start, len };
        // SAFETY: the ioctl reads one struct uffdio_range.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut range) })?;
        self.wake(start, len)
    }

    /// Wakes threads that wait for a page in the range; they look again.
    ///
    /// # Errors
    /// The process has ended.
    pub fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = Range { start, len };
        // SAFETY: the ioctl reads one struct uffdio_range.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_WAKE, &raw mut range) })
    }

    /// Fills the missing page at `at`, which is in a mapping of this process, and wakes the threads
    /// that wait for it. If the page is present, only wakes them.
    ///
    /// # Errors
    /// The kernel has no memory, or there is no such mapping.
    ///
    /// # Safety
    /// As of [`Self::copy`].
    pub unsafe fn give(&self, at: u64, page: &[u8]) -> io::Result<()> {
        loop {
            // SAFETY: the caller vouches for the page.
            match unsafe { self.copy_once(at, page, 0) }.1 {
                Err(e) if again(&e) => {}
                // Another thread waited for the page too.
                Err(e) if is_present(&e) => return self.wake(at, page.len() as u64),
                other => return other,
            }
        }
    }

    /// One UFFDIO_COPY to missing pages. Returns the bytes filled.
    ///
    /// # Safety
    /// As of [`Self::copy`].
    #[inline]
    unsafe fn copy_once(&self, dst: u64, bytes: &[u8], mode: u64) -> (usize, io::Result<()>) {
        let (src, len) = (bytes.as_ptr().addr() as u64, bytes.len() as u64);
        let mut copy = Copy { dst, src, len, mode, copy: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_copy, reads `bytes`, and fills pages
        // for which the caller vouches.
        let result = check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_COPY, &raw mut copy) });
        (usize::try_from(copy.copy).unwrap_or(0), result)
    }

    /// Fills missing pages from `at` on with `bytes`, whole pages; `at` is in a mapping of this
    /// process. Wakes no thread. A process that has the memfd open may have made a page of zeroes
    /// by reading. Returns the offsets in `bytes` of pages that are present with other content.
    ///
    /// # Errors
    /// The kernel has no memory, or there is no such mapping.
    ///
    /// # Safety
    /// No reference in this process may treat the pages at `at` as unchanging, unless they are
    /// still missing.
    pub unsafe fn copy(&self, at: u64, bytes: &[u8], page: usize) -> io::Result<Vec<usize>> {
        let (mut done, mut others) = (0, Vec::new());
        while done < bytes.len() {
            // SAFETY: the caller vouches for the pages.
            let (filled, result) =
                unsafe { self.copy_once(at + done as u64, &bytes[done..], COPY_DONTWAKE) };
            done += filled;
            match result {
                Ok(()) => {}
                Err(e) if again(&e) => {}
                Err(e) if is_present(&e) => {
                    let there = usize::try_from(at).map_err(io::Error::other)?.wrapping_add(done);
                    let there = std::ptr::with_exposed_provenance::<u8>(there);
                    let mut now = vec![0; page];
                    // SAFETY: the page is in the mapping for which the caller vouches, and it is
                    // present; `now` is as long, and is another allocation.
                    unsafe { std::ptr::copy_nonoverlapping(there, now.as_mut_ptr(), page) };
                    if now != bytes[done..done + page] {
                        others.push(done);
                    }
                    done += page;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(others)
    }

    /// Fills the missing page at `at` of another process, in a private mapping, with `page`. Wakes
    /// no thread. Returns `false` if that process has a page there already.
    ///
    /// # Errors
    /// That process has ended (ESRCH), or has no such mapping registered (ENOENT).
    pub fn put(&self, at: u64, page: &[u8]) -> io::Result<bool> {
        for _ in 0..TRIES {
            // SAFETY: memory of another process, to which this process has no reference.
            match unsafe { self.copy_once(at, page, COPY_DONTWAKE) }.1 {
                Err(e) if again(&e) => std::thread::yield_now(),
                Err(e) if is_present(&e) => return Ok(false),
                other => return other.map(|()| true),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Gives a page of zeroes to threads that wait at `at`, in a private mapping.
    ///
    /// # Errors
    /// The kernel has no memory, or the process changes its mappings all the time.
    pub fn zero(&self, at: u64, page: u64) -> io::Result<()> {
        for _ in 0..TRIES {
            let range = Range { start: at, len: page };
            let mut zeropage = Zeropage { range, mode: 0, zeropage: 0 };
            // SAFETY: the ioctl reads and writes one struct uffdio_zeropage.
            let result = check(unsafe {
                libc::ioctl(self.0.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zeropage)
            });
            match result {
                Err(e) if again(&e) => std::thread::yield_now(),
                Err(e) if is_present(&e) => return self.wake(at, page),
                // The process is ending, or has no such mapping any more, so no thread waits.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => {
                    return Ok(());
                }
                other => return other,
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Whether the watched memory is gone, so that no fault in it is possible any more.
    #[must_use]
    pub fn is_memory_gone(&self) -> bool {
        // Removes the write protection of a page, which changes nothing: only mappings registered
        // for write faults have one. The kernel looks for the process first. The address is valid
        // with four and with five levels of page tables.
        let range = Range { start: 1 << 46, len: 4096 };
        let mut unprotect = Writeprotect { range, mode: WRITEPROTECT_DONTWAKE };
        // SAFETY: the ioctl reads one struct uffdio_writeprotect.
        let result = check(unsafe {
            libc::ioctl(self.0.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut unprotect)
        });
        result.is_err_and(|e| e.raw_os_error() == Some(libc::ESRCH))
    }

    /// The address of the next fault; `None` if there is none now. Never waits, even if another
    /// holder of the descriptor has made it blocking.
    ///
    /// # Errors
    /// The userfaultfd cannot be read, or it reports something else than a fault.
    pub fn next(&self) -> io::Result<Option<u64>> {
        // The offset of a file that has none.
        const NO_OFFSET: u64 = u64::MAX;
        let mut message = [0_u8; MESSAGE_BYTES];
        let got = loop {
            let mut buffers = [IoSliceMut::new(&mut message)];
            match preadv2(&self.0, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                got => break got?,
            }
        };
        let address = faults(&message[..got]).next();
        let other = || io::Error::new(io::ErrorKind::InvalidData, "an event that is no page fault");
        address.ok_or_else(other).map(Some)
    }

    /// Reads messages by one read(2), which waits unless the descriptor is non-blocking; tries
    /// again after a signal. [`faults`] decodes the messages.
    ///
    /// # Errors
    /// The userfaultfd cannot be read.
    pub fn read<'a>(&self, messages: &'a mut [u8]) -> io::Result<&'a [u8]> {
        let got = rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut *messages))?;
        if got == 0 || got % MESSAGE_BYTES != 0 {
            let text = format!("faults: expected {MESSAGE_BYTES} bytes each, got {got}");
            return Err(io::Error::other(text));
        }
        Ok(&messages[..got])
    }
}

/// The addresses of the faults among messages of a userfaultfd.
pub fn faults(messages: &[u8]) -> impl Iterator<Item = u64> {
    let (messages, _) = messages.as_chunks::<MESSAGE_BYTES>();
    let faults = messages.iter().filter(|message| message[0] == EVENT_PAGEFAULT);
    faults.map(|message| u64::from_le_bytes(std::array::from_fn(|n| message[16 + n])))
}

#[cfg(test)]
mod tests;
