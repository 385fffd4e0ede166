//! The program's command line.

use crate::streams::MAX_STREAMS;
use rustix::fd::{FromRawFd, IntoRawFd, OwnedFd};
use rustix::io::{FdFlags, fcntl_setfd};
use std::net::Ipv4Addr;

/// How the program is called.
pub const USAGE: &str = "usage: dayfly-relay --guest ADDRESS --vmm FD --connections N --flows N \
                         [--user UID] [--buffer BYTES] {tcp|udp|framed}:FD:PORT...\n       \
                         dayfly-relay --streams FD --vmm FD --most N [--user UID]";

/// Most connections, and most flows.
pub const MOST: usize = 1024;
/// Most ports.
pub const MOST_PORTS: usize = 256;

/// What comes to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
    /// Connections that carry datagrams.
    Framed,
}

/// A published port.
#[derive(Debug)]
pub struct Port {
    /// What comes to it.
    pub kind: Kind,
    /// The listener, or the bound socket.
    pub socket: OwnedFd,
    /// The guest's port.
    pub guest_port: u16,
}

/// Bounds, in numbers that the VM's limits allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most connections.
    pub connections: usize,
    /// Most flows.
    pub flows: usize,
    /// Size of each buffer of a socket; `None`: as the kernel chooses.
    pub buffer_bytes: Option<usize>,
}

/// The command line.
#[derive(Debug)]
pub struct Arguments {
    /// Address of the guest.
    pub guest: Ipv4Addr,
    /// Readable when the VM has ended.
    pub vmm: OwnedFd,
    /// Bounds.
    pub limits: Limits,
    /// The user to become.
    pub user: Option<u32>,
    /// The ports.
    pub ports: Vec<Port>,
}

/// The command line of a process of streams.
#[derive(Debug)]
pub struct StreamArguments {
    /// The socket on which streams are handed over.
    pub control: OwnedFd,
    /// Readable when the VM has ended.
    pub vmm: OwnedFd,
    /// Most streams.
    pub most: usize,
    /// The user to become.
    pub user: Option<u32>,
}

/// What the program is called for.
#[derive(Debug)]
pub enum Called {
    /// Published ports.
    ForPorts(Arguments),
    /// Streams.
    ForStreams(StreamArguments),
}

/// Reads the command line, without the program's name. The caller passes descriptors that nothing
/// else in this process uses.
///
/// # Errors
/// What is wrong, and [`USAGE`].
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Called, String> {
    let (mut guest, mut vmm, mut user, mut buffer_bytes) = (None, None, None, None);
    let (mut control, mut most) = (None, None);
    let (mut connections, mut flows, mut ports) = (None, None, Vec::new());
    let mut words = arguments.into_iter();
    while let Some(name) = words.next() {
        if !name.starts_with("--") {
            ports.push(port(&name)?);
            continue;
        }
        let value = words.next().ok_or_else(|| format!("{name}: expected a value\n{USAGE}"))?;
        match name.as_str() {
            "--guest" => guest = Some(number::<Ipv4Addr>(&name, &value, "an IPv4 address")?),
            "--vmm" => vmm = Some(descriptor(&name, &value)?),
            "--streams" => control = Some(descriptor(&name, &value)?),
            "--most" => most = Some(bounded(&name, &value, 1..=MAX_STREAMS)?),
            "--connections" => connections = Some(bounded(&name, &value, 1..=MOST)?),
            "--flows" => flows = Some(bounded(&name, &value, 1..=MOST)?),
            "--buffer" => buffer_bytes = Some(bounded(&name, &value, 4096..=(1 << 20))?),
            "--user" => user = Some(number::<u32>(&name, &value, "a user's number")?),
            _ => return Err(format!("{name:?}: unknown option\n{USAGE}")),
        }
    }
    let missing = |what: &str| format!("expected {what}\n{USAGE}");
    let user = user.filter(|user| *user != u32::MAX);
    if let Some(control) = control {
        let vmm = vmm.ok_or_else(|| missing("--vmm"))?;
        let other = guest.is_some() || connections.is_some() || flows.is_some();
        if other || buffer_bytes.is_some() || !ports.is_empty() {
            let text = "--streams: expected only --vmm, --most and --user beside it";
            return Err(format!("{text}\n{USAGE}"));
        }
        let most = most.ok_or_else(|| missing("--most"))?;
        return Ok(Called::ForStreams(StreamArguments { control, vmm, most, user }));
    }
    if most.is_some() {
        return Err(format!("--most: expected --streams beside it\n{USAGE}"));
    }
    if !(1..=MOST_PORTS).contains(&ports.len()) {
        return Err(format!("expected 1 to {MOST_PORTS} ports, got {}\n{USAGE}", ports.len()));
    }
    Ok(Called::ForPorts(Arguments {
        guest: guest.ok_or_else(|| missing("--guest"))?,
        vmm: vmm.ok_or_else(|| missing("--vmm"))?,
        limits: Limits {
            connections: connections.ok_or_else(|| missing("--connections"))?,
            flows: flows.ok_or_else(|| missing("--flows"))?,
            buffer_bytes,
        },
        user,
        ports,
    }))
}

fn number<T: std::str::FromStr>(name: &str, value: &str, what: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name}: expected {what}, got {value:?}"))
}

fn bounded(
    name: &str,
    value: &str,
    range: std::ops::RangeInclusive<usize>,
) -> Result<usize, String> {
    let got = value.parse().ok().filter(|got| range.contains(got));
    got.ok_or_else(|| {
        format!("{name}: expected {} to {}, got {value:?}", range.start(), range.end())
    })
}

