//! Published ports of VMs: the user's host listens, and each connection goes on into the machine.
//!
//! Orders come from inside the machine, which may have been taken over. So the supervisor, even as
//! root, listens on no privileged port, and with `--no-network` on none.
//!
//! One thread stays in the host's network namespace and makes the listeners. All other threads are
//! in the supervisor's namespace, from which the machine is reached. `dayfly_machine_init::ports`
//! has the protocol.

use crate::datagrams::{Idle, UdpPort};
use crate::places::{Connect, MAX_PORTS, Place, Room, Rooms};
use crate::progress::{SupervisorError, system};
use dayfly_machine_init::{
    GUEST_ADDRESS, MAX_PORT_LINE_BYTES, PORTS_PORT, PortAnswer, PortOrder, PortRefusal, RELAY_PORT,
    RefusalKind, Token, join_streams,
};
use rustix::net::sockopt::{set_socket_keepalive, set_socket_linger, set_tcp_keepidle};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Idle time before TCP keepalive probes the client.
const SILENCE: Duration = Duration::from_secs(60);
/// Pause before the daemon is connected again, and before the next accept if no descriptor is left.
const PAUSE: Duration = Duration::from_millis(100);

/// A request for a listener, of UDP or TCP, and where to send it.
type Wanted = (SocketAddr, bool, mpsc::Sender<io::Result<Listener>>);

/// A bound port.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Listener {
    fn port(&self) -> io::Result<u16> {
        let address = match self {
            Self::Tcp(listener) => listener.local_addr(),
            Self::Udp(socket) => socket.local_addr(),
        };
        address.map(|address| address.port())
    }
}

/// The thread in the host's network namespace.
#[derive(Debug, Clone)]
pub(crate) struct Outside(mpsc::Sender<Wanted>);

impl Outside {
    /// Starts the thread in the calling thread's network namespace. Unless `allowed`, it refuses
    /// all ports.
    ///
    /// # Errors
    /// The thread cannot be made.
    pub(crate) fn start(allowed: bool) -> Result<Self, SupervisorError> {
        let (sender, wanted) = mpsc::channel::<Wanted>();
        let thread = std::thread::Builder::new().name("ports".to_owned()).stack_size(128 << 10);
        let listen = move || {
            for (address, udp, answer) in wanted {
                let made = may_listen(allowed, address.port()).and_then(|()| listen(address, udp));
                // A session that has ended meanwhile drops the listener.
                drop(answer.send(made));
            }
        };
        thread.spawn(listen).map_err(system("the thread of published ports"))?;
        Ok(Self(sender))
    }

    fn listen(&self, address: SocketAddr, udp: bool) -> io::Result<Listener> {
        let (sender, answer) = mpsc::channel();
        let gone = || io::Error::other("the supervisor's thread of published ports has ended");
        self.0.send((address, udp, sender)).map_err(|_| gone())?;
        answer.recv().unwrap_or_else(|_| Err(gone()))
    }
}

