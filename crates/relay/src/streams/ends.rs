//! The two directions of a stream.

use crate::pipes::{Pipe, Pipes};
use crate::streams::message::{HEADER_BYTES, Header, Rules};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, write};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::pipe::{SpliceFlags, splice};

/// Bytes that one direction passes on before other streams have their turn.
pub const TURN_BYTES: usize = 256 << 10;
/// What reading a header counts for, so that frames without bytes have bounds too.
const HEADER_COST_BYTES: usize = 1 << 10;
/// The most bytes that one call asks for: what a pipe takes.
const PIPE_BYTES: usize = 64 << 10;
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);
/// How each byte that is not spliced is sent: the filter of system calls allows no other flags.
pub const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// One end. Both flags are set until a call has refuted them, and again when epoll reports it.
#[derive(Debug)]
pub struct End {
    /// Its connection.
    pub socket: OwnedFd,
    /// It may have bytes.
    pub readable: bool,
    /// It may take bytes.
    pub writable: bool,
}

impl End {
    /// An end of which nothing is known yet.
    #[must_use]
    pub const fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: true, writable: true }
    }
}

/// How far a direction came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passed {
    /// It waits for an end.
    Waits,
    /// It has more to do.
    More,
    /// There is nothing more to pass on. What was passed on has left this process.
    Over(Over),
}

/// Why there is nothing more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Over {
    /// The connection ended, of the client or of the agent.
    Closed,
    /// The agent sent this frame.
    Frame(Vec<u8>),
    /// The agent sent this header, which it may not.
    Wrong([u8; HEADER_BYTES]),
}

/// Bytes that are in this process's memory.
#[derive(Debug, Default)]
pub struct Queue {
    bytes: Vec<u8>,
    sent: usize,
}

impl Queue {
    /// A queue with these bytes.
    #[must_use]
    pub const fn of(bytes: Vec<u8>) -> Self {
        Self { bytes, sent: 0 }
    }

    /// Whether everything was sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sent >= self.bytes.len()
    }

    /// Sends what `to` takes.
    ///
    /// # Errors
    /// The receiver is gone.
    pub fn send(&mut self, to: &mut End) -> Result<(), Errno> {
        while to.writable && !self.is_empty() {
            match send(&to.socket, self.bytes.get(self.sent..).unwrap_or_default(), SEND) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => to.writable = false,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        if self.is_empty() {
            *self = Self::default();
        }
        Ok(())
    }
}

/// A pipe, only while it has bytes.
#[derive(Debug, Default)]
struct Held {
    pipe: Option<Pipe>,
    bytes: usize,
}

impl Held {
    /// The pipe to fill.
    fn pipe(&mut self, pipes: &mut Pipes) -> Result<&Pipe, Errno> {
        if self.pipe.is_none() {
            self.pipe = Some(pipes.take()?);
        }
        self.pipe.as_ref().ok_or(Errno::PIPE)
    }

