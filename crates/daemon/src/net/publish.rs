//! Published ports: ports of the host that lead to ports of a guest.
//!
//! The daemon binds the ports, so that a request gets the error of one that is in use. A process in
//! the VM's control group passes the bytes ([`relay`](super::relay)), in the host's namespace, from
//! which guests are reached by their addresses. So published ports work from everywhere, the host's
//! loopback included, and the host's own packet filter stays unchanged. The guest does not see a
//! client's address. Connections outlive the daemon, and end with the VM.
//!
//! In the machine, ports are those of the user's host, on which the machine's supervisor listens
//! ([`publisher`](super::publisher)). It passes each connection or flow on, as a connection to a
//! port of the machine's loopback, which the relay serves. These connections end with the daemon,
//! because the supervisor frees the ports then.
//!
//! A request for the host's port 0 gets a port that is free. It is chosen by the kernel that binds
//! it, so no other program gets it in between.

use crate::base::error::{ApiError, Outcome};
use crate::net::bound::{Kind, Listener, bind, refusal, refused};
use crate::net::publisher::{Answer, Order, Publisher};
use crate::net::relay::{self, Place, Ports, Relay};
use dayfly_api::types::{PortProtocol, Publish};
use dayfly_host::process::Process;
use dayfly_machine_init::PortRefusal;
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum number of published ports of one VM.
pub const MAX_PUBLISHED: usize = 256;
/// Time limit for the publisher's answer, which listens on its host at once.
const ANSWER: Duration = Duration::from_secs(60);

/// Bound ports, which from [`Self::connect_to`] on lead to a guest. [`Self::close`] frees them.
/// Dropping this lets a relay that runs be, as when the daemon stops, but no other one follows it.
#[derive(Debug)]
pub struct Published {
    /// Orders of the publisher, freed before the listeners to which they lead.
    orders: Vec<Order>,
    listeners: Vec<(Listener, Publish)>,
    /// The relay of an earlier daemon, which has the listeners.
    adopted: Option<Process>,
    relay: Option<Relay>,
}

/// Validates a request for ports.
///
/// # Errors
/// The first invalid port.
pub fn check(ports: &[Publish]) -> Outcome<()> {
    if ports.len() > MAX_PUBLISHED {
        return Err(ApiError::invalid(format_args!(
            "publish: expected at most {MAX_PUBLISHED} ports, got {}",
            ports.len()
        )));
    }
    let mut seen = BTreeSet::new();
    for port in ports {
        if port.guest_port == 0 {
            return Err(ApiError::invalid(format_args!(
                "publish {}:{}: expected a port of the VM from 1 to 65535",
                port.host_port, port.guest_port
            )));
        }
        let chosen = port.host_port != 0;
        if chosen && !seen.insert((port.host, port.host_port, port.protocol)) {
            return Err(ApiError::invalid(format_args!(
                "publish: port {} of the host is asked for twice",
                port.host_port
            )));
        }
    }
    Ok(())
}

/// Checks that ports can be published for this many VMs at once.
///
/// # Errors
/// As [`check`]; or a port that only one of them can have.
pub fn check_many(count: u32, ports: &[Publish]) -> Outcome<()> {
    check(ports)?;
    match ports.iter().find(|port| count > 1 && port.host_port != 0) {
        None => Ok(()),
        Some(port) => Err(ApiError::invalid(format_args!(
            "publish {}:{}: {count} VMs cannot share a port of the host; leave the host's port \
             away (`-p {}`), so that each gets a free one",
            port.host_port, port.guest_port, port.guest_port
        ))),
    }
}

/// Ports to bind: each as it was requested, and the port of the host to try first for one that
/// leaves the choice open.
#[must_use]
pub fn with_choice(asked: &[Publish], before: &[Publish]) -> Vec<(Publish, Option<u16>)> {
    let mut before = before.to_vec();
    let mut choose = |port: &Publish| {
        let same = |had: &Publish| Publish { host_port: 0, ..*had } == *port;
        let at = before.iter().position(same).filter(|_| port.host_port == 0)?;
        Some(before.swap_remove(at).host_port)
    };
    asked.iter().map(|port| (*port, choose(port))).collect()
}

impl Published {
    /// Binds these ports of the host.
    ///
    /// # Errors
    /// A port is in use, or may not be bound by this user.
    pub fn take(ports: &[(Publish, Option<u16>)]) -> Outcome<Self> {
        let mut published = Self::empty(ports)?;
        for (asked, choice) in ports {
            let at = |port| (asked.host.unwrap_or(Ipv4Addr::LOCALHOST.into()), port);
            let first = choice.map(|port| bind(asked.protocol, at(port)));
            let bound = match first {
                Some(Ok(bound)) => Ok(bound),
                Some(Err(_)) | None => bind(asked.protocol, at(asked.host_port)),
            };
            let (listener, host_port) = bound.map_err(|e| refused(asked, &refusal(&e)))?;
            published.listeners.push((listener, Publish { host_port, ..*asked }));
        }
        Ok(published)
    }

