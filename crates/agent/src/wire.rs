//! Frames over a stream socket: a frame is read whole or not at all, and its length is checked
//! before memory is allocated.

use dayfly_api::agent::{
    Failure, FailureCode, FrameError, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, Reply,
    StringsError, decode_header,
};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for a connection's first request, and for the next piece of an archive.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes per read if no longer frame is expected.
const READ_BYTES: usize = 16 << 10;

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The client closed its half between two frames.
    #[error("the client closed the connection")]
    Closed,
    /// The client closed its half within a frame.
    #[error("the client closed the connection within a frame, after {got} bytes of it")]
    Cut {
        /// Bytes of the frame that had arrived.
        got: usize,
    },
    /// Nothing arrived within the time limit.
    #[error("nothing came for {0:?}")]
    Slow(Duration),
    /// The bytes are no valid frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame of a kind that is not permitted at this point.
    #[error("frame: expected {expected}, got {got:?}")]
    Unexpected {
        /// The permitted kinds.
        expected: &'static str,
        /// The kind that arrived.
        got: FrameKind,
    },
    /// A frame's JSON body is invalid.
    #[error("{what}: {source}")]
    Json {
        /// What the body should be.
        what: &'static str,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A frame's body has the wrong length.
    #[error("{what}: expected {expected} bytes, got {got}")]
    Length {
        /// What the body should be.
        what: &'static str,
        /// Expected bytes.
        expected: usize,
        /// Received bytes.
        got: usize,
    },
    /// The arguments and the environment of a program are not what its request announces.
    #[error("exec: {0}")]
    Strings(#[from] StringsError),
    /// They did not come in time.
    #[error("exec: arguments and environment: not complete after {0:?}")]
    Late(Duration),
    /// Too many programs with long arguments start at once.
    #[error("exec: long arguments: expected fewer programs that start at once; try again")]
    Crowded,
    /// The socket failed.
    #[error("connection: {0}")]
    Io(Errno),
}

impl WireError {
    /// The failure to send to a client that may still listen; `None` if the client is gone.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        match self {
            Self::Closed | Self::Cut { .. } | Self::Io(_) => None,
            Self::Strings(why) if why.is_too_long() => {
                Some(Failure { code: FailureCode::NotPermitted, message: self.to_string() })
            }
            Self::Crowded => Some(Failure { code: FailureCode::Io, message: self.to_string() }),
            other => Some(Failure { code: FailureCode::Invalid, message: other.to_string() }),
        }
    }
}

impl From<&WireError> for Failure {
    fn from(error: &WireError) -> Self {
        error
            .failure()
            .unwrap_or_else(|| Self { code: FailureCode::Io, message: error.to_string() })
    }
}

/// The result of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// At least one byte.
    Some,
    /// No bytes yet.
    Nothing,
    /// The client has closed its half.
    End,
}

/// Memory that a worker thread keeps between connections, so that the first request after a restore
/// touches pages that are already mapped.
#[derive(Debug, Default)]
pub struct Buffers {
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

/// A connection with its buffers.
#[derive(Debug)]
pub struct Conn {
    fd: Arc<OwnedFd>,
    inbox: Vec<u8>,
    at: usize,
    outbox: Vec<u8>,
    sent: usize,
}

impl Conn {
    /// Takes over a connected stream socket.
    #[must_use]
    pub fn new(fd: Arc<OwnedFd>, buffers: Buffers) -> Self {
        let Buffers { mut inbox, mut outbox } = buffers;
        inbox.clear();
        outbox.clear();
        Self { fd, inbox, at: 0, outbox, sent: 0 }
    }

    /// Returns the memory and drops the socket.
    #[must_use]
    pub fn into_buffers(self) -> Buffers {
        let Self { mut inbox, outbox, .. } = self;
        inbox.clear();
        inbox.shrink_to(READ_BYTES);
        Buffers { inbox, outbox }
    }

