//! The daemon's network of VMs, from which VMs lease their addresses.

use crate::base::config::Config;
use crate::net::error::NetError;
use crate::net::lease::Lease;
use crate::net::network::{LEAST_READY, Network, Returned, guest, tap_name};
use crate::net::publisher::Publisher;
use dayfly_api::types::NetworkRequest;
use dayfly_host::net::{Guest, NOT_PUBLIC, VmNetns, VmNetnsSpec};
use dayfly_units::Egress;
use dayfly_units::egress::Target;
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use ipnet::Ipv4Net;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Maximum number of concurrent connections of one VM, those to its gateway excluded. The host
/// tracks 65,536 to 262,144 connections for all VMs (nf_conntrack_max).
const MOST_CONNECTIONS: u32 = 1024;

/// Whether VMs can reach an address of this range: one that is public, or in `reach`.
fn is_reachable(range: Ipv4Net, reach: &[Ipv4Net]) -> bool {
    let private = NOT_PUBLIC.iter().any(|private| private.contains(&range));
    !private || reach.iter().any(|reach| reach.contains(&range) || range.contains(reach))
}

/// The daemon's network, or the reason why there is none.
#[derive(Debug, Clone)]
pub struct Networks(Result<Arc<Network>, Arc<str>>);

impl Networks {
    /// No network, for this reason.
    #[must_use]
    pub fn none(why: &str) -> Self {
        Self(Err(why.into()))
    }

    /// The configured network: that of an earlier daemon, or a new one. `recorded` are the
    /// addresses and requests of the earlier daemon's VMs. Blocks.
    #[must_use]
    pub fn new(config: &Config, recorded: &[(Ipv4Addr, NetworkRequest)]) -> Self {
        let Some(prefix) = config.network else {
            return Self::none("the daemon was started with --network none");
        };
        let spec = VmNetnsSpec {
            pin: config.netns(),
            first: prefix.first,
            bits: prefix.bits,
            uplink: config.uplink(),
            reach: config.reach.clone(),
            most_connections: MOST_CONNECTIONS,
        };
        let ours = recorded.iter().filter(|(address, _)| prefix.index(*address).is_some());
        let guests: Vec<Guest> = ours.map(|(address, asked)| guest(*address, asked)).collect();
        let kept =
            guests.iter().filter_map(|guest| prefix.index(guest.address)).map(tap_name).collect();
        match VmNetns::open_or_create(&spec, &guests) {
            Ok(vm_netns) => {
                // Taps stay without a process: those that waited, and those of VMs that ended
                // while no daemon ran.
                if let Err(e) = vm_netns.remove_other_taps(&kept) {
                    tracing::error!("removing taps of an earlier daemon: {}", chain(&e));
                }
                let (state, names, wanted) = (Mutex::default(), Arc::default(), Notify::new());
                let (unclaimed, reach) = (Mutex::new(guests), config.reach.as_slice().into());
                Self(Ok(Arc::new(Network {
                    vm_netns,
                    prefix,
                    state,
                    unclaimed,
                    names,
                    reach,
                    publisher: config.ports.as_ref().map(|_| Arc::default()),
                    relay: config.relay(),
                    wanted,
                })))
            }
            Err(e) => Self::none(&chain(&e)),
        }
    }

    pub(super) fn get(&self) -> Result<&Arc<Network>, NetError> {
        self.0.as_ref().map_err(|why| NetError::None(why.clone()))
    }

    /// The process that listens for published ports, if it is not this daemon.
    #[must_use]
    pub fn publisher(&self) -> Option<&Arc<Publisher>> {
        self.0.as_ref().ok()?.publisher.as_ref()
    }

    /// Checks that ports can be relayed on this host.
    ///
    /// # Errors
    /// The installation has no program for that.
    pub(super) fn check_relay(&self) -> Result<(), NetError> {
        let program = &self.get()?.relay;
        if program.is_file() { Ok(()) } else { Err(NetError::NoRelay(program.clone())) }
    }

