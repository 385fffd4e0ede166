//! A clone without a VMM, for tests and benchmarks: a mapping in this process that a pager serves.

use crate::wire::{ToPager, pair, receive_bytes, send, send_bytes};
use dayfly_sys::uffd::Uffd;
use dayfly_units::regions::{self, Region};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;

const PAGE: usize = 4096;

/// An empty memfd for a template.
///
/// # Errors
/// The host has no memory.
pub fn memory(bytes: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = File::from(rustix::fs::memfd_create("template", flags)?);
    memory.set_len(bytes)?;
    Ok(memory)
}

/// A private mapping of a template, and the userfaultfd registered on it.
#[derive(Debug)]
pub struct Guest {
    at: usize,
    bytes: usize,
    /// `None` once it is closed.
    uffd: Option<Uffd>,
    socket: OwnedFd,
}

impl Guest {
    /// Maps `memory`, and announces the clone to the pager at the other end of `daemon`. If a page
    /// cannot be fetched, the pager kills `process` and writes the cause to `exit`.
    ///
    /// # Errors
    /// The kernel refuses, or the pager has ended.
    pub fn new(
        daemon: &OwnedFd,
        memory: &File,
        process: BorrowedFd<'_>,
        exit: &File,
    ) -> io::Result<Self> {
        let bytes = usize::try_from(memory.metadata()?.len()).map_err(io::Error::other)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at =
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE, memory, 0)? };
        let at = at.expose_provenance();
        let (socket, theirs) = pair()?;
        let uffd = Uffd::own()?;
        uffd.register(at as u64, bytes as u64)?;
        let guest = Self { at, bytes, uffd: Some(uffd), socket };
        let message = ToPager::Clone { vm: "0123456789ab".to_owned() };
        send(daemon, &message, &[theirs.as_fd(), process, exit.as_fd()])?;
        Ok(guest)
    }

    /// The mapping as two regions, the upper one first.
    #[must_use]
    pub fn regions(&self) -> Vec<Region> {
        let half = (self.bytes / 2) as u64;
        let region = |offset| Region { host: self.at as u64 + offset, bytes: half, offset };
        vec![region(half), region(0)]
    }

    /// The userfaultfd.
    ///
    /// # Panics
    /// The userfaultfd was closed.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests and benchmarks, which know")]
    pub const fn uffd(&self) -> &OwnedFd {
        self.uffd.as_ref().expect("a guest's userfaultfd").fd()
    }

    /// Closes this process's descriptor of the userfaultfd, as the end of a process does; the pager
    /// keeps its own.
    pub fn close(&mut self) {
        self.uffd = None;
    }

    /// Sends regions and userfaultfd to the pager, and returns its answer; `None` if the pager
    /// refuses.
    ///
    /// # Errors
    /// The pager has ended.
    pub fn register(&self, regions: &[Region], uffd: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
        send_bytes(&self.socket, &regions::encode(regions), &[uffd.as_fd()])?;
        Ok(receive_bytes(&self.socket)?.map(|(bytes, _)| bytes))
    }

    /// The address of byte `byte` of a frame.
    fn place(&self, frame: u32, byte: usize) -> usize {
        let place = frame as usize * PAGE + byte;
        assert!(
            byte < PAGE && place < self.bytes,
            "frame {frame}, byte {byte}: RAM has {} bytes",
            self.bytes
        );
        self.at + place
    }

    /// Reads one byte of a frame; blocks until the page is present.
    #[must_use]
    pub fn touch(&self, frame: u32) -> u8 {
        let from = std::ptr::with_exposed_provenance::<u8>(self.place(frame, 0));
        // SAFETY: the byte lies in our mapping, as `place` asserts.
        unsafe { std::ptr::read_volatile(from) }
    }

    /// Reads a frame; blocks until the page is present.
    #[must_use]
    pub fn read(&self, frame: u32) -> [u8; PAGE] {
        let from = std::ptr::with_exposed_provenance::<u8>(self.place(frame, 0));
        let mut bytes = [0; PAGE];
        // SAFETY: the page lies in our mapping, as `place` asserts, and `bytes` does not.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), PAGE) };
        bytes
    }

    /// Writes one byte of a frame; blocks until the page is present.
    pub fn write(&self, frame: u32, byte: usize, value: u8) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.place(frame, byte));
        // SAFETY: the byte lies in our mapping, as `place` asserts, and nothing has a reference to
        // it.
        unsafe { std::ptr::write_volatile(to, value) };
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and nothing has a reference to it. If munmap fails, the
        // mapping stays.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.at), self.bytes) };
    }
}
