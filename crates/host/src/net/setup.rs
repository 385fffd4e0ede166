//! Configuring both ends of a VM network namespace: links, addresses, routes, sysctls, and the
//! host's rules.

use super::error::{NetError, call, file};
use super::messages::{address, neighbour, route, up};
use super::netlink::Batch;
use super::netns::{self, Netns};
use super::ranges::NOT_PUBLIC;
use super::spec::{HOST_MAC, NETNS_MAC, NEXT, UPLINK, VmNetnsSpec};
use super::{forwarding, nft};
use libc::{RTM_DELLINK, RTM_GETLINK, RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::link::{LinkHeader, LinkMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteScope, RouteType};
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::io::Errno;
use rustix::net::{AddressFamily as Family, SocketType, netdevice, socket};
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

/// Whether the namespace is complete up to the packet filter's table, and has these addresses: the
/// addresses of gateway and host together determine the first address and the prefix length.
pub(super) fn whole(netns: &Netns, spec: &VmNetnsSpec) -> Result<bool, NetError> {
    let own = |address| UdpSocket::bind((address, 0)).is_ok();
    let inside = netns.run(|| index(UPLINK).is_ok() && own(spec.gateway()))?;
    // The host's address is set in the last step but one, in one batch with the route.
    Ok(inside && index(&spec.uplink).is_ok() && own(spec.host()))
}

/// Removes everything of a network that exists: the uplink, the packet filter's table, the
/// namespace.
///
/// Forwarding goes off before the removal of the rules that keep the host from being a router.
pub(super) fn sweep(spec: &VmNetnsSpec) -> Result<(), NetError> {
    if let Ok(index) = index(&spec.uplink) {
        let mut message = LinkMessage::default();
        message.header = LinkHeader { index, ..LinkHeader::default() };
        let mut batch = Batch::default();
        batch.ask(format!("removing {}", spec.uplink), RTM_DELLINK, 0, &message);
        batch.send(NETLINK_ROUTE)?;
    }
    forwarding::switch_off()?;
    match nft::remove_host(&spec.uplink) {
        // A kernel without nf_tables has no table.
        Err(e) if !matches!(e.errno, Errno::PROTONOSUPPORT | Errno::OPNOTSUPP) => {
            return Err(e.into());
        }
        _ => {}
    }
    netns::remove(&spec.pin)
}

/// The index of an interface of the calling thread's namespace.
pub(super) fn index(name: &str) -> Result<u32, NetError> {
    let any = socket(Family::INET, SocketType::DGRAM, None).map_err(call("a socket"))?;
    netdevice::name_to_index(&any, name).map_err(call("looking for an interface"))
}

/// Configures the VM network namespace, which the calling thread must be in.
pub(super) fn inside(spec: &VmNetnsSpec) -> Result<(), NetError> {
    sysctl("ipv4/ip_forward", "1")?;
    // "default" applies to taps that are created later.
    for of in ["all", "default"] {
        sysctl(&format!("ipv4/conf/{of}/rp_filter"), "1")?;
        sysctl(&format!("ipv4/conf/{of}/send_redirects"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/accept_redirects"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/accept_source_route"), "0")?;
        // A new namespace copies these settings from the initial one
        // (net.core.devconf_inherit_init_net). With arp_ignore=1, which load balancers use, no
        // guest would find the gateway, because the gateway's address is not on the tap.
        sysctl(&format!("ipv4/conf/{of}/arp_ignore"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/proxy_arp"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/accept_local"), "0")?;
        // Guests must not fill the host's log.
        sysctl(&format!("ipv4/conf/{of}/log_martians"), "0")?;
        sysctl_if_there(&format!("ipv6/conf/{of}/disable_ipv6"), "1")?;
    }
    let (lo, uplink) = (index("lo")?, index(UPLINK)?);
    let mut batch = Batch::default();
    batch.ask("setting up lo", RTM_NEWLINK, 0, &up(lo, None));
    batch.ask(
        "the gateway's address",
        RTM_NEWADDR,
        NLM_F_CREATE | NLM_F_REPLACE,
        &address(lo, spec.gateway()),
    );
    batch.ask("setting up the uplink", RTM_NEWLINK, 0, &up(uplink, Some(NETNS_MAC)));
    let next = neighbour(uplink, NEXT, HOST_MAC);
    batch.ask("the host as a neighbour", RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &next);
    let mut to = |what: &str, where_to, kind, via: Option<()>| {
        let (oif, gateway) = (via.map(|()| uplink), via.map(|()| NEXT));
        let scope = RouteScope::Universe;
        batch.ask(
            what,
            RTM_NEWROUTE,
            NLM_F_CREATE | NLM_F_REPLACE,
            &route(where_to, kind, scope, oif, gateway),
        );
    };
    to("the way out", (Ipv4Addr::UNSPECIFIED, 0), RouteType::Unicast, Some(()));
    to("the way to the host", (spec.host(), 32), RouteType::Unicast, Some(()));
    for range in &spec.reach {
        to(
            "a range that guests reach",
            (range.network(), range.prefix_len()),
            RouteType::Unicast,
            Some(()),
        );
    }
    // Black holes, because an ICMP answer would reveal what exists. An address of the network
    // without a guest would otherwise leave by the uplink and come back.
    let own = spec.guests()?;
    for range in NOT_PUBLIC.iter().filter(|range| !spec.reach.contains(range)).chain([&own]) {
        let what = format!("guests do not reach {range}");
        to(&what, (range.network(), range.prefix_len()), RouteType::BlackHole, None);
    }
    Ok(batch.send(NETLINK_ROUTE)?)
}

/// Configures the host's namespace, which the calling thread must be in.
pub(super) fn outside(spec: &VmNetnsSpec) -> Result<(), NetError> {
    let uplink = index(&spec.uplink)?;
    // The rules come before forwarding is on.
    outside_filter(spec)?;
    sysctl(&format!("ipv4/conf/{}/rp_filter", spec.uplink), "1")?;
    sysctl(&format!("ipv4/conf/{}/accept_redirects", spec.uplink), "0")?;
    sysctl_if_there(&format!("ipv6/conf/{}/disable_ipv6", spec.uplink), "1")?;
    let mut batch = Batch::default();
    batch.ask(
        "the host's address",
        RTM_NEWADDR,
        NLM_F_CREATE | NLM_F_REPLACE,
        &address(uplink, spec.host()),
    );
    batch.ask("setting up the uplink", RTM_NEWLINK, 0, &up(uplink, Some(HOST_MAC)));
    let next = neighbour(uplink, NEXT, NETNS_MAC);
    batch.ask("the namespace as a neighbour", RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &next);
    let own = (spec.first, spec.bits);
    let mut way = route(own, RouteType::Unicast, RouteScope::Universe, Some(uplink), Some(NEXT));
    way.attributes.push(RouteAttribute::PrefSource(RouteAddress::Inet(spec.host())));
    // NLM_F_EXCL: a foreign route to these addresses is not replaced.
    let what =
        format!("the route to {}/{} (another network has these addresses?)", spec.first, spec.bits);
    batch.ask(what, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &way);
    Ok(batch.send(NETLINK_ROUTE)?)
}

/// Returns once an interface that is up carries packets. The kernel activates a new link in a work
/// queue and drops packets until then (net/core/link_watch.c); RTM_GETLINK of one interface runs
/// that work first (`rtnl_getlink`, since Linux 6.9).
pub(super) fn carries(name: &str) -> Result<(), NetError> {
    let mut message = LinkMessage::default();
    message.header = LinkHeader { index: index(name)?, ..LinkHeader::default() };
    let mut batch = Batch::default();
    batch.ask(format!("waiting for {name}"), RTM_GETLINK, 0, &message);
    Ok(batch.send(NETLINK_ROUTE)?)
}

/// Sets the packet filter's rules in the host's namespace. A reload of the host's firewall (`nft
/// flush ruleset`) removes only these rules, not those in the VM network namespace.
pub(super) fn outside_filter(spec: &VmNetnsSpec) -> Result<(), NetError> {
    let others = match forwarding::note()? {
        // The note is lost, but the earlier daemon's chain shows that dayfly switched forwarding
        // on.
        None if nft::has_router(&spec.uplink)? => Some(forwarding::note_again()?),
        others => others,
    };
    let (uplink, guests, reach) = (spec.uplink.as_str(), spec.guests()?, spec.reach.as_slice());
    nft::set_host(nft::Host { uplink, guests, reach, others: others.as_ref() })?;
    forwarding::switch_on()
}

/// Writes a sysctl of the calling thread's network namespace
/// (Documentation/networking/ip-sysctl.rst).
fn sysctl(name: &str, value: &str) -> Result<(), NetError> {
    let path = Path::new("/proc/sys/net").join(name);
    std::fs::write(&path, value).map_err(file("setting", &path))
}

fn sysctl_if_there(name: &str, value: &str) -> Result<(), NetError> {
    match sysctl(name, value) {
        Err(NetError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Ok(())
        }
        set => set,
    }
}
