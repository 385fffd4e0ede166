//! userfaultfd(2), as far as a pager needs it.
//!
//! Pages enter a template by UFFDIO_COPY over a mapping of its memfd: the kernel fills a page before anybody can see it. A pwrite(2) is not that
//! safe: where its source is not mapped at that moment (the page is just being moved), the kernel makes a page of zeroes visible, and tries again.

use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::io;

// linux/userfaultfd.h
const API: u64 = 0xaa;
const USER_MODE_ONLY: libc::c_int = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const MODE_MISSING: u64 = 1;
const COPY_DONTWAKE: u64 = 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`
const UFFDIO_API: u64 = 0xc018_aa3f;
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
/// `_IOR(0xaa, 0x01, struct uffdio_range)`
const UFFDIO_UNREGISTER: u64 = 0x8010_aa01;
/// `_IOR(0xaa, 0x02, struct uffdio_range)`
const UFFDIO_WAKE: u64 = 0x8010_aa02;
/// `_IOWR(0xaa, 0x03, struct uffdio_copy)`
const UFFDIO_COPY: u64 = 0xc028_aa03;
/// `_IOWR(0xaa, 0x04, struct uffdio_zeropage)`
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
/// `struct uffd_msg`: the event at 0, the address of a fault at 16.
const MESSAGE_BYTES: usize = 32;
/// What /proc/self/fd shows for one.
const KIND: &[u8] = b"anon_inode:[userfaultfd]";

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

#[repr(C)]
struct Zeropage {
    range: Range,
    mode: u64,
    zeropage: i64,
}

/// /proc/self/fd, opened while there is a path to it: what this process's descriptors are.
#[derive(Debug)]
pub struct Descriptors(OwnedFd);

impl Descriptors {
    /// Opens it.
    ///
    /// # Errors
    /// There is no /proc.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open("/proc/self/fd", flags, Mode::empty())?))
    }

    fn kind(&self, fd: &OwnedFd) -> io::Result<Vec<u8>> {
        let shown = rustix::fs::readlinkat(&self.0, fd.as_raw_fd().to_string(), Vec::new())?;
        Ok(shown.into_bytes())
    }
}

/// A userfaultfd: this process's own, or one that a VMM has sent.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the kernel asks to try again: the mapping was just changing.
fn again(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

impl Uffd {
    /// One of this process's own, which sees no faults of the kernel's.
    ///
    /// # Errors
    /// The kernel has none.
    pub fn own() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: makes a descriptor; the flags are integers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        check(fd)?;
        // SAFETY: the kernel has just made it, and nobody else knows it.
        let uffd = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = Api { api: API, features: 0, ioctls: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_api, which `api` is laid out as.
        check(unsafe { libc::ioctl(uffd.0.as_raw_fd(), UFFDIO_API, &raw mut api) })?;
        Ok(uffd)
    }

    /// One that somebody has sent, who says that it is one; it is made non-blocking.
    ///
    /// # Errors
    /// It is something else, which could keep whoever reads it for ever.
    pub fn sent(fd: OwnedFd, descriptors: &Descriptors) -> io::Result<Self> {
        let shown = descriptors.kind(&fd)?;
        if shown != KIND {
            let text =
                format!("a userfaultfd: expected {}, got {}", KIND.escape_ascii(), shown.escape_ascii());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(fd))
    }

    /// Its descriptor, for epoll.
    #[must_use]
    pub const fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// From now on, missing pages of the mapping at `start` are told.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn register(&self, start: u64, len: u64) -> io::Result<()> {
        let range = Range { start, len };
        let mut register = Register { range, mode: MODE_MISSING, ioctls: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_register.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) })
    }

    /// Missing pages of the mapping are the kernel's own concern again; who waits goes on.
    ///
    /// UFFDIO_UNREGISTER wakes who waits before it keeps others from beginning to: whoever faults in between, under the lock of his mapping
    /// alone (Linux from 6.6 on), would wait for ever. So all are woken once more.
    ///
    /// # Errors
    /// The process has no such mapping any more, or is gone.
    pub fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = Range { start, len };
        // SAFETY: the ioctl reads one struct uffdio_range.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut range) })?;
        self.wake(start, len)
    }

    /// Whoever waits for a page there looks again.
    ///
    /// # Errors
    /// The process is gone.
    pub fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = Range { start, len };
        // SAFETY: the ioctl reads one struct uffdio_range.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_WAKE, &raw mut range) })
    }

    /// Makes whole pages the content of missing ones from `at` on, which is one of a mapping of this process's own. One that is there already
    /// must be the same: who has the memory open may have made it one of zeroes by reading it. Wakes nobody.
    ///
    /// # Errors
    /// `InvalidData`: one that is there is another. The kernel has no memory, or there is no such mapping.
    ///
    /// # Safety
    /// Nothing of this process may take the pages at `at` for unchanging, or they are missing as yet.
    pub unsafe fn copy(&self, at: u64, bytes: &[u8], page: usize) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let (src, len) = (bytes[done..].as_ptr().addr() as u64, (bytes.len() - done) as u64);
            let mut copy = Copy { dst: at + done as u64, src, len, mode: COPY_DONTWAKE, copy: 0 };
            // SAFETY: the ioctl reads and writes one struct uffdio_copy, reads `bytes`, and fills pages that the caller answers for.
            let result = check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_COPY, &raw mut copy) });
            done += usize::try_from(copy.copy).unwrap_or(0);
            match result {
                Ok(()) => {}
                Err(e) if again(&e) => {}
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                    let there = usize::try_from(at).map_err(io::Error::other)?.wrapping_add(done);
                    // SAFETY: the page is in the mapping that the caller answers for, and there; nobody changes it any more.
                    let there = unsafe {
                        std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(there), page)
                    };
                    if there != &bytes[done..done + page] {
                        let text = "a page of the template was made by somebody else, and is another";
                        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                    }
                    done += page;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Gives a page of zeroes to who waits for it at `at`, in a private mapping.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn zero(&self, at: u64, page: u64) -> io::Result<()> {
        loop {
            let range = Range { start: at, len: page };
            let mut zeropage = Zeropage { range, mode: 0, zeropage: 0 };
            // SAFETY: the ioctl reads and writes one struct uffdio_zeropage.
            let result =
                check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zeropage) });
            match result {
                Err(e) if again(&e) => {}
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => return self.wake(at, page),
                // The process is ending, or has no such mapping any more: nobody waits.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => return Ok(()),
                other => return other,
            }
        }
    }

    /// Whether the memory that it watches is gone, and nothing can fault in it any more.
    #[must_use]
    pub fn is_of_nobody(&self) -> bool {
        // The highest page that a process may map (x86-64, four levels of tables), in no mapping that is watched: ENOENT while there is memory.
        const NOWHERE: u64 = (1 << 47) - 2 * 4096;
        let range = Range { start: NOWHERE, len: 4096 };
        let mut zeropage = Zeropage { range, mode: 0, zeropage: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_zeropage. Where a process has put its memory there, it gets a page of zeroes.
        let result = check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zeropage) });
        result.is_err_and(|e| e.raw_os_error() == Some(libc::ESRCH))
    }

    /// The address of the next fault; `None` when there is none.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn next(&self) -> io::Result<Option<u64>> {
        let mut message = [0_u8; MESSAGE_BYTES];
        loop {
            match rustix::io::read(&self.0, &mut message) {
                Ok(MESSAGE_BYTES) if message[0] == EVENT_PAGEFAULT => {
                    return Ok(Some(u64::from_le_bytes(std::array::from_fn(|n| message[16 + n]))));
                }
                // Of mappings that go or move nobody asked to be told.
                Ok(MESSAGE_BYTES) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Ok(n) => {
                    return Err(io::Error::other(format!(
                        "a fault: expected {MESSAGE_BYTES} bytes, got {n}"
                    )));
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn a_page_that_is_there_must_be_the_one_that_is_to_come() {
        const PAGE: usize = 4096;
        let memory = crate::guest::memory(2 * PAGE as u64).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice; it stays as long as this process.
        let at = unsafe { mmap(std::ptr::null_mut(), 2 * PAGE, protection, MapFlags::SHARED, &memory, 0) };
        let at = at.unwrap().expose_provenance() as u64;
        let uffd = Uffd::own().unwrap();
        uffd.register(at, 2 * PAGE as u64).unwrap();
        // Somebody who has the memory open makes its second page.
        memory.write_all_at(&[7; PAGE], PAGE as u64).unwrap();
        let bytes = |second: u8| [[1; PAGE], [second; PAGE]].concat();
        // SAFETY: pages of the mapping above, which nobody has a reference to.
        let copy = |bytes: &[u8]| unsafe { uffd.copy(at, bytes, PAGE) };
        assert_eq!(copy(&bytes(0)).unwrap_err().kind(), io::ErrorKind::InvalidData);
        copy(&bytes(7)).unwrap();
        let mut now = [0; PAGE];
        memory.read_exact_at(&mut now, 0).unwrap();
        assert_eq!(now, [1; PAGE]);
    }

    #[test]
    fn memory_is_somebodys_until_its_process_has_ended() {
        let own = Uffd::own().unwrap();
        assert!(!own.is_of_nobody());
        let (ours, theirs) = crate::wire::pair().unwrap();
        let pid = {
            // SAFETY: the child calls nothing but what follows, none of which takes a lock that another thread of ours may have.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let told =
                    Uffd::own().map(|uffd| crate::wire::send_bytes(&theirs, b"it", &[uffd.fd().as_fd()]));
                // SAFETY: waits for a signal, and ends; runs no code of ours at its end.
                unsafe {
                    if told.is_ok_and(|sent| sent.is_ok()) {
                        libc::pause();
                    }
                    libc::_exit(1)
                }
            }
            pid
        };
        drop(theirs);
        let (_, mut fds) = crate::wire::receive_bytes(&ours).unwrap().unwrap();
        let childs = Uffd(fds.pop().unwrap());
        assert!(!childs.is_of_nobody());
        // SAFETY: our child, which nobody else waits for.
        let ended = unsafe { (libc::kill(pid, libc::SIGKILL), libc::waitpid(pid, std::ptr::null_mut(), 0)) };
        assert_eq!(ended, (0, pid));
        assert!(childs.is_of_nobody() && !own.is_of_nobody());
    }

    #[test]
    fn who_faults_just_as_memory_is_let_go_goes_on() {
        const PAGE: usize = 4096;
        const PAGES: usize = 64;
        let memory = crate::guest::memory((PAGES * PAGE) as u64).unwrap();
        let until = Instant::now() + Duration::from_secs(3);
        let mut rounds = 0;
        while Instant::now() < until {
            rounds += 1;
            // SAFETY: a new mapping, at an address of the kernel's choice; it goes at the end of this round, after all who read it.
            let at = unsafe {
                mmap(std::ptr::null_mut(), PAGES * PAGE, ProtFlags::READ, MapFlags::SHARED, &memory, 0)
            };
            let at = at.unwrap().expose_provenance();
            let uffd = Uffd::own().unwrap();
            uffd.register(at as u64, (PAGES * PAGE) as u64).unwrap();
            let (begun, read) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    begun.store(true, Ordering::SeqCst);
                    // SAFETY: a page of the mapping above.
                    let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(at).read_volatile() };
                    assert_eq!(byte, 0);
                    read.store(true, Ordering::SeqCst);
                });
                while !begun.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
                let moment = Instant::now() + Duration::from_nanos(rounds * 37 % 20_000);
                while Instant::now() < moment {
                    std::hint::spin_loop();
                }
                uffd.unregister(at as u64, (PAGES * PAGE) as u64).unwrap();
                let late = Instant::now() + Duration::from_secs(2);
                while !read.load(Ordering::SeqCst) && Instant::now() < late {
                    thread::yield_now();
                }
                let waits = !read.load(Ordering::SeqCst);
                uffd.wake(at as u64, (PAGES * PAGE) as u64).unwrap();
                assert!(!waits, "it still waits, in round {rounds}");
            });
            // SAFETY: nobody reads it any more.
            unsafe { munmap(std::ptr::with_exposed_provenance_mut(at), PAGES * PAGE).unwrap() };
            memory.set_len(0).unwrap();
            memory.set_len((PAGES * PAGE) as u64).unwrap();
        }
    }
}
