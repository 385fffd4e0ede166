//! Streams of one VM: the connections of clients to its guest's agent, such as of `dayfly exec` and
//! `dayfly cp`. The daemon opens each and then hands it over, so that the VM pays for its bytes.
//!
//! ```text
//!  dayflyd ── control: hand-overs ──▶ dayfly-relay --streams
//!     └────── line of each stream ──▶   client ─ socket ─splice─▶ pipe ─splice─▶ socket ─ agent
//! ```
//!
//! ```text
//! dayfly-relay --streams FD --vmm FD --most N --user UID
//! ```
//! It is a process apart from that of published ports, because anyone on the network may speak to
//! those, and only the VM's owner to these. It holds the streams of one VM and can make no
//! connection: its filter of system calls has neither socket(2) nor connect(2) nor sendmsg(2). So a
//! process that a guest has taken over can read and write the streams of that guest, which it could
//! before.
//!
//! Bytes of the client are passed on unread, because the agent checks them. Of the agent's frames
//! only headers are read, to find the last one ([`message::Rules`]).
//!
//! | | bound | past it |
//! |---|---|---|
//! | streams | `--most`, up to [`MAX_STREAMS`] | the daemon keeps them |
//! | bytes of a direction between its sockets | one pipe, while it has bytes | the sender waits |
//! | bytes before other streams have their turn | [`ends::TURN_BYTES`] | |
//! | bytes of a stream in memory | [`message`]: hand-over, last frame, farewell | refused |
//! | life after the VM | [`DRAIN`]; the daemon ends it earlier | ends |
//!
//! A daemon that ends closes its lines. The streams go on, and the process ends with the last one.
//! The next daemon starts another process for its own streams.
//!
//! # If a guest takes it over
//!
//! Such a process can send the clients any frame on the streams that it holds, and the agent any
//! byte. It can stop to serve, or to answer. The daemon reads nothing but the lines from it, ends a
//! line with a message that is not due, and watches each client's connection itself.

pub mod ends;
pub mod message;
mod stream;

use crate::pipes::Pipes;
use crate::table::{Key, Table, What};
use message::{HANDED_MAX_BYTES, Handed};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use rustix::time::Timespec;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};
use stream::{Next, Side, Stream};

/// The most streams at a time.
pub const MAX_STREAMS: usize = 128;
/// Descriptors of a stream: three, and two pipes.
pub const FDS_OF_STREAM: u64 = 7;
/// Time after the end of the VM in which clients may take their last bytes.
pub const DRAIN: Duration = Duration::from_secs(10);
/// Descriptors of a hand-over.
const FDS: usize = 3;
/// Events that one call reports.
const EVENTS: usize = 128;
/// Hand-overs that are taken before streams have their turn.
const TAKES: usize = 16;

/// The streams of one VM.
#[derive(Debug)]
pub struct Streams {
    epoll: OwnedFd,
    control: OwnedFd,
    vmm: OwnedFd,
    table: Table<Stream>,
    pipes: Pipes,
    /// Those that have more to do.
    turns: VecDeque<Key>,
    scratch: Vec<u8>,
    /// Whether more hand-overs may come.
    has_daemon: bool,
    /// When to end, once the VM has ended.
    until: Option<Instant>,
}

const fn what(side: Side) -> What {
    match side {
        Side::Client => What::StreamClient,
        Side::Agent => What::StreamAgent,
        Side::Line => What::Line,
    }
}

impl Streams {
    /// All that serving needs. `control` is the socket for hand-overs, `vmm` is readable when the
    /// VM has ended, and `most` is the number of streams at a time.
    ///
    /// # Errors
    /// There is no memory or no descriptor.
    pub fn new(control: OwnedFd, vmm: OwnedFd, most: usize) -> io::Result<Self> {
        let most = most.min(MAX_STREAMS);
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (fd, what) in [(&vmm, What::Vmm), (&control, What::Control)] {
            let key = Key { at: 0, turn: 0 }.pack(what);
            epoll::add(&epoll, fd, EventData::new_u64(key), EventFlags::IN)?;
        }
        Ok(Self {
            epoll,
            control,
            vmm,
            table: Table::new(most),
            pipes: Pipes::default(),
            turns: VecDeque::with_capacity(most),
            scratch: vec![0; HANDED_MAX_BYTES + 1],
            has_daemon: true,
            until: None,
        })
    }