    /// The first complete frame in the read buffer. The frame stays there until [`Conn::consume`].
    ///
    /// # Errors
    /// [`FrameError`] if the bytes are no valid frame.
    pub fn frame(&self) -> Result<Option<(FrameKind, &[u8])>, FrameError> {
        let have = self.inbox.get(self.at..).unwrap_or_default();
        let Some((header, rest)) = have.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let (kind, length) = decode_header(*header)?;
        Ok(rest.get(..length).map(|body| (kind, body)))
    }

    /// Removes the frame that [`Conn::frame`] returns.
    pub fn consume(&mut self) {
        if let Ok(Some((_, body))) = self.frame() {
            self.at += HEADER_BYTES + body.len();
        }
        if self.at >= self.inbox.len() {
            self.inbox.clear();
            self.at = 0;
        }
    }

    /// Takes all bytes that were read and not consumed: what follows a request after which the
    /// connection has no frames.
    pub fn take_rest(&mut self) -> Vec<u8> {
        let rest = self.inbox.split_off(self.at.min(self.inbox.len()));
        self.inbox.clear();
        self.at = 0;
        rest
    }

    /// Reads once, without waiting.
    ///
    /// # Errors
    /// [`WireError::Frame`] before memory is allocated for an invalid frame; [`WireError::Io`].
    pub fn fill(&mut self) -> Result<Filled, WireError> {
        let have = self.inbox.len() - self.at;
        let need = match self.inbox.get(self.at..).unwrap_or_default().first_chunk::<HEADER_BYTES>()
        {
            Some(header) => HEADER_BYTES + decode_header(*header)?.1,
            None => HEADER_BYTES,
        };
        let room = need.saturating_sub(have).max(READ_BYTES);
        if self.inbox.capacity() - self.inbox.len() < room {
            self.inbox.drain(..self.at);
            self.at = 0;
            self.inbox.reserve_exact(room);
        }
        loop {
            match rustix::net::recv(&self.fd, spare_capacity(&mut self.inbox), RecvFlags::DONTWAIT)
            {
                Ok((_, 0)) => return Ok(Filled::End),
                Ok(_) => return Ok(Filled::Some),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Filled::Nothing),
                Err(errno) => return Err(WireError::Io(errno)),
            }
        }
    }

    /// Waits for a complete frame. `Ok(false)`: the client closed between frames.
    ///
    /// # Errors
    /// Any [`WireError`] but `Closed`; `Slow` if nothing arrived within `time_limit`.
    pub fn wait_frame(&mut self, time_limit: Duration) -> Result<bool, WireError> {
        loop {
            if self.frame()?.is_some() {
                return Ok(true);
            }
            match self.fill()? {
                Filled::Some => {}
                Filled::Nothing => wait(self.fd.as_fd(), PollFlags::IN, time_limit)?,
                Filled::End if self.inbox.len() == self.at => return Ok(false),
                Filled::End => return Err(WireError::Cut { got: self.inbox.len() - self.at }),
            }
        }
    }

