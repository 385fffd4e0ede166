//! The network of the user's host, as the calling thread's network namespace has it.

use super::filter::Range;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use std::fs;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Bits of `nl_groups` (linux/rtnetlink.h): links, IPv4 addresses, IPv4 routes.
const GROUPS: u32 = 1 | 1 << 4 | 1 << 6;
/// Interval of a look at the host's resolvers, whose file announces no change to this socket.
const TICK: Duration = Duration::from_secs(5);
/// An address of the internet (RFC 5737) that stands for all that only a default route leads to.
const FAR: (Ipv4Addr, u16) = (Ipv4Addr::new(203, 0, 113, 1), 9);

/// What the host has.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Host {
    /// The ranges of the host's addresses, loopback included.
    pub(super) own: Vec<Range>,
    /// Whether it has a route to any other host.
    pub(super) routes: bool,
    /// Its IPv4 resolvers, in the order of resolv.conf(5). The uplink's programs use no others.
    pub(super) resolvers: Vec<Ipv4Addr>,
}

impl Host {
    /// Reads the host's state.
    ///
    /// # Errors
    /// The host's addresses cannot be read.
    pub(super) fn read() -> io::Result<Self> {
        let local = fs::read_to_string("/proc/thread-self/net/fib_trie")?;
        let routes = fs::read_to_string("/proc/thread-self/net/route")?;
        let routes = has_route(&routes) || far_is_routed();
        Ok(Self { own: own(&local), routes, resolvers: resolvers() })
    }

    /// The state after a time in which the kernel has reported no change. Only the resolvers are
    /// read, because a router's tables are long.
    pub(super) fn later(self) -> Self {
        Self { resolvers: resolvers(), ..self }
    }
}

fn resolvers() -> Vec<Ipv4Addr> {
    listed(&fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
}

/// The ranges of type LOCAL in the text of /proc/net/fib_trie: `|-- ADDRESS` in one line, `/BITS
/// SCOPE TYPE` in those below. They include addresses that only a route makes local.
fn own(fib_trie: &str) -> Vec<Range> {
    let (mut address, mut ranges) = (None, Vec::new());
    for line in fib_trie.lines() {
        let line = line.trim();
        if let Some(leaf) = line.strip_prefix("|-- ") {
            address = leaf.parse::<Ipv4Addr>().ok();
        } else if let (Some(address), Some(rest)) = (address, line.strip_prefix('/'))
            && let [bits, _, "LOCAL"] = rest.split_whitespace().collect::<Vec<_>>()[..]
        {
            ranges.extend(bits.parse().ok().and_then(|bits| Range::new(address, bits)));
        }
    }
    ranges.sort_unstable();
    ranges.dedup();
    ranges
}

/// Whether the text of /proc/net/route has a route that is up and leads to another host.
fn has_route(text: &str) -> bool {
    text.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace();
        let name = fields.next().unwrap_or("lo");
        let flags = fields.nth(2).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        let flags = flags.unwrap_or(0);
        name != "lo"
            && flags & u32::from(libc::RTF_UP) != 0
            && flags & u32::from(libc::RTF_REJECT) == 0
    })
}

/// Whether the kernel has a route for an address of the internet, in any table. Connecting a UDP
/// socket sends nothing.
fn far_is_routed() -> bool {
    let probe = || -> io::Result<bool> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(FAR)?;
        Ok(!socket.local_addr()?.ip().is_loopback())
    };
    probe().unwrap_or(false)
}

/// The IPv4 resolvers in a text in the format of resolv.conf(5).
fn listed(text: &str) -> Vec<Ipv4Addr> {
    let address =
        |line: &str| line.trim().strip_prefix("nameserver")?.trim().parse::<Ipv4Addr>().ok();
    text.lines().filter_map(address).take(3).collect()
}

/// Reports changes of the network of the calling thread's namespace.
#[derive(Debug)]
pub(super) struct Changes(OwnedFd);

impl Changes {
    pub(super) fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // The default protocol is NETLINK_ROUTE (0).
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        Ok(Self(socket))
    }

    /// Waits for a change, at most [`TICK`]. Returns whether there was one.
    pub(super) fn wait(&self) -> bool {
        let time = dayfly_machine_init::timespec(TICK);
        let changed = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&time)) != Ok(0);
        // A queue that overflowed (ENOBUFS) is a change too.
        while !matches!(
            recv(&self.0, &mut [0_u8; 8192][..], RecvFlags::empty()),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
        ) {}
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_those_of_local_routes() {
        let text = [
            "Main:",
            "+-- 0.0.0.0/0 3 0 5",
            "|-- 0.0.0.0",
            "/0 universe UNICAST",
            "|-- 192.0.2.0",
            "/24 link UNICAST",
            "Local:",
            "+-- 0.0.0.0/0 3 0 5",
            "|-- 127.0.0.0",
            "/8 host LOCAL",
            "|-- 127.0.0.1",
            "/32 host LOCAL",
            "|-- 127.255.255.255",
            "/32 link BROADCAST",
            "|-- 192.0.2.2",
            "/32 host LOCAL",
            "|-- 203.0.113.0",
            "/24 host LOCAL",
            "/99 host LOCAL",
            "|-- bad",
            "/32 host LOCAL",
        ]
        .join("\n      ");
        let range = |a: [u8; 4], bits| Range::new(a.into(), bits).unwrap();
        let expected = [
            range([127, 0, 0, 0], 8),
            range([127, 0, 0, 1], 32),
            range([192, 0, 2, 2], 32),
            range([203, 0, 113, 0], 24),
        ];
        assert_eq!(own(&text), expected);
        assert_eq!(own(""), []);
    }

    #[test]
    fn a_route_leads_to_another_host() {
        let head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n";
        let has = |lines: &str| has_route(&format!("{head}{lines}"));
        assert!(!has(""));
        assert!(has("eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"));
        assert!(!has("lo\t0000007F\t00000000\t0001\t0\t0\t0\t000000FF\n"));
        assert!(!has("eth0\t000200C0\t00000000\t0000\t0\t0\t0\t00FFFFFF\n"), "down");
        assert!(!has("*\t000200C0\t00000000\t0201\t0\t0\t0\t00FFFFFF\n"), "unreachable");
        assert!(!has("eth0\n\n"));
    }

    #[test]
    fn ipv4_resolvers_are_read() {
        let text =
            "# x\nnameserver 192.0.2.53\n nameserver ::1 \nnameserver\nsearch a\nnameserver x";
        assert_eq!(listed(text), [Ipv4Addr::new(192, 0, 2, 53)]);
        assert!(listed("nameserver 2001:db8::1\n").is_empty());
    }
}
