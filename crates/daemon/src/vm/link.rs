//! The connection to a VMM that is made ahead of it, and over which its guest is brought to life: no thread waits, nothing has to be
//! found or accepted.

use crate::error::{Fault, Outcome, chain};
use dayfly_api::types::ErrorCode;
use dayfly_vmm::control::wire::{Received, Receiver, WireError, send};
use dayfly_vmm::control::{Answer, Command};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The conversation.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Waiting for the VMM.
    #[error("waiting for the VMM")]
    Wait(#[source] io::Error),
    /// It ended.
    #[error("the VMM ended before it answered")]
    Gone,
    /// It did not answer.
    #[error("the VMM did not answer within {} s", .0.as_secs())]
    Timeout(Duration),
    /// It says no.
    #[error("the VMM: {0}")]
    Refused(String),
    /// It answers something else.
    #[error("the VMM: expected Ok, got {0:?}")]
    Unexpected(Answer),
}

impl From<LinkError> for Fault {
    fn from(e: LinkError) -> Self {
        Self::new(ErrorCode::Internal, chain(&e))
    }
}

/// A connection to one VMM.
#[derive(Debug)]
pub struct Link {
    stream: AsyncFd<UnixStream>,
    receiver: Receiver,
}

impl Link {
    /// A link, and the VMM's end of it. Within a runtime.
    ///
    /// # Errors
    /// The host gives no sockets.
    pub fn new() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // SAFETY: a `UnixStream` gives the same open descriptor as long as it lives, and the `AsyncFd` owns it.
        let stream = unsafe { AsyncFd::register_with_interest(ours, tokio::io::Interest::READABLE) }?;
        Ok((Self { stream, receiver: Receiver::default() }, theirs))
    }

    /// Asks; [`Self::done`] waits for the answer. One at a time: a command fits into an empty socket, so this never waits.
    ///
    /// # Errors
    /// The VMM is gone, or has not read what was asked before.
    pub fn ask(&self, command: &Command, fds: &[OwnedFd]) -> Result<(), LinkError> {
        let json = serde_json::to_vec(command).map_err(WireError::Json)?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        Ok(send(self.stream.get_ref(), &json, &fds)?)
    }

    /// Waits at most `within` until what was asked is done.
    ///
    /// # Errors
    /// It is not.
    pub async fn done(&mut self, within: Duration) -> Result<(), LinkError> {
        match timeout(within, self.answer()).await.map_err(|_| LinkError::Timeout(within))?? {
            Answer::Ok => Ok(()),
            Answer::Err { message } => Err(LinkError::Refused(message)),
            other => Err(LinkError::Unexpected(other)),
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
                Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(LinkError::Gone);
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// As [`Link::ask`] and [`Link::done`].
///
/// # Errors
/// [`LinkError`].
pub async fn tell(link: &mut Link, command: &Command, fds: &[OwnedFd], within: Duration) -> Outcome<()> {
    link.ask(command, fds)?;
    Ok(link.done(within).await?)
}
