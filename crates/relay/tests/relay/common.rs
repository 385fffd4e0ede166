//! A relay in a thread of the test, without its jail.

use dayfly_relay::arguments::{Arguments, Kind, Limits, Port};
use dayfly_relay::serve::Relay;
use dayfly_relay::udp::Idle;
use std::io::PipeWriter;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::Duration;

pub const LONG: Duration = Duration::from_secs(3600);
pub const FOREVER: Idle = Idle { once: LONG, lasting: LONG };

/// A relay that runs until this is dropped, which is the end of its VM.
pub struct Running {
    /// The port for clients.
    pub at: SocketAddr,
    vmm: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.vmm.take());
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// A port for clients, and its socket.
pub fn port(kind: Kind) -> (SocketAddr, OwnedFd) {
    match kind {
        Kind::Udp => {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.set_nonblocking(true).unwrap();
            (socket.local_addr().unwrap(), socket.into())
        }
        Kind::Tcp | Kind::Framed => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            // As the daemon's: std's own backlog is shorter.
            rustix::net::listen(&listener, 1024).unwrap();
            listener.set_nonblocking(true).unwrap();
            (listener.local_addr().unwrap(), listener.into())
        }
    }
}

/// Relays one port to `guest`, whose address is of the loopback.
pub fn relay(kind: Kind, guest: SocketAddr, limits: Limits, idle: Idle, of_port: usize) -> Running {
    let (at, socket) = port(kind);
    relay_at((at, socket), kind, guest, limits, idle, of_port)
}

/// As [`relay`], with a socket that exists.
pub fn relay_at(
    (at, socket): (SocketAddr, OwnedFd),
    kind: Kind,
    guest: SocketAddr,
    limits: Limits,
    idle: Idle,
    of_port: usize,
) -> Running {
    let (ended, vmm) = std::io::pipe().unwrap();
    let ports = vec![Port { kind, socket, guest_port: guest.port() }];
    let guest = Ipv4Addr::LOCALHOST;
    let arguments = Arguments { guest, vmm: ended.into(), limits, user: None, ports };
    let mut relay = Relay::with(arguments, idle, of_port).unwrap();
    let thread = std::thread::spawn(move || relay.serve().unwrap());
    Running { at, vmm: Some(vmm), thread: Some(thread) }
}

/// Bounds of which no test reaches one by accident.
pub const fn wide() -> Limits {
    Limits { connections: 1024, flows: 1024, buffer_bytes: None }
}
