//! A ring of io_uring(7) that can read files and wait for an eventfd, and nothing else.
//!
//! seccomp does not see what a ring does. So the kernel itself is asked to restrict the ring
//! (IORING_REGISTER_RESTRICTIONS), before it accepts the first request: READ, READV and POLL_ADD,
//! no flag of a request, and no io_uring_register(2) at all. The two reads are the thread's
//! preadv(2). What the ring adds to the system calls of that thread is poll(2), and that a read of
//! a socket or a pipe can hold a kernel thread ([`WORKERS`] at most of each kind). Only the thread
//! that made the ring can use it (IORING_SETUP_SINGLE_ISSUER), and no kernel thread polls it (no
//! IORING_SETUP_SQPOLL).
//!
//! The ring has no table of registered files. The table would make a cached read about 10 % cheaper
//! (`docs/lab-notes/2026-11-29-io-uring.md`), but it would need io_uring_register(2) after each
//! freeze, and with that call a VMM that was taken over can register whatever it has open. A table
//! also outlives its process by some milliseconds, because a kernel thread frees it: a layer would
//! stay open for writing after its freeze, and the space of a dead VM's disks would be freed by the
//! host instead of by the VM.
//!
//! Requires Linux 6.1 (IORING_SETUP_DEFER_TASKRUN): completions appear only while the thread is in
//! io_uring_enter(2), so nothing interrupts it elsewhere.

use io_uring::register::Restriction;
use io_uring::{EnterFlags, IoUring, opcode, squeue, types};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Most reads in flight, without the wait for the eventfd. A pause waits for them.
pub(super) const MAX_IN_FLIGHT: usize = 32;
/// Entries of the submission queue. A request's place is free again when it was submitted. The
/// completion queue has room for twice as many, so it never overflows.
const ENTRIES: u32 = 64;
const _: () = assert!(MAX_IN_FLIGHT < ENTRIES as usize, "all reads and the wait are ready at once");
/// Most kernel threads that work for the ring, of each of the two kinds. A read needs one if its
/// file system cannot go on with it when the host's disk has answered (FMODE_BUF_RASYNC). If the
/// kernel makes none, because of the group's `pids_max`, the read ends with ECANCELED.
const WORKERS: u32 = 4;
/// The token of the wait for the eventfd.
const WAKE: u64 = u64::MAX;

/// What a ring has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completion {
    /// The eventfd became readable.
    Wake,
    /// A read.
    Read {
        /// The number that [`Uring::read`] was given.
        token: u32,
        /// The bytes read; `None` after an error.
        bytes: Option<usize>,
    },
}

/// The ring. Before it is dropped, its owner waits for the reads that the kernel has taken.
pub struct Uring {
    ring: IoUring,
    /// The tokens of the requests that the kernel has not taken yet, in their order.
    ready: Vec<u64>,
    /// Whether the kernel watches the eventfd.
    watching: bool,
    /// Calls of io_uring_enter(2).
    enters: u64,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("enters", &self.enters).finish_non_exhaustive()
    }
}

