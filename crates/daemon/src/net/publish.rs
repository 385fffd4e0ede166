//! Published ports: ports of the host that lead to ports of a guest.
//!
//! The daemon relays connections in the host's namespace, from which guests are reached by their
//! addresses. So published ports work from everywhere, the host's loopback included, and the host's
//! own packet filter stays unchanged. The guest does not see a client's address. Connections end
//! with the daemon; the next daemon publishes the same ports again.
//!
//! UDP has no connections: the relay of a UDP port has a flow for each address from which
//! datagrams come ([`datagrams`](super::datagrams)).
//!
//! In the machine, ports are those of the user's host, on which the machine's supervisor listens
//! ([`publisher`](super::publisher)). It passes each connection or flow on, as a connection to a
//! port of the machine's loopback, which the daemon relays.
//!
//! A request for the host's port 0 gets a port that is free. It is chosen by the kernel that binds
//! it, so no other program gets it in between.

use crate::base::error::{ApiError, Outcome};
use crate::net::datagrams;
use crate::net::permits::{permits_of_all, permits_of_flows, reset, turn};
use crate::net::publisher::{Answer, Order, Publisher};
use dayfly_api::types::{ErrorCode, PortProtocol, Publish};
use dayfly_machine_init::{PortRefusal, RefusalKind};
use rustix::net::sockopt::{set_socket_keepalive, set_socket_reuseaddr, set_tcp_keepidle};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Maximum number of published ports of one VM.
pub const MAX_PUBLISHED: usize = 256;
/// Maximum number of concurrent connections to all ports of one VM. Further connections are reset
/// at once.
pub const MAX_CONNECTIONS: usize = 1024;
/// Maximum number of concurrent flows of all UDP ports of one VM.
pub const MAX_FLOWS_OF_VM: usize = 1024;
/// Time limit for the publisher's answer, which listens on its host at once.
const ANSWER: Duration = Duration::from_secs(60);
/// Idle time of a connection before TCP keepalive probes both ends.
const SILENCE: Duration = Duration::from_secs(60);
/// Time limit for a guest to accept a connection.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections that wait in a listener's queue.
const BACKLOG: u32 = 1024;

/// Bound ports, which from [`Self::connect_to`] on lead to a guest. Dropping this frees the ports.
#[derive(Debug)]
pub struct Published {
    /// Orders of the publisher, freed before the listeners to which they lead.
    orders: Vec<Order>,
    listeners: Vec<(Listener, Publish)>,
    tasks: Vec<AbortHandle>,
}

/// What receives for a published port.
#[derive(Debug)]
enum Listener {
    Tcp(Arc<TcpListener>),
    /// No task keeps this socket, so that dropping it frees the port at once.
    Udp(Arc<UdpSocket>),
    /// The machine's supervisor receives, and makes a connection for each flow.
    Flows(Arc<TcpListener>),
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
    /// Binds these ports of the host. Call it within a tokio runtime.
    ///
    /// # Errors
    /// A port is in use, or may not be bound by this user.
    pub fn take(ports: &[(Publish, Option<u16>)]) -> Outcome<Self> {
        let mut published = Self::empty(ports)?;
        for (asked, choice) in ports {
            let at = |port| (asked.host.unwrap_or(Ipv4Addr::LOCALHOST.into()), port);
            let first = choice.map(|port| bound(asked.protocol, at(port)));
            let bound = match first {
                Some(Ok(bound)) => Ok(bound),
                Some(Err(_)) | None => bound(asked.protocol, at(asked.host_port)),
            };
            let (listener, host_port) = bound.map_err(|e| refused(asked, &refusal(&e)))?;
            published.listeners.push((listener, Publish { host_port, ..*asked }));
        }
        Ok(published)
    }

    fn empty(ports: &[(Publish, Option<u16>)]) -> Outcome<Self> {
        check(&ports.iter().map(|(port, _)| *port).collect::<Vec<_>>())?;
        Ok(Self { orders: Vec::new(), listeners: Vec::new(), tasks: Vec::new() })
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
        let inside = listen((Ipv4Addr::LOCALHOST.into(), 0)).and_then(|listener| {
            let to = listener.local_addr()?.port();
            Ok((Arc::new(listener), to))
        });
        let (listener, to) = inside.map_err(|e| {
            ApiError::internal(format_args!(
                "publishing port {}: a port of the machine: {e}",
                port.host_port
            ))
        })?;
        let ip = port.host.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let address = SocketAddr::from((ip, port.host_port));
        let (order, answer) = publisher.order(address, to, port.protocol);
        let listener = match port.protocol {
            PortProtocol::Tcp => Listener::Tcp(listener),
            PortProtocol::Udp => Listener::Flows(listener),
        };
        self.listeners.push((listener, *port));
        self.orders.push(order);
        Ok(answer)
    }

    /// The ports, each with the port of the host that it has.
    #[must_use]
    pub fn ports(&self) -> Vec<Publish> {
        self.listeners.iter().map(|(_, port)| *port).collect()
    }

