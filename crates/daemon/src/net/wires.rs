//! What one VM has of the network.

use super::publish::check;
use super::{Lease, NetError, Published, mac, mac_text};
use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking};
use crate::vm::Facts;
use dayfly_api::agent::NetworkIdentity;
use dayfly_api::types::{NetworkRequest, VmNetwork};
use dayfly_vmm::config::LinkConfig;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// An address, and ports of the host; or neither.
#[derive(Debug, Default)]
pub struct Wires {
    // Ports go first: they lead to the address.
    published: Option<Published>,
    shown: Option<VmNetwork>,
    lease: Option<Lease>,
}

impl Wires {
    /// What a VM with these facts has. One without a network device has nothing; so has one on a host without a network, unless
    /// it wants to be reached.
    ///
    /// # Errors
    /// What is asked for cannot be had.
    pub async fn lay(daemon: &Arc<Daemon>, facts: &Facts) -> Outcome<Self> {
        let asked = &facts.network;
        check(&asked.publish)?;
        if facts.nets == 0 || asked.none {
            if let Some(port) = asked.publish.first() {
                let why = if asked.none {
                    "it is to have no network"
                } else {
                    "its snapshot has no network device: bake it again"
                };
                return Err(Fault::invalid(format_args!(
                    "publish {}:{}: {why}",
                    port.host_port, port.guest_port
                )));
            }
            return Ok(Self::default());
        }
        let lease = match daemon.networks.ready() {
            Some(lease) => Ok(lease),
            None => {
                let shared = daemon.clone();
                blocking(move || Ok(shared.networks.lease())).await?
            }
        };
        match lease {
            Ok(lease) => Self::with(lease, asked),
            Err(NetError::None(_)) if asked.publish.is_empty() => Ok(Self::default()),
            Err(e) => Err(e.into()),
        }
    }

    fn with(lease: Lease, asked: &NetworkRequest) -> Outcome<Self> {
        let published = if asked.publish.is_empty() { None } else { Some(Published::take(&asked.publish)?) };
        let (address, mac) = (lease.address(), mac_text(mac(lease.address())));
        let shown = Some(VmNetwork { address, mac, published: asked.publish.clone() });
        Ok(Self { published, shown, lease: Some(lease) })
    }

    /// What a VM has that an earlier daemon started.
    pub fn adopt(daemon: &Daemon, had: Option<VmNetwork>) -> Self {
        let Some(had) = had else { return Self::default() };
        let lease = daemon.networks.adopt(had.address);
        let published = Published::take(&had.published);
        if let Err(fault) = &published {
            tracing::error!(address = %had.address, "not published any more: {fault}");
        }
        let mut wires = Self { published: published.ok(), shown: Some(had), lease };
        wires.lead();
        wires
    }

    /// What people are shown of it.
    #[must_use]
    pub fn shown(&self) -> Option<VmNetwork> {
        self.shown.clone()
    }

    /// What the guest is told.
    #[must_use]
    pub fn identity(&self) -> Option<NetworkIdentity> {
        self.lease.as_ref().map(Lease::identity)
    }

    /// What its VMM is told, and the tap.
    ///
    /// # Errors
    /// The tap cannot be given away.
    pub fn link(&self, asked: &NetworkRequest) -> Option<io::Result<(LinkConfig, Vec<OwnedFd>)>> {
        self.lease.as_ref().map(|lease| lease.link(asked))
    }

    /// Others may have its ports.
    pub fn unpublish(&mut self) {
        self.published = None;
    }

    /// From now on its ports lead to it. Within a runtime.
    pub fn lead(&mut self) {
        if let (Some(published), Some(shown)) = (&mut self.published, &self.shown) {
            published.lead_to(shown.address);
        }
    }
}
