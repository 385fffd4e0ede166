//! One stream, from the hand-over to the client's last byte.
//!
//! ```text
//!  Offered ──No──▶ (end)
//!     │ Go, or the daemon has ended
//!     ▼
//!  Passing ──frame that ends it, or the agent's connection ends──▶ Asking ──farewell──▶ Leaving
//!     │                                                                                  │
//!     └── the daemon's farewell, such as that the agent does not answer ──▶ Closing ─────┤
//!                         (until the client has what came before)                        ▼
//!  (client gone) ────────────────────────────────────────────────────────────────────▶ (end)
//! ```
//! The client's last bytes, the **farewell**, come from the daemon: it knows why a VM has ended,
//! and adds warnings. If there is no daemon any more, the farewell is the frame that ended the
//! stream, or the one of the hand-over. A client that has only the beginning of a frame gets no
//! farewell, because it would take that for the rest of the frame.
//!
//! A client that closes its connection may have sent bytes before, such as a signal. They go to the
//! agent, as far as that takes them without waiting.

use crate::pipes::Pipes;
use crate::streams::ends::{End, Inwards, Outwards, Over, Passed, Queue, SEND};
use crate::streams::message::{Event, Handed, Heard, LINE_MAX_BYTES, Order};
use rustix::event::epoll::EventFlags;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, send, shutdown};

/// How far a stream is.
#[derive(Debug)]
enum State {
    /// The daemon may keep it. Nothing is passed on.
    Offered,
    /// The daemon has kept it.
    Refused,
    Passing,
    /// The agent has ended, which was reported to the daemon. These are the client's last bytes if
    /// there is no daemon.
    Asking(Vec<u8>),
    /// The daemon has sent the client's last bytes, which follow those that came before.
    Closing(Vec<u8>),
    Leaving(Queue),
}

/// The next step of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It waits for an event.
    Waits,
    /// It has more to do, when the others had their turn.
    More,
    /// It is over.
    End,
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    client: End,
    agent: Option<End>,
    line: OwnedFd,
    /// Whether a daemon listens on the line.
    has_daemon: bool,
    /// Whether the client has closed its connection. Bytes of it may be unread.
    has_left: bool,
    outwards: Outwards,
    inwards: Inwards,
    farewell: Vec<u8>,
    state: State,
    /// Whether it waits for its turn.
    pub is_queued: bool,
}

/// Which of a stream's descriptors an event is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client's connection.
    Client,
    /// The agent's.
    Agent,
    /// The line to the daemon.
    Line,
}

impl Stream {
    /// A stream that was handed over.
    #[must_use]
    pub fn new(handed: Handed, [client, agent, line]: [OwnedFd; 3]) -> Self {
        let Handed { rules, body_left, to_agent, to_client, header, farewell } = handed;
        Self {
            client: End::new(client),
            agent: Some(End::new(agent)),
            line,
            has_daemon: true,
            has_left: false,
            outwards: Outwards::new(rules, to_client, body_left, &header),
            inwards: Inwards::new(to_agent),
            farewell,
            state: State::Offered,
            is_queued: false,
        }
    }

    /// Reports to the daemon that this process has the descriptors.
    pub fn taken(&mut self) {
        self.say(&Event::Taken);
    }

    /// Its descriptors.
    pub fn sides(&self) -> impl Iterator<Item = (Side, &OwnedFd)> {
        let agent = self.agent.as_ref().map(|agent| (Side::Agent, &agent.socket));
        [(Side::Client, &self.client.socket), (Side::Line, &self.line)].into_iter().chain(agent)
    }

    fn say(&mut self, event: &Event) {
        // The queue of a line takes more messages than a stream has, except answers to a daemon
        // that asks and does not read.
        self.has_daemon &= match send(&self.line, &event.encode(), SEND) {
            Err(Errno::AGAIN) => matches!(event, Event::Heard { .. }),
            sent => sent.is_ok(),
        };
    }

