//! Connections: bytes of a client go to the guest, and bytes of the guest to the client.
//!
//! ```text
//! client ─ socket ─splice─▶ pipe ─splice─▶ socket ─ guest        and the same the other way
//! ```
//! A pipe is filled only when it is empty, so a socket that has no bytes differs from a pipe that
//! has no room. A connection whose receiver does not read keeps one full pipe, and its sender
//! waits.
//!
//! splice(2) stops in front of urgent data (tcp(7)) as at the end of the stream. So bytes of a
//! sender that has sent urgent data, or seems to have ended, are copied by recv(2), which leaves
//! out the urgent byte.

use crate::arguments::Limits;
use crate::guests::Guests;
use crate::pipes::{Pipe, Pipes};
use crate::table::{Key, Table, What};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, write};
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_linger, set_socket_recv_buffer_size,
    set_socket_send_buffer_size, set_tcp_keepidle, set_tcp_nodelay, socket_error,
};
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketFlags, SocketType, recv, shutdown, socket_with,
};
use rustix::pipe::{SpliceFlags, splice};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time limit for the guest to accept a connection.
pub const CONNECT: Duration = Duration::from_secs(10);
/// Bytes that one direction of a connection passes on before others have their turn.
pub const TURN_BYTES: usize = 256 << 10;
/// The most bytes that one call asks for: what a pipe takes.
const PIPE_BYTES: usize = 64 << 10;
/// Bytes that one call copies: a page, which is what the smallest pipe takes at once.
const COPY_BYTES: usize = 4096;
/// Idle time of a connection before TCP keepalive probes both ends.
const SILENCE: Duration = Duration::from_secs(60);

/// Makes closing the socket send an RST instead of a FIN.
pub fn reset(socket: OwnedFd) {
    let _ = set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}

/// A new socket for the guest.
///
/// # Errors
/// No descriptor or no memory is free.
pub fn socket_to_guest(kind: SocketType, buffer_bytes: Option<usize>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, kind, flags, None)?;
    set_buffers(&socket, buffer_bytes);
    Ok(socket)
}

/// Limits the memory that the kernel uses for a socket.
pub fn set_buffers(socket: &OwnedFd, bytes: Option<usize>) {
    if let Some(bytes) = bytes {
        let _ = set_socket_recv_buffer_size(socket, bytes);
        let _ = set_socket_send_buffer_size(socket, bytes);
    }
}

/// One end, and what epoll has reported of it that no call has refuted since.
#[derive(Debug)]
struct End {
    socket: OwnedFd,
    readable: bool,
    writable: bool,
}

/// Bytes from one end to the other.
#[derive(Debug, Default)]
struct Direction {
    /// Only while it has bytes.
    pipe: Option<Pipe>,
    /// Bytes in the pipe.
    held: usize,
    /// Whether bytes are copied instead of spliced.
    is_copied: bool,
    /// The sender has sent its last byte.
    ended: bool,
    /// The receiver knows that.
    passed_on: bool,
}

#[derive(Debug)]
struct Connection {
    /// The client's and the guest's.
    ends: [End; 2],
    /// From the client, and from the guest.
    directions: [Direction; 2],
    /// Whether the guest has accepted it.
    is_open: bool,
    /// Whether it waits for its turn.
    is_queued: bool,
}

/// All connections.
#[derive(Debug)]
pub struct Connections {
    table: Table<Connection>,
    pipes: Pipes,
    /// For bytes that are copied.
    buffer: Vec<u8>,
    /// Those that have more bytes to pass on.
    turns: VecDeque<Key>,
    /// Those that the guest has to accept, the oldest first, with their time limits.
    connecting: VecDeque<(Instant, Key)>,
    buffer_bytes: Option<usize>,
    /// The most connections.
    most: usize,
}

/// What a direction has done.
enum Passed {
    /// It waits for a socket.
    Waits,
    /// It has more to do.
    More,
}

impl Direction {
    fn pass(
        &mut self,
        from: &mut End,
        to: &mut End,
        pipes: &mut Pipes,
        buffer: &mut [u8],
    ) -> Result<Passed, Errno> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let mut left = TURN_BYTES;
        loop {
            if self.held > 0 {
                let Some(pipe) = &self.pipe else { return Err(Errno::PIPE) };
                if !to.writable {
                    return Ok(Passed::Waits);
                }
                match splice(&pipe.from, None, &to.socket, None, self.held, flags) {
                    Ok(count) => {
                        self.held = self.held.saturating_sub(count);
                        left = left.saturating_sub(count);
                    }
                    Err(Errno::AGAIN) => to.writable = false,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(e),
                }
            } else if self.ended {
                self.put_back(pipes);
                if !std::mem::replace(&mut self.passed_on, true) {
                    shutdown(&to.socket, Shutdown::Write)?;
                }
                return Ok(Passed::Waits);
            } else if !from.readable {
                self.put_back(pipes);
                return Ok(Passed::Waits);
            } else if left == 0 {
                return Ok(Passed::More);
            } else {
                let pipe = match self.pipe.take() {
                    Some(pipe) => pipe,
                    None => pipes.take()?,
                };
                let filled = if self.is_copied {
                    copy(&from.socket, &pipe.into, buffer)
                } else {
                    splice(&from.socket, None, &pipe.into, None, PIPE_BYTES, flags)
                };
                match filled {
                    Ok(0) if self.is_copied => self.ended = true,
                    Ok(0) => self.is_copied = true,
                    Ok(count) => self.held = count,
                    Err(Errno::AGAIN) => from.readable = false,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(e),
                }
                self.pipe = Some(pipe);
            }
        }
    }

    /// Gives its pipe, which is empty, to other connections.
    fn put_back(&mut self, pipes: &mut Pipes) {
        if let Some(pipe) = self.pipe.take() {
            pipes.give(pipe);
        }
    }
}

