//! The address that a VM has until its end.

use crate::net::error::NetError;
use crate::net::mac::{mac, mac_text};
use crate::net::names::{Policy, Registration};
use crate::net::network::{Network, Returned, guest};
use dayfly_api::agent::NetworkIdentity;
use dayfly_api::types::NetworkRequest;
use dayfly_host::net::{GATEWAY_MAC, Guest, Tap};
use dayfly_units::{Name, VmId, error::chain};
use dayfly_vmm::config::{LinkConfig, Rate};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// An address in use by a VM. Dropping the lease returns the address.
#[derive(Debug)]
pub struct Lease {
    network: Arc<Network>,
    place: u32,
    /// What the guest may reach, as in the packet filter.
    guest: Guest,
    /// The only description of the tap, until the VMM gets it. The daemon must not share one with a
    /// VMM: the VMM could clear its flags, and reads of the daemon would block.
    tap: Option<Tap>,
}

impl Lease {
    pub(super) fn new(network: &Arc<Network>, place: u32, tap: Tap) -> Self {
        let address = network.prefix.address(place).unwrap_or(network.prefix.first);
        let guest = Guest { address, network: None, closed: false };
        Self { network: network.clone(), place, guest, tap: Some(tap) }
    }

    /// The lease of an adopted VM, whose rules are already in the packet filter.
    pub(super) fn adopted(network: &Arc<Network>, place: u32, guest: Guest) -> Self {
        Self { network: network.clone(), place, guest, tap: None }
    }

    /// Sets the packet filter's rules for the request, and keeps them for the lease's end. Blocks.
    ///
    /// # Errors
    /// The host refuses.
    pub fn admit(&mut self, asked: &NetworkRequest) -> Result<(), NetError> {
        let guest = guest(self.guest.address, asked);
        self.network.vm_netns.admit(&guest).map_err(|e| NetError::Rules(chain(&e).into()))?;
        self.guest = guest;
        Ok(())
    }

    /// The leased address.
    #[must_use]
    pub const fn address(&self) -> Ipv4Addr {
        self.guest.address
    }

    /// Makes the VM with this address resolvable by name and id, until the result is dropped.
    #[must_use]
    pub fn register(&self, id: VmId, name: &Name) -> Registration {
        let Guest { address, network, closed } = &self.guest;
        let policy = Policy { group: network.as_deref().map(Into::into), closed: *closed };
        self.network.names.insert(*address, id, name, policy)
    }

    /// The network part of the guest's identity.
    #[must_use]
    pub fn identity(&self) -> NetworkIdentity {
        let gateway = self.network.prefix.gateway();
        let (mac, address) = (mac_text(mac(self.guest.address)), self.guest.address);
        let gateway_mac = Some(mac_text(GATEWAY_MAC));
        NetworkIdentity { mac, address, gateway, gateway_mac, nameservers: vec![gateway] }
    }

    /// The configuration of the VMM's network device, and the tap's descriptor. Only the first call
    /// returns the descriptor.
    pub fn link(&mut self, limits: &NetworkRequest) -> (LinkConfig, Vec<OwnedFd>) {
        let tap = self.tap.take().map(OwnedFd::from);
        let rate = |bytes_per_second: u64| Rate {
            bytes_per_second,
            burst_bytes: (bytes_per_second / 10).max(1),
        };
        let link = LinkConfig {
            mac: mac(self.guest.address),
            address: self.guest.address,
            sends: limits.sends_bytes_per_second.map(rate),
            receives: limits.receives_bytes_per_second.map(rate),
        };
        (link, tap.into_iter().collect())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Self { place, ref guest, .. } = *self;
        self.network.take_back(Returned { place, guest: guest.clone(), tap: self.tap.take() });
    }
}