    /// Number of bytes that wait to be sent.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.outbox.len().saturating_sub(self.sent)
    }

    /// Whether bytes wait to be sent.
    #[must_use]
    pub fn pending(&self) -> bool {
        self.pending_bytes() > 0
    }

    /// Appends a frame of `body` (at most [`MAX_FRAME_BYTES`]) to the send buffer.
    pub fn push(&mut self, kind: FrameKind, body: &[u8]) {
        self.tidy();
        // Longer bodies do not occur, because replies are capped and streams are cut. Truncation
        // makes the reader report an error; an assertion here would end the machine.
        let body = body.get(..MAX_FRAME_BYTES).unwrap_or(body);
        self.outbox.reserve(HEADER_BYTES + body.len());
        self.outbox.extend_from_slice(&header(kind, body.len()));
        self.outbox.extend_from_slice(body);
    }

    /// Reads at most `most` bytes from `from` into a new frame in the send buffer. Returns the
    /// number of bytes; if it is 0, no frame is added.
    ///
    /// # Errors
    /// The error of `read(2)`.
    pub fn push_from(
        &mut self,
        kind: FrameKind,
        from: BorrowedFd<'_>,
        most: usize,
    ) -> Result<usize, Errno> {
        self.tidy();
        let start = self.outbox.len();
        let most = most.min(MAX_FRAME_BYTES);
        self.outbox.reserve(HEADER_BYTES + most);
        self.outbox.extend_from_slice(&[0; HEADER_BYTES]);
        let room = self.outbox.spare_capacity_mut();
        let most = most.min(room.len());
        let result = rustix::io::read(from, &mut room[..most]).map(|(read, _)| read.len());
        match result {
            Ok(n) if n > 0 => {
                // SAFETY: read(2) initialised the first `n` bytes of the spare capacity, which
                // starts at the vector's length, start + HEADER_BYTES.
                unsafe { self.outbox.set_len(start + HEADER_BYTES + n) };
                self.outbox[start..start + HEADER_BYTES].copy_from_slice(&header(kind, n));
            }
            Ok(_) | Err(_) => self.outbox.truncate(start),
        }
        result
    }

    fn tidy(&mut self) {
        if self.sent >= self.outbox.len() {
            self.outbox.clear();
            self.sent = 0;
        }
    }

    /// Sends what the socket takes, without waiting.
    ///
    /// # Errors
    /// [`WireError::Io`].
    pub fn flush_some(&mut self) -> Result<(), WireError> {
        while self.pending() {
            let rest = self.outbox.get(self.sent..).unwrap_or_default();
            match rustix::net::send(&self.fd, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => self.sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(WireError::Io(errno)),
            }
        }
        self.tidy();
        Ok(())
    }

    /// Sends everything; waits for a slow client as long as it is connected.
    ///
    /// # Errors
    /// [`WireError::Io`].
    pub fn flush(&mut self) -> Result<(), WireError> {
        loop {
            self.flush_some()?;
            if !self.pending() {
                return Ok(());
            }
            let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(WireError::Io(errno)),
            }
        }
    }

    /// Sends a reply and waits until it is sent.
    ///
    /// # Errors
    /// [`WireError::Io`].
    pub fn reply(&mut self, reply: &Reply) -> Result<(), WireError> {
        self.push_json(FrameKind::Reply, reply);
        self.flush()
    }

    /// Appends a frame with a JSON body.
    pub fn push_json<T: serde::Serialize>(&mut self, kind: FrameKind, value: &T) {
        // The wire types always serialise; if one did not, the client would report the empty body
        // as an error.
        let body = serde_json::to_vec(value).unwrap_or_default();
        self.push(kind, &body);
    }

    /// Reads and drops what a client still sends, so that a reset does not destroy a reply that is
    /// on its way. Limited to 5 s and 1 GiB.
    pub fn linger(&mut self) {
        let until = Instant::now() + Duration::from_secs(5);
        let mut left: usize = 1 << 30;
        self.inbox.clear();
        self.at = 0;
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
        while left > 0 && Instant::now() < until {
            // Not `fill`, because there are no frames after malformed input.
            self.inbox.clear();
            self.inbox.reserve(READ_BYTES);
            match rustix::net::recv(&self.fd, spare_capacity(&mut self.inbox), RecvFlags::DONTWAIT)
            {
                Ok((_, 0)) => break,
                Ok((_, n)) => left = left.saturating_sub(n),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if wait(self.fd.as_fd(), PollFlags::IN, Duration::from_millis(500)).is_err() {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        self.inbox.clear();
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn header(kind: FrameKind, length: usize) -> [u8; HEADER_BYTES] {
    // Both callers limit `length` to MAX_FRAME_BYTES (256 KiB).
    let [a, b, c, d] = u32::try_from(length).unwrap_or(0).to_le_bytes();
    [a, b, c, d, kind as u8]
}

/// Waits for `flags` (or an error state) on `fd`.
///
/// # Errors
/// [`WireError::Slow`] after `time_limit`.
pub fn wait(fd: BorrowedFd<'_>, flags: PollFlags, time_limit: Duration) -> Result<(), WireError> {
    let until = Instant::now() + time_limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&fd, flags)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Err(WireError::Slow(time_limit)),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(WireError::Io(errno)),
        }
    }
}

/// A duration in poll(2)'s form.
#[must_use]
pub fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