/// Moves bytes from a socket into an empty pipe, which takes them all.
fn copy(from: &OwnedFd, into: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (_, count) = recv(from, &mut *buffer, RecvFlags::DONTWAIT)?;
    match buffer.get(..count) {
        Some(bytes) if count > 0 => write(into, bytes),
        _ => Ok(count),
    }
}

impl Connection {
    /// Passes on what it can. Returns whether it has more to do.
    fn pass(&mut self, pipes: &mut Pipes, buffer: &mut [u8]) -> Result<bool, Errno> {
        let [client, guest] = &mut self.ends;
        let [there, back] = &mut self.directions;
        let there = matches!(there.pass(client, guest, pipes, buffer)?, Passed::More);
        let back = matches!(back.pass(guest, client, pipes, buffer)?, Passed::More);
        Ok(there || back)
    }

    /// Whether both ends have sent their last byte, and know that of each other.
    fn has_ended(&self) -> bool {
        self.directions.iter().all(|direction| direction.passed_on)
    }
}

impl Connections {
    /// No connections; at most as many as the limits say.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            table: Table::new(limits.connections),
            pipes: Pipes::default(),
            buffer: vec![0; COPY_BYTES],
            turns: VecDeque::with_capacity(limits.connections),
            connecting: VecDeque::with_capacity(limits.connections + 1),
            buffer_bytes: limits.buffer_bytes,
            most: limits.connections,
        }
    }

    /// Begins to connect a client with entry `at` of the guest's addresses. If that is not
    /// possible, the client sees what it would see if the guest did not listen.
    pub fn accept(&mut self, epoll: &OwnedFd, client: OwnedFd, guests: &Guests, at: usize) {
        let Some(key) = self.table.next() else { return reset(client) };
        let Ok(guest) = socket_to_guest(SocketType::STREAM, self.buffer_bytes) else {
            return reset(client);
        };
        for socket in [&client, &guest] {
            let _ = set_tcp_nodelay(socket, true);
            // Keepalive finds an end that has disappeared, so that the connection does not stay.
            let _ =
                set_socket_keepalive(socket, true).and_then(|()| set_tcp_keepidle(socket, SILENCE));
        }
        set_buffers(&client, self.buffer_bytes);
        let flags =
            EventFlags::IN | EventFlags::PRI | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let add =
            |socket, what| epoll::add(epoll, socket, EventData::new_u64(key.pack(what)), flags);
        // A socket that is neither connected nor connecting has hung up, so it is added last.
        if guests.connect(&guest, at).is_err()
            || add(&client, What::Client).is_err()
            || add(&guest, What::Guest).is_err()
        {
            return reset(client);
        }
        let end = |socket| End { socket, readable: false, writable: false };
        self.table.add(Connection {
            ends: [end(client), end(guest)],
            directions: Default::default(),
            is_open: false,
            is_queued: false,
        });
        if self.connecting.len() >= self.most {
            // Those that the guest has accepted, and those that have ended: at least one, because
            // the others are in the table.
            let table = &mut self.table;
            self.connecting.retain(|(_, key)| table.get(*key).is_some_and(|one| !one.is_open));
        }
        self.connecting.push_back((Instant::now() + CONNECT, key));
    }

    /// Takes in what epoll reports of an end.
    pub fn event(&mut self, key: Key, is_client: bool, flags: EventFlags) {
        let Some(connection) = self.table.get(key) else { return };
        let end = &mut connection.ends[usize::from(!is_client)];
        let has = |any: EventFlags| flags.intersects(any);
        end.readable |= has(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP);
        end.writable |= has(EventFlags::OUT | EventFlags::HUP);
        connection.directions[usize::from(!is_client)].is_copied |= has(EventFlags::PRI);
        // Also while the other end does not read, so that its bytes do not hide the error.
        if has(EventFlags::ERR) && !matches!(socket_error(&end.socket), Ok(Ok(()))) {
            return self.break_off(key);
        }
        if !is_client && has(EventFlags::OUT) && !has(EventFlags::HUP) {
            connection.is_open = true;
        }
        self.pass(key);
    }

    fn pass(&mut self, key: Key) {
        let Some(connection) = self.table.get(key).filter(|connection| connection.is_open) else {
            return;
        };
        match connection.pass(&mut self.pipes, &mut self.buffer) {
            Err(_) => self.break_off(key),
            Ok(_) if connection.has_ended() => drop(self.table.remove(key)),
            Ok(more) => {
                if more && !std::mem::replace(&mut connection.is_queued, true) {
                    self.turns.push_back(key);
                }
            }
        }
    }

    /// Ends a connection. The end that is still there must see an error, not an end of stream.
    fn break_off(&mut self, key: Key) {
        if let Some(connection) = self.table.remove(key) {
            connection.ends.into_iter().for_each(|end| reset(end.socket));
        }
    }

    /// Gives each connection that has more to do one turn.
    pub fn take_turns(&mut self) {
        for _ in 0..self.turns.len() {
            let Some(key) = self.turns.pop_front() else { return };
            if let Some(connection) = self.table.get(key) {
                connection.is_queued = false;
                self.pass(key);
            }
        }
    }

    /// Whether a connection has more to do.
    #[must_use]
    pub fn has_turns(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Ends connections that the guest has not accepted in time. Returns when to look again.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        while let Some((limit, key)) = self.connecting.front().copied() {
            let waits = self.table.get(key).is_some_and(|connection| !connection.is_open);
            if waits && limit > now {
                return Some(limit);
            }
            self.connecting.pop_front();
            if waits {
                self.break_off(key);
            }
        }
        None
    }
}