    /// Why there is no network; `None` if there is one.
    #[must_use]
    pub fn missing(&self) -> Option<&str> {
        self.0.as_ref().err().map(|why| &**why)
    }

    /// Checks an egress policy: each range must have addresses that VMs of this daemon can reach.
    ///
    /// # Errors
    /// The first range without such an address.
    pub fn check_egress(&self, egress: &Egress) -> Result<(), NetError> {
        let Ok(network) = &self.0 else { return Ok(()) };
        for rule in egress.rules() {
            if let Target::Range(range) = rule.target
                && !is_reachable(range, &network.reach)
            {
                return Err(NetError::OutOfReach(range));
            }
        }
        Ok(())
    }

    /// An address with a waiting tap, if there is one. Does not block.
    ///
    /// # Errors
    /// [`NetError::None`].
    pub fn ready(&self) -> Result<Option<Lease>, NetError> {
        let network = self.get()?;
        let mut state = lock(&network.state);
        let Some((place, tap)) = state.ready.pop_front() else { return Ok(None) };
        if state.ready.len() < LEAST_READY / 2 {
            network.wanted.notify_one();
        }
        drop(state);
        Ok(Some(Lease::new(network, place, tap)))
    }

    /// An address, with a new tap if none waits. Blocks.
    ///
    /// # Errors
    /// [`NetError`].
    pub fn lease(&self) -> Result<Lease, NetError> {
        let network = self.get()?;
        match self.ready()? {
            Some(lease) => Ok(lease),
            None => network.make().map(|(place, tap)| Lease::new(network, place, tap)),
        }
    }

    /// The address of a VM that an earlier daemon started, with the VM's request.
    #[must_use]
    pub fn adopt(&self, address: Ipv4Addr, asked: &NetworkRequest) -> Option<Lease> {
        let network = self.0.as_ref().ok()?;
        let place = network.prefix.index(address)?;
        lock(&network.unclaimed).retain(|guest| guest.address != address);
        lock(&network.state)
            .taken
            .insert(place)
            .then(|| Lease::adopted(network, place, guest(address, asked)))
    }

    /// Takes back the addresses of an earlier daemon's VMs that were not adopted. Call it once all
    /// live VMs are adopted.
    pub fn adopted_all(&self) {
        let Ok(network) = &self.0 else { return };
        for guest in std::mem::take(&mut *lock(&network.unclaimed)) {
            if let Some(place) = network.prefix.index(guest.address)
                && lock(&network.state).taken.insert(place)
            {
                network.take_back(Returned { place, guest, tap: None });
            }
        }
    }

    /// Number of addresses that VMs have, and number of waiting taps.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        let Ok(network) = &self.0 else { return (0, 0) };
        let state = lock(&network.state);
        let unused = state.ready.len() + state.returned.len();
        (state.taken.len() - unused, state.ready.len())
    }

    /// Removes all waiting taps, and the whole network if no VM has an address. Blocks.
    pub fn end(&self) {
        let Ok(network) = &self.0 else { return };
        lock(&network.state).closed = true;
        network.clean();
        let mut state = lock(&network.state);
        let ready = std::mem::take(&mut state.ready);
        drop(state);
        network.remove(&ready.iter().map(|(place, _)| *place).collect::<Vec<_>>());
        drop(ready);
        let unused = lock(&network.state).taken.is_empty();
        if unused && let Err(e) = network.vm_netns.remove() {
            tracing::error!("removing the network of VMs: {}", chain(&e));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_no_vm_reaches_is_refused() {
        let reach = ["10.7.0.0/16".parse().unwrap()];
        for (range, reachable) in [
            ("192.0.2.0/24", true),
            ("0.0.0.0/0", true),
            ("172.0.0.0/8", true),
            ("10.7.1.0/24", true),
            ("10.0.0.0/8", true),
            ("10.8.0.0/16", false),
            ("127.0.0.1/32", false),
            ("169.254.169.254/32", false),
            ("100.64.0.0/10", false),
        ] {
            assert_eq!(is_reachable(range.parse().unwrap(), &reach), reachable, "{range}");
        }
    }
}
