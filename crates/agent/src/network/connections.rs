//! Ending connections from addresses that are not this machine's any more (sock_diag(7),
//! `SOCK_DESTROY`).
//!
//! Their programs get ECONNABORTED at once; listening sockets stay. The peer belongs to the machine
//! that this one was cloned from. It is not notified, because the kernel has no route for a reset
//! from a removed address.
//!
//! Every list walks the kernel's table of all connections (a slot for each 128 KiB of memory),
//! whose pages a clone would have to fetch. So this module first checks in `/proc/net/sockstat`
//! whether there is any socket of each kind.

use super::error::NetworkError;
use super::netlink::{Batch, Channel, Refused};
use netlink_packet_core::{NLM_F_DUMP, Parseable};
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags, Timer,
};
use netlink_packet_sock_diag::{
    AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, SOCK_DESTROY, SOCK_DIAG_BY_FAMILY, TCP_CLOSE,
    TCP_LISTEN, TCP_TIME_WAIT,
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// Messages per batch, because the refusals must fit into the socket's buffer.
const TOGETHER: usize = 64;
/// Errors of a kernel without sock_diag, without its TCP part, or without SOCK_DESTROY.
const UNABLE: [Errno; 3] = [Errno::NOENT, Errno::OPNOTSUPP, Errno::PROTONOSUPPORT];
const LIST: &str = "list connections";

/// Whether a connection from this local address must end. IPv4-mapped IPv6 addresses are passed in
/// IPv4 form.
pub(super) type Doomed<'a> = &'a dyn Fn(IpAddr) -> bool;

/// Ends all doomed TCP connections, and doomed connected UDP sockets if the kernel can.
///
/// # Errors
/// A doomed connection exists and cannot be ended.
pub(super) fn reset(root: &Path, doomed: Doomed<'_>) -> Result<(), NetworkError> {
    let (four, six) = (sockstat(root, "sockstat"), sockstat(root, "sockstat6"));
    // A kernel without IPv6 has no such file.
    let with_six = six != Err(Errno::NOENT);
    for (protocol, family, there) in [
        (IPPROTO_TCP, AF_INET, any(&four, "TCP:")),
        (IPPROTO_TCP, AF_INET6, with_six && any(&six, "TCP6:")),
        (IPPROTO_UDP, AF_INET, any(&four, "UDP:")),
        (IPPROTO_UDP, AF_INET6, with_six && any(&six, "UDP6:")),
    ] {
        if !there {
            continue;
        }
        match reset_family(protocol, family, doomed) {
            // The kernel sends no datagram from a removed address, so a remaining UDP socket is
            // harmless.
            _ if protocol == IPPROTO_UDP => {}
            Err(Refused { what: LIST, errno }) if UNABLE.contains(&errno) => {
                without(root, family, doomed, errno)?;
            }
            other => {
                other.map_err(|Refused { what, errno }| NetworkError::Sockets { what, errno })?
            }
        }
    }
    Ok(())
}

/// The text of /proc/net/`file`: about 200 bytes, which one read returns.
fn sockstat(root: &Path, file: &str) -> Result<String, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(proc_net(root).join(file), flags, Mode::empty())?;
    let mut text = [0; 1024];
    let length = rustix::io::read(&file, &mut text)?;
    Ok(String::from_utf8_lossy(text.get(..length).unwrap_or_default()).into_owned())
}

/// Whether a sockstat may show sockets in use (bound, listening or connected). Unreadable text
/// counts as yes.
fn any(sockstat: &Result<String, Errno>, label: &str) -> bool {
    let line = sockstat
        .as_ref()
        .ok()
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix(label)));
    line.is_none_or(|line| {
        let mut words = line.split_ascii_whitespace();
        words.next() != Some("inuse") || words.next() != Some("0")
    })
}

fn reset_family(protocol: u8, family: u8, doomed: Doomed<'_>) -> Result<(), Refused> {
    let mut channel =
        Channel::open(NETLINK_SOCK_DIAG).map_err(|errno| Refused { what: LIST, errno })?;
    let ends = list(&mut channel, protocol, family, doomed)?;
    let mut refused = None;
    for ends in ends.chunks(TOGETHER) {
        let mut batch = Batch::default();
        for end in ends {
            let request = InetRequest {
                family,
                protocol,
                extensions: ExtensionFlags::empty(),
                states: StateFlags::all(),
                socket_id: end.clone(),
            };
            // NOENT: the connection has already ended.
            batch.push("end a connection", (SOCK_DESTROY, 0), &request, &[Errno::NOENT]);
        }
        if let Err(error) = channel.exchange(batch, &mut |_, _| {}) {
            refused = Some(error);
        }
    }
    // Not all kernels can destroy a connection that has entered TIME_WAIT meanwhile; such a
    // connection is not listed any more.
    match refused {
        Some(refused) if !list(&mut channel, protocol, family, doomed)?.is_empty() => Err(refused),
        _ => Ok(()),
    }
}

/// Lists the doomed connections.
fn list(
    channel: &mut Channel,
    protocol: u8,
    family: u8,
    doomed: Doomed<'_>,
) -> Result<Vec<SocketId>, Refused> {
    let mut ends = Vec::new();
    let mut batch = Batch::default();
    let request = InetRequest {
        family,
        protocol,
        extensions: ExtensionFlags::empty(),
        // For UDP, ESTABLISHED means connected and CLOSE means not connected.
        states: StateFlags::all() - StateFlags::LISTEN - StateFlags::TIME_WAIT - StateFlags::CLOSE,
        socket_id: SocketId::new_v4(),
    };
    batch.push(LIST, (SOCK_DIAG_BY_FAMILY, NLM_F_DUMP), &request, &[]);
    let mut odd = false;
    channel.exchange(batch, &mut |_, body| match InetResponseHeader::parse(body) {
        // A connection in FIN_WAIT2 that the kernel keeps as a timewait entry sends nothing by
        // itself.
        Ok(InetResponseHeader { timer: Some(Timer::TimeWait), .. }) => {}
        Ok(header) if doomed(header.socket_id.source_address.to_canonical()) => {
            ends.push(header.socket_id)
        }
        Ok(_) => {}
        Err(_) => odd = true,
    })?;
    if odd { Err(Refused { what: "read connections", errno: Errno::BADMSG }) } else { Ok(ends) }
}