impl Uring {
    /// Makes a ring for the calling thread: io_uring_setup(2), two mmap(2), three
    /// io_uring_register(2).
    ///
    /// # Errors
    /// The kernel's: `EPERM` if the host forbids io_uring (sysctl kernel.io_uring_disabled, or a
    /// container's filter), `ENOSYS` if it has none, `EINVAL` before Linux 6.1, `ENOMEM` if the
    /// limit of locked memory is reached (before Linux 5.12).
    pub fn new() -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(ENTRIES)?;
        let submitter = ring.submitter();
        submitter.register_iowq_max_workers(&mut [WORKERS, WORKERS])?;
        let operations = [opcode::Read::CODE, opcode::Readv::CODE, opcode::PollAdd::CODE];
        submitter.register_restrictions(&mut operations.map(Restriction::sqe_op))?;
        submitter.register_enable_rings()?;
        Ok(Self { ring, ready: Vec::new(), watching: false, enters: 0 })
    }

    /// How often io_uring_enter(2) was called.
    pub const fn enters(&self) -> u64 {
        self.enters
    }

    /// How many reads are ready: the kernel has not taken them yet.
    pub fn ready_reads(&self) -> usize {
        self.ready.iter().filter(|token| **token != WAKE).count()
    }

    /// Makes a read of `file` at byte `at` ready for submission. At most [`MAX_IN_FLIGHT`] reads
    /// may be ready or in flight.
    ///
    /// # Safety
    /// The memory of `iovecs` may be written, and they and their memory stay where they are until
    /// the completion with this `token`. `file` stays open as long as the read is ready.
    pub unsafe fn read(
        &mut self,
        file: BorrowedFd<'_>,
        at: u64,
        iovecs: &[libc::iovec],
        token: u32,
    ) {
        let file = types::Fd(file.as_raw_fd());
        let entry = match iovecs {
            [one] if let Ok(len) = u32::try_from(one.iov_len) => {
                opcode::Read::new(file, one.iov_base.cast(), len).offset(at).build()
            }
            _ => {
                let count = u32::try_from(iovecs.len()).unwrap_or(u32::MAX);
                opcode::Readv::new(file, iovecs.as_ptr(), count).offset(at).build()
            }
        };
        self.push(entry, token.into());
    }

    /// Makes the next [`Self::enter`] that waits return as well when `event` is readable, once.
    pub fn watch(&mut self, event: BorrowedFd<'_>) {
        if !self.watching {
            let readable = u32::from(libc::POLLIN.cast_unsigned());
            let wait = opcode::PollAdd::new(types::Fd(event.as_raw_fd()), readable).build();
            self.push(wait, WAKE);
            self.watching = true;
        }
    }

    fn push(&mut self, entry: squeue::Entry, token: u64) {
        let entry = entry.user_data(token);
        // SAFETY: the callers uphold what the kernel needs of the entry. A wait for an eventfd
        // needs nothing.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "at most {MAX_IN_FLIGHT} reads and one wait are ready");
        self.ready.push(token);
    }

    /// Submits what is ready and waits for `least` completions. Reads of cached data complete
    /// at once, even if `least` is 0.
    ///
    /// Returns whether the kernel has taken all that was ready. If it has not, it has no memory for
    /// the rest, and this call has not waited.
    ///
    /// # Errors
    /// The kernel's. Nothing is known then about what was in flight.
    pub fn enter(&mut self, least: u32) -> io::Result<bool> {
        loop {
            let ready = u32::try_from(self.ready.len()).unwrap_or(u32::MAX);
            match self.call(ready, least) {
                Ok(taken) => {
                    self.ready.drain(..taken.min(self.ready.len()));
                    if self.ready.is_empty() {
                        return Ok(true);
                    }
                    // The kernel takes a part if it refuses a request, or if memory gets short.
                    if taken == 0 {
                        return Ok(false);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_short(&e) => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// Waits for a completion and submits nothing, for which the kernel needs no memory. A signal
    /// may end the wait before.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub fn wait_only(&mut self) -> io::Result<()> {
        match self.call(0, 1) {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted || is_short(&e) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn call(&mut self, submit: u32, least: u32) -> io::Result<usize> {
        self.enters += 1;
        let (none, flags) = (None::<&libc::sigset_t>, EnterFlags::GETEVENTS.bits());
        // SAFETY: no argument points to memory. The caller of `read` keeps the memory of what is
        // submitted here.
        unsafe { self.ring.submitter().enter(submit, least, flags, none) }
    }

    /// The next completion, without a system call.
    pub fn next(&mut self) -> Option<Completion> {
        let entry = self.ring.completion().next()?;
        if entry.user_data() == WAKE {
            self.watching = false;
            return Some(Completion::Wake);
        }
        let token = u32::try_from(entry.user_data()).unwrap_or(u32::MAX);
        Some(Completion::Read { token, bytes: usize::try_from(entry.result()).ok() })
    }
}

/// Whether the kernel had no memory for a request. The same call can succeed later.
fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    /// The result of one request, whatever it is.
    fn result(ring: &mut Uring, entry: &squeue::Entry) -> i32 {
        ring.push(entry.clone(), 7);
        assert!(ring.enter(1).unwrap());
        let done = ring.ring.completion().next().unwrap();
        assert_eq!(done.user_data(), 7);
        done.result()
    }

    #[test]
    fn the_kernel_refuses_all_but_reads_and_the_wait_and_all_changes_of_the_ring() {
        let mut ring = Uring::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let fd = types::Fd(file.as_raw_fd());
        let mut bytes = [1; 16];
        let at = bytes.as_mut_ptr();
        let read = opcode::Read::new(fd, at, 16).build();
        assert_eq!(result(&mut ring, &read), 16);
        assert_eq!(bytes, [0; 16]);
        let refused = [
            ("write", opcode::Write::new(fd, bytes.as_ptr(), 16).build()),
            ("open", opcode::OpenAt::new(fd, c"/".as_ptr()).build()),
            ("socket", opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build()),
            ("close", opcode::Close::new(fd).build()),
            ("nop", opcode::Nop::new().build()),
            ("fallocate", opcode::Fallocate::new(fd, 1).build()),
            ("linked read", read.clone().flags(squeue::Flags::IO_LINK)),
            ("registered file", opcode::Read::new(types::Fixed(0), at, 16).build()),
        ];
        for (what, entry) in refused {
            assert_eq!(result(&mut ring, &entry), -libc::EACCES, "{what}");
        }
        assert_eq!(file.metadata().unwrap().len(), 4096);
        let submitter = ring.ring.submitter();
        for refused in [submitter.register_files(&[0]), submitter.register_files_sparse(4)] {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EACCES));
        }
        // Not even the thread that made it can lift the restrictions.
        let refused = submitter.register_restrictions(&mut [Restriction::sqe_op(0)]);
        assert!(refused.is_err());
    }

    #[test]
    fn only_the_thread_that_made_it_can_use_it() {
        let mut ring = Uring::new().unwrap();
        let other = std::thread::scope(|scope| {
            scope.spawn(|| ring.enter(0).unwrap_err().raw_os_error()).join().unwrap()
        });
        assert_eq!(other, Some(libc::EEXIST));
        ring.enter(0).unwrap();
    }

    #[test]
    fn an_event_ends_the_wait_for_a_read() {
        let event = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
        // SAFETY: `event` outlives the borrow.
        let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
        let mut ring = Uring::new().unwrap();
        for _ in 0..3 {
            ring.watch(fd);
            ring.watch(fd);
            ring.enter(0).unwrap();
            assert_eq!(ring.next(), None);
            event.write(1).unwrap();
            ring.enter(1).unwrap();
            assert_eq!((ring.next(), ring.next()), (Some(Completion::Wake), None));
            event.read().unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        let mut bytes = [1; 16];
        let iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 16 };
        // SAFETY: `bytes` and `iovec` live until the completion below.
        unsafe { ring.read(file.as_fd(), 4, &[iovec], 9) };
        ring.enter(1).unwrap();
        assert_eq!(ring.next(), Some(Completion::Read { token: 9, bytes: Some(6) }));
    }
}
