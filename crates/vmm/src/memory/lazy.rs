//! RAM that has not arrived yet: a template's memfd that a pager fills while clones of it run.
//!
//! A thread that touches a missing page waits in the VMM's userfaultfd. The pager has a copy of
//! that descriptor; it puts the page into the memfd and wakes the thread. When all pages are
//! present, the pager removes the registration. The VMM keeps its descriptor open all the same: if
//! the last copy were closed while pages are missing, they would read as zero. If a pager dies, its
//! waiters go on waiting, and the daemon ends the VM.

use super::Part;
use crate::arch::layout;
use dayfly_sys::{fdwire, uffd::Uffd};
use dayfly_units::regions::{self, Region, SERVED};
use rustix::fs::SealFlags;
use rustix::net::{RecvFlags, recv};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};

/// Makes the pager at the other end of `pager` responsible for `parts`. These are all parts of RAM
/// that are mapped from its memfd, and they are untouched.
///
/// # Errors
/// When the pager has ended, or refuses the parts.
pub fn serve(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    parts: &[Part],
    uffd: &Uffd,
    pager: &OwnedFd,
) -> io::Result<()> {
    for part in parts {
        uffd.register(part.host, part.len)?;
    }
    let region = |(guest, offset, bytes)| {
        let host = memory.get_host_address(guest).map_err(io::Error::other)?.addr() as u64;
        Ok(Region { host, bytes, offset })
    };
    let served: Vec<Region> =
        layout::ram(memory_bytes).into_iter().map(region).collect::<io::Result<_>>()?;
    let packet = regions::encode(&served);
    fdwire::send(pager, &packet, &[uffd.as_fd()])?;
    let mut answer = [0_u8; 32];
    let (got, _) = rustix::io::retry_on_intr(|| recv(pager, &mut answer[..], RecvFlags::empty()))?;
    match &answer[..got] {
        SERVED => Ok(()),
        [] => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the pager closed the connection")),
        other => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("expected {}, got {}", SERVED.escape_ascii(), other.escape_ascii()),
        )),
    }
}

/// Whether all of a template's memory is present: the pager has then sealed the memfd. Files that
/// no pager fills also count as whole, because they are sealed memfds or regular files.
#[must_use]
pub fn is_whole(file: &File) -> bool {
    let seals = rustix::fs::fcntl_get_seals(file);
    seals.is_ok_and(|seals| seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE))
}
