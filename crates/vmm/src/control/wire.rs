//! One message over a unix stream socket: length, JSON and descriptors. The first byte carries the
//! descriptors; if they are too many for one system call, the bytes after it carry the rest.

use super::message::MAX_MESSAGE_BYTES;
use crate::config::{MAX_DISKS, MAX_LAYERS};
use crate::memory::backing::MAX_FILES;
use dayfly_sys::fdwire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most descriptors of one message. A restore has state, memory, working set and pager, the
/// list of shared pages with its files, and for each disk the base with its hash tree, the layers
/// with their maps and hash trees, and the writable layer.
pub const MAX_FDS: usize = 4 + 1 + MAX_FILES + MAX_DISKS * (3 + 3 * MAX_LAYERS);

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed, or a timeout passed (`WouldBlock`).
    #[error("control socket: {0}")]
    Io(&'static str, #[source] io::Error),
    /// The peer closed the connection in the middle of a message.
    #[error("control socket: closed after {got} of {expected} bytes of a message")]
    Closed {
        /// Bytes received.
        got: usize,
        /// Bytes of the message, as far as its length is known.
        expected: usize,
    },
    /// The message exceeds [`MAX_MESSAGE_BYTES`].
    #[error("control socket: a message of {got} bytes, at most {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// The stated length in bytes.
        got: usize,
    },
    /// More than [`MAX_FDS`] descriptors, or some with a message that may have none.
    #[error("control socket: more descriptors than a message may have, at most {MAX_FDS}")]
    TooManyFds,
    /// The message is not JSON of the expected type.
    #[error("control socket: message")]
    Json(#[source] serde_json::Error),
}

/// Sends one message with `fds`. JSON of at least two bytes is expected.
///
/// # Errors
/// When the socket fails, or the message or its descriptors exceed a limit.
pub fn send(stream: &UnixStream, json: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
    let bytes = frame(json)?;
    if fds.len() > MAX_FDS {
        return Err(WireError::TooManyFds);
    }
    let mut sent = 0;
    // Each chunk but the last takes one byte. The length has four bytes, and JSON at least two.
    let mut chunks = fds.chunks(fdwire::MAX_FDS);
    while sent < bytes.len() {
        let end = if chunks.len() > 1 { sent + 1 } else { bytes.len() };
        sent += fdwire::send(stream, &bytes[sent..end], chunks.next().unwrap_or_default())
            .map_err(|error| WireError::Io("sending", error))?;
    }
    Ok(())
}

/// Sends one message without descriptors on a non-blocking socket, in at most `within`.
///
/// # Errors
/// When the socket fails, the message exceeds its limit, or the time passes.
pub fn send_within(stream: &UnixStream, json: &[u8], within: Duration) -> Result<(), WireError> {
    let fails = |error| WireError::Io("sending", error);
    let (bytes, deadline) = (frame(json)?, Instant::now() + within);
    let mut sent = 0;
    while sent < bytes.len() {
        match fdwire::send(stream, &bytes[sent..], &[]) {
            Ok(some) => sent += some,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = deadline.saturating_duration_since(Instant::now());
                let left = Timespec::try_from(left).map_err(|e| fails(io::Error::other(e)))?;
                match poll(&mut [PollFd::new(stream, PollFlags::OUT)], Some(&left)) {
                    Ok(0) => return Err(fails(io::ErrorKind::WouldBlock.into())),
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(fails(error.into())),
                }
            }
            Err(error) => return Err(fails(error)),
        }
    }
    Ok(())
}

/// A message's length and JSON.
fn frame(json: &[u8]) -> Result<Vec<u8>, WireError> {
    if json.len() > MAX_MESSAGE_BYTES {
        return Err(WireError::TooLong { got: json.len() });
    }
    let length = u32::try_from(json.len()).map_err(|_| WireError::TooLong { got: json.len() })?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    Ok(bytes)
}

/// Assembles messages from a socket, regardless of how the bytes arrive.
#[derive(Debug, Default)]
pub struct Receiver {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    refuses_fds: bool,
}

