//! Carries FUSE messages between the kernel's device and a stream, in both directions.
//!
//! A read of the device gives one whole message, and a write must be one whole message. On the
//! stream, messages follow each other; the first four bytes of each are its length. Nothing else of
//! a message is looked at.
//!
//! One thread, two buffers. While a message waits for a slow stream, the device is not read. The
//! stream is read meanwhile, because a write to the device never waits: so a server that does not
//! read because its own answers are stuck gets rid of them.

use dayfly_api::agent::{MAX_FUSE_BYTES, MIN_FUSE_BYTES};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::fmt;
use std::os::fd::BorrowedFd;

/// Why a relay ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayEnd {
    /// The host closed the stream.
    Host,
    /// The file system was unmounted.
    Unmounted,
}

impl fmt::Display for RelayEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "the host's server has ended",
            Self::Unmounted => "unmounted",
        })
    }
}

/// Why a relay ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RelayError {
    /// The stream failed.
    #[error("stream: {0}")]
    Stream(Errno),
    /// The device failed.
    #[error("/dev/fuse: {0}")]
    Device(Errno),
    /// The host sent bytes that are not a message.
    #[error(
        "stream: a message's length: expected {MIN_FUSE_BYTES} to {MAX_FUSE_BYTES} bytes, got {0}"
    )]
    Length(u32),
    /// The stream ended within a message.
    #[error("stream: it ended after {0} bytes of a message")]
    Cut(usize),
}

/// Relays until one side ends. `device` must be non-blocking, and `stream` a socket.
///
/// # Errors
/// [`RelayError`].
pub fn relay(
    stream: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
    early: &[u8],
) -> Result<RelayEnd, RelayError> {
    let mut inbound = Inbound::new(early);
    let mut outbound = Outbound { bytes: vec![0; MAX_FUSE_BYTES], sent: 0, end: 0 };
    let ended = match inbound.deliver(device) {
        Ok(None) => run(stream, device, &mut inbound, &mut outbound),
        other => other.map(|end| end.unwrap_or(RelayEnd::Unmounted)),
    };
    // The server ends with its stream.
    let _ = rustix::net::shutdown(stream, Shutdown::Both);
    ended
}

fn run(
    stream: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
    inbound: &mut Inbound,
    outbound: &mut Outbound,
) -> Result<RelayEnd, RelayError> {
    loop {
        let waits = outbound.waits();
        let mut of_stream = PollFlags::IN;
        of_stream.set(PollFlags::OUT, waits);
        let of_device = if waits { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = [PollFd::new(&stream, of_stream), PollFd::new(&device, of_device)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(RelayError::Stream(errno)),
        }
        let (of_stream, of_device) = (fds[0].revents(), fds[1].revents());
        if of_stream.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
            && let Some(end) = inbound.receive(stream, device)?
        {
            return Ok(end);
        }
        if of_device.contains(PollFlags::IN) && !waits {
            if let Some(end) = outbound.read(device)? {
                return Ok(end);
            }
        } else if of_device.intersects(PollFlags::ERR | PollFlags::HUP) {
            return Ok(RelayEnd::Unmounted);
        }
        if let Some(end) = outbound.send(stream)? {
            return Ok(end);
        }
    }
}

/// Messages of the server.
struct Inbound {
    bytes: Vec<u8>,
    /// Bytes of messages that are not whole.
    have: usize,
}

impl Inbound {
    fn new(early: &[u8]) -> Self {
        let mut bytes = vec![0; MAX_FUSE_BYTES.max(early.len())];
        bytes[..early.len()].copy_from_slice(early);
        Self { bytes, have: early.len() }
    }

    /// Reads once from the stream, and writes whole messages to the device.
    fn receive(
        &mut self,
        stream: BorrowedFd<'_>,
        device: BorrowedFd<'_>,
    ) -> Result<Option<RelayEnd>, RelayError> {
        // The buffer has room: a message that is not whole is shorter than the buffer.
        match rustix::net::recv(stream, &mut self.bytes[self.have..], RecvFlags::DONTWAIT) {
            Ok((0, _)) if self.have > 0 => Err(RelayError::Cut(self.have)),
            Ok((0, _)) => Ok(Some(RelayEnd::Host)),
            Ok((got, _)) => {
                self.have += got;
                self.deliver(device)
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(None),
            // In a clone the connection has no peer.
            Err(Errno::CONNRESET) => Ok(Some(RelayEnd::Host)),
            Err(errno) => Err(RelayError::Stream(errno)),
        }
    }

    fn deliver(&mut self, device: BorrowedFd<'_>) -> Result<Option<RelayEnd>, RelayError> {
        let mut at = 0;
        while let Some(message) = first(&self.bytes[at..self.have])? {
            at += message.len();
            match write(device, message) {
                // A request that was interrupted, or an entry that is not cached any more.
                Ok(()) | Err(Errno::NOENT | Errno::INVAL) => {}
                Err(Errno::NODEV | Errno::NOTCONN) => return Ok(Some(RelayEnd::Unmounted)),
                Err(errno) => return Err(RelayError::Device(errno)),
            }
        }
        self.bytes.copy_within(at..self.have, 0);
        self.have -= at;
        Ok(None)
    }
}

/// The first whole message in `bytes`.
fn first(bytes: &[u8]) -> Result<Option<&[u8]>, RelayError> {
    let Some(length) = bytes.first_chunk::<4>().map(|four| u32::from_le_bytes(*four)) else {
        return Ok(None);
    };
    match usize::try_from(length) {
        Ok(bytes_of) if (MIN_FUSE_BYTES..=MAX_FUSE_BYTES).contains(&bytes_of) => {
            Ok(bytes.get(..bytes_of))
        }
        _ => Err(RelayError::Length(length)),
    }
}

/// Writes one message. The kernel takes it whole or not at all.
fn write(device: BorrowedFd<'_>, message: &[u8]) -> Result<(), Errno> {
    loop {
        match rustix::io::write(device, message) {
            Err(Errno::INTR) => {}
            written => return written.map(drop),
        }
    }
}

/// A message of the kernel.
struct Outbound {
    bytes: Vec<u8>,
    sent: usize,
    end: usize,
}

impl Outbound {
    const fn waits(&self) -> bool {
        self.sent < self.end
    }

    fn read(&mut self, device: BorrowedFd<'_>) -> Result<Option<RelayEnd>, RelayError> {
        match rustix::io::read(device, &mut self.bytes[..]) {
            Ok(got) => (self.sent, self.end) = (0, got),
            // ENOENT: the request was interrupted before it was read.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(Errno::NODEV | Errno::NOTCONN) => return Ok(Some(RelayEnd::Unmounted)),
            Err(errno) => return Err(RelayError::Device(errno)),
        }
        Ok(None)
    }

    /// Sends what the stream takes now.
    fn send(&mut self, stream: BorrowedFd<'_>) -> Result<Option<RelayEnd>, RelayError> {
        while self.waits() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(stream, &self.bytes[self.sent..self.end], flags) {
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Some(RelayEnd::Host)),
                Err(errno) => return Err(RelayError::Stream(errno)),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
