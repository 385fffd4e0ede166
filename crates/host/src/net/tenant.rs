//! A tenant's network: its namespace, its gateway, its way out, its taps.

use super::messages::{address, neighbour, route, up};
use super::netlink::Batch;
use super::netns::{self, Netns};
use super::{NetError, Tap, call, file, nft};
use libc::{RTM_DELLINK, RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkHeader, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteScope, RouteType};
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::io::Errno;
use rustix::net::{AddressFamily as Family, SocketType, netdevice, socket};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

/// The way out, in the tenant's namespace.
const UPLINK: &str = "uplink";
/// Of every tap: what guests have learned of their gateway is right in every clone.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 1];
/// Of the uplink's ends, the host's and the tenant's, which know each other.
const HOST_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 2];
const TENANT_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 3];
/// RFC 3927: of a link alone, so of nobody who could be reached; clouds tell their machines secrets there.
const LINK_LOCAL: (Ipv4Addr, u8) = (Ipv4Addr::new(169, 254, 0, 0), 16);
/// The other end of the uplink, seen from each: an address of that link alone.
const NEXT: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The group of interfaces (netdevice(7), IFLA_GROUP) that are removed together.
const DOOMED: u32 = 0xdf;
/// So many at one time: their acknowledgements wait in one socket.
const TOGETHER: usize = 128;

/// Where a tenant's network is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantSpec {
    /// The file on which its namespace is mounted.
    pub pin: PathBuf,
    /// Its addresses: the first, of which the next is the gateway's and the last but one the host's.
    pub first: Ipv4Addr,
    /// How many bits they have in common, 8 to 29.
    pub bits: u8,
    /// The host's end of the uplink, and its table of the packet filter: `dayfly…`, at most 15 bytes.
    pub uplink: String,
}

impl TenantSpec {
    /// How many addresses it has.
    const fn count(&self) -> u32 {
        1 << (32 - self.bits)
    }

    fn check(&self) -> Result<(), NetError> {
        let fits = (8..=29).contains(&self.bits) && self.first.to_bits().is_multiple_of(self.count());
        fits.then_some(()).ok_or(NetError::Addresses(self.first, self.bits))
    }

    /// Whether a guest may have this address.
    const fn is_a_guest_s(&self, address: Ipv4Addr) -> bool {
        let place = address.to_bits().wrapping_sub(self.first.to_bits());
        place > 1 && place < self.count() - 2
    }

    const fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first.to_bits() + 1)
    }

    /// By which VMs reach their host, and it reaches them.
    const fn host(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first.to_bits() + self.count() - 2)
    }
}

/// A tenant's network.
#[derive(Debug)]
pub struct Tenant {
    netns: Netns,
    spec: TenantSpec,
}

impl Tenant {
    /// The one that is there, if it is whole and has these addresses, or a new one: VMs of the one before then have no network any more. What is
    /// called the host's here is the calling thread's namespace.
    ///
    /// # Errors
    /// There are no such addresses, or the host refuses; nothing of a new one stays.
    pub fn open_or_create(spec: &TenantSpec) -> Result<Self, NetError> {
        spec.check()?;
        if let Ok(netns) = Netns::open(&spec.pin)
            && whole(&netns, spec)?
        {
            // The only part that others take away: `nft flush ruleset`, as each reload of a firewall begins.
            nft::set(&spec.uplink, spec.first, spec.bits)?;
            return Ok(Self { netns, spec: spec.clone() });
        }
        sweep(spec)?;
        let made = Netns::create(&spec.pin).and_then(|netns| {
            let tenant = Self { netns, spec: spec.clone() };
            tenant.set_up()?;
            Ok(tenant)
        });
        made.inspect_err(|_| {
            let _ = sweep(spec);
        })
    }

