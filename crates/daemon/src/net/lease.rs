//! The address that a VM has until its end.

use crate::net::error::NetError;
use crate::net::mac::{mac, mac_text};
use crate::net::names::{self, Policy, Registration};
use crate::net::network::{Network, Returned, guest};
use dayfly_api::agent::NetworkIdentity;
use dayfly_api::types::NetworkRequest;
use dayfly_host::net::{GATEWAY_MAC, Guest, Tap};
use dayfly_units::{Egress, Name, VmId, error::chain, sync::lock};
use dayfly_vmm::config::{LinkConfig, Rate};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// An address in use by a VM. Dropping the lease returns the address.
#[derive(Debug)]
pub struct Lease {
    network: Arc<Network>,
    place: u32,
    address: Ipv4Addr,
    /// What the guest may reach, as in the packet filter; `None` once the lease has ended. Held
    /// while the filter's rules for the guest change.
    guest: Arc<Mutex<Option<Guest>>>,
    /// The only description of the tap, until the VMM gets it. The daemon must not share one with a
    /// VMM: the VMM could clear its flags, and reads of the daemon would block.
    tap: Option<Tap>,
}

/// The egress policy of a VM that has an address.
#[derive(Debug, Clone)]
pub struct EgressControl {
    network: Arc<Network>,
    guest: Arc<Mutex<Option<Guest>>>,
    named: Arc<names::Guest>,
}

impl EgressControl {
    /// Changes the policy; connections that the new one forbids are cut. Blocks.
    ///
    /// # Errors
    /// The VM has ended, or the host refuses.
    pub fn set(&self, egress: &Egress) -> Result<(), NetError> {
        let mut guest = lock(&self.guest);
        let guest = guest.as_mut().ok_or(NetError::Ended)?;
        let had = std::mem::replace(&mut guest.egress, egress.clone());
        self.network.vm_netns.set_egress(guest.address, egress).map_err(|e| {
            // What `dismiss` will remove is what the filter has.
            guest.egress = had;
            NetError::Rules(chain(&e).into())
        })?;
        self.named.set_egress(egress.clone());
        if let Err(e) = self.network.vm_netns.cut(guest.address) {
            // Their packets are dropped all the same.
            tracing::warn!(address = %guest.address, "forgetting cut connections: {}", chain(&e));
        }
        Ok(())
    }

    /// What the policy has refused: packets, and names. Blocks.
    ///
    /// # Errors
    /// The host refuses.
    pub fn refused(&self) -> Result<(u64, u64), NetError> {
        let all = self.network.vm_netns.refused();
        let all = all.map_err(|e| NetError::Rules(chain(&e).into()))?;
        let packets = all.get(&self.named.address).copied().unwrap_or(0);
        Ok((packets, self.named.refused()))
    }
}

impl Lease {
    pub(super) fn new(network: &Arc<Network>, place: u32, tap: Tap) -> Self {
        let address = network.prefix.address(place).unwrap_or(network.prefix.first);
        let guest = Guest { address, network: None, egress: Egress::internet() };
        let mut lease = Self::adopted(network, place, guest);
        lease.tap = Some(tap);
        lease
    }

    /// The lease of an adopted VM, whose rules are already in the packet filter.
    pub(super) fn adopted(network: &Arc<Network>, place: u32, guest: Guest) -> Self {
        let (network, address) = (network.clone(), guest.address);
        Self { network, place, address, guest: Arc::new(Mutex::new(Some(guest))), tap: None }
    }

    /// Sets the packet filter's rules for the request, and keeps them for the lease's end. Blocks.
    ///
    /// # Errors
    /// The host refuses.
    pub fn admit(&mut self, asked: &NetworkRequest) -> Result<(), NetError> {
        let new = guest(self.address, asked);
        let mut guest = lock(&self.guest);
        self.network.vm_netns.admit(&new).map_err(|e| NetError::Rules(chain(&e).into()))?;
        *guest = Some(new);
        Ok(())
    }

    /// The leased address.
    #[must_use]
    pub const fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Makes the VM with this address resolvable by name and id, until the result is dropped.
    #[must_use]
    pub fn register(&self, id: VmId, name: &Name) -> Registration {
        let guest = lock(&self.guest).clone();
        let (network, egress) =
            guest.map(|guest| (guest.network, guest.egress)).unwrap_or_default();
        let policy = Policy { group: network.as_deref().map(Into::into), egress };
        self.network.names.insert(self.address, id, name, policy)
    }

    /// The VM's egress policy. `named` is its entry of the name service.
    #[must_use]
    pub fn egress(&self, named: &Registration) -> EgressControl {
        let (network, guest) = (self.network.clone(), self.guest.clone());
        EgressControl { network, guest, named: named.guest().clone() }
    }

    /// The network part of the guest's identity.
    #[must_use]
    pub fn identity(&self) -> NetworkIdentity {
        let gateway = self.network.prefix.gateway();
        let (mac, address) = (mac_text(mac(self.address)), self.address);
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
            mac: mac(self.address),
            address: self.address,
            sends: limits.sends_bytes_per_second.map(rate),
            receives: limits.receives_bytes_per_second.map(rate),
        };
        (link, tap.into_iter().collect())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let guest = lock(&self.guest).take();
        if let Some(guest) = guest {
            self.network.take_back(Returned { place: self.place, guest, tap: self.tap.take() });
        }
    }
}
