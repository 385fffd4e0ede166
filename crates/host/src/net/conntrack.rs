//! Tracked connections (linux/netfilter/nfnetlink_conntrack.h): listing them, and deleting them.
//!
//! An address may later belong to another guest. If the previous guest's connections stayed, the
//! new guest would receive their packets, and its own packets would pass as part of them.

use super::netlink::{Batch, NetlinkError, Raw, dump, find};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

const NETLINK_NETFILTER: isize = 12;
/// NFNL_SUBSYS_CTNETLINK.
const SUBSYSTEM: u16 = 1;
const GET: u16 = SUBSYSTEM << 8 | 1;
const DELETE: u16 = SUBSYSTEM << 8 | 2;
const NLA_F_NESTED: u16 = 1 << 15;
const AF_INET: u8 = 2;
// enum ctattr_type, ctattr_tuple, ctattr_ip, ctattr_filter
const TUPLE_ORIG: u16 = 1;
const FILTER: u16 = 25;
const TUPLE_IP: u16 = 1;
const IP_V4_SRC: u16 = 1;
const IP_V4_DST: u16 = 2;
const FILTER_ORIG_FLAGS: u16 = 1;
/// Bytes of `struct nfgenmsg`.
const HEADER_BYTES: usize = 4;
/// Addresses or connections per batch, because all acknowledgements of a batch wait in one socket's
/// buffer.
const TOGETHER: usize = 64;

/// `struct nfgenmsg`: the kernel heeds the family only if the version is not 0.
const HEADER: [u8; HEADER_BYTES] = [AF_INET, 1, 0, 0];

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Source and destination of the connection's original direction.
fn ends(message: &[u8]) -> Option<[Ipv4Addr; 2]> {
    let ip = find(find(message.get(HEADER_BYTES..)?, TUPLE_ORIG)?, TUPLE_IP)?;
    let address = |kind| Some(Ipv4Addr::from(*find(ip, kind)?.first_chunk::<4>()?));
    Some([address(IP_V4_SRC)?, address(IP_V4_DST)?])
}

/// Addresses that have tracked connections in the calling thread's namespace, as source or
/// destination.
///
/// # Errors
/// The kernel lacks the module nf_conntrack_netlink, or refuses.
pub(super) fn addresses() -> Result<BTreeSet<Ipv4Addr>, NetlinkError> {
    let mut all = BTreeSet::new();
    dump(
        "connections (module nf_conntrack_netlink)",
        NETLINK_NETFILTER,
        GET,
        &Raw(HEADER.into()),
        |one| {
            all.extend(ends(one).into_iter().flatten());
        },
    )?;
    Ok(all)
}

/// Deletes all tracked connections whose original source or destination is one of these addresses,
/// in the calling thread's namespace.
///
/// The kernel walks its whole connection table twice per address.
///
/// # Errors
/// The kernel refuses.
pub(super) fn forget(addresses: &BTreeSet<Ipv4Addr>) -> Result<(), NetlinkError> {
    let all: Vec<Ipv4Addr> = addresses.iter().copied().collect();
    for some in all.chunks(TOGETHER) {
        let mut batch = Batch::default();
        for address in some {
            for (kind, flag) in [(IP_V4_SRC, 1_u32), (IP_V4_DST, 2)] {
                let ip = attribute(TUPLE_IP | NLA_F_NESTED, &attribute(kind, &address.octets()));
                let flags = attribute(FILTER_ORIG_FLAGS, &flag.to_ne_bytes());
                let body = [
                    HEADER.to_vec(),
                    attribute(TUPLE_ORIG | NLA_F_NESTED, &ip),
                    attribute(FILTER | NLA_F_NESTED, &flags),
                ];
                let what = format!("forgetting connections of {address}");
                batch.ask(what, DELETE, 0, &Raw(body.concat()));
            }
        }
        batch.send(NETLINK_NETFILTER)?;
    }
    Ok(())
}

/// A tracked connection, by its original direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Connection {
    /// Its destination.
    pub(super) to: Ipv4Addr,
    /// Its protocol above IP.
    pub(super) protocol: u8,
    /// Its destination port; 0 if the protocol has none.
    pub(super) port: u16,
    /// CTA_TUPLE_ORIG as the kernel wrote it.
    tuple: Vec<u8>,
}

/// The connection in a message, if `from` has begun it.
fn begun_by(message: &[u8], from: Ipv4Addr) -> Option<Connection> {
    // enum ctattr_tuple, ctattr_l4proto
    const TUPLE_PROTO: u16 = 2;
    const NUMBER: u16 = 1;
    const DESTINATION_PORT: u16 = 3;
    let [source, to] = ends(message)?;
    let tuple = find(message.get(HEADER_BYTES..)?, TUPLE_ORIG)?;
    let above = find(tuple, TUPLE_PROTO)?;
    let protocol = *find(above, NUMBER)?.first()?;
    let port = find(above, DESTINATION_PORT).and_then(|port| port.first_chunk());
    let port = port.map_or(0, |port| u16::from_be_bytes(*port));
    (source == from).then(|| Connection { to, protocol, port, tuple: tuple.to_vec() })
}

/// The connections in the calling thread's namespace that `from` has begun.
///
/// # Errors
/// The kernel lacks the module nf_conntrack_netlink, or refuses.
pub(super) fn begun(from: Ipv4Addr) -> Result<Vec<Connection>, NetlinkError> {
    let mut all = Vec::new();
    let what = format!("connections of {from} (module nf_conntrack_netlink)");
    dump(&what, NETLINK_NETFILTER, GET, &Raw(HEADER.into()), |one| {
        all.extend(begun_by(one, from));
    })?;
    Ok(all)
}

/// Deletes these connections in the calling thread's namespace, as far as it has them.
///
/// # Errors
/// The kernel refuses.
pub(super) fn cut(connections: &[Connection]) -> Result<(), NetlinkError> {
    for some in connections.chunks(TOGETHER) {
        let mut batch = Batch::default();
        for Connection { tuple, .. } in some {
            let body = [HEADER.to_vec(), attribute(TUPLE_ORIG | NLA_F_NESTED, tuple)].concat();
            batch.ask("cutting a connection", DELETE, 0, &Raw(body));
        }
        match batch.send(NETLINK_NETFILTER) {
            // NOENT: it has ended by itself, or this namespace has not seen it. The kernel handles
            // each message of a batch, whatever came of those before.
            Err(e) if e.errno != Errno::NOENT => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_message_has_ends_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = ends(&bytes);
            let _ = begun_by(&bytes, Ipv4Addr::LOCALHOST);
        }
    }
}
