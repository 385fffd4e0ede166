//! The network attachment of one VM.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::model::facts::Facts;
use crate::net::error::NetError;
use crate::net::lease::{EgressControl, Lease};
use crate::net::mac::{mac, mac_text};
use crate::net::names::Registration;
use crate::net::networks::Networks;
use crate::net::publish::{Published, check, with_choice};
use crate::net::relay::Place;
use dayfly_api::agent::NetworkIdentity;
use dayfly_api::types::{NetworkRequest, Publish, VmNetwork};
use dayfly_host::process::Process;
use dayfly_units::{Egress, GuestPort, ImageConfig, Name, VmId};
use dayfly_vmm::config::LinkConfig;
use std::os::fd::OwnedFd;

/// A VM's address and published ports, or nothing.
#[derive(Debug, Default)]
pub struct Attachment {
    // Field order is drop order: ports first, because they lead to the address.
    published: Option<Published>,
    // The name before the address, because another VM may get the address afterwards.
    named: Option<Registration>,
    shown: Option<VmNetwork>,
    lease: Option<Lease>,
}

impl Attachment {
    /// Allocates what a VM with these facts needs. The result is empty if the VM has no network
    /// device or asks for no network. On a host without a network it is also empty, unless the
    /// request publishes ports or names a network. `before` are the ports that the VM had before
    /// it was started again: it gets the same free ports if it can.
    ///
    /// # Errors
    /// The request is invalid or cannot be fulfilled.
    pub async fn allocate(networks: &Networks, facts: &Facts, before: &[Publish]) -> Outcome<Self> {
        let asked = &facts.network;
        let ports = wanted(asked, &facts.config);
        check(&ports)?;
        let ports = with_choice(&ports, before);
        check_name(asked)?;
        let policy = check_egress(networks, asked)?;
        if facts.nets == 0 || asked.none {
            if let Some((port, _)) = ports.first() {
                let why = if asked.none {
                    "it is to have no network"
                } else {
                    "its snapshot has no network device: bake it again"
                };
                return Err(ApiError::invalid(format_args!(
                    "publish {}:{}: {why}",
                    port.host_port, port.guest_port
                )));
            }
            if let Some(name) = asked.network.as_ref().filter(|_| asked.none) {
                return Err(ApiError::invalid(format_args!(
                    "network {name}: it is to have no network"
                )));
            }
            return Ok(Self::default());
        }
        let lease = match networks.ready() {
            Ok(Some(lease)) => Ok(lease),
            Err(e) => Err(e),
            // Only this needs another thread.
            Ok(None) => {
                let networks = networks.clone();
                blocking(move || Ok(networks.lease())).await?
            }
        };
        let lease = match lease {
            Ok(lease) => lease,
            // The request does not require a network.
            Err(NetError::None(_)) if ports.is_empty() && asked.network.is_none() => {
                return Ok(Self::default());
            }
            Err(e) => return Err(e.into()),
        };
        if asked.network.is_none() && policy.is_internet() {
            return Self::with(networks, lease, asked, &ports).await;
        }
        let special = asked.clone();
        let lease = blocking(move || {
            let mut lease = lease;
            Ok(lease.admit(&special).map(|()| lease))
        });
        Self::with(networks, lease.await??, asked, &ports).await
    }

    /// An attachment with this address and the requested ports.
    async fn with(
        networks: &Networks,
        lease: Lease,
        asked: &NetworkRequest,
        ports: &[(Publish, Option<u16>)],
    ) -> Outcome<Self> {
        if !ports.is_empty() {
            networks.check_relay()?;
        }
        let published = match (ports, networks.publisher()) {
            ([], _) => None,
            (ports, None) => Some(Published::take_when_free(ports).await?),
            (ports, Some(publisher)) => Some(Published::ask_for(ports, publisher).await?),
        };
        let (address, mac) = (lease.address(), mac_text(mac(lease.address())));
        let ports = published.as_ref().map(Published::ports).unwrap_or_default();
        let (closed, egress, network) = (false, None, asked.network.clone());
        let mut shown = VmNetwork { address, mac, network, closed, egress, published: ports };
        shown.set_policy(asked.policy().unwrap_or_default());
        let shown = Some(shown);
        Ok(Self { published, named: None, shown, lease: Some(lease) })
    }

    #[cfg(test)]
    pub(super) fn of(lease: Lease) -> Self {
        Self { lease: Some(lease), ..Self::default() }
    }

    /// The attachment of a VM that an earlier daemon started. `relay` is the relay that the daemon
    /// left. Its ports lead to the guest from [`Self::connect`] on, or still do.
    pub fn adopt(
        networks: &Networks,
        had: Option<VmNetwork>,
        asked: &NetworkRequest,
        relay: Option<Process>,
    ) -> Self {
        let Some(had) = had else { return Self::default() };
        let lease = networks.adopt(had.address, asked);
        let published = match (&*had.published, networks.publisher(), relay) {
            ([], ..) => None,
            (ports, None, Some(relay)) => Some(Ok(Published::adopted(ports, relay))),
            (ports, None, None) => Some(Published::take(&with_choice(ports, &[]))),
            (ports, Some(publisher), relay) => {
                // Its listeners are of no use: the supervisor has freed the ports, and their order
                // has to name new ones.
                if let Some(Err(e)) = relay.map(|relay| relay.kill()) {
                    tracing::error!(address = %had.address, "ending its relay: {e}");
                }
                Some(Published::again(ports, publisher))
            }
        };
        let published = published.and_then(|published| {
            published
                .inspect_err(|error| {
                    tracing::error!(address = %had.address, "not published any more: {error}");
                })
                .ok()
        });
        Self { published, named: None, shown: Some(had), lease }
    }