    /// Splices up to `most` bytes into the pipe. Zero: the sender has ended.
    fn fill(&mut self, from: &mut End, most: usize, pipes: &mut Pipes) -> Result<usize, Errno> {
        let count = loop {
            match splice(&from.socket, None, &self.pipe(pipes)?.into, None, most, FLAGS) {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        };
        self.bytes += count;
        Ok(count)
    }

    /// Splices out of the pipe what `to` takes. Returns the number of bytes.
    fn drain(&mut self, to: &mut End) -> Result<usize, Errno> {
        let Some(pipe) = &self.pipe else { return Err(Errno::PIPE) };
        match splice(&pipe.from, None, &to.socket, None, self.bytes, FLAGS) {
            Ok(count) => {
                self.bytes = self.bytes.saturating_sub(count);
                Ok(count)
            }
            Err(Errno::AGAIN) => {
                to.writable = false;
                Ok(0)
            }
            Err(Errno::INTR) => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// Gives its pipe, which is empty, to other streams.
    fn put_back(&mut self, pipes: &mut Pipes) {
        if let Some(pipe) = self.pipe.take() {
            pipes.give(pipe);
        }
    }
}

/// From the agent to the client: whole frames, of which only the headers are read.
#[derive(Debug)]
pub struct Outwards {
    rules: Rules,
    queue: Queue,
    held: Held,
    /// The pipe has only a header, to which the beginning of its body is added.
    fresh: bool,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that were read.
    have: usize,
    /// Bytes of the frame's body that were not read.
    body_left: usize,
    /// The frame that ends the stream, as far as it was read, and its length.
    ending: Option<(Vec<u8>, usize)>,
    /// Bytes that the agent has sent.
    pub heard: u64,
}

impl Outwards {
    /// The direction of a stream that was handed over: these bytes go first, then the rest of a
    /// frame's body. `begun` is the beginning of a header.
    #[must_use]
    pub fn new(rules: Rules, first: Vec<u8>, body_left: u32, begun: &[u8]) -> Self {
        let mut header = [0; HEADER_BYTES];
        let have = begun.len().min(HEADER_BYTES - 1);
        header[..have].copy_from_slice(&begun[..have]);
        Self {
            rules,
            queue: Queue::of(first),
            held: Held::default(),
            fresh: false,
            header,
            have,
            body_left: usize::try_from(body_left).unwrap_or(usize::MAX),
            ending: None,
            heard: 0,
        }
    }

    /// Whether the client has everything that came.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.queue.is_empty() && self.held.bytes == 0
    }

    /// Whether the client has only whole frames and takes another one.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        self.waits() && self.body_left == 0
    }

    /// Gives back its pipe.
    pub fn end(&mut self, pipes: &mut Pipes) {
        if self.held.bytes == 0 {
            self.held.put_back(pipes);
        }
    }

    /// Sends the client what is in memory and in the pipe, and reads nothing more. Returns whether
    /// the client has all of it.
    ///
    /// # Errors
    /// The client is gone.
    pub fn flush(&mut self, client: &mut End) -> Result<bool, Errno> {
        self.fresh = false;
        self.queue.send(client)?;
        while self.queue.is_empty() && self.held.bytes > 0 && client.writable {
            self.held.drain(client)?;
        }
        Ok(self.waits())
    }

    /// Passes on what it can, before other streams have their turn.
    ///
    /// # Errors
    /// The client is gone, or no descriptor is free.
    pub fn pass(
        &mut self,
        agent: &mut End,
        client: &mut End,
        pipes: &mut Pipes,
    ) -> Result<Passed, Errno> {
        let mut left = TURN_BYTES;
        loop {
            if !self.queue.is_empty() {
                self.queue.send(client)?;
                if !self.queue.is_empty() {
                    return Ok(Passed::Waits);
                }
            } else if self.held.bytes > 0 && !self.fresh {
                if !client.writable {
                    return Ok(Passed::Waits);
                }
                left = left.saturating_sub(self.held.drain(client)?);
            } else if !agent.readable {
                if std::mem::take(&mut self.fresh) {
                    continue;
                }
                self.held.put_back(pipes);
                return Ok(Passed::Waits);
            } else if left == 0 && !self.fresh {
                return Ok(Passed::More);
            } else {
                if self.body_left == 0 {
                    left = left.saturating_sub(HEADER_COST_BYTES);
                }
                if let Some(over) = self.read(agent, pipes)? {
                    self.held.put_back(pipes);
                    return Ok(Passed::Over(over));
                }
            }
        }
    }

    /// Takes one step in what the agent sends.
    fn read(&mut self, agent: &mut End, pipes: &mut Pipes) -> Result<Option<Over>, Errno> {
        if self.ending.is_some() {
            return Ok(self.read_ending(agent));
        }
        if self.body_left > 0 {
            self.fresh = false;
            let most = self.body_left.min(PIPE_BYTES);
            return match self.held.fill(agent, most, pipes) {
                Ok(0) => Ok(Some(Over::Closed).filter(|_| self.held.bytes == 0)),
                Ok(count) => {
                    self.body_left -= count.min(self.body_left);
                    self.heard = self.heard.wrapping_add(count as u64);
                    Ok(None)
                }
                Err(Errno::AGAIN) => {
                    agent.readable = false;
                    Ok(None)
                }
                // A connection that breaks has ended.
                Err(Errno::CONNRESET) => Ok(Some(Over::Closed).filter(|_| self.held.bytes == 0)),
                Err(e) => Err(e),
            };
        }
        let Some(count) = receive(agent, &mut self.header[self.have..]) else { return Ok(None) };
        if count == 0 {
            return Ok(Some(Over::Closed));
        }
        self.heard = self.heard.wrapping_add(count as u64);
        self.have += count;
        if self.have < HEADER_BYTES {
            return Ok(None);
        }
        self.have = 0;
        match self.rules.read(self.header) {
            Header::Passes(length) => {
                // An empty pipe has room for it.
                let header = self.header;
                if write(&self.held.pipe(pipes)?.into, &header)? != HEADER_BYTES {
                    return Err(Errno::PIPE);
                }
                self.held.bytes = HEADER_BYTES;
                self.body_left = usize::try_from(length).unwrap_or(usize::MAX);
                self.fresh = length > 0;
                Ok(None)
            }
            Header::Ends(length) => {
                let whole = HEADER_BYTES + usize::try_from(length).unwrap_or_default();
                self.ending = Some((self.header.to_vec(), whole));
                Ok(self.read_ending(agent))
            }
            Header::Wrong => Ok(Some(Over::Wrong(self.header))),
        }
    }

    /// Reads the frame that ends the stream.
    fn read_ending(&mut self, agent: &mut End) -> Option<Over> {
        let (frame, whole) = self.ending.as_mut()?;
        while frame.len() < *whole {
            let have = frame.len();
            frame.resize(*whole, 0);
            let got = receive(agent, frame.get_mut(have..).unwrap_or_default());
            frame.truncate(have + got.unwrap_or_default());
            match got {
                None => return None,
                Some(0) => return Some(Over::Closed),
                Some(_) => {}
            }
        }
        self.ending.take().map(|(frame, _)| Over::Frame(frame))
    }
}

/// Receives bytes. `None`: there are none yet. Zero: the sender has ended, or its connection broke.
fn receive(from: &mut End, into: &mut [u8]) -> Option<usize> {
    loop {
        match recv(&from.socket, &mut *into, RecvFlags::DONTWAIT) {
            Ok((_, count)) => return Some(count),
            Err(Errno::AGAIN) => {
                from.readable = false;
                return None;
            }
            Err(Errno::INTR) => {}
            Err(_) => return Some(0),
        }
    }
}

/// From the client to the agent: bytes, which the agent checks.
#[derive(Debug, Default)]
pub struct Inwards {
    queue: Queue,
    held: Held,
    /// The agent takes nothing any more. Its last frames are still of interest.
    refused: bool,
}

impl Inwards {
    /// The direction of a stream that was handed over: these bytes go first.
    #[must_use]
    pub fn new(first: Vec<u8>) -> Self {
        Self { queue: Queue::of(first), ..Self::default() }
    }

