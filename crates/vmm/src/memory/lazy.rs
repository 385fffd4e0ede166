//! RAM that has not arrived: a template's memfd that a pager fills while clones of it run.
//!
//! Who touches a page that is missing waits in the VMM's userfaultfd; the pager, which has a copy of that, puts the page into the memfd and
//! wakes him. When all is there the pager takes the registration back. The descriptor stays open here all the same: where the last one
//! is closed while pages are missing, they read as zeroes; so whoever waits when a pager dies waits on, and the daemon ends the VM.

use super::{Part, uffd};
use crate::arch::layout;
use dayfly_units::regions::{self, Region, SERVED};
use rustix::fs::SealFlags;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};

pub use uffd::open;
pub(crate) use uffd::{UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_WAKE};

/// From now on the pager at the other end of `pager` answers for `parts`, which are all of RAM that is mapped from its memfd and which
/// nobody has touched.
///
/// # Errors
/// It is gone, or does not take them.
pub fn serve(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    parts: &[Part],
    uffd: &OwnedFd,
    pager: &OwnedFd,
) -> io::Result<()> {
    for part in parts {
        uffd::register(uffd, part.host, part.len)?;
    }
    let region = |(guest, offset, bytes)| {
        let host = memory.get_host_address(guest).map_err(io::Error::other)?.addr() as u64;
        Ok(Region { host, bytes, offset })
    };
    let told: Vec<Region> = layout::ram(memory_bytes).into_iter().map(region).collect::<io::Result<_>>()?;
    let packet = regions::encode(&told);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [uffd.as_fd()];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    sendmsg(pager, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)?;
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

/// Whether all of a template's memory is there: its pager has sealed it. So is what was never lazy, a memfd that was saved, or a file.
#[must_use]
pub fn is_whole(file: &File) -> bool {
    let seals = rustix::fs::fcntl_get_seals(file);
    seals.is_ok_and(|seals| seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE))
}
