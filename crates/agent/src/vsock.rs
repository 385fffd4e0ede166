//! AF_VSOCK: the agent's listener and its one call to the host.
//!
//! rustix has no address type for it, so addresses are libc's `sockaddr_vm` (linux/vm_sockets.h).

use crate::kernel::last_errno;
use crate::server::Listener;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The host's context identifier, `VMADDR_CID_HOST`.
const HOST: u32 = libc::VMADDR_CID_HOST;

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: sockaddr_vm is plain integers, for which zero bytes are a value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or(40);
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

fn length() -> libc::socklen_t {
    // 16 bytes (linux/vm_sockets.h): fits in any socklen_t.
    libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).unwrap_or(16)
}

fn socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::VSOCK, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// A listening vsock socket that only the host is let in by.
#[derive(Debug)]
pub struct VsockListener {
    fd: OwnedFd,
    /// Whether a refusal was reported: whoever is refused could fill the console with more of them.
    said: AtomicBool,
}

impl VsockListener {
    /// Listens on `port` of every context identifier that this guest has or gets.
    ///
    /// # Errors
    /// What the kernel says: `AFNOSUPPORT` without the vsock module, `ADDRINUSE`.
    pub fn bind(port: u32) -> Result<Self, Errno> {
        let fd = socket()?;
        let address = address(libc::VMADDR_CID_ANY, port);
        // SAFETY: `address` is a whole sockaddr_vm, whose length is passed.
        if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length()) } != 0 {
            return Err(last_errno());
        }
        rustix::net::listen(&fd, 128)?;
        Ok(Self { fd, said: AtomicBool::new(false) })
    }
}

impl Listener for VsockListener {
    /// Waits for the host. A program inside the guest that comes by the loopback transport is turned away:
    /// whoever reaches this port acts as root.
    fn accept(&self) -> io::Result<OwnedFd> {
        loop {
            let mut peer = address(0, 0);
            let mut length = length();
            let into = (&raw mut peer).cast();
            // SAFETY: accept4 writes at most `length` bytes to `peer`, which has that size.
            let fd = unsafe { libc::accept4(self.fd.as_raw_fd(), into, &raw mut length, libc::SOCK_CLOEXEC) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: accept4 gave us this descriptor and nobody else has it.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            if peer.svm_cid == HOST {
                return Ok(fd);
            }
            if !self.said.swap(true, Ordering::Relaxed) {
                crate::say!("vsock: refused context {}: expected {HOST}, the host (said once)", peer.svm_cid);
            }
        }
    }
}

/// Connects to `port` on the host. The kernel gives up after two seconds without an answer.
///
/// # Errors
/// What the kernel says: `CONNRESET` where nobody listens, `NODEV` without a transport.
pub fn connect_host(port: u32) -> Result<OwnedFd, Errno> {
    let fd = socket()?;
    let address = address(HOST, port);
    // SAFETY: `address` is a whole sockaddr_vm, whose length is passed.
    if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length()) } != 0 {
        return Err(last_errno());
    }
    Ok(fd)
}
