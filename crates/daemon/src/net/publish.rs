//! Ports of the host at which ports of a guest are reached.
//!
//! Connections are relayed, in the host's own namespace, from which guests are reached by their addresses: so they work from
//! everywhere, from the host's own loopback too, and nothing of the host's own packet filter is changed. Who connects is not seen by
//! the guest, and connections end with the daemon; the next one publishes the same ports again.

use crate::error::{Fault, Outcome};
use dayfly_api::types::{ErrorCode, Publish};
use rustix::net::sockopt::{set_socket_linger, set_socket_reuseaddr};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// The most ports of one VM.
pub const MAX_PUBLISHED: usize = 256;
/// The most connections to one port at a time; more wait.
const MAX_CONNECTIONS: usize = 1024;
/// How long a guest may take to take a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that wait to be taken.
const BACKLOG: u32 = 1024;

/// Ports that are taken, and from [`Self::lead_to`] on lead to a guest. They are free again when this is dropped.
#[derive(Debug)]
pub struct Published {
    listeners: Vec<(Arc<TcpListener>, Publish)>,
    tasks: Vec<AbortHandle>,
}

/// Whether a request for ports makes sense.
///
/// # Errors
/// Which does not.
pub fn check(ports: &[Publish]) -> Outcome<()> {
    if ports.len() > MAX_PUBLISHED {
        return Err(Fault::invalid(format_args!(
            "publish: expected at most {MAX_PUBLISHED} ports, got {}",
            ports.len()
        )));
    }
    let mut seen = BTreeSet::new();
    for port in ports {
        if port.host_port == 0 || port.guest_port == 0 {
            return Err(Fault::invalid(format_args!(
                "publish {}:{}: expected ports from 1 to 65535",
                port.host_port, port.guest_port
            )));
        }
        if !seen.insert((port.host, port.host_port)) {
            return Err(Fault::invalid(format_args!(
                "publish: port {} of the host is asked for twice",
                port.host_port
            )));
        }
    }
    Ok(())
}

impl Published {
    /// Takes these ports of the host. Within a runtime.
    ///
    /// # Errors
    /// One of them is taken, or not for us.
    pub fn take(ports: &[Publish]) -> Outcome<Self> {
        check(ports)?;
        let listener = |port: &Publish| {
            listen(port.host, port.host_port).map(|listener| (Arc::new(listener), *port)).map_err(|e| {
                let what = format_args!(
                    "publishing port {} of the host: {e}; give another one, or end who has it",
                    port.host_port
                );
                match e.kind() {
                    io::ErrorKind::AddrInUse => Fault::new(ErrorCode::Conflict, what),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::AddrNotAvailable => Fault::invalid(what),
                    _ => Fault::internal(what),
                }
            })
        };
        let listeners = ports.iter().map(listener).collect::<Outcome<_>>()?;
        Ok(Self { listeners, tasks: Vec::new() })
    }

    /// From now on who connects to them is connected to the guest at `address`.
    pub fn lead_to(&mut self, address: Ipv4Addr) {
        for (listener, port) in &self.listeners {
            let relays = relay(listener.clone(), SocketAddr::from((address, port.guest_port)));
            self.tasks.push(tokio::spawn(relays).abort_handle());
        }
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        // Others may have the ports now, and not only when the tasks have noticed (tcp_disconnect of the kernel's; SO_REUSEADDR).
        for (listener, _) in &self.listeners {
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        }
    }
}

fn listen(host: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    let bind = |ip: IpAddr| {
        let socket = if ip.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
        set_socket_reuseaddr(&socket, true)?;
        socket.bind(SocketAddr::from((ip, port)))?;
        socket.listen(BACKLOG)
    };
    match host {
        Some(ip) => bind(ip),
        // One socket for both; IPv4's alone where there is no other.
        None => match bind(Ipv6Addr::UNSPECIFIED.into()) {
            Err(e)
                if e.raw_os_error() == Some(libc::EAFNOSUPPORT)
                    || e.kind() == io::ErrorKind::AddrNotAvailable =>
            {
                bind(Ipv4Addr::UNSPECIFIED.into())
            }
            bound => bound,
        },
    }
}

async fn relay(listener: Arc<TcpListener>, guest: SocketAddr) {
    let turns = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // Those under way end with this task.
    let mut under_way = tokio::task::JoinSet::new();
    loop {
        let Ok(turn) = turns.clone().acquire_owned().await else { return };
        while under_way.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((client, _)) => {
                under_way.spawn(async move {
                    one(client, guest).await;
                    drop(turn);
                });
            }
            // Descriptors are short: who waits is served later.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn one(mut client: TcpStream, guest: SocketAddr) {
    let Ok(Ok(mut server)) = timeout(PATIENCE, TcpStream::connect(guest)).await else {
        // As if nobody listened: a reset.
        let _ = set_socket_linger(&client, Some(Duration::ZERO));
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    if tokio::io::copy_bidirectional(&mut client, &mut server).await.is_err() {
        // Whoever broke it off, the other hears that it was not an end.
        let _ = set_socket_linger(&client, Some(Duration::ZERO));
        let _ = set_socket_linger(&server, Some(Duration::ZERO));
    }
}
