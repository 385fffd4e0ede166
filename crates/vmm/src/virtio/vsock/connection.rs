//! One connection: a stream socket on the host's side, credit and packets on the guest's.
//!
//! ```text
//! host CONNECT ──▶ Asking ──REQUEST to the guest──▶ Asked ──RESPONSE from the guest──▶ Open
//! guest REQUEST ──▶ host socket connected ──RESPONSE to the guest────────────────────▶ Open
//!
//! Open ──both sides ended and all is flushed──▶ gone
//! Open ──RST from the guest──▶ GuestGone ──the guest's data is flushed to the host──▶ gone
//! ```
//! Each direction ends alone. The guest's SHUTDOWN (send) becomes `shutdown(SHUT_WR)`, once all
//! data before it is written. The host's end of stream becomes SHUTDOWN (send), once all data
//! before it is delivered.
//!
//! Credit (5.10.6.3) counts bytes modulo 2^32, separately for each direction:
//! - Guest to host: `received − forwarded ≤ BUFFER_BYTES` bounds the buffer. A guest that exceeds
//!   it gets a reset.
//! - Host to guest: `sent − peer_forwarded ≤ peer_buffer`. Data for which the guest has no buffer
//!   is not read from the host's socket.

use super::packet::{Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use crate::disk::IoList;
use rustix::net::Shutdown;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Most bytes of the guest's data buffered for a host that does not read; this is the guest's
/// credit.
pub const BUFFER_BYTES: u32 = 256 << 10;
/// Time for the guest to answer a REQUEST, or to end a connection whose host side is gone. It may
/// be long, because a waiting program of the host has its own limit, and closes its socket then.
pub const ANSWER_TIME: Duration = Duration::from_secs(120);
/// Time for the host to read the last data of a guest that has reset the connection.
pub const LINGER_TIME: Duration = Duration::from_secs(600);

/// Phase of a connection; see the module's diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The host asked; the guest has no REQUEST yet.
    Asking,
    /// The guest has the REQUEST.
    Asked,
    /// Both sides have agreed.
    Open,
    /// The guest has reset the connection; its data is being flushed to the host.
    GuestGone,
}

/// What the muxer must do with a connection after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Keep the connection.
    Stay,
    /// Free the ports, because the guest has forgotten the connection; keep it only to flush.
    Orphan,
    /// Remove the connection.
    Remove,
    /// Remove the connection, and send the guest a reset.
    Reset,
}

/// A connection: ports, phase, host socket, buffer and credit.
#[derive(Debug)]
pub struct Connection {
    /// Port on the host's side.
    pub host_port: u32,
    /// Port on the guest's side.
    pub guest_port: u32,
    /// Whether the connection waits in the muxer's queue for a packet to the guest.
    pub in_line: bool,
    /// When the connection expires.
    pub deadline: Option<Instant>,
    phase: Phase,
    /// `None` once the host's side has no more use.
    socket: Option<OwnedFd>,
    /// The socket may have data to read; cleared only by `WouldBlock`.
    readable: bool,
    /// The socket may take data; cleared only by `WouldBlock`.
    writable: bool,
    /// The peer has shut both directions of the socket.
    hung_up: bool,
    /// The host will send no more: its end of stream was read.
    host_ended: bool,
    /// The host takes no more.
    host_deaf: bool,
    /// The guest will send no more.
    guest_ended: bool,
    /// The guest takes no more.
    guest_deaf: bool,
    /// `shutdown(SHUT_WR)` was done.
    write_shut: bool,
    /// SHUTDOWN flags that the guest has got.
    shutdown_sent: u32,
    respond: bool,
    credit_wanted: bool,
    credit_asked: bool,
    /// Data of the guest that the host has not taken yet.
    buffer: VecDeque<u8>,
    received: u32,
    forwarded: u32,
    announced: u32,
    sent: u32,
    peer_buffer: u32,
    peer_forwarded: u32,
}

impl Connection {
    /// A connection that a program of the host asked for.
    #[must_use]
    pub fn asked_by_host(socket: OwnedFd, host_port: u32, guest_port: u32) -> Self {
        Self::new(socket, host_port, guest_port, Phase::Asking)
    }

    /// A connection that the guest asked for with `request`; `socket` is connected.
    #[must_use]
    pub fn asked_by_guest(socket: OwnedFd, request: &Header) -> Self {
        let mut new = Self::new(socket, request.dst_port, request.src_port, Phase::Open);
        new.respond = true;
        new.take_credit(request);
        new
    }

