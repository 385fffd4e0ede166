//! The machine's interface: finding it, reading its state, and giving it another machine's
//! addresses (rtnetlink(7)).

use super::error::NetworkError;
use super::netlink::{Batch, Channel, Raw, Refused};
use super::settings::Settings;
use libc::{
    RTM_DELADDR, RTM_DELNEIGH, RTM_GETADDR, RTM_GETLINK, RTM_GETROUTE, RTM_NEWADDR, RTM_NEWLINK,
    RTM_NEWNEIGH, RTM_NEWROUTE, RTM_SETLINK,
};
use netlink_packet_core::{
    NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NlasIterator, Parseable, parse_u32,
};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressHeader, AddressMessage};
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
    RouteType,
};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

/// The folder in which the kernel lists interfaces (Documentation/ABI/testing/sysfs-class-net).
const INTERFACES: &str = "sys/class/net";
/// The driver of the VM's own interface.
const DRIVER: &str = "virtio_net";
/// The message that a driver refuses if it cannot change the MAC of a running interface.
const SET: &str = "set the MAC, and up";
/// Bytes of `struct ifinfomsg` and `struct rtmsg` (linux/rtnetlink.h), which precede the
/// attributes.
const LINK_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;

/// The interface's name below `root`; `None` if there is no such interface.
pub(super) fn find(root: &Path) -> Result<Option<String>, NetworkError> {
    let folder = root.join(INTERFACES);
    let failed = |e: std::io::Error| NetworkError::File {
        path: folder.clone(),
        errno: Errno::from_io_error(&e).unwrap_or(Errno::IO),
    };
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let mut found: Option<String> = None;
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let driver = std::fs::read_link(entry.path().join("device/driver"));
        if !driver.is_ok_and(|d| d.file_name().is_some_and(|name| name == DRIVER)) {
            continue;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(first) = found {
            return Err(NetworkError::Many { driver: DRIVER, first, second: name });
        }
        found = Some(name);
    }
    Ok(found)
}

/// The error for a required interface that is missing.
pub(super) fn missing(root: &Path) -> NetworkError {
    NetworkError::Missing { driver: DRIVER, folder: root.join(INTERFACES) }
}

/// An IPv4 address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Own {
    local: Ipv4Addr,
    /// The kernel's IFA_ADDRESS: the peer's address, or `local` again.
    address: Ipv4Addr,
    prefix: u8,
}

/// An interface and its state.
pub(super) struct Interface {
    pub(super) name: String,
    index: u32,
    mac: Vec<u8>,
    up: bool,
    own: Vec<Own>,
    /// Addresses of all other interfaces.
    elsewhere: Vec<IpAddr>,
}

impl Interface {
    /// Reads the state of the interface `name`; repeats the read if addresses changed meanwhile.
    pub(super) fn read(channel: &mut Channel, name: String) -> Result<Self, NetworkError> {
        for _ in 0..2 {
            match Self::read_once(channel, name.clone()) {
                Err(NetworkError::Interface { errno: Errno::AGAIN, .. }) => {}
                other => return other,
            }
        }
        Self::read_once(channel, name)
    }

