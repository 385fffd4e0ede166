//! AF_VSOCK: the agent's listener and its calls to the host.
//!
//! rustix has no vsock address type, so addresses are libc's `sockaddr_vm` (linux/vm_sockets.h).

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
    // SAFETY: sockaddr_vm is plain integers; all-zero is a valid value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or(40);
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

fn length() -> libc::socklen_t {
    // 16 bytes (linux/vm_sockets.h), which fits any socklen_t.
    libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).unwrap_or(16)
}

fn socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::VSOCK, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// A listening vsock socket that only accepts the host.
#[derive(Debug)]
pub struct VsockListener {
    fd: OwnedFd,
    /// Whether a refusal was reported. Only the first one is, because refused programs could fill
    /// the console.
    said: AtomicBool,
}

impl VsockListener {
    /// Listens on `port` of every context identifier that this guest has or gets.
    ///
    /// # Errors
    /// The kernel's error: `AFNOSUPPORT` without the vsock module, `ADDRINUSE`.
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
    /// Waits for the host. Refuses programs inside the guest, which can connect by the loopback
    /// transport, because every client of this port acts as root.
    fn accept(&self) -> io::Result<OwnedFd> {
        loop {
            let mut peer = address(0, 0);
            let mut length = length();
            let into = (&raw mut peer).cast();
            // SAFETY: accept4 writes at most `length` bytes to `peer`, which has that size.
            let fd = unsafe {
                libc::accept4(self.fd.as_raw_fd(), into, &raw mut length, libc::SOCK_CLOEXEC)
            };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: accept4 returned this descriptor, and nothing else owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            if peer.svm_cid == HOST {
                return Ok(fd);
            }
            if !self.said.swap(true, Ordering::Relaxed) {
                crate::say!(
                    "vsock: refused context {}: expected {HOST}, the host (said once)",
                    peer.svm_cid
                );
            }
        }
    }
}

/// Local ports for calls to the host. Only root may bind them (the kernel reserves ports below
/// 1024), so the VMM knows that no other program of the guest calls.
const ROOT_PORTS: std::ops::Range<u32> = 512..1024;

/// A socket bound to one of [`ROOT_PORTS`].
fn root_socket() -> Result<OwnedFd, Errno> {
    let mut random = [0; 4];
    // A random start avoids the port of a connection that just ended.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK);
    let count = ROOT_PORTS.end - ROOT_PORTS.start;
    let fd = socket()?;
    for n in 0..count {
        let port = ROOT_PORTS.start + (u32::from_le_bytes(random) % count + n) % count;
        let address = address(libc::VMADDR_CID_ANY, port);
        // SAFETY: `address` is a whole sockaddr_vm, whose length is passed.
        if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length()) } == 0 {
            return Ok(fd);
        }
        match last_errno() {
            Errno::ADDRINUSE => {}
            errno => return Err(errno),
        }
    }
    Err(Errno::ADDRINUSE)
}

/// Connects to `port` on the host, from a port that only root may bind. The kernel gives up after
/// two seconds without an answer.
///
/// # Errors
/// The kernel's error: `CONNRESET` if nothing listens, `NODEV` without a transport, `ADDRINUSE` if
/// all ports are taken.
pub fn connect_host(port: u32) -> Result<OwnedFd, Errno> {
    let fd = root_socket()?;
    let address = address(HOST, port);
    // SAFETY: `address` is a whole sockaddr_vm, whose length is passed.
    if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length()) } != 0 {
        return Err(last_errno());
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The port to which a socket is bound.
    fn port(fd: &OwnedFd) -> u32 {
        let mut own = address(0, 0);
        let mut length = length();
        // SAFETY: getsockname writes at most `length` bytes to `own`, which has that size.
        let got =
            unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut own).cast(), &raw mut length) };
        assert_eq!(got, 0, "{}", io::Error::last_os_error());
        own.svm_port
    }

    #[test]
    fn calls_to_the_host_come_from_ports_that_no_other_user_may_have() {
        assert!(rustix::process::geteuid().is_root(), "this test has to run as root");
        let several: Vec<OwnedFd> = (0..20).map(|_| root_socket().unwrap()).collect();
        let ports: std::collections::BTreeSet<u32> = several.iter().map(port).collect();
        assert!(
            ports.len() == 20 && ports.iter().all(|port| ROOT_PORTS.contains(port)),
            "{ports:?}"
        );
        let unprivileged = std::thread::spawn(|| {
            const UNPRIVILEGED: libc::uid_t = 65_534;
            // SAFETY: the bare system call changes only the user of this thread (credentials(7)),
            // which ends at once.
            let changed = unsafe {
                libc::syscall(libc::SYS_setresuid, UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
            };
            assert_eq!(changed, 0, "{}", io::Error::last_os_error());
            root_socket().map(drop)
        });
        assert_eq!(
            unprivileged.join().unwrap(),
            Err(Errno::ACCESS),
            "net/vmw_vsock/af_vsock.c: LAST_RESERVED_PORT"
        );
    }
}