    fn new(socket: OwnedFd, host_port: u32, guest_port: u32, phase: Phase) -> Self {
        Self {
            host_port,
            guest_port,
            in_line: false,
            deadline: None,
            phase,
            socket: Some(socket),
            readable: true,
            writable: true,
            hung_up: false,
            host_ended: false,
            host_deaf: false,
            guest_ended: false,
            guest_deaf: false,
            write_shut: false,
            shutdown_sent: 0,
            respond: false,
            credit_wanted: false,
            credit_asked: false,
            buffer: VecDeque::new(),
            received: 0,
            forwarded: 0,
            announced: 0,
            sent: 0,
            peer_buffer: 0,
            peer_forwarded: 0,
        }
    }

    /// Whether the guest knows nothing of the connection yet.
    #[must_use]
    pub fn unknown_to_guest(&self) -> bool {
        self.phase == Phase::Asking
    }

    /// Whether the guest believes that the connection is alive. It does from REQUEST on, until it
    /// has got SHUTDOWN for both directions.
    #[must_use]
    pub fn guest_believes(&self) -> bool {
        let over = self.shutdown_sent == SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
        matches!(self.phase, Phase::Asked | Phase::Open) && !over
    }

    /// Bytes of the guest's data in the buffer.
    pub fn buffered(&self) -> usize {
        self.buffer.len()
    }

    /// Bytes that the guest can still take.
    #[must_use]
    pub const fn credit(&self) -> u32 {
        self.peer_buffer.saturating_sub(self.sent.wrapping_sub(self.peer_forwarded))
    }

    const fn take_credit(&mut self, header: &Header) {
        (self.peer_buffer, self.peer_forwarded) = (header.buf_alloc, header.fwd_cnt);
        if self.credit() > 0 {
            self.credit_asked = false;
        }
    }

    /// Handles a packet of this connection from the guest.
    pub fn on_packet(&mut self, header: &Header, data: &IoList<'_>, now: Instant) -> Fate {
        self.take_credit(header);
        match (self.phase, header.op) {
            (_, op::RST) => self.guest_left(now),
            (Phase::Asked, op::RESPONSE) => self.opened(),
            (Phase::Open, op::RW) => self.take(data, now),
            (Phase::Open, op::SHUTDOWN) => {
                self.guest_ended |= header.flags & SHUTDOWN_SEND != 0;
                if header.flags & SHUTDOWN_RECEIVE != 0 {
                    self.guest_takes_no_more();
                }
                self.settle(now)
            }
            (Phase::Open, op::CREDIT_UPDATE) => Fate::Stay,
            (Phase::Open, op::CREDIT_REQUEST) => {
                self.credit_wanted = true;
                Fate::Stay
            }
            _ => Fate::Reset,
        }
    }

    fn opened(&mut self) -> Fate {
        (self.phase, self.deadline) = (Phase::Open, None);
        let mut line = format!("OK {}\n", self.host_port).into_bytes();
        let sent = self.socket.as_ref().map(|socket| IoList::of(&mut line).send(socket.as_fd()));
        match sent {
            Some(Ok(n)) if n == line.len() => Fate::Stay,
            // A fresh socket takes these few bytes. If it does not, its owner has gone.
            _ => Fate::Reset,
        }
    }

    /// Handles a reset by the guest.
    fn guest_left(&mut self, now: Instant) -> Fate {
        if self.phase != Phase::Open {
            return Fate::Remove;
        }
        self.guest_ended = true;
        self.guest_takes_no_more();
        self.phase = Phase::GuestGone;
        self.deadline = Some(now + LINGER_TIME);
        match self.settle(now) {
            Fate::Stay => Fate::Orphan,
            other => other,
        }
    }

    /// Shuts reading, and throws away the data that the host sent. A socket closed with unread data
    /// would give the host ECONNRESET in place of the guest's last data.
    fn guest_takes_no_more(&mut self) {
        self.guest_deaf = true;
        if let Some(socket) = &self.socket {
            let _ = rustix::net::shutdown(socket, Shutdown::Read);
            let mut waste = vec![0; 16 << 10];
            let waste = IoList::of(&mut waste);
            // The loop is bounded, because nothing arrives after the shutdown.
            while waste.receive(socket.as_fd()).is_ok_and(|n| n > 0) {}
        }
    }

