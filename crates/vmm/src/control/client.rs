//! The daemon's side: a small blocking client.

use super::wire::{Received, Receiver, WireError, send};
use super::{Answer, Command, Frozen, Precopied, Status};
use crate::config::RestoreConfig;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Why a command was not done.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket cannot be reached: no VMM behind it.
    #[error("control socket {path}")]
    Connect {
        /// Where.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The conversation failed; the VMM may or may not have done it.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The VMM went away before it answered: see its exit record.
    #[error("control socket: the VMM ended before it answered")]
    Gone,
    /// The VMM says no; the VM is as it was.
    #[error("{0}")]
    Refused(String),
    /// An answer to something else.
    #[error("control socket: expected {expected}, got {got:?}")]
    Unexpected {
        /// The answer that fits.
        expected: &'static str,
        /// What came.
        got: Box<Answer>,
    },
}

/// One connection to a VMM.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    receiver: Receiver,
}

impl Client {
    /// Connects. `timeout` bounds each wait for the VMM, not a whole command; `None` waits for ever.
    ///
    /// # Errors
    /// When nothing listens at `path`.
    pub fn connect(path: &Path, timeout: Option<Duration>) -> Result<Self, ClientError> {
        let fails = |source| ClientError::Connect { path: path.display().to_string(), source };
        let stream = UnixStream::connect(path).map_err(fails)?;
        Self::from_stream(stream, timeout).map_err(fails)
    }

    /// Uses a connected stream.
    ///
    /// # Errors
    /// When the timeout cannot be set, as when it is zero.
    pub fn from_stream(stream: UnixStream, timeout: Option<Duration>) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(timeout)?;
        stream.set_write_timeout(timeout)?;
        Ok(Self { stream, receiver: Receiver::default() })
    }

    /// Changes the timeout, for a command that takes longer (Save writes all memory).
    ///
    /// # Errors
    /// When it is zero.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(timeout)?;
        self.stream.set_write_timeout(timeout)
    }

    /// Sends a command with descriptors and waits for its answer. After an error other than [`ClientError::Refused`] the
    /// connection is of no more use.
    ///
    /// # Errors
    /// When the conversation fails, or the VMM refuses.
    pub fn call(&mut self, command: &Command, fds: &[BorrowedFd<'_>]) -> Result<Answer, ClientError> {
        let json = serde_json::to_vec(command).map_err(WireError::Json)?;
        send(&self.stream, &json, fds)?;
        loop {
            match self.receiver.receive(&self.stream)? {
                Received::Part => {}
                Received::End => return Err(ClientError::Gone),
                Received::Message(json, _) => {
                    return match serde_json::from_slice(&json).map_err(WireError::Json)? {
                        Answer::Err { message } => Err(ClientError::Refused(message)),
                        answer => Ok(answer),
                    };
                }
            }
        }
    }

    fn call_ok(&mut self, command: &Command, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        match self.call(command, fds)? {
            Answer::Ok => Ok(()),
            got => Err(ClientError::Unexpected { expected: "ok", got: Box::new(got) }),
        }
    }

    /// What the VM does now.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.call(&Command::Status, &[])? {
            Answer::Status(status) => Ok(status),
            got => Err(ClientError::Unexpected { expected: "a status", got: Box::new(got) }),
        }
    }

    /// Gives a shell its guest.
    ///
    /// # Errors
    /// As [`Client::call`]; [`ClientError::Gone`] when it could not be done.
    pub fn restore(&mut self, config: RestoreConfig, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call_ok(&Command::Restore(config), fds)
    }

    /// Stops the VM.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn pause(&mut self) -> Result<(), ClientError> {
        self.call_ok(&Command::Pause, &[])
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn resume(&mut self) -> Result<(), ClientError> {
        self.call_ok(&Command::Resume, &[])
    }

    /// Saves the paused VM to `fds`, in the order that [`Command::Save`] says.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn save(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call_ok(&Command::Save, fds)
    }

    /// Copies RAM to `memory` while the VM runs; with `own` only what is not as in its template.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn precopy(&mut self, own: bool, memory: BorrowedFd<'_>) -> Result<Precopied, ClientError> {
        match self.call(&Command::Precopy { own }, &[memory])? {
            Answer::Precopied(done) => Ok(done),
            got => Err(ClientError::Unexpected { expected: "how RAM was copied", got: Box::new(got) }),
        }
    }

    /// Saves the running VM to `fds`, in the order that [`Command::Save`] says.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn freeze(&mut self, fds: &[BorrowedFd<'_>]) -> Result<Frozen, ClientError> {
        self.stand_still(&Command::Freeze, fds)
    }

    /// Writes the running VM to `fds` for clones that start at once, in the order that [`Command::Fork`] says.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn fork(&mut self, fds: &[BorrowedFd<'_>]) -> Result<Frozen, ClientError> {
        self.stand_still(&Command::Fork, fds)
    }

    fn stand_still(&mut self, how: &Command, fds: &[BorrowedFd<'_>]) -> Result<Frozen, ClientError> {
        match self.call(how, fds)? {
            Answer::Frozen(done) => Ok(done),
            got => Err(ClientError::Unexpected { expected: "how it was frozen", got: Box::new(got) }),
        }
    }

    /// Puts other layers under a disk, as [`Command::Rebase`] says.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn rebase(&mut self, disk: u8, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call_ok(&Command::Rebase { disk }, fds)
    }

    /// Ends the VMM.
    ///
    /// # Errors
    /// As [`Client::call`]; that the VMM is gone is success.
    pub fn quit(&mut self) -> Result<(), ClientError> {
        match self.call_ok(&Command::Quit, &[]) {
            Err(ClientError::Gone) => Ok(()),
            other => other,
        }
    }
}