    fn set_up(&self) -> Result<(), NetError> {
        let Self { netns, spec } = self;
        let mut peer = LinkMessage::default();
        peer.attributes =
            vec![LinkAttribute::IfName(UPLINK.to_owned()), LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd())];
        let mut veth = LinkMessage::default();
        veth.attributes = vec![
            LinkAttribute::IfName(spec.uplink.clone()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
            ]),
        ];
        let mut batch = Batch::default();
        batch.ask(
            format!("making the uplink {}", spec.uplink),
            RTM_NEWLINK,
            NLM_F_CREATE | NLM_F_EXCL,
            &veth,
        );
        batch.send(NETLINK_ROUTE)?;
        netns.run(|| inside(spec))??;
        outside(spec)
    }

    /// A tap for the guest that has this address and this MAC, with the route to it.
    ///
    /// # Errors
    /// The name is taken, the address is no guest's, or the host refuses; nothing stays.
    pub fn tap(&self, name: &str, address: Ipv4Addr, mac: [u8; 6]) -> Result<Tap, NetError> {
        if !self.spec.is_a_guest_s(address) {
            return Err(NetError::Foreign(address, self.spec.first, self.spec.bits));
        }
        self.netns.run(|| {
            let tap = Tap::open(name)?;
            let index = index(name)?;
            let mut batch = Batch::default();
            batch.ask(format!("setting up {name}"), RTM_NEWLINK, 0, &up(index, Some(GATEWAY_MAC)));
            let route = route((address, 32), RouteType::Unicast, RouteScope::Link, Some(index), None);
            batch.ask(format!("the route to {address}"), RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &route);
            let neighbour = neighbour(index, address, mac);
            batch.ask(
                format!("the neighbour {address}"),
                RTM_NEWNEIGH,
                NLM_F_CREATE | NLM_F_REPLACE,
                &neighbour,
            );
            batch.send(NETLINK_ROUTE)?;
            Ok(tap)
        })?
    }

    /// Removes taps that no VM has, together: each alone waits for a grace period of the kernel's when it is closed (16 ms).
    ///
    /// # Errors
    /// The host refuses; they are gone all the same.
    pub fn remove_taps(&self, taps: Vec<Tap>) -> Result<(), NetError> {
        self.netns.run(|| {
            for some in taps.chunks(TOGETHER) {
                let mut batch = Batch::default();
                for tap in some {
                    let mut message = LinkMessage::default();
                    message.header = LinkHeader { index: tap.index()?, ..LinkHeader::default() };
                    message.attributes = vec![LinkAttribute::Group(DOOMED)];
                    batch.ask("marking a tap", RTM_NEWLINK, 0, &message);
                }
                let mut doomed = LinkMessage::default();
                doomed.attributes = vec![LinkAttribute::Group(DOOMED)];
                batch.ask("removing taps", RTM_DELLINK, 0, &doomed);
                match batch.send(NETLINK_ROUTE) {
                    // Somebody who did the same has removed these, too.
                    Err(e) if e.errno != Errno::NODEV => return Err(e.into()),
                    _ => {}
                }
            }
            Ok(())
        })?
    }

    /// Does `act` in a thread of its own in the namespace.
    ///
    /// # Errors
    /// The thread cannot be made, or may not go there.
    pub fn run<R: Send>(&self, act: impl FnOnce() -> R + Send) -> Result<R, NetError> {
        self.netns.run(act)
    }

    /// Removes it, from the host's namespace.
    ///
    /// # Errors
    /// The host refuses.
    pub fn remove(&self) -> Result<(), NetError> {
        sweep(&self.spec)
    }
}

/// Whether all of it was made, up to the packet filter's table, and for these addresses: the gateway's and the host's tell the first and how many.
fn whole(netns: &Netns, spec: &TenantSpec) -> Result<bool, NetError> {
    let own = |address| UdpSocket::bind((address, 0)).is_ok();
    let inside = netns.run(|| index(UPLINK).is_ok() && own(spec.gateway()))?;
    // The last step but one, with the route: they are sent together.
    Ok(inside && index(&spec.uplink).is_ok() && own(spec.host()))
}