    /// Passes data from the guest to the host's socket, and buffers the rest.
    fn take(&mut self, data: &IoList<'_>, now: Instant) -> Fate {
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let held = self.received.wrapping_sub(self.forwarded);
        if self.guest_ended || len > BUFFER_BYTES - held.min(BUFFER_BYTES) {
            return Fate::Reset;
        }
        self.received = self.received.wrapping_add(len);
        let mut done = 0;
        if self.buffer.is_empty() {
            done = self.send(data, now);
        }
        let rest = data.window(done, data.len());
        if !self.host_deaf && !rest.is_empty() {
            let mut bytes = vec![0; rest.len()];
            rest.copy_to(&mut bytes);
            self.buffer.extend(bytes);
        }
        // If the host has no reader any more, SHUTDOWN reports it to the guest.
        self.note_hang_up();
        self.settle(now)
    }

    /// Sends bytes to the host's socket; returns how many it took.
    fn send(&mut self, data: &IoList<'_>, now: Instant) -> usize {
        let mut done = 0;
        while done < data.len() && self.writable && !self.host_deaf {
            let Some(socket) = &self.socket else {
                self.host_deaf = true;
                break;
            };
            match data.window(done, data.len()).send(socket.as_fd()) {
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(_) => self.host_deaf = true,
            }
        }
        if done > 0 && self.phase == Phase::GuestGone {
            self.deadline = Some(now + LINGER_TIME);
        }
        // `done` is at most `BUFFER_BYTES`, so it fits into 32 bits.
        self.forwarded = self.forwarded.wrapping_add(u32::try_from(done).unwrap_or_default());
        done
    }

    /// Handles an event of the host's socket.
    pub fn on_socket(
        &mut self,
        readable: bool,
        writable: bool,
        hung_up: bool,
        now: Instant,
    ) -> Fate {
        self.readable |= readable || hung_up;
        self.writable |= writable || hung_up;
        self.hung_up |= hung_up;
        self.note_hang_up();
        match self.phase {
            Phase::Asking if hung_up => Fate::Remove,
            Phase::Asked if hung_up => Fate::Reset,
            Phase::Asking | Phase::Asked => Fate::Stay,
            Phase::Open | Phase::GuestGone => {
                self.flush(now);
                self.settle(now)
            }
        }
    }

    /// Marks the host as deaf if its socket hung up and has no more data to read: then it has no
    /// reader either.
    ///
    /// Our own shutdown of both directions also hangs the socket up, but that of writing comes only
    /// after the buffer is empty.
    fn note_hang_up(&mut self) {
        self.host_deaf |= self.hung_up && self.host_ended;
        if self.host_deaf {
            self.forwarded = self.received;
            self.buffer = VecDeque::new();
        }
    }

    fn flush(&mut self, now: Instant) {
        while !self.buffer.is_empty() && self.writable && !self.host_deaf {
            let mut held = std::mem::take(&mut self.buffer);
            let (front, back) = held.as_mut_slices();
            let mut list = IoList::of(front);
            list.append(&IoList::of(back));
            let done = self.send(&list, now);
            held.drain(..done);
            self.buffer = held;
        }
        self.note_hang_up();
        if self.buffer.is_empty() {
            self.buffer = VecDeque::new();
        }
    }

    /// Shuts down the directions that have ended, and decides what becomes of the connection.
    fn settle(&mut self, now: Instant) -> Fate {
        let flushed = self.buffer.is_empty();
        if self.guest_ended && flushed && !self.write_shut {
            self.write_shut = true;
            if let Some(socket) = &self.socket {
                let _ = rustix::net::shutdown(socket, Shutdown::Write);
            }
        }
        let guest_done = self.guest_ended && flushed;
        let host_done = self.guest_deaf || self.shutdown_sent & SHUTDOWN_SEND != 0;
        if guest_done && host_done {
            return if self.phase == Phase::GuestGone { Fate::Remove } else { Fate::Reset };
        }
        if host_done && self.host_deaf && self.phase == Phase::Open {
            // The host has gone, and the guest has all that it sent. Only the guest's own end is
            // missing.
            self.socket = None;
            self.deadline.get_or_insert(now + ANSWER_TIME);
        }
        Fate::Stay
    }

