//! Flows: datagrams of clients go to a port of the guest, and its answers back.
//!
//! ```text
//! client A ─▶┐ the host's port ┌─ socket of flow A ─▶ guest      the guest sees another port
//! client B ─▶┘  (one socket)   └─ socket of flow B ─▶ guest      of the host for each flow
//! ```
//! A **flow** is all datagrams of one client's address and port. It begins with a datagram of the
//! client, and ends when it has been idle. What the guest sends to a flow's socket goes to the
//! client of that flow only. Datagrams wait in the kernel's queues, whose size the kernel bounds;
//! what does not fit is lost, as UDP permits. If there are as many flows as there may be, datagrams
//! of other clients are dropped.

use crate::guests::Guests;
use crate::table::{Key, Table, What};
use crate::tcp::socket_to_guest;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketType, recv, recvfrom, send, sendto};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The most flows of one port.
pub const MAX_FLOWS_OF_PORT: usize = 512;
/// Idle time that ends a flow whose client has not sent again after an answer. The times are those
/// of the kernel's connection tracking (nf_conntrack_udp_timeout and _stream).
pub const ONCE: Duration = Duration::from_secs(30);
/// Idle time that ends a flow whose client has sent again after an answer.
pub const LASTING: Duration = Duration::from_secs(120);
/// The longest datagram, and a byte more.
pub const DATAGRAM_BYTES: usize = 1 << 16;
/// Datagrams of one socket before others have their turn.
const TURN: usize = 64;

/// How each datagram is sent: the filter of system calls allows no other flags.
pub(crate) const FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// One flow.
#[derive(Debug)]
struct Flow {
    client: SocketAddr,
    /// The port to which its client sends.
    port: usize,
    /// Its socket, connected to the guest.
    guest: OwnedFd,
    /// When the last datagram of either side came.
    last: Instant,
    answered: bool,
    /// Whether the client has sent after an answer.
    lasting: bool,
}

/// The idle times that end flows.
#[derive(Debug, Clone, Copy)]
pub struct Idle {
    /// [`ONCE`], but for tests.
    pub once: Duration,
    /// [`LASTING`], but for tests.
    pub lasting: Duration,
}

/// All flows of UDP sockets.
#[derive(Debug)]
pub struct Flows {
    table: Table<Flow>,
    keys: HashMap<(usize, SocketAddr), Key>,
    /// Flows of each port.
    of_port: Vec<usize>,
    /// Flows of each port that there may be.
    most_of_port: usize,
    idle: Idle,
    buffer_bytes: Option<usize>,
    /// No flow ends before.
    next_end: Option<Instant>,
}

/// Sends a datagram that is lost if it cannot be sent at once. An error may be the answer to an
/// earlier datagram: no program listens there. Linux reports it once, so the second call sends.
pub(crate) fn send_to_guest(guest: &OwnedFd, datagram: &[u8]) {
    if send(guest, datagram, FLAGS).is_err() {
        let _ = send(guest, datagram, FLAGS);
    }
}

/// A socket that exchanges datagrams with entry `at` of the guest's addresses only.
pub(crate) fn connected(
    guests: &Guests,
    at: usize,
    buffer_bytes: Option<usize>,
) -> Option<OwnedFd> {
    let socket = socket_to_guest(SocketType::DGRAM, buffer_bytes).ok()?;
    guests.connect(&socket, at).ok()?;
    Some(socket)
}

impl Flows {
    /// No flows.
    #[must_use]
    pub fn new(most: usize, most_of_port: usize, idle: Idle, ports: usize) -> Self {
        Self {
            table: Table::new(most),
            // Twice, so that it never grows, whatever was removed from it.
            keys: HashMap::with_capacity(2 * most),
            of_port: vec![0; ports],
            most_of_port,
            idle,
            buffer_bytes: None,
            next_end: None,
        }
    }

    /// As [`Self::new`], with sockets whose buffers have this size.
    #[must_use]
    pub fn with_buffers(self, buffer_bytes: Option<usize>) -> Self {
        Self { buffer_bytes, ..self }
    }