/// The result of one read.
#[derive(Debug)]
pub enum Received {
    /// A message and its descriptors.
    Message(Vec<u8>, Vec<OwnedFd>),
    /// Part of a message: read again.
    Part,
    /// The peer closed the connection between two messages.
    End,
}

impl Receiver {
    /// A receiver of messages without descriptors, such as a VMM's answers.
    #[must_use]
    pub fn without_descriptors() -> Self {
        Self { refuses_fds: true, ..Self::default() }
    }

    /// Reads once from the socket. Blocks if the socket is blocking.
    ///
    /// # Errors
    /// When the socket fails or the message exceeds a limit; the connection is then unusable.
    pub fn receive(&mut self, stream: &UnixStream) -> Result<Received, WireError> {
        let wanted = self.wanted()?;
        let mut chunk = vec![0; wanted - self.bytes.len()];
        let received = match fdwire::receive(stream, &mut chunk, &mut self.fds) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Received::Part),
            Err(error) => return Err(WireError::Io("receiving", error)),
        };
        let most = if self.refuses_fds { 0 } else { MAX_FDS };
        if received.fds_truncated || self.fds.len() > most {
            self.fds.clear();
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
        // One read never crosses into the next message, because `wanted` ends with this message.
        if self.bytes.len() >= 4 && self.bytes.len() == self.wanted()? {
            let json = self.bytes.split_off(4);
            self.bytes.clear();
            return Ok(Received::Message(json, std::mem::take(&mut self.fds)));
        }
        Ok(Received::Part)
    }

    /// The length of the message in bytes, header included, as far as it is known.
    fn wanted(&self) -> Result<usize, WireError> {
        let Some(length) = self.bytes.first_chunk::<4>() else { return Ok(4) };
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length > MAX_MESSAGE_BYTES {
            Err(WireError::TooLong { got: length })
        } else {
            Ok(4 + length)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DiskConfig, LayerConfig, RestoreConfig, SharedConfig, TreeConfig};
    use crate::control::message::Command;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsFd;

    #[test]
    fn a_message_takes_its_descriptors_along_however_many() {
        for count in [0, 1, fdwire::MAX_FDS, fdwire::MAX_FDS + 1, 700] {
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
    }

    #[test]
    fn the_largest_restore_fits_into_a_message_and_one_more_descriptor_does_not() {
        // Both ends are in this process, whose limit may be 1024.
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        let mut count = 0;
        let mut fd = || {
            count += 1;
            count - 1
        };
        let mut disk = || DiskConfig {
            size_bytes: 1 << 40,
            base_fd: fd(),
            layers: (0..MAX_LAYERS).map(|_| LayerConfig { data_fd: fd(), map_fd: fd() }).collect(),
            writable_fd: Some(fd()),
            trees: (0..=MAX_LAYERS)
                .map(|_| Some(TreeConfig(fd(), dayfly_units::Digest([255; 32]))))
                .collect(),
        };
        let disks = (0..MAX_DISKS).map(|_| disk()).collect();
        let config = RestoreConfig {
            state_fd: fd(),
            memory_fd: fd(),
            shared: Some(SharedConfig {
                list_fd: fd(),
                file_fds: (0..MAX_FILES).map(|_| fd()).collect(),
            }),
            disks,
            generation: [255; 16],
            working_set_fd: Some(fd()),
            pager_fd: Some(fd()),
            paused: false,
        };
        let json = serde_json::to_vec(&Command::Restore(config)).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let fds = vec![file.as_fd(); usize::try_from(count).unwrap()];
        send(&here, &json, &fds).unwrap();
        let mut receiver = Receiver::default();
        let (got, got_fds) = loop {
            match receiver.receive(&there).unwrap() {
                Received::Message(json, fds) => break (json, fds),
                Received::Part => {}
                Received::End => panic!("the end"),
            }
        };
        assert_eq!((got.len(), got_fds.len()), (json.len(), 1581));
        let many = vec![file.as_fd(); MAX_FDS + 1];
        assert!(matches!(send(&here, b"{}", &many), Err(WireError::TooManyFds)));
    }
}
