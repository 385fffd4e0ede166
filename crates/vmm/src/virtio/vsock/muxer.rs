//! All connections of a VM: the listening socket, the ports, and the order in which connections
//! send.
//!
//! The muxer never polls. Sockets are watched edge-triggered, and an event only sets flags. So a
//! socket that cannot be served now costs nothing, and a slow socket holds up only its own
//! connection. Every list is bounded.

use super::connection::{ANSWER_TIME, Connection, Fate};
use super::packet::{HOST_CID, Header, TYPE_STREAM, op};
use crate::disk::IoList;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Most connections of a VM, including callers without a complete first line. Further ones are
/// closed at once.
pub const MAX_CONNECTIONS: usize = 512;
/// Most resets for unknown connections kept for a guest that takes no packets. Further resets are
/// dropped: the guest gets one for its next packet.
const MAX_RESETS: usize = 1024;
/// Longest first line of a caller, in bytes: "CONNECT 4294967295\n".
const MAX_LINE: usize = 19;
/// Lowest port of the host's side for connections that the host asks for.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Lowest guest port that a program can use without CAP_NET_BIND_SERVICE in the guest:
/// `LAST_RESERVED_PORT` of Linux's net/vmw_vsock/af_vsock.c is 1023.
const FIRST_USER_PORT: u32 = 1024;

/// A socket's epoll token in the event loop.
pub type Token = u64;

/// The ports of a connection: host's side, guest's side.
type Ports = (u32, u32);

/// All connections of a VM.
#[derive(Debug)]
pub struct Muxer {
    guest_cid: u64,
    listener: OwnedFd,
    path: PathBuf,
    epoll: Arc<Epoll>,
    /// Sockets of callers whose first line is not complete, with their deadlines.
    callers: HashMap<Token, (OwnedFd, Instant)>,
    connections: HashMap<Token, Connection>,
    by_ports: HashMap<Ports, Token>,
    /// Connections that may have a packet for the guest, each once.
    line: VecDeque<Token>,
    resets: VecDeque<Header>,
    /// accept(2) failed, most likely for want of descriptors. Its edge is consumed, so accept again
    /// when a connection is removed.
    starved: bool,
    next_token: Token,
    next_port: u32,
    /// A lower bound of all deadlines.
    deadline: Option<Instant>,
}

impl Muxer {
    /// A muxer for the guest with `guest_cid`. Sockets get tokens from `first_token` up.
    pub fn new(
        guest_cid: u32,
        listener: OwnedFd,
        path: PathBuf,
        epoll: Arc<Epoll>,
        first_token: Token,
    ) -> Self {
        let mut random = [0; 4];
        // A random start keeps the ports of a clone apart from those of its parent. Any value is
        // correct, so a failure is ignored.
        let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
        Self {
            guest_cid: guest_cid.into(),
            listener,
            path,
            epoll,
            callers: HashMap::new(),
            connections: HashMap::new(),
            by_ports: HashMap::new(),
            line: VecDeque::new(),
            resets: VecDeque::new(),
            starved: false,
            next_token: first_token,
            next_port: FIRST_HOST_PORT + u32::from_le_bytes(random) % FIRST_HOST_PORT,
            deadline: None,
        }
    }

    /// Whether a packet may wait for the guest. [`Self::next_packet`] may still find none.
    #[must_use]
    pub fn has_packet(&self) -> bool {
        !self.resets.is_empty() || !self.line.is_empty()
    }

    /// Whether the guest believes in a connection, or a reset waits for it.
    #[must_use]
    pub fn guest_has_connections(&self) -> bool {
        !self.resets.is_empty() || self.connections.values().any(Connection::guest_believes)
    }