/// For a kernel that cannot list or end connections: an error if /proc/net shows doomed ones.
fn without(root: &Path, family: u8, doomed: Doomed<'_>, errno: Errno) -> Result<(), NetworkError> {
    let path = proc_net(root).join(if family == AF_INET { "tcp" } else { "tcp6" });
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => {
            return Err(NetworkError::File {
                path,
                errno: Errno::from_io_error(&e).unwrap_or(Errno::IO),
            });
        }
    };
    let ends: Vec<IpAddr> =
        text.lines().skip(1).filter_map(local_of).filter(|ip| doomed(ip.to_canonical())).collect();
    match ends.first() {
        None => Ok(()),
        Some(first) => Err(NetworkError::Unable { count: ends.len(), first: *first, errno }),
    }
}

/// The local address in a line of /proc/net/tcp or tcp6 (proc_pid_net(5)), unless the socket is
/// listening, closed or in TIME_WAIT.
fn local_of(line: &str) -> Option<IpAddr> {
    let mut words = line.split_ascii_whitespace();
    let (address, _port) = words.nth(1)?.split_once(':')?;
    let state = u8::from_str_radix(words.nth(1)?, 16).ok()?;
    if [TCP_LISTEN, TCP_TIME_WAIT, TCP_CLOSE].contains(&state) {
        return None;
    }
    // Words of four bytes, each one printed as a number in native byte order.
    let word = |at: usize| {
        let digits = address.get(at..at + 8)?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    };
    match address.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let mut bytes = [0; 16];
            for (to, at) in bytes.chunks_mut(4).zip([0, 8, 16, 24]) {
                to.copy_from_slice(&word(at)?);
            }
            Some(IpAddr::V6(Ipv6Addr::from(bytes)))
        }
        _ => None,
    }
}

/// /proc/net of the calling thread; `/proc/net` itself is that of the process's first thread.
pub(super) fn proc_net(root: &Path) -> PathBuf {
    root.join("proc/thread-self/net")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_own_list_is_read_without_sock_diag() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let line =
            |address: &str, state: &str| format!("   0: {address} 0100007F:0016 {state} 0:0 0:0\n");
        let of = |line: &str| local_of(line).map(|ip| ip.to_string());
        assert_eq!(of(&line("0200580A:1F90", "01")).as_deref(), Some("10.88.0.2"));
        let mapped = "0000000000000000FFFF00000200580A:1F90";
        assert_eq!(of(&line(mapped, "02")).as_deref(), Some("::ffff:10.88.0.2"));
        for over in ["0A", "06", "07", "xx"] {
            assert_eq!(of(&line("0200580A:1F90", over)), None);
        }
        for odd in ["0200580:1F90", "0200580A", "g200580A:1F90", "éé00580A:1F90", ""] {
            assert_eq!(of(&line(odd, "01")), None);
        }

        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(proc_net(root.path())).unwrap();
        let doomed = |ip: IpAddr| ip == Ipv4Addr::new(10, 88, 0, 2);
        let ask = |family| without(root.path(), family, &doomed, Errno::NOENT);
        ask(AF_INET).unwrap();
        std::fs::write(
            proc_net(root.path()).join("tcp"),
            format!("{head}{}", line("0100007F:1", "01")),
        )
        .unwrap();
        ask(AF_INET).unwrap();
        let two = format!("{head}{}{}", line(mapped, "01"), line(mapped, "08"));
        std::fs::write(proc_net(root.path()).join("tcp6"), two).unwrap();
        let error = ask(AF_INET6).unwrap_err().to_string();
        assert!(error.contains("2 connections") && error.contains("10.88.0.2"), "{error}");
    }

    #[test]
    fn only_a_plain_zero_means_that_there_are_none() {
        for (text, there) in [
            (
                "sockets: used 9\nTCP: inuse 0 orphan 0 tw 1 alloc 3 mem 1\nUDP: inuse 7 mem 4\n",
                false,
            ),
            ("TCP: inuse 10 orphan 0\n", true),
            ("TCP: orphan 0\n", true),
            ("UDP: inuse 0\n", true),
            ("", true),
        ] {
            assert_eq!(any(&Ok(text.to_owned()), "TCP:"), there, "{text}");
        }
        assert!(any(&Err(Errno::NOENT), "TCP:"));
        let real = sockstat(Path::new("/"), "sockstat").unwrap();
        assert!(real.lines().any(|line| line.starts_with("TCP: inuse ")), "{real}");
        assert!(
            real.lines().any(|line| line.starts_with("UDP: inuse ")) && real.len() < 1024,
            "{real}"
        );
    }

    #[test]
    fn a_kernel_without_a_handler_says_so() {
        // An unregistered protocol, which fails as TCP does without tcp_diag.
        let refused = reset_family(250, AF_INET, &|_| true).unwrap_err();
        assert_eq!(refused, Refused { what: LIST, errno: Errno::NOENT });
        assert!(UNABLE.contains(&refused.errno));
    }
}
