//! The few ioctls of netdevice(7) and rtentry(7) that bring an interface up; netlink would be a dependency.

use rustix::fs::{FileType, Mode};
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked before use.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was returned by socket(2) just above and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data, all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

fn ioctl<T>(socket: &OwnedFd, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: `argument` is an exclusive reference to the structure that each caller pairs with `number`
    // (ifreq for SIOC?IF* and TUNSETIFF); the kernel keeps no pointer after the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), number, std::ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn address(ip: Ipv4Addr) -> libc::sockaddr {
    let [a, b, c, d] = ip.octets().map(|byte| libc::c_char::from_ne_bytes([byte]));
    let family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default();
    // sockaddr_in: two bytes of port, four of address, eight of padding.
    libc::sockaddr { sa_family: family, sa_data: [0, 0, a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0] }
}

/// Sets `IFF_UP`.
///
/// # Errors
/// The system's answer, `ENODEV` when there is no such interface.
pub fn set_up(name: &str) -> io::Result<()> {
    let socket = socket()?;
    let mut request = request(name)?;
    ioctl(&socket, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS filled in this member of the union.
    unsafe { request.ifr_ifru.ifru_flags |= libc::c_short::try_from(libc::IFF_UP).unwrap_or(1) };
    ioctl(&socket, libc::SIOCSIFFLAGS, &mut request)
}

/// Gives the interface one IPv4 address.
///
/// # Errors
/// The system's answer.
pub fn set_address(name: &str, ip: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
    let socket = socket()?;
    let mut request = request(name)?;
    request.ifr_ifru.ifru_addr = address(ip);
    ioctl(&socket, libc::SIOCSIFADDR, &mut request)?;
    request.ifr_ifru.ifru_netmask = address(mask);
    ioctl(&socket, libc::SIOCSIFNETMASK, &mut request)
}

/// Makes an Ethernet interface of this network namespace whose other end is the descriptor
/// (Documentation/networking/tuntap.rst), with the header by which QEMU passes on checksum and segmentation offload.
///
/// # Errors
/// The system's answer.
pub(crate) fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let file = match File::options().read(true).write(true).open("/dev/net/tun") {
        Ok(file) => file,
        // Containers often lack the node, though not the driver: make one of our own (misc device 10, minor 200).
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let node = std::env::temp_dir().join(format!("dayfly-tun.{}", std::process::id()));
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &node,
                FileType::CharacterDevice,
                Mode::RWXU,
                rustix::fs::makedev(10, 200),
            )
            .map_err(|_| e)?;
            let file = File::options().read(true).write(true).open(&node);
            drop(std::fs::remove_file(&node));
            file?
        }
        Err(e) => return Err(e),
    };
    let mut request = request(name)?;
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let fd = OwnedFd::from(file);
    ioctl(&fd, libc::TUNSETIFF, &mut request)?;
    Ok(fd)
}
