//! Parameters of a VM network namespace and its guests, and the addresses of its ends.

use super::error::NetError;
use dayfly_units::Egress;
use ipnet::Ipv4Net;
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// The namespace's end of the uplink.
pub(super) const UPLINK: &str = "uplink";
/// MAC of every tap. One MAC for all taps keeps a clone's neighbour entry of its gateway valid.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 1];
/// MACs of the uplink's ends, the host's and the namespace's; each is a permanent neighbour of the
/// other.
pub(super) const HOST_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 2];
pub(super) const NETNS_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 3];
/// The next hop on the uplink, seen from either end: an address that only this link uses.
pub(super) const NEXT: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// Parameters of a VM network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmNetnsSpec {
    /// The file on which the namespace is mounted.
    pub pin: PathBuf,
    /// The first address of the network. The next address is the gateway's, and the last but one is
    /// the host's.
    pub first: Ipv4Addr,
    /// Prefix length of the network, 8 to 29.
    pub bits: u8,
    /// Name of the host's end of the uplink, and of the host's packet filter table: `dayfly…`, at
    /// most 15 bytes.
    pub uplink: String,
    /// Ranges that every guest reaches although they are not public ([`super::NOT_PUBLIC`]). The
    /// host's own addresses stay unreachable.
    pub reach: Vec<Ipv4Net>,
    /// Maximum number of concurrent connections of one guest, those to the gateway excluded. Closed
    /// TCP connections do not count.
    pub most_connections: u32,
}

/// What a guest may reach, if it differs from the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// The guest's address.
    pub address: Ipv4Addr,
    /// The network of guests that reach each other: a name of at most 200 bytes.
    pub network: Option<String>,
    /// What the guest reaches outside its network.
    pub egress: Egress,
}

/// The tap of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapSpec {
    /// The interface's name, at most 15 bytes.
    pub name: String,
    /// The guest's address.
    pub address: Ipv4Addr,
    /// The guest's MAC.
    pub mac: [u8; 6],
}

impl Guest {
    pub(super) fn is_special(&self) -> bool {
        !self.egress.is_internet() || self.network.is_some()
    }
}

impl VmNetnsSpec {
    /// Number of addresses of the network.
    const fn count(&self) -> u32 {
        1 << (32 - self.bits)
    }

    pub(super) fn check(&self) -> Result<(), NetError> {
        let fits =
            (8..=29).contains(&self.bits) && self.first.to_bits().is_multiple_of(self.count());
        fits.then_some(()).ok_or(NetError::Addresses(self.first, self.bits))
    }

    /// Whether a guest may have this address.
    pub(super) const fn is_a_guest_s(&self, address: Ipv4Addr) -> bool {
        let place = address.to_bits().wrapping_sub(self.first.to_bits());
        place > 1 && place < self.count() - 2
    }

    pub(super) fn guests(&self) -> Result<Ipv4Net, NetError> {
        Ipv4Net::new(self.first, self.bits).map_err(|_| NetError::Addresses(self.first, self.bits))
    }

    pub(super) const fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first.to_bits() + 1)
    }

    /// Ranges with a separate route to the uplink: the host's address, and the ranges in `reach`.
    pub(super) fn ways(&self) -> Vec<Ipv4Net> {
        self.reach.iter().copied().chain([Ipv4Net::from(self.host())]).collect()
    }

    /// The host's address on the uplink, by which VMs and host reach each other.
    pub(super) const fn host(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first.to_bits() + self.count() - 2)
    }
}