    /// Takes in what epoll reports, and goes on.
    pub fn event(
        &mut self,
        side: Side,
        flags: EventFlags,
        pipes: &mut Pipes,
        scratch: &mut [u8],
    ) -> Next {
        let has = |any: EventFlags| flags.intersects(any);
        let closed = EventFlags::HUP | EventFlags::ERR;
        let end = match side {
            Side::Client => {
                self.has_left |= has(closed);
                Some(&mut self.client)
            }
            Side::Agent => self.agent.as_mut(),
            Side::Line => {
                self.listen(scratch);
                None
            }
        };
        if let Some(end) = end {
            end.readable |= has(EventFlags::IN | EventFlags::RDHUP | closed);
            end.writable |= has(EventFlags::OUT | closed);
        }
        self.pass(pipes, scratch)
    }

    /// Reads the daemon's messages.
    fn listen(&mut self, scratch: &mut [u8]) {
        loop {
            let most = scratch.len().min(LINE_MAX_BYTES + 1);
            let message = scratch.get_mut(..most).unwrap_or_default();
            match recv(&self.line, &mut *message, RecvFlags::DONTWAIT) {
                Ok((_, count)) if count > 0 => {
                    let order = Order::decode(message.get(..count).unwrap_or_default());
                    self.obey(order);
                }
                Err(Errno::AGAIN) => return,
                // The end of the connection is reported once before the messages that came earlier,
                // if the daemon had not read everything (unix_release in net/unix/af_unix.c).
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Ok(_) | Err(_) => break,
            }
        }
        self.has_daemon = false;
        if let State::Offered = self.state {
            self.state = State::Passing;
        }
    }

    fn obey(&mut self, order: Option<Order>) {
        let is_offered = matches!(self.state, State::Offered);
        match order {
            // Also if the daemon has closed the line meanwhile.
            Some(Order::Go) if is_offered => self.state = State::Passing,
            Some(Order::No) if is_offered => self.state = State::Refused,
            Some(Order::Ask(question)) if self.has_daemon && !is_offered => {
                let waits = self.outwards.waits() && matches!(self.state, State::Passing);
                let heard = Heard { bytes: self.outwards.heard, waits };
                self.say(&Event::Heard { question, heard });
            }
            Some(Order::Finish(bytes)) if self.has_daemon && !is_offered => self.finish(bytes),
            // It is not the daemon that made this process.
            _ => self.has_daemon = false,
        }
    }

    fn finish(&mut self, bytes: Vec<u8>) {
        match self.state {
            State::Passing => {
                self.agent = None;
                self.state = State::Closing(bytes);
            }
            State::Asking(_) => self.leave(bytes),
            State::Offered | State::Refused | State::Closing(_) | State::Leaving(_) => {}
        }
    }

    /// Begins with the client's last bytes. A client that waits for the rest of a frame gets none.
    fn leave(&mut self, bytes: Vec<u8>) {
        let whole = self.outwards.is_between_frames();
        self.state = State::Leaving(Queue::of(if whole { bytes } else { Vec::new() }));
    }

    fn gone(&mut self) -> Next {
        self.say(&Event::Gone);
        Next::End
    }

    /// Goes on.
    pub fn pass(&mut self, pipes: &mut Pipes, scratch: &mut [u8]) -> Next {
        let next = self.step(pipes, scratch);
        if next == Next::End {
            self.outwards.end(pipes);
            self.inwards.end(pipes);
        }
        next
    }

    fn step(&mut self, pipes: &mut Pipes, scratch: &mut [u8]) -> Next {
        match self.state {
            State::Offered => return Next::Waits,
            // The connections are the daemon's: nothing is sent or shut down.
            State::Refused => return Next::End,
            State::Passing => {}
            _ if self.has_left => return self.gone(),
            _ => {}
        }
        if let State::Passing = self.state {
            match self.both(pipes, scratch) {
                Some(next) => return next,
                None => self.agent = None,
            }
        }
        if let State::Closing(bytes) = &mut self.state {
            match self.outwards.flush(&mut self.client) {
                Err(e) => return self.broken(e),
                Ok(false) => return Next::Waits,
                Ok(true) => {
                    let bytes = std::mem::take(bytes);
                    self.leave(bytes);
                }
            }
        }
        if let State::Asking(own) = &mut self.state {
            if self.has_daemon {
                return Next::Waits;
            }
            let own = std::mem::take(own);
            self.leave(own);
        }
        let State::Leaving(queue) = &mut self.state else { return Next::Waits };
        match queue.send(&mut self.client) {
            Err(_) => self.gone(),
            Ok(()) if !queue.is_empty() => Next::Waits,
            Ok(()) => {
                let _ = shutdown(&self.client.socket, Shutdown::Write);
                self.say(&Event::Done);
                Next::End
            }
        }
    }