/// Whether this port may be published. Port 0 is one that the kernel chooses.
///
/// # Errors
/// `PermissionDenied`, with the next step.
fn may_listen(allowed: bool, port: u16) -> io::Result<()> {
    let why = if allowed {
        let first = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
        let first = first.ok().and_then(|first| first.trim().parse().ok()).unwrap_or(1024_u16);
        if port == 0 || port >= first {
            return Ok(());
        }
        format!(
            "VMs in a machine get ports from {first} on; `sysctl \
             net.ipv4.ip_unprivileged_port_start={port}` on this host changes that"
        )
    } else {
        "the machine was made with --no-network; `dayfly machine init` without that option, then \
         `dayfly machine restart`, allows ports"
            .to_owned()
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Binds a port of the calling thread's network namespace.
fn listen(address: SocketAddr, udp: bool) -> io::Result<Listener> {
    if udp {
        return UdpSocket::bind(address).map(Listener::Udp);
    }
    let listener = TcpListener::bind(address)?;
    // A second listen lengthens the library's queue.
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(Listener::Tcp(listener))
}

/// A port on which the host listens until this is dropped.
#[derive(Debug)]
enum Port {
    Tcp { listener: Arc<TcpListener>, ended: Arc<AtomicBool> },
    Udp(#[expect(dead_code, reason = "its drop frees the port")] UdpPort),
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Self::Tcp { listener, ended } = self {
            ended.store(true, Ordering::Release);
            // This frees the port at once, and wakes the thread that accepts.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        }
    }
}

/// Carries out the daemon's orders until the supervisor ends. A daemon that ends is connected
/// again.
pub(crate) fn keep(outside: Outside, token: &Token) {
    let token = token.clone();
    let for_clients = token.clone();
    let connect: Connect = Arc::new(move |port| {
        let mut machine = TcpStream::connect((GUEST_ADDRESS, RELAY_PORT))?;
        machine.set_nodelay(true)?;
        for_clients.send(&mut machine)?;
        machine.write_all(&port.to_be_bytes())?;
        Ok(machine)
    });
    let rooms = Arc::new(Rooms::default());
    let keeping = move || {
        loop {
            let session = TcpStream::connect((GUEST_ADDRESS, PORTS_PORT)).and_then(|mut stream| {
                token.send(&mut stream)?;
                serve(&stream, &outside, &connect, &rooms)
            });
            if let Err(e) = session
                && e.kind() == io::ErrorKind::InvalidData
            {
                eprintln!("published ports: {e}");
            }
            std::thread::sleep(PAUSE);
        }
    };
    let thread = std::thread::Builder::new().name("ports-orders".into()).stack_size(256 << 10);
    if let Err(e) = thread.spawn(keeping) {
        eprintln!("no port is published: {e}");
    }
}

/// Carries out the orders of one connection. Its end frees all ports.
///
/// # Errors
/// The connection's errors; `InvalidData` for a line that is no order.
pub(crate) fn serve(
    stream: &TcpStream,
    outside: &Outside,
    connect: &Connect,
    rooms: &Arc<Rooms>,
) -> io::Result<()> {
    let mut ports = BTreeMap::new();
    let mut reader = BufReader::new(stream);
    while let Some(order) = read_order(&mut reader)? {
        match order {
            PortOrder::Free { id } => drop(ports.remove(&id)),
            PortOrder::Bind { id, address, to, udp } => {
                let made = if ports.len() < MAX_PORTS {
                    outside.listen(address, udp).and_then(|listener| {
                        let port = listener.port()?;
                        publish(listener, to, connect, rooms).map(|made| (made, port))
                    })
                } else {
                    Err(io::Error::other(format!("{MAX_PORTS} ports are published already")))
                };
                let bound = made.map(|(made, port)| {
                    ports.insert(id, made);
                    port
                });
                let (port, refused) = match bound {
                    Ok(port) => (Some(port), None),
                    Err(e) => (None, Some(refusal(e))),
                };
                let mut line = serde_json::to_vec(&PortAnswer { id, refused, port })?;
                line.push(b'\n');
                let mut to = stream;
                to.write_all(&line)?;
            }
        }
    }
    Ok(())
}

/// The next order; `None` at the connection's end.
fn read_order(from: &mut impl BufRead) -> io::Result<Option<PortOrder>> {
    let most = u64::try_from(MAX_PORT_LINE_BYTES).unwrap_or(u64::MAX);
    let mut line = Vec::new();
    from.take(most).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&line)
        .map(Some)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("an order: {e}")))
}

fn refusal(e: io::Error) -> PortRefusal {
    let kind = match e.kind() {
        io::ErrorKind::AddrInUse => RefusalKind::Taken,
        io::ErrorKind::PermissionDenied | io::ErrorKind::AddrNotAvailable => RefusalKind::Invalid,
        _ => RefusalKind::Other,
    };
    PortRefusal { kind, why: e.to_string() }
}

fn publish(listener: Listener, to: u16, connect: &Connect, rooms: &Arc<Rooms>) -> io::Result<Port> {
    let (connect, rooms) = (Arc::clone(connect), Arc::clone(rooms));
    let listener = match listener {
        Listener::Tcp(listener) => Arc::new(listener),
        Listener::Udp(socket) => {
            let idle = Idle::default();
            return UdpPort::start(socket, to, connect, rooms, idle).map(Port::Udp);
        }
    };
    let ended = Arc::<AtomicBool>::default();
    let port = Port::Tcp { listener: Arc::clone(&listener), ended: Arc::clone(&ended) };
    let thread = std::thread::Builder::new().name("port".to_owned()).stack_size(128 << 10);
    thread.spawn(move || {
        let of_port = Arc::new(Room::default());
        while !ended.load(Ordering::Acquire) {
            match listener.accept() {
                Ok((client, _)) => forward(client, to, &connect, Place::take(&rooms, &of_port)),
                Err(_) if ended.load(Ordering::Acquire) => return,
                // Out of descriptors: connections that end will free some.
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    })?;
    Ok(port)
}

/// Forwards a client's connection, or resets it if there is no place.
fn forward(client: TcpStream, to: u16, connect: &Connect, place: Option<Place>) {
    let Some(place) = place else { return reset(&client) };
    let connect = Arc::clone(connect);
    let thread = std::thread::Builder::new().name("port-client".to_owned());
    let joined = thread.stack_size(128 << 10).spawn(move || {
        let _place = place;
        let _ = client.set_nodelay(true);
        // Keepalive finds a client that has disappeared, so that it does not keep its place.
        let _ = set_socket_keepalive(&client, true);
        let _ = set_tcp_keepidle(&client, SILENCE);
        let joined = connect(to).and_then(|machine| join_streams(&client, &machine));
        if joined.is_err() {
            reset(&client);
        }
    });
    if let Err(e) = joined {
        eprintln!("a connection to a published port: {e}");
    }
}

/// Makes closing the stream send an RST instead of a FIN.
fn reset(stream: &TcpStream) {
    let _ = set_socket_linger(stream, Some(Duration::ZERO));
}

#[cfg(test)]
#[path = "ports_tests.rs"]
mod tests;
