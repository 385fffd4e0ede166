//! Taps: the host ends of VMs' network devices (Documentation/networking/tuntap.rst).

use super::error::{NetError, file};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

const DEVICE: &str = "/dev/net/tun";
/// Bytes of the header before each packet: struct virtio_net_hdr_mrg_rxbuf (virtio 1.2, 5.1.6).
pub const HEADER_BYTES: i32 = 12;

// linux/if_tun.h
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const IFF_TAP_NO_PI_VNET_HDR: i16 = 0x0002 | 0x1000 | 0x4000;
/// TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6.
const OFFLOADS: libc::c_ulong = 1 | 2 | 4;

/// One open description of a tap. A tap has one description at a time, and its queue of packets
/// belongs to the description.
#[derive(Debug)]
pub struct Tap(OwnedFd);

impl Tap {
    /// Opens the tap `name` in the calling thread's network namespace, and makes it if it does not
    /// exist. Reads and writes do not block. The reader handles checksums and segmentation.
    ///
    /// The kernel removes a tap that was made here with its description, unless [`Self::stay`] is
    /// called.
    ///
    /// # Errors
    /// The tap is open elsewhere, the name is invalid, or the host has no tap driver.
    pub fn open(name: &str) -> Result<Self, NetError> {
        let path = Path::new(DEVICE);
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(io::Error::from)
            .map_err(file("opening", path))?;
        let mut request = request(name)?;
        request.ifr_ifru.ifru_flags = IFF_TAP_NO_PI_VNET_HDR;
        // SAFETY: TUNSETIFF reads and writes one ifreq; `request` is the only reference to it.
        done("TUNSETIFF", unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
        let size = HEADER_BYTES;
        // SAFETY: TUNSETVNETHDRSZ reads one int.
        done("TUNSETVNETHDRSZ", unsafe {
            libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ, &raw const size)
        })?;
        // SAFETY: TUNSETOFFLOAD takes flags, not a pointer.
        done("TUNSETOFFLOAD", unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, OFFLOADS) })?;
        Ok(Self(fd))
    }

    /// Lets the tap exist without a description, until [`super::VmNetns::remove_taps`] removes it.
    pub(super) fn stay(&self) -> Result<(), NetError> {
        const ON: libc::c_int = 1;
        // SAFETY: TUNSETPERSIST takes a flag, not a pointer.
        done("TUNSETPERSIST", unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETPERSIST, ON) })
    }
}

impl From<Tap> for OwnedFd {
    fn from(tap: Tap) -> Self {
        tap.0
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

/// The names of the taps that process `pid` has open, from its `fdinfo` (drivers/net/tun.c,
/// `tun_chr_show_fdinfo`).
///
/// # Errors
/// The folder of its descriptors cannot be read: `NotFound` if there is no such process.
pub fn taps_of(pid: u32) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // The descriptor may have been closed meanwhile.
        let Ok(text) = std::fs::read_to_string(entry?.path()) else { continue };
        names
            .extend(text.lines().filter_map(|line| Some(line.strip_prefix("iff:")?.trim().into())));
    }
    Ok(names)
}
