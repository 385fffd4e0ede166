//! One message over a unix stream socket: length, JSON, and descriptors with the first byte; more than one system call takes go
//! with the bytes after it.

use super::MAX_MESSAGE_BYTES;
use crate::config::{MAX_DISKS, MAX_LAYERS};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Most descriptors with one message: state, memory, working set and pager, and for each disk base, layers with their maps, and writable
/// layer.
pub const MAX_FDS: usize = 4 + MAX_DISKS * (2 + 2 * MAX_LAYERS);
/// Most that one sendmsg(2) takes are 253 (SCM_MAX_FD).
const FDS_AT_ONCE: usize = 250;
const SPACE: usize = rustix::cmsg_space!(ScmRights(FDS_AT_ONCE));

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
    if fds.len() > MAX_FDS {
        return Err(WireError::TooManyFds);
    }
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut sent = 0;
    // The header has a byte for each but the last, and there are at least two bytes of JSON.
    let mut chunks = fds.chunks(FDS_AT_ONCE).peekable();
    while sent < bytes.len() {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(chunk) = chunks.peek()
            && !control.push(SendAncillaryMessage::ScmRights(chunk))
        {
            return Err(WireError::TooManyFds);
        }
        let end = if chunks.len() > 1 { sent + 1 } else { bytes.len() };
        match sendmsg(stream, &[IoSlice::new(&bytes[sent..end])], &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => {
                sent += n;
                chunks.next();
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_message_takes_its_descriptors_along_however_many() {
        for count in [0, 1, FDS_AT_ONCE, FDS_AT_ONCE + 1, 700] {
            let (here, there) = UnixStream::pair().unwrap();
            let file = tempfile::tempfile().unwrap();
            let fds = vec![file.as_fd(); count];
            for text in [&b"{}"[..], &b"[1, 2, 3, 4, 5]"[..]] {
                send(&here, text, &fds).unwrap();
            }
            let mut receiver = Receiver::default();
            for text in [&b"{}"[..], &b"[1, 2, 3, 4, 5]"[..]] {
                let (json, fds) = loop {
                    match receiver.receive(&there).unwrap() {
                        Received::Message(json, fds) => break (json, fds),
                        Received::Part => {}
                        Received::End => panic!("the end"),
                    }
                };
                assert_eq!((json.as_slice(), fds.len()), (text, count));
            }
        }
        let (here, _there) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let many = vec![file.as_fd(); MAX_FDS + 1];
        assert!(matches!(send(&here, b"{}", &many), Err(WireError::TooManyFds)));
    }
}