    fn read_once(channel: &mut Channel, name: String) -> Result<Self, NetworkError> {
        let mut batch = Batch::default();
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::IfName(name.clone()),
            // Skips the counters, which are not needed.
            LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]),
        ];
        batch.push("read it", (RTM_GETLINK, 0), &link, &[]);
        // For all interfaces, because kernels list all of them anyway.
        batch.push("list addresses", (RTM_GETADDR, NLM_F_DUMP), &AddressMessage::default(), &[]);
        let mut own = Self {
            name,
            index: 0,
            mac: Vec::new(),
            up: false,
            own: Vec::new(),
            elsewhere: Vec::new(),
        };
        let answered = channel.exchange(batch, &mut |kind, body| match kind {
            RTM_NEWLINK => own.note_link(body),
            RTM_NEWADDR => own.note_address(body),
            _ => {}
        });
        answered.map_err(own.failed())?;
        if own.index == 0 {
            return Err(own.failed()(Refused { what: "read it", errno: Errno::BADMSG }));
        }
        Ok(own)
    }

    fn failed(&self) -> impl Fn(Refused) -> NetworkError + use<> {
        let name = self.name.clone();
        move |Refused { what, errno }| NetworkError::Interface { name: name.clone(), what, errno }
    }

    fn note_link(&mut self, body: &[u8]) {
        let Ok(header) = LinkHeader::parse(body) else { return };
        (self.index, self.up) = (header.index, header.flags.contains(LinkFlags::Up));
        // Only one of about fifty attributes, some of them nested, is needed.
        for attribute in NlasIterator::new(body.get(LINK_BYTES..).unwrap_or_default()).flatten() {
            if attribute.kind() == libc::IFLA_ADDRESS {
                self.mac = attribute.value().to_vec();
            }
        }
    }

    fn note_address(&mut self, body: &[u8]) {
        let Ok(AddressMessage { header, attributes, .. }) = AddressMessage::parse(body) else {
            return;
        };
        let (mut local, mut address) = (None, None);
        for attribute in attributes {
            match attribute {
                AddressAttribute::Local(ip) => local = Some(ip),
                AddressAttribute::Address(ip) => address = Some(ip),
                _ => {}
            }
        }
        // For IPv6, the kernel sets IFA_LOCAL only if there is a peer address.
        let Some(ip) = local.or(address) else { return };
        match (ip, address.unwrap_or(ip)) {
            _ if header.index != self.index => self.elsewhere.push(ip),
            (IpAddr::V4(local), IpAddr::V4(address)) => {
                self.own.push(Own { local, address, prefix: header.prefix_len });
            }
            _ => {}
        }
    }

    /// Whether the interface has this IPv4 address.
    pub(super) fn has(&self, ip: Ipv4Addr) -> bool {
        self.own.iter().any(|own| own.local == ip)
    }

    /// Whether another interface has this address.
    pub(super) fn elsewhere(&self, ip: IpAddr) -> bool {
        self.elsewhere.contains(&ip)
    }

    /// Whether the interface is up with these settings' MAC and address.
    pub(super) fn is(&self, new: &Settings) -> bool {
        self.up && self.mac == new.mac && self.has(new.address)
    }

    /// Whether the interface is down and has no address.
    pub(super) fn is_unset(&self) -> bool {
        !self.up && self.own.is_empty()
    }

    /// Gives the interface another machine's settings; the routes that users added stay.
    pub(super) fn become_machine(
        &self,
        channel: &mut Channel,
        new: &Settings,
    ) -> Result<(), NetworkError> {
        let only = Own { local: new.address, address: new.address, prefix: 32 };
        let mut batch = Batch::default();
        if !self.own.contains(&only) {
            batch.push(
                "add the address",
                (RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE),
                &self.address(only),
                &[],
            );
        }
        if !self.up || self.mac != new.mac {
            batch.push(SET, (RTM_SETLINK, 0), &self.link(true, Some(new.mac)), &[]);
        }
        match channel.exchange(batch, &mut |_, _| {}) {
            Err(Refused { what: SET, errno: Errno::BUSY }) => self.replug(channel, new.mac)?,
            other => other.map_err(self.failed())?,
        }

        let mut batch = Batch::default();
        let mut neighbour = NeighbourMessage::default();
        neighbour.header.family = AddressFamily::Inet;
        neighbour.header.ifindex = self.index;
        neighbour.attributes =
            vec![NeighbourAttribute::Destination(NeighbourAddress::Inet(new.gateway))];
        if let Some(mac) = new.gateway_mac {
            // A permanent entry: packets sent before the VMM connects the network are dropped
            // there, instead of waiting here for ARP.
            neighbour.header.state = NeighbourState::Permanent;
            neighbour.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.to_vec()));
            let replace = (RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE);
            batch.push("the gateway's MAC", replace, &neighbour, &[]);
        } else if self.mac == new.mac && !self.has(new.address) {
            // A change of the MAC drops all neighbour entries. Without a change, the gateway's
            // entry may come from another network.
            batch.push("forget the gateway's MAC", (RTM_DELNEIGH, 0), &neighbour, &[Errno::NOENT]);
        }
        let replace = (RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE);
        batch.push("route to the gateway", replace, &self.route(new, true), &[]);
        batch.push("default route", replace, &self.route(new, false), &[]);
        self.push_deletes(&mut batch, &only);
        channel.exchange(batch, &mut |_, _| {}).map_err(self.failed())
    }

    /// Deletes the interface's addresses and sets it down.
    pub(super) fn take_away(&self, channel: &mut Channel) -> Result<(), NetworkError> {
        let mut batch = Batch::default();
        self.push_deletes(
            &mut batch,
            &Own { local: Ipv4Addr::UNSPECIFIED, address: Ipv4Addr::UNSPECIFIED, prefix: 0 },
        );
        if self.up {
            batch.push("set it down", (RTM_SETLINK, 0), &self.link(false, None), &[]);
        }
        channel.exchange(batch, &mut |_, _| {}).map_err(self.failed())
    }

    /// Sets the interface down.
    pub(super) fn down(&self, channel: &mut Channel) -> Result<(), NetworkError> {
        let mut batch = Batch::default();
        batch.push("set it down", (RTM_SETLINK, 0), &self.link(false, None), &[]);
        channel.exchange(batch, &mut |_, _| {}).map_err(self.failed())
    }

    fn push_deletes(&self, batch: &mut Batch, but: &Own) {
        for own in self.own.iter().filter(|own| *own != but) {
            // ADDRNOTAVAIL: a secondary address, which the kernel deleted with its primary address.
            let gone = &[Errno::ADDRNOTAVAIL];
            batch.push("delete the old address", (RTM_DELADDR, 0), &self.address(*own), gone);
        }
    }

    /// Sets the MAC of an interface that must be down for the change. The interface loses its
    /// routes then, so they are read before and added again (as ip-route(8) `save` and `restore`
    /// do).
    pub(super) fn replug(&self, channel: &mut Channel, mac: [u8; 6]) -> Result<(), NetworkError> {
        let mut routes = Vec::new();
        let mut batch = Batch::default();
        let mut all = RouteMessage::default();
        all.header.address_family = AddressFamily::Inet;
        batch.push("list routes", (RTM_GETROUTE, NLM_F_DUMP), &all, &[]);
        let listed = channel.exchange(batch, &mut |kind, body| {
            if kind == RTM_NEWROUTE
                && let Some(route) = self.kept_route(body)
            {
                routes.push(route);
            }
        });
        listed.map_err(self.failed())?;
        // Routes of narrower scope (larger number) first, because the others depend on them.
        routes.sort_by_key(|(scope, _)| std::cmp::Reverse(*scope));

        let mut batch = Batch::default();
        batch.push("set it down", (RTM_SETLINK, 0), &self.link(false, None), &[]);
        batch.push("set the MAC", (RTM_SETLINK, 0), &self.link(true, Some(mac)), &[]);
        for (_, route) in routes {
            let flags = (RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL);
            batch.push("restore a route", flags, &Raw(route), &[Errno::EXIST]);
        }
        channel.exchange(batch, &mut |_, _| {}).map_err(self.failed())
    }

    /// A listed route in a form that can be added again, and its scope; `None` for routes of other
    /// interfaces and of the kernel.
    fn kept_route(&self, body: &[u8]) -> Option<(u8, Vec<u8>)> {
        let header = RouteHeader::parse(body).ok()?;
        let own = NlasIterator::new(body.get(ROUTE_BYTES..)?).flatten().any(|attribute| {
            attribute.kind() == libc::RTA_OIF
                && parse_u32(attribute.value()).is_ok_and(|i| i == self.index)
        });
        if !own || header.protocol == RouteProtocol::Kernel {
            return None;
        }
        let mut route = body.to_vec();
        // Clears the flags of a next hop that the kernel reports but does not accept. The flags are
        // the header's last four bytes.
        let said = RouteFlags::Dead | RouteFlags::Linkdown;
        route
            .get_mut(ROUTE_BYTES - 4..ROUTE_BYTES)?
            .copy_from_slice(&(header.flags - said).bits().to_ne_bytes());
        Some((header.scope.into(), route))
    }

    fn address(&self, own: Own) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header = AddressHeader {
            family: AddressFamily::Inet,
            prefix_len: own.prefix,
            index: self.index,
            ..AddressHeader::default()
        };
        message.attributes = vec![
            AddressAttribute::Local(own.local.into()),
            AddressAttribute::Address(own.address.into()),
        ];
        message
    }

    fn link(&self, up: bool, mac: Option<[u8; 6]>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = self.index;
        message.header.change_mask = LinkFlags::Up;
        message.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        message.attributes =
            mac.map(|mac| LinkAttribute::Address(mac.to_vec())).into_iter().collect();
        message
    }

    /// The route to the gateway, or the default route through the gateway. Both name the machine's
    /// address as their source, so the kernel drops them when that address is deleted.
    fn route(&self, new: &Settings, to_gateway: bool) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: AddressFamily::Inet,
            destination_prefix_length: if to_gateway { 32 } else { 0 },
            table: RouteHeader::RT_TABLE_MAIN,
            protocol: RouteProtocol::Static,
            scope: if to_gateway { RouteScope::Link } else { RouteScope::Universe },
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        let gateway = RouteAddress::Inet(new.gateway);
        message.attributes = vec![
            if to_gateway {
                RouteAttribute::Destination(gateway)
            } else {
                RouteAttribute::Gateway(gateway)
            },
            RouteAttribute::Oif(self.index),
            RouteAttribute::PrefSource(RouteAddress::Inet(new.address)),
        ];
        message
    }
}
