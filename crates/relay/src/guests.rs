//! The addresses that this process may connect to, which nothing can change any more.
//!
//! A filter of system calls sees the arguments of connect(2), but not the address behind the
//! pointer. So all addresses are in pages that are made read-only before the filter is installed,
//! and the filter allows only pointers to entries of this table. The filter has no call that
//! changes a mapping (mmap, munmap, mprotect, mremap, madvise), so the table stays as it is,
//! whatever runs in the process.

use rustix::fd::OwnedFd;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

/// Bytes of an entry, a `struct sockaddr_in`.
pub const ENTRY_BYTES: usize = 16;
const _: () = assert!(ENTRY_BYTES == size_of::<libc::sockaddr_in>());
/// As the kernel takes it.
const ENTRY_LENGTH: libc::socklen_t = 16;
/// AF_INET.
const FAMILY: libc::sa_family_t = 2;

/// The table of addresses.
#[derive(Debug)]
pub struct Guests {
    /// In pages that are read-only for the rest of the process's life.
    entries: &'static [libc::sockaddr_in],
}

impl Guests {
    /// A table of these ports of `guest`, in their order.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(guest: Ipv4Addr, ports: &[u16]) -> io::Result<Self> {
        let bytes = (ports.len() * ENTRY_BYTES).max(1);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }?;
        let first = start.cast::<libc::sockaddr_in>();
        for (at, port) in ports.iter().enumerate() {
            let entry = libc::sockaddr_in {
                sin_family: FAMILY,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(guest).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: `at` is below the number of entries for which the mapping was made; nothing
            // else uses the mapping yet.
            unsafe { first.add(at).write(entry) };
        }
        // SAFETY: the mapping that was made above. It has as many entries as there are ports, page
        // alignment, and it is never unmapped, nor written to after this.
        let entries = unsafe {
            mprotect(start, bytes, MprotectFlags::READ)?;
            std::slice::from_raw_parts(first, ports.len())
        };
        Ok(Self { entries })
    }

    /// The pointers to the first entry and to the last one.
    #[must_use]
    pub fn pointers(&self) -> (u64, u64) {
        let first = self.entries.as_ptr() as u64;
        (first, first + (self.entries.len().saturating_sub(1) * ENTRY_BYTES) as u64)
    }

    /// Connects a non-blocking socket to entry `at`, or begins to.
    ///
    /// # Errors
    /// The host does not reach the guest, or there is no such entry.
    pub fn connect(&self, socket: &OwnedFd, at: usize) -> io::Result<()> {
        let entry = self.entries.get(at).ok_or(io::ErrorKind::InvalidInput)?;
        let entry = std::ptr::from_ref(entry).cast::<libc::sockaddr>();
        // SAFETY: the kernel reads one whole entry of the table.
        let result = unsafe { libc::connect(socket.as_raw_fd(), entry, ENTRY_LENGTH) };
        match io::Error::last_os_error() {
            _ if result == 0 => Ok(()),
            e if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(()),
            e => Err(e),
        }
    }
}