    /// The number of flows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are no flows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Passes on the datagrams that wait at a port. `may_begin` says whether there may be one more
    /// flow beside `len` of them.
    pub fn receive(
        &mut self,
        epoll: &OwnedFd,
        (port, socket): (usize, &OwnedFd),
        guests: &Guests,
        buffer: &mut [u8],
        may_begin: impl Fn(usize) -> bool,
    ) {
        for _ in 0..TURN {
            let (count, client) = match recvfrom(socket, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, count, client)) => (count, client),
                Err(Errno::AGAIN) => return,
                // An error of an earlier answer, such as a client whose port is closed.
                Err(_) => continue,
            };
            let Some(client) = client.and_then(|client| SocketAddr::try_from(client).ok()) else {
                continue;
            };
            let known = self.keys.get(&(port, client)).copied();
            let key = known.or_else(|| {
                may_begin(self.table.len()).then(|| self.begin(epoll, client, port, guests))?
            });
            let Some(flow) = key.and_then(|key| self.table.get(key)) else { continue };
            flow.last = Instant::now();
            if flow.answered && !std::mem::replace(&mut flow.lasting, true) {
                let end = flow.last + self.idle.lasting;
                self.next_end = Some(self.next_end.map_or(end, |next| next.min(end)));
            }
            send_to_guest(&flow.guest, buffer.get(..count).unwrap_or_default());
        }
    }

    fn begin(
        &mut self,
        epoll: &OwnedFd,
        client: SocketAddr,
        port: usize,
        guests: &Guests,
    ) -> Option<Key> {
        let key = self.table.next()?;
        let of_port = self.of_port.get_mut(port)?;
        if *of_port >= self.most_of_port {
            return None;
        }
        let guest = connected(guests, port, self.buffer_bytes)?;
        epoll::add(epoll, &guest, EventData::new_u64(key.pack(What::Flow)), EventFlags::IN).ok()?;
        let (last, answered, lasting) = (Instant::now(), false, false);
        let end = last + self.idle.once;
        self.next_end = Some(self.next_end.map_or(end, |next| next.min(end)));
        self.table.add(Flow { client, port, guest, last, answered, lasting });
        self.keys.insert((port, client), key);
        *of_port += 1;
        Some(key)
    }

    /// Passes on the datagrams of the guest that wait at a flow. `socket_of` gives the socket of a
    /// port.
    pub fn answer<'a>(
        &mut self,
        key: Key,
        buffer: &mut [u8],
        socket_of: impl Fn(usize) -> Option<&'a OwnedFd>,
    ) {
        let Some(flow) = self.table.get(key) else { return };
        let Some(socket) = socket_of(flow.port) else { return };
        for _ in 0..TURN {
            let count = match recv(&flow.guest, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, count)) => count,
                Err(Errno::AGAIN) => return,
                // The guest's answer to an earlier datagram: no program listens there.
                Err(_) => continue,
            };
            flow.answered = true;
            flow.last = Instant::now();
            let datagram = buffer.get(..count).unwrap_or_default();
            // As in `send_to_guest`.
            if sendto(socket, datagram, FLAGS, &flow.client).is_err() {
                let _ = sendto(socket, datagram, FLAGS, &flow.client);
            }
        }
    }

    /// Ends the flows that have been idle. Returns when to look again.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        if self.next_end.is_none_or(|next| next > now) {
            return self.next_end;
        }
        let Self { table, keys, of_port, idle, .. } = self;
        let mut next: Option<Instant> = None;
        keys.retain(|(port, _), key| {
            let Some(flow) = table.get(*key) else { return false };
            let end = flow.last + if flow.lasting { idle.lasting } else { idle.once };
            if end <= now {
                drop(table.remove(*key));
                of_port[*port] -= 1;
                return false;
            }
            next = Some(next.map_or(end, |next| next.min(end)));
            true
        });
        self.next_end = next;
        next
    }
}