    /// Whether there may be a packet for the guest.
    #[must_use]
    pub fn has_packet(&self) -> bool {
        match self.phase {
            Phase::Asking => true,
            Phase::Asked | Phase::GuestGone => false,
            Phase::Open => {
                self.respond
                    || self.credit_wanted
                    || self.may_read() && (self.credit() > 0 || !self.credit_asked)
                    || self.shutdown_flags() & !self.shutdown_sent != 0
                    || self.credit_due()
            }
        }
    }

    /// Whether the next packet carries data, so that several buffers are useful.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        self.phase == Phase::Open && !self.respond && self.may_read() && self.credit() > 0
    }

    const fn may_read(&self) -> bool {
        self.socket.is_some() && self.readable && !self.host_ended && !self.guest_deaf
    }

    const fn shutdown_flags(&self) -> u32 {
        (if self.host_ended { SHUTDOWN_SEND } else { 0 })
            | (if self.host_deaf { SHUTDOWN_RECEIVE } else { 0 })
    }

    /// Whether the guest sees less than half of its credit although more is free.
    const fn credit_due(&self) -> bool {
        !self.guest_ended
            && self.forwarded != self.announced
            && self.received.wrapping_sub(self.announced) > BUFFER_BYTES / 2
    }

    /// The next packet for the guest, if there is one: its header, and the bytes of data put into
    /// `room`. The caller may cut a data packet into several.
    pub fn next_packet(
        &mut self,
        room: &IoList<'_>,
        now: Instant,
    ) -> (Option<(Header, usize)>, Fate) {
        if self.phase == Phase::Asking {
            (self.phase, self.deadline) = (Phase::Asked, Some(now + ANSWER_TIME));
            return (Some((self.header(op::REQUEST, 0), 0)), Fate::Stay);
        }
        if self.phase != Phase::Open {
            return (None, Fate::Stay);
        }
        if std::mem::take(&mut self.respond) {
            return (Some((self.header(op::RESPONSE, 0), 0)), Fate::Stay);
        }
        if self.may_read() && self.credit() > 0 {
            let got = self.receive(room);
            if got > 0 {
                self.credit_wanted = false;
                return (Some((self.header(op::RW, 0), got)), Fate::Stay);
            }
        }
        let news = self.shutdown_flags() & !self.shutdown_sent;
        if news != 0 {
            self.shutdown_sent |= news;
            let header = self.header(op::SHUTDOWN, self.shutdown_sent);
            return (Some((header, 0)), self.settle(now));
        }
        if self.credit_wanted || self.credit_due() {
            self.credit_wanted = false;
            return (Some((self.header(op::CREDIT_UPDATE, 0), 0)), Fate::Stay);
        }
        if self.may_read() && self.credit() == 0 && !self.credit_asked {
            self.credit_asked = true;
            return (Some((self.header(op::CREDIT_REQUEST, 0), 0)), Fate::Stay);
        }
        (None, Fate::Stay)
    }

    /// Reads from the host's socket within the guest's credit; 0 if there is nothing now.
    fn receive(&mut self, room: &IoList<'_>) -> usize {
        let Some(socket) = &self.socket else { return 0 };
        let most = usize::try_from(self.credit()).unwrap_or(usize::MAX);
        match room.window(0, most).receive(socket.as_fd()) {
            Ok(0) if room.is_empty() => 0,
            Ok(0) => {
                self.host_ended = true;
                self.note_hang_up();
                0
            }
            Ok(n) => {
                self.sent = self.sent.wrapping_add(u32::try_from(n).unwrap_or_default());
                n
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                0
            }
            Err(_) => {
                // ECONNRESET: the host closed without reading all. Data that it sent has been read
                // before this error.
                (self.host_ended, self.host_deaf) = (true, true);
                self.note_hang_up();
                0
            }
        }
    }

    /// A header of this connection with the current credit, which counts as announced from now on.
    fn header(&mut self, op: u16, flags: u32) -> Header {
        self.announced = self.forwarded;
        Header {
            src_port: self.host_port,
            dst_port: self.guest_port,
            op,
            flags,
            buf_alloc: BUFFER_BYTES,
            fwd_cnt: self.forwarded,
            ..Header::default()
        }
    }

    /// What becomes of the connection at its deadline.
    #[must_use]
    pub fn expired(&self) -> Fate {
        if self.phase == Phase::GuestGone { Fate::Remove } else { Fate::Reset }
    }
}