    /// As [`Self::take`], when no relay that was killed may have one of the ports still.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub async fn take_when_free(ports: &[(Publish, Option<u16>)]) -> Outcome<Self> {
        let wanted = ports.iter().map(|(asked, choice)| choice.unwrap_or(asked.host_port));
        relay::ended(&wanted.collect()).await;
        Self::take(ports)
    }

    fn empty(ports: &[(Publish, Option<u16>)]) -> Outcome<Self> {
        check(&ports.iter().map(|(port, _)| *port).collect::<Vec<_>>())?;
        Ok(Self { orders: Vec::new(), listeners: Vec::new(), adopted: None, relay: None })
    }

    /// Has the publisher bind these ports, and waits until it has. Call it within a tokio runtime.
    ///
    /// # Errors
    /// As [`Self::take`]; or the publisher does not answer.
    pub async fn ask_for(
        ports: &[(Publish, Option<u16>)],
        publisher: &Arc<Publisher>,
    ) -> Outcome<Self> {
        let mut published = Self::empty(ports)?;
        let mut answers = Vec::new();
        for (asked, choice) in ports {
            let first = Publish { host_port: choice.unwrap_or(asked.host_port), ..*asked };
            answers.push(published.order(&first, publisher)?);
        }
        for (at, ((asked, choice), answer)) in ports.iter().zip(answers).enumerate() {
            let mut got = answered(asked, answer).await?;
            if got.is_err() && choice.is_some() {
                // Its earlier port is not free any more.
                let answer = published.order(asked, publisher)?;
                // The new order takes the place of the refused one.
                let (order, listener) = (published.orders.pop(), published.listeners.pop());
                if let (Some(order), Some(listener)) = (order, listener) {
                    published.orders[at] = order;
                    published.listeners[at] = listener;
                }
                got = answered(asked, answer).await?;
            }
            let host_port = got.map_err(|refusal| refused(asked, &refusal))?;
            published.listeners[at].1 = Publish { host_port, ..*asked };
        }
        Ok(published)
    }

    /// Has the publisher bind the ports of an adopted VM as soon as it is connected. It logs which
    /// of them it cannot have. Call it within a tokio runtime.
    ///
    /// # Errors
    /// No port of the loopback is free.
    pub fn again(ports: &[Publish], publisher: &Arc<Publisher>) -> Outcome<Self> {
        let mut published = Self::empty(&with_choice(ports, &[]))?;
        for port in ports {
            published.order(port, publisher)?;
        }
        Ok(published)
    }

    /// Listens on the loopback, and orders a port that leads there.
    fn order(&mut self, port: &Publish, publisher: &Arc<Publisher>) -> Outcome<Answer> {
        let inside = bind(PortProtocol::Tcp, (Ipv4Addr::LOCALHOST.into(), 0));
        let (mut listener, to) = inside.map_err(|e| {
            ApiError::internal(format_args!(
                "publishing port {}: a port of the machine: {e}",
                port.host_port
            ))
        })?;
        let ip = port.host.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let address = SocketAddr::from((ip, port.host_port));
        let (order, answer) = publisher.order(address, to, port.protocol);
        if !port.protocol.is_tcp() {
            listener.kind = Kind::Framed;
        }
        self.listeners.push((listener, *port));
        self.orders.push(order);
        Ok(answer)
    }

    /// The ports, each with the port of the host that it has.
    #[must_use]
    pub fn ports(&self) -> Vec<Publish> {
        self.listeners.iter().map(|(_, port)| *port).collect()
    }

    /// The ports of an adopted VM, which the relay of the daemon before has bound.
    #[must_use]
    pub fn adopted(ports: &[Publish], relay: Process) -> Self {
        let listener = |port: &Publish| {
            let kind = if port.protocol.is_tcp() { Kind::Tcp } else { Kind::Udp };
            (Listener { kind, socket: None }, *port)
        };
        let listeners = ports.iter().map(listener).collect();
        Self { orders: Vec::new(), listeners, adopted: Some(relay), relay: None }
    }

    /// Has a relay pass new connections and datagrams to the guest at `address`. Clients that came
    /// before wait in the listeners' queues. Does not wait for the relay. Call it within a tokio
    /// runtime.
    pub fn connect_to(&mut self, address: Ipv4Addr, place: Place) {
        let published = self.listeners.iter().map(|(listener, port)| (*port, listener.bound(port)));
        let ports = Ports { guest: address, published: published.collect() };
        self.relay = Some(Relay::keep(place, ports, self.adopted.take()));
    }

    /// Frees the ports: those of TCP now, and those of UDP when the relay is gone
    /// ([`relay::ended`]).
    pub fn close(mut self) {
        self.orders.clear();
        for (Listener { kind, socket }, _) in &self.listeners {
            if let (Kind::Tcp | Kind::Framed, Some(socket)) = (kind, socket) {
                // Also while the relay has the listener (tcp_disconnect of the kernel;
                // SO_REUSEADDR).
                let _ = rustix::net::shutdown(&**socket, rustix::net::Shutdown::Both);
            }
        }
        if let Some(relay) = self.relay.take() {
            relay.stop();
        }
        // One that was not followed yet.
        if let Some(Err(e)) = self.adopted.take().map(|relay| relay.kill()) {
            tracing::error!("ending a relay: {e}");
        }
    }
}

/// The publisher's answer.
///
/// # Errors
/// There is none.
async fn answered(port: &Publish, answer: Answer) -> Outcome<Result<u16, PortRefusal>> {
    match timeout(ANSWER, answer).await {
        Ok(Ok(got)) => Ok(got),
        Ok(Err(_)) | Err(_) => Err(ApiError::internal(format_args!(
            "publishing port {} of the host: the machine's supervisor does not answer",
            port.host_port
        ))),
    }
}