    /// Makes the VM resolvable by this name and id for the VMs of its network.
    pub fn name(&mut self, id: VmId, name: &Name) {
        self.named = self.lease.as_ref().map(|lease| lease.register(id, name));
    }

    /// The attachment as the API shows it.
    #[must_use]
    pub fn shown(&self) -> Option<VmNetwork> {
        self.shown.clone()
    }

    /// The VM's egress policy; `None` if it has no address.
    #[must_use]
    pub fn egress(&self) -> Option<EgressControl> {
        Some(self.lease.as_ref()?.egress(self.named.as_ref()?))
    }

    /// The network part of the guest's identity.
    #[must_use]
    pub fn identity(&self) -> Option<NetworkIdentity> {
        self.lease.as_ref().map(Lease::identity)
    }

    /// The configuration of the VMM's network device, and the tap's descriptor, as
    /// [`Lease::link`].
    pub fn link(&mut self, asked: &NetworkRequest) -> Option<(LinkConfig, Vec<OwnedFd>)> {
        self.lease.as_mut().map(|lease| lease.link(asked))
    }

    /// Frees the published ports, and ends their relay.
    pub fn unpublish(&mut self) {
        if let Some(published) = self.published.take() {
            published.close();
        }
    }

    /// Has published ports lead to the guest from now on, by a relay that runs in `place`. Call it
    /// within a tokio runtime.
    pub fn connect(&mut self, place: impl FnOnce() -> Option<Place>) {
        if let (Some(published), Some(shown)) = (&mut self.published, &self.shown)
            && let Some(place) = place()
        {
            published.connect_to(shown.address, place);
        }
    }
}

/// The ports that a VM publishes: those of the request, and the image's if it asks for them.
fn wanted(asked: &NetworkRequest, config: &ImageConfig) -> Vec<Publish> {
    let mut ports = asked.publish.clone();
    if asked.publish_exposed {
        let named = |exposed: &GuestPort| {
            let same = |port: &Publish| {
                (port.guest_port, port.protocol) == (exposed.port, exposed.protocol)
            };
            asked.publish.iter().any(same)
        };
        let exposed = config.exposed_ports().into_iter().filter(|port| !named(port));
        ports.extend(exposed.map(|GuestPort { port, protocol }| Publish {
            host: None,
            host_port: 0,
            guest_port: port,
            protocol,
        }));
    }
    ports
}

/// Refuses network names that have another meaning in docker.
fn check_name(asked: &NetworkRequest) -> Outcome<()> {
    match asked.network.as_ref().map(Name::as_str) {
        Some(taken @ ("default" | "none" | "host" | "bridge" | "container")) => {
            Err(ApiError::invalid(format_args!(
                "network {taken}: expected a name of your own; \
                 without one a VM reaches the internet and no other VM"
            )))
        }
        _ => Ok(()),
    }
}

/// The egress policy that a request asks for.
fn check_egress(networks: &Networks, asked: &NetworkRequest) -> Outcome<Egress> {
    let policy = asked.policy().unwrap_or_default();
    if asked.closed && !policy.is_none() {
        return Err(ApiError::invalid(format_args!(
            "egress {policy}: `closed` asks for `none`; give one of both"
        )));
    }
    networks.check_egress(&policy)?;
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::publish::check_many;
    use dayfly_api::types::PortProtocol;

    fn port(host_port: u16, guest_port: u16, protocol: PortProtocol) -> Publish {
        Publish { host: None, host_port, guest_port, protocol }
    }

    #[test]
    fn exposed_ports_get_free_ones_unless_the_request_names_them() {
        let exposed = ["80/tcp", "53/udp", "53/tcp", "x"].map(str::to_owned).to_vec();
        let config = ImageConfig { exposed, ..ImageConfig::default() };
        let (tcp, udp) = (PortProtocol::Tcp, PortProtocol::Udp);
        let publish = vec![port(8080, 80, tcp), port(0, 53, tcp)];
        let mut asked = NetworkRequest { publish, ..NetworkRequest::default() };
        assert_eq!(wanted(&asked, &config), asked.publish);
        asked.publish_exposed = true;
        let all = [port(8080, 80, tcp), port(0, 53, tcp), port(0, 53, udp)];
        assert_eq!(wanted(&asked, &config), all);
    }

    #[test]
    fn many_vms_share_no_port_of_the_host() {
        let (fixed, free) = (port(8080, 80, PortProtocol::Tcp), port(0, 80, PortProtocol::Tcp));
        check_many(1, &[fixed]).unwrap();
        check_many(9, &[free, free]).unwrap();
        let refused = check_many(2, &[free, fixed]).unwrap_err().0.message;
        assert!(refused.contains("-p 80"), "{refused}");
        check_many(1, &[fixed, fixed]).unwrap_err();
        check_many(1, &[port(0, 0, PortProtocol::Udp)]).unwrap_err();
    }
}
