//! A list of pieces of memory, of the guest or of this process, for vectored system calls.

use crate::memory::writes::Writes;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// The most pieces of one `preadv`, `pwritev`, `sendmsg` or `readv` (IOV_MAX).
const MAX_IOVECS: usize = 1024;

/// A list of pieces of memory, seen as one run of bytes. Others may change the bytes at any time,
/// as the guest does.
///
/// The list gives the kernel pointers, or copies. It never makes a Rust reference to the bytes.
#[derive(Debug, Clone, Default)]
pub struct IoList<'a> {
    pieces: Vec<VolatileSlice<'a>>,
    len: usize,
    /// Notes which pages of the pieces are written to.
    writes: Option<&'a Writes>,
}

impl<'a> IoList<'a> {
    /// An empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self { pieces: Vec::new(), len: 0, writes: None }
    }

    /// An empty list; writes to its later pieces are noted in `writes`.
    #[must_use]
    pub const fn noted(writes: &'a Writes) -> Self {
        Self { pieces: Vec::new(), len: 0, writes: Some(writes) }
    }

    /// Notes that the first `bytes` bytes were written to, at least in part. The kernel, which may
    /// have written them, is done.
    pub(crate) fn written(&self, bytes: usize) {
        let Some(writes) = self.writes else { return };
        let mut left = bytes;
        let ranges = self.pieces.iter().map(|piece| {
            let (start, len) = (pointer(piece).addr(), piece.len().min(left));
            left -= len;
            start..start + len
        });
        writes.note(ranges);
    }

    /// A list of one buffer of this process.
    #[must_use]
    pub fn of(bytes: &'a mut [u8]) -> Self {
        let mut list = Self::new();
        list.push(VolatileSlice::from(bytes));
        list
    }

    /// Appends a piece; an empty piece is dropped. The length saturates, which no list of real
    /// memory reaches.
    pub fn push(&mut self, piece: VolatileSlice<'a>) {
        if !piece.is_empty() {
            self.len = self.len.saturating_add(piece.len());
            self.pieces.push(piece);
        }
    }

    /// Appends all pieces of `other`.
    pub fn append(&mut self, other: &Self) {
        self.writes = self.writes.or(other.writes);
        for piece in &other.pieces {
            self.push(*piece);
        }
    }

    /// The pieces; none is empty.
    #[must_use]
    pub fn pieces(&self) -> &[VolatileSlice<'a>] {
        &self.pieces
    }

    /// The length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the list has no byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// At most `len` bytes from byte `start` on; bytes past the end are left out.
    #[must_use]
    pub fn window(&self, start: usize, len: usize) -> Self {
        let mut out = Self { writes: self.writes, ..Self::new() };
        let (mut skip, mut want) = (start, len);
        for piece in &self.pieces {
            if want == 0 {
                break;
            }
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let take = want.min(piece.len() - skip);
            if let Ok(part) = piece.subslice(skip, take) {
                out.push(part);
            }
            (skip, want) = (0, want - take);
        }
        out
    }

    /// Copies the first bytes to `out`; returns their number, the smaller of the two lengths.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let mut done = 0;
        for piece in &self.pieces {
            if done == out.len() {
                break;
            }
            done += piece.copy_to(&mut out[done..]);
        }
        done
    }

    /// Copies `bytes` to the front of the list; returns how many fitted.
    pub fn copy_from(&self, bytes: &[u8]) -> usize {
        let mut done = 0;
        for piece in &self.pieces {
            let take = piece.len().min(bytes.len() - done);
            if take == 0 {
                break;
            }
            piece.copy_from(&bytes[done..done + take]);
            done += take;
        }
        self.written(done);
        done
    }

    /// Sets every byte to zero.
    pub fn zero(&self) {
        const ZEROS: [u8; 4096] = [0; 4096];
        for piece in &self.pieces {
            let mut at = 0;
            while let Ok(rest) = piece.offset(at)
                && !rest.is_empty()
            {
                let take = rest.len().min(ZEROS.len());
                rest.copy_from(&ZEROS[..take]);
                at += take;
            }
        }
        self.written(self.len);
    }

    /// The pieces for a vectored system call; those past the first 1024 are left out.
    pub(super) fn iovecs(&self) -> Vec<libc::iovec> {
        self.pieces
            .iter()
            .take(MAX_IOVECS)
            .map(|piece| libc::iovec { iov_base: pointer(piece), iov_len: piece.len() })
            .collect()
    }

    /// Reads from a file's `offset` until the list is full or the file ends; returns the bytes
    /// read.
    ///
    /// # Errors
    /// The error of `preadv(2)`; `EINTR` is retried.
    pub fn read_at(&self, fd: BorrowedFd<'_>, offset: u64) -> io::Result<usize> {
        let read = self.repeat(offset, |iovecs, offset| {
            // SAFETY: each iovec is a piece of memory that a live VolatileSlice of `self` bounds.
            // The kernel writes only into them, and no Rust reference to these bytes exists. The
            // count is at most MAX_IOVECS.
            unsafe { libc::preadv(fd.as_raw_fd(), iovecs.as_ptr(), count(iovecs), offset) }
        });
        self.written(self.len);
        read
    }

    /// Reads what is cached of a file from `offset` on, at most the list, without waiting for the
    /// host's disk; returns the bytes read.
    ///
    /// # Errors
    /// The error of `preadv2(2)` with `RWF_NOWAIT`: `WouldBlock` if nothing is cached,
    /// `EOPNOTSUPP` if the file system cannot say.
    pub(crate) fn read_cached(&self, fd: BorrowedFd<'_>, offset: u64) -> io::Result<usize> {
        let at = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let iovecs = self.iovecs();
        let (fd, all) = (fd.as_raw_fd(), iovecs.as_ptr());
        // SAFETY: as in `read_at`.
        let read =
            retry(|| unsafe { libc::preadv2(fd, all, count(&iovecs), at, libc::RWF_NOWAIT) });
        self.written(read.as_ref().map_or(self.len, |bytes| *bytes));
        read
    }

    /// Writes all bytes at a file's `offset`.
    ///
    /// # Errors
    /// The error of `pwritev(2)`; `EINTR` is retried. `WriteZero` if the file takes no more bytes.
    pub fn write_at(&self, fd: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
        let done = self.repeat(offset, |iovecs, offset| {
            // SAFETY: each iovec is a piece of memory that a live VolatileSlice of `self` bounds;
            // the kernel only reads them. The count is at most MAX_IOVECS.
            unsafe { libc::pwritev(fd.as_raw_fd(), iovecs.as_ptr(), count(iovecs), offset) }
        })?;
        if done == self.len { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// One `sendmsg(2)`, non-blocking and without SIGPIPE; returns the bytes taken.
    ///
    /// # Errors
    /// The error of `sendmsg(2)`; `WouldBlock` if the socket is full.
    pub fn send(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut iovecs = self.iovecs();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let message = message(&mut iovecs);
        // SAFETY: `message` points to `iovecs`, alive here, whose pieces live VolatileSlices of
        // `self` bound; the kernel only reads them.
        retry(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
    }

    /// One `recvmsg(2)`, non-blocking; returns the bytes received, 0 at the end of the stream.
    ///
    /// # Errors
    /// The error of `recvmsg(2)`; `WouldBlock` if nothing is there.
    pub fn receive(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut iovecs = self.iovecs();
        let mut message = message(&mut iovecs);
        // SAFETY: `message` points to `iovecs`, alive here, whose pieces live VolatileSlices of
        // `self` bound. The kernel writes only into them and into `message`; no Rust reference to
        // these bytes exists. No control buffer is given, so the kernel closes descriptors that a
        // peer sends.
        let received = retry(|| unsafe {
            libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
        });
        self.written(received.as_ref().map_or(0, |bytes| *bytes));
        received
    }

    /// One `writev(2)` of all bytes, which are one packet in at most `MAX_IOVECS` pieces.
    ///
    /// # Errors
    /// The error of `writev(2)`; `WriteZero` if not all bytes were taken.
    pub fn write(&self, to: BorrowedFd<'_>) -> io::Result<()> {
        let iovecs = self.iovecs();
        // SAFETY: each iovec is a piece of memory that a live VolatileSlice of `self` bounds; the
        // kernel only reads them. The count is at most MAX_IOVECS.
        let written =
            retry(|| unsafe { libc::writev(to.as_raw_fd(), iovecs.as_ptr(), count(&iovecs)) })?;
        if written == self.len { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Calls `transfer` with the remaining bytes until all are done or it transfers none.
    fn repeat(
        &self,
        offset: u64,
        transfer: impl Fn(&[libc::iovec], i64) -> isize,
    ) -> io::Result<usize> {
        let mut done = 0;
        while done < self.len {
            let rest = self.window(done, self.len - done).iovecs();
            let at = offset.checked_add(done as u64).and_then(|at| i64::try_from(at).ok());
            let at = at.ok_or(io::ErrorKind::InvalidInput)?;
            match retry(|| transfer(&rest, at))? {
                0 => break,
                n => done += n,
            }
        }
        Ok(done)
    }
}

fn pointer<B: BitmapSlice>(piece: &VolatileSlice<'_, B>) -> *mut libc::c_void {
    // The guard of vm-memory's mmap backend holds nothing. The mapping lives as long as the slice.
    piece.ptr_guard_mut().as_ptr().cast()
}

fn count(iovecs: &[libc::iovec]) -> libc::c_int {
    libc::c_int::try_from(iovecs.len()).unwrap_or(libc::c_int::MAX)
}

fn message(iovecs: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is a plain C structure of numbers and pointers for which all zeroes is a valid
    // value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len();
    message
}

/// Repeats a system call while it fails with `EINTR`.
fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(n) = usize::try_from(call()) {
            return Ok(n);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