/// Removes whatever there is of a network: the uplink, the packet filter's table, the namespace.
fn sweep(spec: &TenantSpec) -> Result<(), NetError> {
    if let Ok(index) = index(&spec.uplink) {
        let mut message = LinkMessage::default();
        message.header = LinkHeader { index, ..LinkHeader::default() };
        let mut batch = Batch::default();
        batch.ask(format!("removing {}", spec.uplink), RTM_DELLINK, 0, &message);
        batch.send(NETLINK_ROUTE)?;
    }
    match nft::remove(&spec.uplink) {
        // Where there is no packet filter, there is no table.
        Err(e) if !matches!(e.errno, Errno::PROTONOSUPPORT | Errno::OPNOTSUPP) => return Err(e.into()),
        _ => {}
    }
    netns::remove(&spec.pin)
}

/// The number of an interface of the calling thread's namespace.
fn index(name: &str) -> Result<u32, NetError> {
    let any = socket(Family::INET, SocketType::DGRAM, None).map_err(call("a socket"))?;
    netdevice::name_to_index(&any, name).map_err(call("looking for an interface"))
}

/// In the tenant's namespace.
fn inside(spec: &TenantSpec) -> Result<(), NetError> {
    sysctl("ipv4/ip_forward", "1")?;
    // Of taps to come, too.
    for of in ["all", "default"] {
        sysctl(&format!("ipv4/conf/{of}/rp_filter"), "1")?;
        sysctl(&format!("ipv4/conf/{of}/send_redirects"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/accept_redirects"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/accept_source_route"), "0")?;
        // A new namespace has these as the host's first one has them (net.core.devconf_inherit_init_net). Where arp_ignore is 1, as
        // balancers of load want it, no guest would find the gateway: its address is not its tap's.
        sysctl(&format!("ipv4/conf/{of}/arp_ignore"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/proxy_arp"), "0")?;
        sysctl(&format!("ipv4/conf/{of}/accept_local"), "0")?;
        // Guests do not write the host's log.
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
    batch.ask("setting up the uplink", RTM_NEWLINK, 0, &up(uplink, Some(TENANT_MAC)));
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
    // An address that nobody has would go out, and come back.
    to("addresses of nobody", (spec.first, spec.bits), RouteType::Unreachable, None);
    to("addresses of links", LINK_LOCAL, RouteType::Prohibit, None);
    Ok(batch.send(NETLINK_ROUTE)?)
}

/// In the host's.
fn outside(spec: &TenantSpec) -> Result<(), NetError> {
    let uplink = index(&spec.uplink)?;
    sysctl("ipv4/ip_forward", "1")?;
    sysctl(&format!("ipv4/conf/{}/rp_filter", spec.uplink), "1")?;
    sysctl(&format!("ipv4/conf/{}/accept_redirects", spec.uplink), "0")?;
    sysctl_if_there(&format!("ipv6/conf/{}/disable_ipv6", spec.uplink), "1")?;
    let mut batch = Batch::default();
    batch.ask("the host's address", RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &address(uplink, spec.host()));
    batch.ask("setting up the uplink", RTM_NEWLINK, 0, &up(uplink, Some(HOST_MAC)));
    let next = neighbour(uplink, NEXT, TENANT_MAC);
    batch.ask("the tenant as a neighbour", RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &next);
    let own = (spec.first, spec.bits);
    let mut way = route(own, RouteType::Unicast, RouteScope::Universe, Some(uplink), Some(NEXT));
    way.attributes.push(RouteAttribute::PrefSource(RouteAddress::Inet(spec.host())));
    // Not in place of a route of somebody else's.
    let what = format!("the route to {}/{} (another network has these addresses?)", spec.first, spec.bits);
    batch.ask(what, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &way);
    batch.send(NETLINK_ROUTE)?;
    Ok(nft::set(&spec.uplink, spec.first, spec.bits)?)
}

/// Writes a setting of the calling thread's namespace (Documentation/networking/ip-sysctl.rst).
fn sysctl(name: &str, value: &str) -> Result<(), NetError> {
    let path = Path::new("/proc/sys/net").join(name);
    std::fs::write(&path, value).map_err(file("setting", &path))
}

fn sysctl_if_there(name: &str, value: &str) -> Result<(), NetError> {
    match sysctl(name, value) {
        Err(NetError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        set => set,
    }
}
