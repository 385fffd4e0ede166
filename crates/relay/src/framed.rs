//! Flows of the machine's supervisor: each is a connection that carries datagrams, each with its
//! length in front (two bytes, the higher first; `dayfly_machine_init::ports`). The supervisor
//! decides when the flow ends.

use crate::guests::Guests;
use crate::table::{Key, Table, What};
use crate::tcp::{reset, set_buffers};
use crate::udp::{DATAGRAM_BYTES, FLAGS, connected, send_to_guest};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{set_tcp_nodelay, socket_error};
use rustix::net::{RecvFlags, recv, send};

/// Bytes of a length.
const LENGTH_BYTES: usize = 2;
/// Datagrams, or parts of the stream, of one flow before others have their turn.
const TURN: usize = 16;

#[derive(Debug)]
struct Framed {
    stream: OwnedFd,
    guest: OwnedFd,
    /// The part of a datagram that has come: less than a length and a datagram.
    came: Vec<u8>,
    /// The part of a datagram that the stream has not taken: no more is received meanwhile.
    left: Vec<u8>,
}

/// All framed flows.
#[derive(Debug)]
pub struct FramedFlows {
    table: Table<Framed>,
    buffer_bytes: Option<usize>,
}

/// Sends the whole datagrams that are at the start of `bytes`. Returns the rest.
fn pass<'a>(guest: &OwnedFd, mut bytes: &'a [u8]) -> &'a [u8] {
    while let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() {
        let length = usize::from(u16::from_be_bytes(*length));
        let Some((datagram, rest)) = rest.split_at_checked(length) else { break };
        send_to_guest(guest, datagram);
        bytes = rest;
    }
    bytes
}

impl Framed {
    /// Passes on what the stream has. Returns whether the flow goes on.
    fn pass_on_stream(&mut self, buffer: &mut [u8]) -> bool {
        for _ in 0..TURN {
            // With what has come, at most a length and the longest datagram.
            let room = buffer.get_mut(self.came.len()..FRAME_BYTES).unwrap_or_default();
            let count = match recv(&self.stream, &mut *room, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return false,
                Ok((_, count)) => count,
                Err(Errno::AGAIN) => return true,
                Err(Errno::INTR) => continue,
                Err(_) => return false,
            };
            let whole = self.came.len() + count;
            buffer[..self.came.len()].copy_from_slice(&self.came);
            let rest = pass(&self.guest, buffer.get(..whole).unwrap_or_default());
            // Most flows are idle most of the time, and have no memory then.
            self.came = rest.to_vec();
        }
        true
    }

    /// Passes on what the guest has sent. Returns whether the flow goes on.
    fn pass_on_answers(&mut self, buffer: &mut [u8]) -> bool {
        for _ in 0..TURN {
            if !self.left.is_empty() {
                return true;
            }
            let Some((length, room)) = buffer.split_first_chunk_mut::<LENGTH_BYTES>() else {
                return false;
            };
            let count = match recv(&self.guest, &mut *room, RecvFlags::DONTWAIT) {
                Ok((_, count)) => count,
                Err(Errno::AGAIN) => return true,
                // The guest's answer to an earlier datagram: no program listens there.
                Err(_) => continue,
            };
            let Ok(short) = u16::try_from(count) else { continue };
            *length = short.to_be_bytes();
            let frame = buffer.get(..LENGTH_BYTES + count).unwrap_or_default();
            let sent = match send(&self.stream, frame, FLAGS) {
                Ok(sent) => sent,
                Err(Errno::AGAIN | Errno::INTR) => 0,
                Err(_) => return false,
            };
            self.left.extend_from_slice(frame.get(sent..).unwrap_or_default());
        }
        true
    }

    /// Sends the rest of a datagram. Returns whether the flow goes on.
    fn send_left(&mut self) -> bool {
        while !self.left.is_empty() {
            match send(&self.stream, &self.left, FLAGS) {
                Ok(sent) => drop(self.left.drain(..sent)),
                Err(Errno::AGAIN) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        self.left = Vec::new();
        true
    }
}

impl FramedFlows {
    /// No flows.
    #[must_use]
    pub fn new(most: usize, buffer_bytes: Option<usize>) -> Self {
        Self { table: Table::new(most), buffer_bytes }
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

    /// Begins a flow to entry `at` of the guest's addresses.
    pub fn accept(&mut self, epoll: &OwnedFd, stream: OwnedFd, guests: &Guests, at: usize) {
        let Some(key) = self.table.next() else { return reset(stream) };
        let Some(guest) = connected(guests, at, self.buffer_bytes) else { return reset(stream) };
        let _ = set_tcp_nodelay(&stream, true);
        set_buffers(&stream, self.buffer_bytes);
        let add = |socket, what| {
            epoll::add(epoll, socket, EventData::new_u64(key.pack(what)), EventFlags::IN)
        };
        if add(&stream, What::Stream).is_err() || add(&guest, What::Datagrams).is_err() {
            return reset(stream);
        }
        self.table.add(Framed { stream, guest, came: Vec::new(), left: Vec::new() });
    }

    /// Takes in what epoll reports of a flow's stream, or of its socket.
    pub fn event(
        &mut self,
        epoll: &OwnedFd,
        key: Key,
        is_stream: bool,
        flags: EventFlags,
        buffer: &mut [u8],
    ) {
        let Some(flow) = self.table.get(key) else { return };
        let waited = !flow.left.is_empty();
        let mut goes_on = true;
        if is_stream {
            if flags.contains(EventFlags::OUT) {
                goes_on = flow.send_left();
            }
            if goes_on && flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
                goes_on = flow.pass_on_stream(buffer);
            }
        } else if waited {
            // It waits for no datagram now. An error is reported all the same, until it is taken.
            let _ = socket_error(&flow.guest);
        } else {
            goes_on = flow.pass_on_answers(buffer);
        }
        let waits = !flow.left.is_empty();
        if goes_on && waits != waited {
            // While the stream takes no more, datagrams wait in the socket's queue, or are lost.
            let (of_stream, of_guest) = if waits {
                (EventFlags::IN | EventFlags::OUT, EventFlags::empty())
            } else {
                (EventFlags::IN, EventFlags::IN)
            };
            let set = |socket, what, flags| {
                epoll::modify(epoll, socket, EventData::new_u64(key.pack(what)), flags)
            };
            goes_on = set(&flow.stream, What::Stream, of_stream).is_ok()
                && set(&flow.guest, What::Datagrams, of_guest).is_ok();
        }
        if !goes_on {
            drop(self.table.remove(key));
        }
    }
}

/// The longest frame.
const FRAME_BYTES: usize = LENGTH_BYTES + u16::MAX as usize;
/// Bytes of the buffer that [`FramedFlows::event`] needs.
pub const BUFFER_BYTES: usize = LENGTH_BYTES + DATAGRAM_BYTES;
