//! Taps: the host's ends of VMs' network devices (Documentation/networking/tuntap.rst).

use super::{NetError, call, file};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

const DEVICE: &str = "/dev/net/tun";
/// Bytes of the header in front of each packet: struct virtio_net_hdr_mrg_rxbuf (virtio 1.2, 5.1.6).
pub const HEADER_BYTES: i32 = 12;
/// Packets that may wait in a tap (TUN_READQ_SIZE of drivers/net/tun.c), and some.
const MOST_QUEUED: usize = 1024;

// linux/if_tun.h
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNGETIFF: libc::c_ulong = 0x8004_54d2;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const IFF_TAP_NO_PI_VNET_HDR: i16 = 0x0002 | 0x1000 | 0x4000;
/// TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6.
const OFFLOADS: libc::c_ulong = 1 | 2 | 4;

/// A tap. It is gone when its last descriptor is closed.
#[derive(Debug)]
pub struct Tap(OwnedFd);

impl Tap {
    /// A new one in the calling thread's namespace, which does not block, with checksums and segmentation left to who reads.
    ///
    /// # Errors
    /// The name is taken or impossible, or the host has none.
    pub fn open(name: &str) -> Result<Self, NetError> {
        let path = Path::new(DEVICE);
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(io::Error::from)
            .map_err(file("opening", path))?;
        let mut request = request(name)?;
        request.ifr_ifru.ifru_flags = IFF_TAP_NO_PI_VNET_HDR;
        // SAFETY: TUNSETIFF reads and writes one ifreq, of which `request` is the only reference.
        done("TUNSETIFF", unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
        let size = HEADER_BYTES;
        // SAFETY: TUNSETVNETHDRSZ reads one int.
        done("TUNSETVNETHDRSZ", unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ, &raw const size) })?;
        // SAFETY: TUNSETOFFLOAD takes flags, not a pointer.
        done("TUNSETOFFLOAD", unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, OFFLOADS) })?;
        Ok(Self(fd))
    }

    /// Another descriptor of it.
    ///
    /// # Errors
    /// There are too many.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// Its number in its namespace, in which the calling thread is.
    pub(super) fn index(&self) -> Result<u32, NetError> {
        // SAFETY: ifreq is plain data, all zeroes is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // SAFETY: TUNGETIFF writes one ifreq, of which `request` is the only reference.
        done("TUNGETIFF", unsafe { libc::ioctl(self.0.as_raw_fd(), TUNGETIFF, &raw mut request) })?;
        // SAFETY: the kernel ended the name with a zero, within the field.
        let index = unsafe { libc::if_nametoindex(request.ifr_name.as_ptr()) };
        if index == 0 {
            Err(NetError::Call("looking for a tap", io::Error::last_os_error()))
        } else {
            Ok(index)
        }
    }

    /// Throws away what waits to be read.
    ///
    /// # Errors
    /// It cannot be read any more.
    pub fn drain(&self) -> Result<(), NetError> {
        // What does not fit is lost with the rest of its packet.
        let mut start = [0; 64];
        for _ in 0..MOST_QUEUED {
            match rustix::io::read(&self.0, &mut start) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(e) => return Err(call("reading a tap")(e)),
            }
        }
        Ok(())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn request(name: &str) -> Result<libc::ifreq, NetError> {
    // SAFETY: ifreq is plain data, all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let fits = (1..request.ifr_name.len()).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/' && b != b'%');
    if !fits {
        return Err(NetError::Name(name.to_owned()));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

fn done(what: &'static str, result: libc::c_int) -> Result<(), NetError> {
    if result < 0 { Err(NetError::Call(what, io::Error::last_os_error())) } else { Ok(()) }
}
