//! The ioctls of netdevice(7) and route(7) that bring an interface up, and the rtnetlink(7) message
//! that moves it into another network namespace. A netlink library would be a further dependency of
//! the init.

use rustix::fs::{FileType, Mode};
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked before use.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was returned by socket(2) just above, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data, for which all zeroes is a valid value.
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
    // SAFETY: `argument` is an exclusive reference to the structure that each caller pairs with
    // `number` (ifreq for SIOC?IF* and TUNSETIFF, rtentry for SIOCADDRT). The kernel keeps no
    // pointer after the call.
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
/// The system's error; `ENODEV` if there is no such interface.
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
/// The system's error.
pub fn set_address(name: &str, ip: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
    let socket = socket()?;
    let mut request = request(name)?;
    request.ifr_ifru.ifru_addr = address(ip);
    ioctl(&socket, libc::SIOCSIFADDR, &mut request)?;
    request.ifr_ifru.ifru_netmask = address(mask);
    ioctl(&socket, libc::SIOCSIFNETMASK, &mut request)
}

/// Sets the default route, which leads to `gateway` through the interface.
///
/// # Errors
/// The system's error; `ENETUNREACH` if `gateway` is not on the interface's link.
pub fn set_gateway(name: &str, gateway: Ipv4Addr) -> io::Result<()> {
    let socket = socket()?;
    let device = std::ffi::CString::new(name)?;
    // SAFETY: rtentry is plain data, for which all zeroes is a valid value.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // The kernel reads the name during the call only, and does not write it (route(7)).
    route.rt_dev = device.as_ptr().cast_mut();
    ioctl(&socket, libc::SIOCADDRT, &mut route)
}

/// The name of the Ethernet interface with this MAC in the network namespace of `/sys`.
///
/// # Errors
/// The system's error; `NotFound` if there is none.
pub fn interface_of(mac: [u8; 6]) -> io::Result<String> {
    let wanted = mac.map(|byte| format!("{byte:02x}")).join(":");
    for entry in std::fs::read_dir("/sys/class/net")? {
        let entry = entry?;
        let address = std::fs::read_to_string(entry.path().join("address"));
        if address.is_ok_and(|address| address.trim() == wanted) {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    let what = format!("no interface with MAC {wanted}");
    Err(io::Error::new(io::ErrorKind::NotFound, what))
}

/// Moves interfaces out of the network namespace in which the value was made. The calling thread
/// may be in another namespace by then, because a socket stays in its first namespace.
#[derive(Debug)]
pub struct InterfaceMover(OwnedFd);

impl InterfaceMover {
    /// Makes a mover for the interfaces of the calling thread's network namespace.
    ///
    /// # Errors
    /// The system's error.
    pub fn new() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers; the result is checked before use.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was returned by socket(2) just above, and no other code has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Moves the interface into `namespace` (an open `/proc/…/ns/net`). The interface arrives down
    /// and without an address.
    ///
    /// # Errors
    /// The system's error; `ENODEV` if there is no such interface.
    pub fn move_to(&self, name: &str, namespace: impl AsFd) -> io::Result<()> {
        let message = move_message(name, namespace.as_fd().as_raw_fd())?;
        rustix::net::send(&self.0, &message, rustix::net::SendFlags::empty())?;
        let mut answer = [0; 4096];
        let length = rustix::io::read(&self.0, &mut answer)?;
        match acknowledged(answer.get(..length).unwrap_or_default()) {
            Some(0) => Ok(()),
            Some(error) => Err(io::Error::from_raw_os_error(-error)),
            None => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "netlink: expected an acknowledgement",
            )),
        }
    }
}

