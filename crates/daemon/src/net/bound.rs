//! Binding ports of this host.

use crate::base::error::ApiError;
use dayfly_api::types::{ErrorCode, PortProtocol, Publish};
use dayfly_machine_init::{PortRefusal, RefusalKind};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Maximum number of connections that wait in a listener's queue.
const BACKLOG: i32 = 1024;

/// A bound port: what comes to it, its socket, and the guest's port.
pub(super) type Bound = (Kind, Arc<OwnedFd>, u16);

/// What comes to a bound port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
    /// The machine's supervisor receives, and makes a connection for each flow.
    Framed,
}

impl Kind {
    /// As the relay's command line has it.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Framed => "framed",
        }
    }
}

/// What receives for a published port.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) kind: Kind,
    /// `None`: the relay of an earlier daemon has it.
    pub(super) socket: Option<Arc<OwnedFd>>,
}

impl Listener {
    /// The port as a relay gets it.
    pub(super) fn bound(&self, port: &Publish) -> Option<Bound> {
        Some((self.kind, self.socket.clone()?, port.guest_port))
    }
}

/// Binds a port of this host, and returns which.
pub(super) fn bind(protocol: PortProtocol, at: (IpAddr, u16)) -> io::Result<(Listener, u16)> {
    let (kind, socket, port): (_, OwnedFd, _) = match protocol {
        PortProtocol::Tcp => {
            let listener = TcpListener::bind(at)?;
            // The standard library's queue is shorter.
            rustix::net::listen(&listener, BACKLOG)?;
            listener.set_nonblocking(true)?;
            let port = listener.local_addr()?.port();
            (Kind::Tcp, listener.into(), port)
        }
        PortProtocol::Udp => {
            let socket = UdpSocket::bind(at)?;
            socket.set_nonblocking(true)?;
            let port = socket.local_addr()?.port();
            (Kind::Udp, socket.into(), port)
        }
    };
    Ok((Listener { kind, socket: Some(Arc::new(socket)) }, port))
}

/// Binds those ports of an adopted VM that are not bound, because its relay has ended. Those that
/// another program has by now are logged, and left out until the next relay.
///
/// # Errors
/// None of its ports is bound.
pub(super) fn bind_again(ports: &mut [(Publish, Option<Bound>)]) -> io::Result<()> {
    for (port, socket) in ports.iter_mut().filter(|(_, socket)| socket.is_none()) {
        let at = (port.host.unwrap_or(Ipv4Addr::LOCALHOST.into()), port.host_port);
        match bind(port.protocol, at) {
            Ok((listener, _)) => *socket = listener.bound(port),
            Err(e) => tracing::error!("not published any more: {}", refused(port, &refusal(&e))),
        }
    }
    if ports.iter().any(|(_, socket)| socket.is_some()) {
        return Ok(());
    }
    Err(io::Error::other("none of its ports can be bound"))
}

/// Why this host does not give a port.
pub(super) fn refusal(e: &io::Error) -> PortRefusal {
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
pub(super) fn refused(port: &Publish, refusal: &PortRefusal) -> ApiError {
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
