//! Questions to nf_tables: which chains exist, what sets hold, and whether rules change.

use super::super::NetlinkError;
use super::super::netlink::{Batch, Raw, dump, find, nested};
use super::encode::{Family, NETLINK_NETFILTER, SUBSYSTEM, head, text};
use rustix::io::Errno;
use std::net::Ipv4Addr;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

/// Whether the IPv4 table has this chain.
pub(super) fn has_chain(table: &str, chain: &str) -> Result<bool, NetlinkError> {
    const GET_CHAIN: u16 = SUBSYSTEM << 8 | 4;
    let mut batch = Batch::default();
    let body = [head(Family::V4, 0), text(1, table), text(3, chain)].concat();
    batch.ask("nf_tables: looking for a chain", GET_CHAIN, 0, &Raw(body));
    match batch.send(NETLINK_NETFILTER) {
        Err(NetlinkError { errno: rustix::io::Errno::NOENT, .. }) => Ok(false),
        found => found.map(|()| true),
    }
}

/// A non-blocking socket that becomes readable when any process changes the rules of the calling
/// thread's namespace.
pub(super) fn changes() -> Result<OwnedFd, NetlinkError> {
    /// NFNLGRP_NFTABLES of linux/netfilter/nfnetlink.h.
    const GROUP: u32 = 7;
    let failed = |e: std::io::Error| {
        let errno = rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO);
        NetlinkError { what: "nf_tables: watching changes".to_owned(), errno }
    };
    let mut socket = netlink_sys::Socket::new(NETLINK_NETFILTER).map_err(failed)?;
    socket.bind_auto().map_err(failed)?;
    socket.add_membership(GROUP).map_err(failed)?;
    socket.set_non_blocking(true).map_err(failed)?;
    // SAFETY: `into_raw_fd` gives up the ownership of the socket's descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(socket.into_raw_fd()) })
}

/// An element of a set of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Element {
    /// The address.
    pub(super) address: Ipv4Addr,
    /// Time until the kernel removes the element, in milliseconds.
    pub(super) expires_ms: Option<u64>,
    /// The packets that the element has counted.
    pub(super) packets: Option<u64>,
}

/// The elements of a set of addresses of the IPv4 table; empty if there is no such set.
pub(super) fn elements(table: &str, set: &str) -> Result<Vec<Element>, NetlinkError> {
    const GET_ELEMENTS: u16 = SUBSYSTEM << 8 | 13;
    let body = [head(Family::V4, 0), text(1, table), text(2, set)].concat();
    let what = format!("nf_tables: listing the set {set:?}");
    let mut all = Vec::new();
    let listed = dump(&what, NETLINK_NETFILTER, GET_ELEMENTS, &Raw(body), |message| {
        all.extend(read(message));
    });
    match listed {
        Err(NetlinkError { errno: Errno::NOENT, .. }) => Ok(Vec::new()),
        listed => listed.map(|()| all),
    }
}

/// Reads the elements of one message: NFTA_SET_ELEM_LIST_ELEMENTS after `struct nfgenmsg`.
fn read(message: &[u8]) -> Vec<Element> {
    const NFGENMSG_BYTES: usize = 4;
    let list = message.get(NFGENMSG_BYTES..).and_then(|body| find(body, 3)).unwrap_or_default();
    let wide = |bytes: &[u8]| Some(u64::from_be_bytes(*bytes.first_chunk()?));
    let one = |element: &[u8]| {
        // NFTA_SET_ELEM_KEY with NFTA_DATA_VALUE.
        let key: [u8; 4] = find(find(element, 1)?, 1)?.try_into().ok()?;
        // NFTA_SET_ELEM_EXPR with NFTA_EXPR_DATA; of a counter, NFTA_COUNTER_PACKETS.
        let counter = find(element, 7).and_then(|expression| find(expression, 2));
        Some(Element {
            address: key.into(),
            // NFTA_SET_ELEM_EXPIRATION.
            expires_ms: find(element, 5).and_then(wide),
            packets: counter.and_then(|data| find(data, 2)).and_then(wide),
        })
    };
    nested(list).filter_map(|(_, element)| one(element)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_message_has_elements_or_none(
            bytes in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            prop_assert!(read(&bytes).len() <= bytes.len());
        }
    }
}