    /// Passes on bytes in both directions. `None`: the agent has ended.
    fn both(&mut self, pipes: &mut Pipes, scratch: &mut [u8]) -> Option<Next> {
        let Self { client, agent, outwards, inwards, has_left, .. } = self;
        let agent = agent.as_mut()?;
        let there = match inwards.pass(client, agent, pipes, scratch) {
            Ok(Passed::More) if *has_left => return Some(Next::More),
            // The agent has all of it, or takes no more.
            Ok(Passed::Waits) if *has_left => return Some(self.gone()),
            Ok(Passed::Over(_)) => return Some(self.gone()),
            Ok(passed) => passed,
            Err(e) => return Some(self.broken(e)),
        };
        match outwards.pass(agent, client, pipes) {
            Err(e) => Some(self.broken(e)),
            Ok(Passed::Over(over)) => {
                let (event, own) = match over {
                    Over::Closed => (Event::Closed, std::mem::take(&mut self.farewell)),
                    Over::Wrong(header) => {
                        (Event::Wrong(header), std::mem::take(&mut self.farewell))
                    }
                    Over::Frame(frame) => (Event::Ended(frame.clone()), frame),
                };
                self.state = State::Asking(own);
                self.say(&event);
                None
            }
            Ok(back) => {
                let more = [there, back].contains(&Passed::More);
                Some(if more { Next::More } else { Next::Waits })
            }
        }
    }

    /// Ends it after an error of a call.
    fn broken(&mut self, error: Errno) -> Next {
        match error {
            Errno::PIPE | Errno::CONNRESET => self.gone(),
            // The line is closed without a message, by which the daemon sees that it is lost.
            _ => Next::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// A stream, the ends of its client and its agent, and the daemon's end of its line.
    fn offered() -> (Stream, UnixStream, UnixStream, OwnedFd) {
        let (client, to_client) = UnixStream::pair().unwrap();
        let (agent, to_agent) = UnixStream::pair().unwrap();
        for end in [&to_client, &to_agent] {
            end.set_nonblocking(true).unwrap();
        }
        let flags = SocketFlags::CLOEXEC;
        let line = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (line, of_process) = line.unwrap();
        let fds = [to_client.into(), to_agent.into(), of_process];
        let mut stream = Stream::new(Handed::default(), fds);
        stream.taken();
        (stream, client, agent, line)
    }

    fn event(stream: &mut Stream, side: Side, flags: EventFlags) -> Next {
        stream.event(side, flags, &mut Pipes::default(), &mut [0; 100])
    }

    #[test]
    fn what_the_daemon_said_counts_although_it_closed_the_line_with_unread_messages() {
        for (order, next) in [(Order::No, Next::End), (Order::Go, Next::Waits)] {
            let (mut stream, _client, _agent, line) = offered();
            send(&line, &order.encode(), SEND).unwrap();
            // `Taken` is unread, so the end of the line is reported before the order.
            drop(line);
            assert_eq!(event(&mut stream, Side::Line, EventFlags::IN), next, "{order:?}");
        }
    }

    #[test]
    fn what_a_client_sent_before_its_end_is_passed_on_at_its_end() {
        let (mut stream, mut client, mut agent, line) = offered();
        send(&line, &Order::Go.encode(), SEND).unwrap();
        assert_eq!(event(&mut stream, Side::Line, EventFlags::IN), Next::Waits);
        client.write_all(b"last").unwrap();
        drop(client);
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP;
        assert_eq!(event(&mut stream, Side::Client, flags), Next::End);
        drop(stream);
        let mut got = String::new();
        agent.read_to_string(&mut got).unwrap();
        assert_eq!(got, "last");
    }
}