    /// Serves until the last stream has ended and no other one may come.
    ///
    /// # Errors
    /// Waiting for events fails.
    pub fn serve(&mut self) -> io::Result<()> {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        while self.goes_on() {
            let left = self.until.map(|at| at.saturating_duration_since(Instant::now()));
            let wait = if self.turns.is_empty() { left } else { Some(Duration::ZERO) };
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            events.clear();
            let into = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, into, wait.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for event in &events {
                if let Some((what, key)) = Key::unpack(event.data.u64()) {
                    self.event(what, key, event.flags);
                }
            }
            for _ in 0..self.turns.len() {
                if let Some(key) = self.turns.pop_front() {
                    self.turn(key);
                }
            }
        }
        Ok(())
    }

    fn goes_on(&self) -> bool {
        let more = self.has_daemon && self.until.is_none();
        (more || !self.table.is_empty()) && self.until.is_none_or(|at| at > Instant::now())
    }

    fn event(&mut self, what: What, key: Key, flags: EventFlags) {
        let side = match what {
            What::Vmm => {
                let _ = epoll::delete(&self.epoll, &self.vmm);
                self.until = Some(Instant::now() + DRAIN);
                return;
            }
            What::Control => return self.take(),
            What::StreamClient => Side::Client,
            What::StreamAgent => Side::Agent,
            What::Line => Side::Line,
            _ => return,
        };
        if let Some(stream) = self.table.get(key) {
            let next = stream.event(side, flags, &mut self.pipes, &mut self.scratch);
            self.next(key, next);
        }
    }

    fn turn(&mut self, key: Key) {
        if let Some(stream) = self.table.get(key) {
            stream.is_queued = false;
            let next = stream.pass(&mut self.pipes, &mut self.scratch);
            self.next(key, next);
        }
    }

    fn next(&mut self, key: Key, next: Next) {
        match next {
            Next::End => drop(self.table.remove(key)),
            Next::More => {
                if let Some(stream) = self.table.get(key)
                    && !std::mem::replace(&mut stream.is_queued, true)
                {
                    self.turns.push_back(key);
                }
            }
            Next::Waits => {}
        }
    }

    /// Takes streams that are handed over. Drops a stream with a wrong message, by which the daemon
    /// sees that it was not taken.
    fn take(&mut self) {
        for _ in 0..TAKES {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut self.scratch)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let got = match recvmsg(&self.control, &mut slices, &mut control, flags) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                // Linux reports what it could not install as truncated, not as an error.
                Err(_) => return self.no_daemon(),
                Ok(got) => got,
            };
            let rights = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fds: Vec<OwnedFd> = rights.flatten().collect();
            if got.bytes == 0 && fds.is_empty() {
                return self.no_daemon();
            }
            let whole = !got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
            let handed = Handed::decode(self.scratch.get(..got.bytes).unwrap_or_default());
            if let (true, Some(handed), Ok(fds)) = (whole, handed, <[OwnedFd; FDS]>::try_from(fds))
            {
                self.add(handed, fds);
            }
        }
    }

    fn no_daemon(&mut self) {
        let _ = epoll::delete(&self.epoll, &self.control);
        self.has_daemon = false;
    }

    fn add(&mut self, handed: Handed, fds: [OwnedFd; FDS]) {
        let Some(key) = self.table.next() else { return };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let mut stream = Stream::new(handed, fds);
        let watched = stream.sides().all(|(side, fd)| {
            let data = EventData::new_u64(key.pack(what(side)));
            epoll::add(&self.epoll, fd, data, flags).is_ok()
        });
        if watched {
            stream.taken();
            // The daemon's answer is reported, so it needs no turn.
            self.table.add(stream);
        }
    }
}
