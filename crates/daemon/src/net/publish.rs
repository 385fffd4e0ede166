//! Published ports: ports of the host that lead to ports of a guest.
//!
//! The daemon relays connections in the host's namespace, from which guests are reached by their
//! addresses. So published ports work from everywhere, the host's loopback included, and the host's
//! own packet filter stays unchanged. The guest does not see a client's address. Connections end
//! with the daemon; the next daemon publishes the same ports again.
//!
//! In the machine, ports are those of the user's host, on which the machine's supervisor listens
//! ([`publisher`](super::publisher)). It passes each connection on to a port of the machine's
//! loopback, which the daemon relays.

use crate::base::error::{ApiError, Outcome};
use crate::net::publisher::{Answer, Order, Publisher};
use dayfly_api::types::{ErrorCode, Publish};
use dayfly_machine_init::{PortRefusal, RefusalKind};
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_linger, set_socket_reuseaddr, set_tcp_keepidle,
};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Maximum number of published ports of one VM.
pub const MAX_PUBLISHED: usize = 256;
/// Maximum number of concurrent connections to all ports of one VM. Further connections are reset
/// at once.
pub const MAX_CONNECTIONS: usize = 1024;
/// Published connections of all VMs use at most 1/`SHARE` of the daemon's descriptors; each uses
/// two.
const SHARE: u64 = 2;
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
    listeners: Vec<(Arc<TcpListener>, Publish)>,
    tasks: Vec<AbortHandle>,
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
        if port.host_port == 0 || port.guest_port == 0 {
            return Err(ApiError::invalid(format_args!(
                "publish {}:{}: expected ports from 1 to 65535",
                port.host_port, port.guest_port
            )));
        }
        if !seen.insert((port.host, port.host_port)) {
            return Err(ApiError::invalid(format_args!(
                "publish: port {} of the host is asked for twice",
                port.host_port
            )));
        }
    }
    Ok(())
}

impl Published {
    /// Binds these ports of the host. Call it within a tokio runtime.
    ///
    /// # Errors
    /// A port is in use, or may not be bound by this user.
    pub fn take(ports: &[Publish]) -> Outcome<Self> {
        check(ports)?;
        let listener = |port: &Publish| {
            let made = listen(port.host, port.host_port);
            made.map(|listener| (Arc::new(listener), *port)).map_err(|e| {
                let kind = match e.kind() {
                    io::ErrorKind::AddrInUse => RefusalKind::Taken,
                    io::ErrorKind::PermissionDenied | io::ErrorKind::AddrNotAvailable => {
                        RefusalKind::Invalid
                    }
                    _ => RefusalKind::Other,
                };
                refused(port, &PortRefusal { kind, why: e.to_string() })
            })
        };
        let listeners = ports.iter().map(listener).collect::<Outcome<_>>()?;
        Ok(Self { orders: Vec::new(), listeners, tasks: Vec::new() })
    }

    /// Has the publisher bind these ports, and waits until it has. Call it within a tokio runtime.
    ///
    /// # Errors
    /// As [`Self::take`]; or the publisher does not answer.
    pub async fn ask_for(ports: &[Publish], publisher: &Arc<Publisher>) -> Outcome<Self> {
        let (published, answers) = Self::order(ports, publisher)?;
        for (port, answer) in ports.iter().zip(answers) {
            match timeout(ANSWER, answer).await {
                Ok(Ok(None)) => {}
                Ok(Ok(Some(refusal))) => return Err(refused(port, &refusal)),
                Ok(Err(_)) | Err(_) => {
                    return Err(ApiError::internal(format_args!(
                        "publishing port {} of the host: the machine's supervisor does not answer",
                        port.host_port
                    )));
                }
            }
        }
        Ok(published)
    }

    /// Has the publisher bind the ports of an adopted VM as soon as it is connected. It logs which
    /// of them it cannot have. Call it within a tokio runtime.
    ///
    /// # Errors
    /// No port of the loopback is free.
    pub fn again(ports: &[Publish], publisher: &Arc<Publisher>) -> Outcome<Self> {
        Self::order(ports, publisher).map(|(published, _)| published)
    }

    /// Listens on the loopback, and orders the ports that lead there.
    fn order(ports: &[Publish], publisher: &Arc<Publisher>) -> Outcome<(Self, Vec<Answer>)> {
        check(ports)?;
        let mut published = Self { orders: Vec::new(), listeners: Vec::new(), tasks: Vec::new() };
        let mut answers = Vec::new();
        for port in ports {
            let inside = listen(None, 0).and_then(|listener| {
                let to = listener.local_addr()?.port();
                Ok((listener, to))
            });
            let (listener, to) = inside.map_err(|e| {
                ApiError::internal(format_args!(
                    "publishing port {}: a port of the machine: {e}",
                    port.host_port
                ))
            })?;
            let ip = port.host.unwrap_or(Ipv4Addr::LOCALHOST.into());
            let (order, answer) = publisher.order(SocketAddr::from((ip, port.host_port)), to);
            published.listeners.push((Arc::new(listener), *port));
            published.orders.push(order);
            answers.push(answer);
        }
        Ok((published, answers))
    }

    /// Relays new connections to the guest at `address`.
    pub fn connect_to(&mut self, address: Ipv4Addr) {
        let turns = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        for (listener, port) in &self.listeners {
            let guest = SocketAddr::from((address, port.guest_port));
            let relays = relay(listener.clone(), guest, turns.clone());
            self.tasks.push(tokio::spawn(relays).abort_handle());
        }
    }
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
        for (listener, _) in &self.listeners {
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        }
    }
}

fn listen(host: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    let ip = host.unwrap_or(Ipv4Addr::LOCALHOST.into());
    let socket = if ip.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
    set_socket_reuseaddr(&socket, true)?;
    socket.bind(SocketAddr::from((ip, port)))?;
    socket.listen(BACKLOG)
}

/// Permits for the connections of all VMs, which keep descriptors free for everything else.
fn permits_of_all() -> Arc<Semaphore> {
    static ALL: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let connections = usize::try_from(descriptors / SHARE / 2).unwrap_or(usize::MAX);
        Arc::new(Semaphore::new(connections.clamp(1, Semaphore::MAX_PERMITS)))
    });
    ALL.clone()
}

/// Permits for one connection, of its VM and of all VMs; `None` if there are none left.
pub(super) fn turn(
    of_vm: &Arc<Semaphore>,
    of_all_vms: &Arc<Semaphore>,
) -> Option<[OwnedSemaphorePermit; 2]> {
    Some([of_vm.clone().try_acquire_owned().ok()?, of_all_vms.clone().try_acquire_owned().ok()?])
}

async fn relay(listener: Arc<TcpListener>, guest: SocketAddr, turns: Arc<Semaphore>) {
    // The set aborts its relays when this task ends.
    let mut under_way = tokio::task::JoinSet::new();
    loop {
        while under_way.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((client, _)) => match turn(&turns, &permits_of_all()) {
                Some(turn) => {
                    under_way.spawn(async move {
                        one(client, guest).await;
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

/// Makes closing the stream send an RST instead of a FIN.
fn reset(stream: &TcpStream) {
    let _ = set_socket_linger(stream, Some(Duration::ZERO));
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
