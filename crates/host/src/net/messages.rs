//! Requests to the kernel about interfaces, addresses, routes and neighbours (rtnetlink(7)).

use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressHeader, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkHeader, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourHeader, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
    RouteType,
};
use std::net::{IpAddr, Ipv4Addr};

/// Sets an interface up, and its MAC if one is given.
pub(super) fn up(index: u32, mac: Option<[u8; 6]>) -> LinkMessage {
    let mut message = LinkMessage::default();
    let (flags, change_mask) = (LinkFlags::Up, LinkFlags::Up);
    message.header = LinkHeader { index, flags, change_mask, ..LinkHeader::default() };
    message.attributes = mac.map(|mac| LinkAttribute::Address(mac.to_vec())).into_iter().collect();
    message
}

/// Adds an address with a /32 prefix, so that no other address is on the link.
pub(super) fn address(index: u32, own: Ipv4Addr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header = AddressHeader {
        family: AddressFamily::Inet,
        prefix_len: 32,
        index,
        ..AddressHeader::default()
    };
    let own = IpAddr::V4(own);
    message.attributes = vec![AddressAttribute::Local(own), AddressAttribute::Address(own)];
    message
}

/// A route of the main table.
pub(super) fn route(
    (to, bits): (Ipv4Addr, u8),
    kind: RouteType,
    scope: RouteScope,
    oif: Option<u32>,
    gateway: Option<Ipv4Addr>,
) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: AddressFamily::Inet,
        destination_prefix_length: bits,
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: RouteProtocol::Static,
        scope,
        kind,
        // Onlink: the gateway is on this link even if no address of the link covers it.
        flags: if gateway.is_some() { RouteFlags::Onlink } else { RouteFlags::empty() },
        ..RouteHeader::default()
    };
    let to = (bits > 0).then_some(RouteAttribute::Destination(RouteAddress::Inet(to)));
    let gateway = gateway.map(|gateway| RouteAttribute::Gateway(RouteAddress::Inet(gateway)));
    message.attributes =
        to.into_iter().chain(oif.map(RouteAttribute::Oif)).chain(gateway).collect();
    message
}

/// A permanent neighbour, for which the kernel sends no ARP requests.
pub(super) fn neighbour(ifindex: u32, address: Ipv4Addr, mac: [u8; 6]) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header = NeighbourHeader {
        family: AddressFamily::Inet,
        ifindex,
        state: NeighbourState::Permanent,
        kind: RouteType::Unicast,
        ..NeighbourHeader::default()
    };
    let destination = NeighbourAttribute::Destination(NeighbourAddress::Inet(address));
    message.attributes = vec![destination, NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
    message
}