fn port(word: &str) -> Result<Port, String> {
    let wrong = || format!("{word:?}: expected {{tcp|udp|framed}}:FD:PORT\n{USAGE}");
    let mut parts = word.split(':');
    let kind = match parts.next() {
        Some("tcp") => Kind::Tcp,
        Some("udp") => Kind::Udp,
        Some("framed") => Kind::Framed,
        _ => return Err(wrong()),
    };
    let (Some(fd), Some(guest_port), None) = (parts.next(), parts.next(), parts.next()) else {
        return Err(wrong());
    };
    let guest_port = guest_port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
    Ok(Port { kind, socket: descriptor(word, fd)?, guest_port })
}

/// An inherited descriptor.
fn descriptor(name: &str, value: &str) -> Result<OwnedFd, String> {
    let wrong = || format!("{name}: expected an open descriptor above 2, got {value:?}");
    let number = value.parse::<i32>().ok().filter(|n| *n > 2).ok_or_else(wrong)?;
    // SAFETY: the process that starts this program passes the descriptor for this use only. If it
    // is not open, the next call fails, and the number is not closed.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if fcntl_setfd(&fd, FdFlags::CLOEXEC).is_ok() {
        return Ok(fd);
    }
    let _ = fd.into_raw_fd();
    Err(wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> String {
        std::fs::File::open("/").unwrap().into_raw_fd().to_string()
    }

    fn called(line: &str) -> Result<Called, String> {
        parse(line.split(' ').map(str::to_owned))
    }

    fn parsed(line: &str) -> Result<Arguments, String> {
        called(line).map(|called| match called {
            Called::ForPorts(arguments) => arguments,
            Called::ForStreams(other) => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_command_line_for_streams() {
        let line = || format!("--streams {} --vmm {} --most 9", fd(), fd());
        for (more, user) in [("", None), (" --user 7", Some(7)), (" --user 4294967295", None)] {
            let Ok(Called::ForStreams(streams)) = called(&format!("{}{more}", line())) else {
                panic!("{more}")
            };
            assert_eq!((streams.user, streams.most), (user, 9));
        }
        for more in ["--guest 10.0.0.1", "--connections 1", "--flows 1", "--buffer 4096"] {
            let wrong = called(&format!("{} {more}", line())).unwrap_err();
            assert!(wrong.starts_with("--streams: expected only"), "{wrong}");
        }
        let wrong = called(&format!("{} tcp:{}:1", line(), fd())).unwrap_err();
        assert!(wrong.starts_with("--streams: expected only"), "{wrong}");
        let wrong = called(&format!("--streams {}", fd())).unwrap_err();
        assert!(wrong.starts_with("expected --vmm"), "{wrong}");
        let wrong = called(&format!("--streams {} --vmm {}", fd(), fd())).unwrap_err();
        assert!(wrong.starts_with("expected --most"), "{wrong}");
        for most in ["0", "129"] {
            let wrong = called(&format!("--most {most}")).unwrap_err();
            assert!(wrong.starts_with("--most: expected 1 to 128"), "{wrong}");
        }
        let wrong = called("--streams 1").unwrap_err();
        assert!(wrong.starts_with("--streams: expected an open descriptor"), "{wrong}");
    }

    const BOUNDS: &str = "--connections 9 --flows 8";

    #[test]
    fn a_whole_command_line() {
        let (vmm, tcp, udp) = (fd(), fd(), fd());
        let line = format!("--guest 10.88.0.2 --vmm {vmm} {BOUNDS} --user 7 --buffer 8192");
        let all = parsed(&format!("{line} tcp:{tcp}:80 udp:{udp}:53")).unwrap();
        assert_eq!((all.guest, all.user), (Ipv4Addr::new(10, 88, 0, 2), Some(7)));
        let limits = Limits { connections: 9, flows: 8, buffer_bytes: Some(8192) };
        assert_eq!(all.limits, limits);
        let ports: Vec<_> = all.ports.iter().map(|port| (port.kind, port.guest_port)).collect();
        assert_eq!(ports, [(Kind::Tcp, 80), (Kind::Udp, 53)]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |line: &str| parsed(line).unwrap_err();
        assert!(wrong("--guest ::1").starts_with("--guest: expected an IPv4 address"));
        assert!(wrong("--vmm 2").starts_with("--vmm: expected an open descriptor"));
        assert!(wrong("--vmm 99999").starts_with("--vmm: expected an open descriptor"));
        assert!(wrong("--connections 0").starts_with("--connections: expected 1 to 1024"));
        assert!(wrong("--flows 1025").starts_with("--flows: expected 1 to 1024"));
        assert!(wrong("--buffer 1").starts_with("--buffer: expected 4096 to"));
        assert!(wrong("--most 1").starts_with("--most: expected --streams"));
        assert!(wrong("--what 1").contains("unknown option"));
        assert!(wrong("--user").contains("expected a value"));
        assert!(wrong("tcp:3").contains("expected {tcp|udp|framed}"));
        assert!(wrong("sctp:3:1").contains("expected {tcp|udp|framed}"));
        assert!(wrong(&format!("tcp:{}:0", fd())).contains("expected {tcp|udp|framed}"));
        assert!(wrong(&format!("--vmm {} {BOUNDS}", fd())).starts_with("expected 1 to 256 ports"));
        assert!(wrong(&format!("tcp:{}:1", fd())).starts_with("expected --guest"));
    }
}
