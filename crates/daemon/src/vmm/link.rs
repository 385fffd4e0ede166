//! Connections to a VMM. One is made before the VMM starts, for the commands that start the guest,
//! because no socket has to be found or accepted. Every later command has a new connection
//! ([`crate::vmm::control_link`]).
//!
//! A VMM may have been taken over by its guest. Its answer is bounded in bytes by the length of one
//! message, and in time by one deadline for the whole answer, however slowly the answer comes. No
//! thread waits for it.

use crate::base::error::{ApiError, Outcome};
use dayfly_api::types::ErrorCode;
use dayfly_units::error::chain;
use dayfly_units::text::{LONG, escaped};
use dayfly_vmm::control::wire::{Received, Receiver, WireError, send};
use dayfly_vmm::control::{Answer, Command};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Sending or receiving failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Waiting for the socket failed.
    #[error("waiting for the VMM")]
    Wait(#[source] io::Error),
    /// The VMM ended.
    #[error("the VMM ended before it answered")]
    Gone,
    /// The VMM did not answer in time.
    #[error("the VMM did not answer within {} s", .0.as_secs())]
    Timeout(Duration),
    /// The VMM refused the command.
    #[error("the VMM: {0}")]
    Refused(String),
    /// The VMM answered something other than `Ok`.
    #[error("the VMM: expected Ok, got {0:?}")]
    Unexpected(Box<Answer>),
}

impl From<LinkError> for ApiError {
    fn from(e: LinkError) -> Self {
        // Escaped and cut, because it may quote the VMM.
        Self::new(ErrorCode::Internal, escaped(&chain(&e), LONG))
    }
}

/// A connection to one VMM.
#[derive(Debug)]
pub struct Link {
    stream: AsyncFd<UnixStream>,
    receiver: Receiver,
}

impl Link {
    /// A link, and the VMM's end of it. Must be called in a Tokio runtime.
    ///
    /// # Errors
    /// The host cannot make the sockets.
    pub fn new() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((Self::of(ours)?, theirs))
    }

    /// Connects to the VMM's control socket at `path`, without waiting. Must be called in a Tokio
    /// runtime.
    ///
    /// # Errors
    /// Nothing listens there, or too many connections wait to be accepted.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::of(socket.into())
    }

    /// A link over a connected, non-blocking stream.
    fn of(stream: UnixStream) -> io::Result<Self> {
        // SAFETY: a `UnixStream` gives the same open descriptor as long as it lives, and the
        // `AsyncFd` owns the `UnixStream`.
        let stream =
            unsafe { AsyncFd::register_with_interest(stream, tokio::io::Interest::READABLE) }?;
        Ok(Self { stream, receiver: Receiver::without_descriptors() })
    }

    /// Sends a command; [`Self::done`] or [`Self::answered`] waits for its answer. Only one command
    /// may be under way. It fits into the empty socket buffer, so this never waits.
    ///
    /// # Errors
    /// The VMM is gone, or has not read the command before.
    pub fn ask(&self, command: &Command, fds: &[OwnedFd]) -> Result<(), LinkError> {
        let json = serde_json::to_vec(command).map_err(WireError::Json)?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        Ok(send(self.stream.get_ref(), &json, &fds)?)
    }

    /// Waits at most `within` for the whole answer to the command.
    ///
    /// # Errors
    /// The VMM refused, did not answer in time, or ended.
    pub async fn answered(&mut self, within: Duration) -> Result<Answer, LinkError> {
        match timeout(within, self.answer()).await.map_err(|_| LinkError::Timeout(within))?? {
            Answer::Err { message } => Err(LinkError::Refused(message)),
            answer => Ok(answer),
        }
    }

    /// Waits at most `within` for the answer `Ok` to the command.
    ///
    /// # Errors
    /// Another answer, no answer in time, or the VMM ended.
    pub async fn done(&mut self, within: Duration) -> Result<(), LinkError> {
        match self.answered(within).await? {
            Answer::Ok => Ok(()),
            other => Err(LinkError::Unexpected(Box::new(other))),
        }
    }

    async fn answer(&mut self) -> Result<Answer, LinkError> {
        loop {
            let mut ready = self.stream.readable().await.map_err(LinkError::Wait)?;
            match self.receiver.receive(self.stream.get_ref()) {
                Ok(Received::Message(json, _)) => {
                    return Ok(serde_json::from_slice(&json).map_err(WireError::Json)?);
                }
                Ok(Received::Part) => {}
                Ok(Received::End) => return Err(LinkError::Gone),
                Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::WouldBlock => {
                    ready.clear_ready()
                }
                Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(LinkError::Gone);
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Sends a command and waits for its answer, as [`Link::ask`] and [`Link::done`].
///
/// # Errors
/// [`LinkError`].
pub async fn command(
    link: &mut Link,
    command: &Command,
    fds: &[OwnedFd],
    within: Duration,
) -> Outcome<()> {
    link.ask(command, fds)?;
    Ok(link.done(within).await?)
}
