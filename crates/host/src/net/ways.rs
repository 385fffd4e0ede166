//! Routes out of the VM network namespace that an earlier daemon made, perhaps for other ranges.

use super::error::NetError;
use super::messages::route;
use super::netlink::{Batch, dump};
use ipnet::Ipv4Net;
use libc::{RTM_DELROUTE, RTM_GETROUTE};
use netlink_packet_core::Parseable;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType,
};
use netlink_sys::protocols::NETLINK_ROUTE;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// Ranges that have a route through the interface `uplink` in the calling thread's namespace and
/// are not in `kept`. The default route is left out.
///
/// # Errors
/// The kernel does not list its routes.
pub(super) fn stale(uplink: u32, kept: &[Ipv4Net]) -> Result<BTreeSet<Ipv4Net>, NetError> {
    let mut ways = BTreeSet::new();
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    dump("routes", NETLINK_ROUTE, RTM_GETROUTE, &message, |bytes| {
        let Ok(route) = RouteMessage::parse(bytes) else { return };
        let has = |attribute| route.attributes.contains(&attribute);
        let ours = has(RouteAttribute::Oif(uplink)) && route.header.kind == RouteType::Unicast;
        let to = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(to)) => Some(*to),
            _ => None,
        });
        let range = to.and_then(|to| Ipv4Net::new(to, route.header.destination_prefix_length).ok());
        ways.extend(range.filter(|_| ours));
    })?;
    ways.retain(|range| !kept.contains(range));
    Ok(ways)
}

/// Removes stale routes, whose next hop is `next`. The other routes stay, because guests use them
/// meanwhile.
///
/// # Errors
/// The kernel refuses.
pub(super) fn remove_stale(uplink: u32, next: Ipv4Addr, kept: &[Ipv4Net]) -> Result<(), NetError> {
    let mut batch = Batch::default();
    for range in stale(uplink, kept)? {
        let to = (range.network(), range.prefix_len());
        let way = route(to, RouteType::Unicast, RouteScope::Universe, Some(uplink), Some(next));
        batch.ask(format!("removing the way to {range}"), RTM_DELROUTE, 0, &way);
    }
    Ok(batch.send(NETLINK_ROUTE)?)
}