    /// Gives back its pipe.
    pub fn end(&mut self, pipes: &mut Pipes) {
        if self.held.bytes == 0 {
            self.held.put_back(pipes);
        }
    }

    /// Passes on what it can, before other streams have their turn. `scratch` is for bytes that
    /// nothing takes.
    ///
    /// # Errors
    /// No descriptor is free, or the client's connection broke.
    pub fn pass(
        &mut self,
        client: &mut End,
        agent: &mut End,
        pipes: &mut Pipes,
        scratch: &mut [u8],
    ) -> Result<Passed, Errno> {
        let mut left = TURN_BYTES;
        loop {
            if self.refused {
                (self.queue, self.held) = (Queue::default(), Held::default());
            }
            if !self.queue.is_empty() {
                self.refused = self.queue.send(agent).is_err();
                if !self.queue.is_empty() && !self.refused {
                    return Ok(Passed::Waits);
                }
            } else if self.held.bytes > 0 {
                if !agent.writable {
                    return Ok(Passed::Waits);
                }
                match self.held.drain(agent) {
                    Ok(count) => left = left.saturating_sub(count),
                    Err(_) => self.refused = true,
                }
            } else if !client.readable {
                self.held.put_back(pipes);
                return Ok(Passed::Waits);
            } else if left == 0 {
                return Ok(Passed::More);
            } else if self.refused {
                match receive(client, scratch) {
                    Some(0) => return Ok(Passed::Over(Over::Closed)),
                    count => left = left.saturating_sub(count.unwrap_or_default()),
                }
            } else {
                match self.held.fill(client, PIPE_BYTES, pipes) {
                    Ok(0) => {
                        self.held.put_back(pipes);
                        return Ok(Passed::Over(Over::Closed));
                    }
                    Ok(_) => {}
                    Err(Errno::AGAIN) => client.readable = false,
                    Err(e) => return Err(e),
                }
            }
        }
    }
}