    /// Relays new connections and datagrams to the guest at `address`.
    pub fn connect_to(&mut self, address: Ipv4Addr) {
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let flows = Arc::new(Semaphore::new(MAX_FLOWS_OF_VM));
        for (listener, port) in &self.listeners {
            let guest = SocketAddr::from((address, port.guest_port));
            let task = match listener {
                Listener::Tcp(listener) => {
                    let turns = (connections.clone(), permits_of_all());
                    tokio::spawn(relay(listener.clone(), turns, move |client| one(client, guest)))
                }
                Listener::Flows(listener) => {
                    let turns = (flows.clone(), permits_of_flows());
                    tokio::spawn(relay(listener.clone(), turns, move |client| {
                        datagrams::framed(client, guest)
                    }))
                }
                Listener::Udp(socket) => {
                    let limits = datagrams::Limits::of_vm(flows.clone());
                    tokio::spawn(datagrams::relay(Arc::downgrade(socket), guest, limits))
                }
            };
            self.tasks.push(task.abort_handle());
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

/// Why this host does not give a port.
fn refusal(e: &io::Error) -> PortRefusal {
    let (kind, next) = match e.kind() {
        io::ErrorKind::AddrInUse => (RefusalKind::Taken, ""),
        io::ErrorKind::PermissionDenied => (
            RefusalKind::Invalid,
            " (ports below net.ipv4.ip_unprivileged_port_start are for a daemon that runs as root)",
        ),
        io::ErrorKind::AddrNotAvailable => (RefusalKind::Invalid, ""),
        _ => (RefusalKind::Other, ""),
    };
    PortRefusal { kind, why: format!("{e}{next}") }
}

/// The error for a port that its host does not give.
fn refused(port: &Publish, refusal: &PortRefusal) -> ApiError {
    let next = match refusal.kind {
        RefusalKind::Taken => "; give another one, or end the program that has it",
        RefusalKind::Invalid | RefusalKind::Other => "",
    };
    let what =
        format_args!("publishing port {} of the host: {}{next}", port.host_port, refusal.why);
    match refusal.kind {
        RefusalKind::Taken => ApiError::new(ErrorCode::Conflict, what),
        RefusalKind::Invalid => ApiError::invalid(what),
        RefusalKind::Other => ApiError::internal(what),
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.orders.clear();
        self.tasks.iter().for_each(AbortHandle::abort);
        // Shutdown frees the ports at once, not only when the tasks have ended (tcp_disconnect of
        // the kernel; SO_REUSEADDR).
        for (listener, _) in self.listeners.drain(..) {
            match listener {
                Listener::Tcp(listener) | Listener::Flows(listener) => {
                    let _ = rustix::net::shutdown(&*listener, rustix::net::Shutdown::Both);
                }
                Listener::Udp(mut socket) => {
                    // Another worker may be using the socket, which takes a system call.
                    while let Err(used) = Arc::try_unwrap(socket) {
                        socket = used;
                        std::thread::yield_now();
                    }
                }
            }
        }
    }
}

/// Binds a port of this host, and returns which.
fn bound(protocol: PortProtocol, at: (IpAddr, u16)) -> io::Result<(Listener, u16)> {
    match protocol {
        PortProtocol::Tcp => {
            let listener = listen(at)?;
            let port = listener.local_addr()?.port();
            Ok((Listener::Tcp(Arc::new(listener)), port))
        }
        PortProtocol::Udp => {
            let socket = std::net::UdpSocket::bind(at)?;
            socket.set_nonblocking(true)?;
            let port = socket.local_addr()?.port();
            Ok((Listener::Udp(Arc::new(UdpSocket::from_std(socket)?)), port))
        }
    }
}

fn listen(at: (IpAddr, u16)) -> io::Result<TcpListener> {
    let socket = if at.0.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
    set_socket_reuseaddr(&socket, true)?;
    socket.bind(SocketAddr::from(at))?;
    socket.listen(BACKLOG)
}

/// Serves connections while there are permits for them, of their VM and of all VMs.
async fn relay<F>(
    listener: Arc<TcpListener>,
    turns: (Arc<Semaphore>, Arc<Semaphore>),
    serve: impl Fn(TcpStream) -> F + Send,
) where
    F: Future<Output = ()> + Send + 'static,
{
    // The set aborts its relays when this task ends.
    let mut under_way = tokio::task::JoinSet::new();
    loop {
        while under_way.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((client, _)) => match turn(&turns.0, &turns.1) {
                Some(turn) => {
                    let served = serve(client);
                    under_way.spawn(async move {
                        served.await;
                        drop(turn);
                    });
                }
                None => reset(&client),
            },
            // No descriptor is free: clients in the backlog are accepted later.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn one(mut client: TcpStream, guest: SocketAddr) {
    let Ok(Ok(mut server)) = timeout(TIMEOUT, TcpStream::connect(guest)).await else {
        // The client sees what it would see if the guest did not listen.
        return reset(&client);
    };
    for stream in [&client, &server] {
        let _ = stream.set_nodelay(true);
        // Keepalive finds an end that has disappeared, so that the connection does not keep its
        // permits.
        let _ = set_socket_keepalive(stream, true).and_then(|()| set_tcp_keepidle(stream, SILENCE));
    }
    if tokio::io::copy_bidirectional(&mut client, &mut server).await.is_err() {
        // The end that is still there must see an error, not an end of stream.
        reset(&client);
        reset(&server);
    }
}
