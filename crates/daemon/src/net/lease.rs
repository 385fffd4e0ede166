//! An address that a VM has as long as it lives.

use super::{Network, mac, mac_text};
use dayfly_api::agent::NetworkIdentity;
use dayfly_api::types::NetworkRequest;
use dayfly_host::net::{GATEWAY_MAC, Tap};
use dayfly_vmm::config::{LinkConfig, Rate};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// It goes back where it came from when it is dropped.
#[derive(Debug)]
pub struct Lease {
    network: Arc<Network>,
    place: u32,
    address: Ipv4Addr,
    tap: Option<Tap>,
}

impl Lease {
    pub(super) fn new(network: &Arc<Network>, place: u32, tap: Option<Tap>) -> Self {
        let address = network.prefix.address(place).unwrap_or(network.prefix.first);
        Self { network: network.clone(), place, address, tap }
    }

    /// The address.
    #[must_use]
    pub const fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// What the guest is told.
    #[must_use]
    pub fn identity(&self) -> NetworkIdentity {
        let gateway = self.network.prefix.gateway();
        let (mac, address) = (mac_text(mac(self.address)), self.address);
        let gateway_mac = Some(mac_text(GATEWAY_MAC));
        NetworkIdentity { mac, address, gateway, gateway_mac, nameservers: vec![gateway] }
    }

    /// What its VMM is told, and the tap.
    ///
    /// # Errors
    /// The tap cannot be given away.
    pub fn link(&self, limits: &NetworkRequest) -> io::Result<(LinkConfig, Vec<OwnedFd>)> {
        let tap = self.tap.as_ref().map(Tap::try_clone_fd).transpose()?;
        let rate =
            |bytes_per_second: u64| Rate { bytes_per_second, burst_bytes: (bytes_per_second / 10).max(1) };
        let link = LinkConfig {
            mac: mac(self.address),
            address: self.address,
            sends: limits.sends_bytes_per_second.map(rate),
            receives: limits.receives_bytes_per_second.map(rate),
        };
        Ok((link, tap.into_iter().collect()))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.network.take_back(self.place, self.tap.take());
    }
}
