//! One message over a unix stream socket: length, JSON, and descriptors with the first byte.

use super::MAX_MESSAGE_BYTES;
use crate::config::MAX_DISKS;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Most descriptors with one message: state, memory, and two for each disk.
pub const MAX_FDS: usize = 2 + 2 * MAX_DISKS;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed, or a timeout passed (`WouldBlock`).
    #[error("control socket: {0}")]
    Io(&'static str, #[source] io::Error),
    /// The other side closed the connection in the middle of a message.
    #[error("control socket: closed after {got} of {expected} bytes of a message")]
    Closed {
        /// Bytes that came.
        got: usize,
        /// Bytes the message has.
        expected: usize,
    },
    /// A message beyond the limit.
    #[error("control socket: a message of {got} bytes, at most {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Its stated length.
        got: usize,
    },
    /// More descriptors than any message has.
    #[error("control socket: more than {MAX_FDS} descriptors with one message")]
    TooManyFds,
    /// Not JSON of the expected type.
    #[error("control socket: message")]
    Json(#[source] serde_json::Error),
}

/// Sends one message with `fds`.
///
/// # Errors
/// When the socket fails or the message is too long.
pub fn send(stream: &UnixStream, json: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
    if json.len() > MAX_MESSAGE_BYTES {
        return Err(WireError::TooLong { got: json.len() });
    }
    let length = u32::try_from(json.len()).map_err(|_| WireError::TooLong { got: json.len() })?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut sent = 0;
    while sent < bytes.len() {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(WireError::TooManyFds);
        }
        match sendmsg(stream, &[IoSlice::new(&bytes[sent..])], &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => sent += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(WireError::Io("sending", error.into())),
        }
    }
    Ok(())
}

/// Collects messages from a socket, however they are cut.
#[derive(Debug, Default)]
pub struct Receiver {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// What one read brought.
#[derive(Debug)]
pub enum Received {
    /// A message and its descriptors.
    Message(Vec<u8>, Vec<OwnedFd>),
    /// Part of a message; read again.
    Part,
    /// The other side closed between two messages.
    End,
}

impl Receiver {
    /// Reads once from the socket. Blocks as the socket does.
    ///
    /// # Errors
    /// When the socket fails or the message exceeds a limit; the connection is then of no more use.
    pub fn receive(&mut self, stream: &UnixStream) -> Result<Received, WireError> {
        let wanted = self.wanted()?;
        let mut chunk = vec![0; wanted - self.bytes.len()];
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result =
            recvmsg(stream, &mut [IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let received = match result {
            Ok(received) => received,
            Err(rustix::io::Errno::INTR) => return Ok(Received::Part),
            Err(error) => return Err(WireError::Io("receiving", error.into())),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(WireError::TooManyFds);
        }
        if received.bytes == 0 {
            return if self.bytes.is_empty() {
                Ok(Received::End)
            } else {
                Err(WireError::Closed { got: self.bytes.len(), expected: wanted })
            };
        }
        self.bytes.extend_from_slice(&chunk[..received.bytes]);
        // One read never crosses into the next message: `wanted` is at most the end of this one.
        if self.bytes.len() >= 4 && self.bytes.len() == self.wanted()? {
            let json = self.bytes.split_off(4);
            self.bytes.clear();
            return Ok(Received::Message(json, std::mem::take(&mut self.fds)));
        }
        Ok(Received::Part)
    }

    /// Bytes of the message as far as is known.
    fn wanted(&self) -> Result<usize, WireError> {
        let Some(length) = self.bytes.first_chunk::<4>() else { return Ok(4) };
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length > MAX_MESSAGE_BYTES { Err(WireError::TooLong { got: length }) } else { Ok(4 + length) }
    }
}