/// The message `RTM_NEWLINK` for the interface `name` with `IFLA_NET_NS_FD` (rtnetlink(7),
/// linux/if_link.h).
fn move_message(name: &str, namespace: i32) -> io::Result<Vec<u8>> {
    const RTM_NEWLINK: u16 = 16;
    const NLM_F_REQUEST_ACK: u16 = 1 | 4;
    const IFLA_IFNAME: u16 = 3;
    const IFLA_NET_NS_FD: u16 = 28;
    if name.is_empty() || name.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut message = vec![0; 4];
    message.extend_from_slice(&RTM_NEWLINK.to_ne_bytes());
    message.extend_from_slice(&NLM_F_REQUEST_ACK.to_ne_bytes());
    // Sequence number, port; then struct ifinfomsg, in which index 0 means "by name".
    message.extend_from_slice(&[0; 8 + 16]);
    let mut attribute = |kind: u16, value: &[u8]| {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        message.extend_from_slice(&length.to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(value);
        message.resize(message.len().next_multiple_of(4), 0);
    };
    attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
    attribute(IFLA_NET_NS_FD, &namespace.to_ne_bytes());
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    message[..4].copy_from_slice(&length.to_ne_bytes());
    Ok(message)
}

/// The error number of an `NLMSG_ERROR`, 0 for success.
fn acknowledged(answer: &[u8]) -> Option<i32> {
    const NLMSG_ERROR: u16 = 2;
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let error = i32::from_ne_bytes(answer.get(16..20)?.try_into().ok()?);
    (kind == NLMSG_ERROR && error <= 0).then_some(error)
}

/// Makes a tap interface in this network namespace and returns its descriptor
/// (Documentation/networking/tuntap.rst). Packets carry the header in which QEMU passes checksum
/// and segmentation offload.
///
/// # Errors
/// The system's error.
pub fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let file = match File::options().read(true).write(true).open("/dev/net/tun") {
        Ok(file) => file,
        // Containers often lack the node although the driver is there, so a temporary node is made
        // (misc device 10, minor 200).
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::UnshareFlags;
    use std::io::Read;

    /// Runs a closure in a thread with a new network namespace.
    fn in_new_namespace<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: NEWNET leaves the table of descriptors alone.
                unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
                run()
            });
            thread.join().unwrap()
        })
    }

    fn has(name: &str) -> bool {
        let mut text = String::new();
        File::open("/proc/thread-self/net/dev").unwrap().read_to_string(&mut text).unwrap();
        text.lines().any(|line| line.trim_start().starts_with(&format!("{name}:")))
    }

    #[test]
    fn an_interface_moves_and_what_listens_there_is_not_where_it_was() {
        assert!(rustix::process::geteuid().is_root(), "makes network namespaces: run as root");
        in_new_namespace(|| {
            let _tap = open_tap("moved").unwrap();
            let mover = InterfaceMover::new().unwrap();
            let listener = in_new_namespace(|| {
                assert!(!has("moved"));
                mover.move_to("moved", File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
                assert!(has("moved"));
                set_address("moved", Ipv4Addr::new(10, 9, 8, 7), Ipv4Addr::new(255, 255, 255, 0))
                    .unwrap();
                set_up("moved").unwrap();
                set_up("lo").unwrap();
                let listener = std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, 1024)).unwrap();
                std::net::TcpStream::connect((Ipv4Addr::new(10, 9, 8, 7), 1024)).unwrap();
                listener
            });
            // The thread of the namespace has ended; its listener and interface still exist.
            listener.accept().unwrap();
            assert!(!has("moved"));
            set_up("lo").unwrap();
            let tcp = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
            assert_eq!(tcp.lines().count(), 1, "{tcp}");
            for address in [Ipv4Addr::new(10, 9, 8, 7), Ipv4Addr::LOCALHOST] {
                let error = std::net::TcpStream::connect((address, 1024)).unwrap_err();
                let expected =
                    [io::ErrorKind::ConnectionRefused, io::ErrorKind::NetworkUnreachable];
                assert!(expected.contains(&error.kind()), "{address}: {error}");
            }
        });
    }

    #[test]
    fn an_interface_that_is_not_there_is_an_error() {
        let namespace = File::open("/proc/thread-self/ns/net").unwrap();
        let mover = InterfaceMover::new().unwrap();
        let error = mover.move_to("no-such", &namespace).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert!(mover.move_to("", &namespace).is_err());
        assert!(mover.move_to(&"x".repeat(16), &namespace).is_err());
    }

    #[test]
    fn answers_that_are_no_acknowledgement_are_told_apart() {
        let good =
            [&36u32.to_ne_bytes()[..], &2u16.to_ne_bytes(), &[0; 10], &0i32.to_ne_bytes()].concat();
        assert_eq!(acknowledged(&good), Some(0));
        for length in 0..good.len() {
            assert_eq!(acknowledged(&good[..length]), None, "{length}");
        }
        let mut other = good;
        other[4] = 3;
        assert_eq!(acknowledged(&other), None);
    }
}