    /// Number of sockets in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.callers.len() + self.connections.len()
    }

    /// When to call [`Self::expire`] at the latest.
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn watch_until(&mut self, deadline: Option<Instant>) {
        self.deadline = [self.deadline, deadline].into_iter().flatten().min();
    }

    /// Watches a socket; epoll reports its present state at once.
    fn register(&self, socket: &OwnedFd, token: Token) -> std::io::Result<()> {
        let events =
            EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        self.epoll.ctl(ControlOperation::Add, socket.as_raw_fd(), EpollEvent::new(events, token))
    }

    fn token(&mut self) -> Token {
        let token = self.next_token;
        self.next_token = token.wrapping_add(1);
        token
    }

    /// Accepts all waiting connections of the host, because the listener is watched edge-triggered.
    pub fn accept(&mut self, now: Instant) {
        self.starved = false;
        loop {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) if self.len() < MAX_CONNECTIONS => {
                    let token = self.token();
                    if self.register(&socket, token).is_ok() {
                        let deadline = now + ANSWER_TIME;
                        self.watch_until(Some(deadline));
                        self.callers.insert(token, (socket, deadline));
                    }
                }
                // Over the limit the socket is closed, which the caller sees as end of stream.
                Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    self.starved = errno != Errno::AGAIN;
                    return;
                }
            }
        }
    }

    /// Handles an event of a connection's or a caller's socket.
    pub fn event(&mut self, token: Token, events: EventSet, now: Instant) {
        let hung_up = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        if let Some(connection) = self.connections.get_mut(&token) {
            let readable = events.intersects(EventSet::IN | EventSet::READ_HANG_UP);
            let fate = connection.on_socket(readable, events.contains(EventSet::OUT), hung_up, now);
            self.follow(token, fate, now);
        } else if self.callers.contains_key(&token) {
            self.read_line(token, hung_up);
        }
    }

    /// Reads a caller's first line, if it is complete; later bytes stay in the socket.
    fn read_line(&mut self, token: Token, hung_up: bool) {
        if hung_up {
            self.callers.remove(&token);
        }
        let Some((socket, _)) = self.callers.get(&token) else {
            return;
        };
        let mut bytes = [0; MAX_LINE];
        let got = match rustix::net::recv(socket, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)
        {
            Ok((got, _)) if got > 0 => got,
            Err(Errno::AGAIN) => return,
            _ => return drop(self.callers.remove(&token)),
        };
        let line = &bytes[..got];
        let Some(end) = line.iter().position(|b| *b == b'\n') else {
            if got == MAX_LINE {
                self.callers.remove(&token);
            }
            return;
        };
        let port = std::str::from_utf8(&line[..end]).ok().and_then(|l| l.strip_prefix("CONNECT "));
        let port =
            port.filter(|p| p.bytes().all(|b| b.is_ascii_digit())).and_then(|p| p.parse().ok());
        let Some((socket, _)) = self.callers.remove(&token) else {
            return;
        };
        let consumed = rustix::net::recv(&socket, &mut bytes[..=end], RecvFlags::DONTWAIT);
        let (Some(guest_port), Ok(_)) = (port, consumed) else {
            return;
        };
        let Some(host_port) = self.free_port(guest_port) else {
            return;
        };
        let connection = Connection::asked_by_host(socket, host_port, guest_port);
        self.by_ports.insert((host_port, guest_port), token);
        self.connections.insert(token, connection);
        self.queue(token);
    }

    /// A port of the host's side that no connection to `guest_port` uses.
    fn free_port(&mut self, guest_port: u32) -> Option<u32> {
        for _ in 0..=MAX_CONNECTIONS {
            let port = self.next_port;
            self.next_port = if port == u32::MAX - 1 { FIRST_HOST_PORT } else { port + 1 };
            if !self.by_ports.contains_key(&(port, guest_port)) {
                return Some(port);
            }
        }
        None
    }

    /// Queues a connection if it may have a packet.
    fn queue(&mut self, token: Token) {
        if let Some(connection) = self.connections.get_mut(&token)
            && !connection.in_line
            && connection.has_packet()
        {
            connection.in_line = true;
            self.line.push_back(token);
        }
    }

    /// Applies the fate that a packet or an event led to.
    fn follow(&mut self, token: Token, fate: Fate, now: Instant) {
        let Some(connection) = self.connections.get(&token) else {
            return;
        };
        let (ports, deadline) =
            ((connection.host_port, connection.guest_port), connection.deadline);
        match fate {
            Fate::Stay => {
                self.watch_until(deadline);
                self.queue(token);
            }
            Fate::Orphan => {
                self.watch_until(deadline);
                self.forget_ports(ports, token);
            }
            Fate::Reset => {
                self.push_reset(Header {
                    src_cid: HOST_CID,
                    dst_cid: self.guest_cid,
                    src_port: ports.0,
                    dst_port: ports.1,
                    kind: TYPE_STREAM,
                    op: op::RST,
                    ..Header::default()
                });
                self.remove(token, ports, now);
            }
            Fate::Remove => self.remove(token, ports, now),
        }
    }

    /// Frees the ports of `token`, unless they belong to a newer connection by now.
    fn forget_ports(&mut self, ports: Ports, token: Token) {
        if self.by_ports.get(&ports) == Some(&token) {
            self.by_ports.remove(&ports);
        }
    }

    fn remove(&mut self, token: Token, ports: Ports, now: Instant) {
        self.forget_ports(ports, token);
        // Closing the socket ends its watch.
        if self.connections.remove(&token).is_some_and(|connection| connection.in_line) {
            self.line.retain(|waiting| *waiting != token);
        }
        if self.starved {
            self.accept(now);
        }
    }

    fn push_reset(&mut self, header: Header) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(header);
        }
    }

    /// Handles a packet from the guest; `data` has exactly the bytes that the header names.
    pub fn on_packet(&mut self, header: &Header, data: &IoList<'_>, now: Instant) {
        if header.src_cid != self.guest_cid {
            return;
        }
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            if header.op != op::RST {
                self.push_reset(header.reset());
            }
            return;
        }
        let ports = (header.dst_port, header.src_port);
        match self.by_ports.get(&ports).copied() {
            Some(token) => {
                let Some(connection) = self.connections.get_mut(&token) else {
                    return;
                };
                let fate = connection.on_packet(header, data, now);
                self.follow(token, fate, now);
            }
            None if header.op == op::REQUEST => self.connect(header, now),
            None if header.op == op::RST => {}
            None => self.push_reset(header.reset()),
        }
    }

    /// Connects the guest to a port of the host. If only root of the guest can have sent the
    /// request, a listener at [`root_socket_path`] comes first, before [`socket_path`].
    fn connect(&mut self, request: &Header, now: Instant) {
        let port = request.dst_port;
        let socket = if self.len() < MAX_CONNECTIONS {
            let by_root =
                (request.src_port < FIRST_USER_PORT).then(|| root_socket_path(&self.path, port));
            by_root.and_then(dial).or_else(|| dial(socket_path(&self.path, port)))
        } else {
            None
        };
        let token = self.token();
        let Some(socket) = socket.filter(|socket| self.register(socket, token).is_ok()) else {
            return self.push_reset(request.reset());
        };
        self.connections.insert(token, Connection::asked_by_guest(socket, request));
        self.by_ports.insert((request.dst_port, request.src_port), token);
        self.follow(token, Fate::Stay, now);
    }

    /// Whether the next packet carries data, so that several buffers are useful.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        let first = self.line.front().and_then(|token| self.connections.get(token));
        self.resets.is_empty() && first.is_some_and(Connection::wants_room)
    }

    /// The next packet for the guest, with its data put into `room`. Connections take turns.
    pub fn next_packet(&mut self, room: &IoList<'_>, now: Instant) -> Option<(Header, usize)> {
        if let Some(reset) = self.resets.pop_front() {
            return Some((reset, 0));
        }
        while let Some(token) = self.line.pop_front() {
            let Some(connection) = self.connections.get_mut(&token) else {
                continue;
            };
            connection.in_line = false;
            let (packet, fate) = connection.next_packet(room, now);
            self.follow(token, fate, now);
            if let Some((header, len)) = packet {
                let (src_cid, dst_cid, kind) = (HOST_CID, self.guest_cid, TYPE_STREAM);
                return Some((Header { src_cid, dst_cid, kind, ..header }, len));
            }
        }
        None
    }

    /// Drops callers and ends connections past their deadline.
    pub fn expire(&mut self, now: Instant) {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return;
        }
        self.callers.retain(|_, (_, deadline)| *deadline > now);
        let late = self.connections.iter().filter(|(_, c)| c.deadline.is_some_and(|d| d <= now));
        let late: Vec<_> = late.map(|(token, c)| (*token, c.expired())).collect();
        for (token, fate) in late {
            self.follow(token, fate, now);
        }
        let callers = self.callers.values().map(|(_, deadline)| *deadline);
        self.deadline = callers.chain(self.connections.values().filter_map(|c| c.deadline)).min();
    }

    /// Drops every connection that the old driver knew, after a reset or a load.
    pub fn forget_guest(&mut self, now: Instant) {
        self.resets.clear();
        self.connections.retain(|_, c| c.unknown_to_guest());
        let connections = &self.connections;
        self.by_ports.retain(|_, token| connections.contains_key(token));
        self.line.retain(|token| connections.contains_key(token));
        if self.starved {
            self.accept(now);
        }
    }

    /// All connections, in no order.
    pub(super) fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.connections.values()
    }
}

/// Connects without waiting; a listener with a full backlog refuses.
fn dial(path: PathBuf) -> Option<OwnedFd> {
    let address = SocketAddrUnix::new(path).ok()?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    rustix::net::connect(socket.as_fd(), &address).ok()?;
    Some(socket)
}

/// The unix socket for connections to `port` of the host that only root of the guest can make:
/// `vsock.root_1026` beside `vsock.sock`.
///
/// The name differs from that of [`socket_path`], so that a VMM without the check of the guest's
/// port never connects to it.
#[must_use]
pub fn root_socket_path(path: &Path, port: u32) -> PathBuf {
    path.with_extension(format!("root_{port}"))
}

/// The unix socket for connections to `port` of the host from any program of the guest.
#[must_use]
pub fn socket_path(path: &Path, port: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("_{port}"));
    name.into()
}
