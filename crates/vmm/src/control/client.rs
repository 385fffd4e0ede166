//! A small blocking client of the control protocol, for tests and benchmarks. The daemon's client
//! is asynchronous.

use super::message::{Answer, Command, Frozen, Precopied, Status};
use super::wire::{Received, Receiver, WireError, send};
use crate::config::RestoreConfig;
use crate::virtio::BalloonStatus;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing accepts connections at the socket: there is no VMM.
    #[error("control socket {path}")]
    Connect {
        /// The socket's path.
        path: String,
        /// The error of connect(2), or of setting the timeout.
        #[source]
        source: io::Error,
    },
    /// The conversation failed. The VMM may have done the command.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The VMM closed the connection before it answered; its exit record names the cause.
    #[error("control socket: the VMM ended before it answered")]
    Gone,
    /// The VMM refused or failed; the VM is unchanged.
    #[error("{0}")]
    Refused(String),
    /// An answer of a kind that does not fit the command.
    #[error("control socket: expected {expected}, got {got:?}")]
    Unexpected {
        /// The kind of answer that fits.
        expected: &'static str,
        /// The answer that came.
        got: Box<Answer>,
    },
}

/// One connection to a VMM.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    receiver: Receiver,
    timeout: Option<Duration>,
}

impl Client {
    /// Connects to the socket at `path`. `timeout` bounds each whole command, however slowly the
    /// answer comes; `None`: no bound.
    ///
    /// # Errors
    /// When nothing listens at `path`.
    pub fn connect(path: &Path, timeout: Option<Duration>) -> Result<Self, ClientError> {
        let fails = |source| ClientError::Connect { path: path.display().to_string(), source };
        let stream = UnixStream::connect(path).map_err(fails)?;
        Self::from_stream(stream, timeout).map_err(fails)
    }

    /// Uses a connected stream, with `timeout` as in [`Client::connect`].
    ///
    /// # Errors
    /// When the timeout cannot be set, for example because it is zero.
    pub fn from_stream(stream: UnixStream, timeout: Option<Duration>) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(timeout)?;
        Ok(Self { stream, receiver: Receiver::without_descriptors(), timeout })
    }

    /// Changes the timeout, for a command that takes longer (`Save` writes all memory).
    ///
    /// # Errors
    /// When it is zero.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.timeout = timeout;
        self.stream.set_write_timeout(timeout)
    }

    /// Bounds the next read by the time that is left.
    fn bound_read(&self, deadline: Option<Instant>) -> Result<(), ClientError> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let set = match left {
            Some(Duration::ZERO) => Err(io::ErrorKind::WouldBlock.into()),
            left => self.stream.set_read_timeout(left),
        };
        Ok(set.map_err(|e| WireError::Io("waiting for an answer", e))?)
    }

    /// Sends a command with its descriptors and waits for the answer. After an error other than
    /// [`ClientError::Refused`] the connection is unusable.
    ///
    /// # Errors
    /// When the conversation fails, or the VMM refuses.
    pub fn call(
        &mut self,
        command: &Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Answer, ClientError> {
        let json = serde_json::to_vec(command).map_err(WireError::Json)?;
        let deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        send(&self.stream, &json, fds)?;
        loop {
            self.bound_read(deadline)?;
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

    /// Asks for the state of the VMM.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.call(&Command::Status, &[])? {
            Answer::Status(status) => Ok(status),
            got => Err(ClientError::Unexpected { expected: "a status", got: Box::new(got) }),
        }
    }

    /// Restores a guest in a warm VMM.
    ///
    /// # Errors
    /// As [`Client::call`]; [`ClientError::Gone`] if the restore failed, because the VMM then ends.
    pub fn restore(
        &mut self,
        config: RestoreConfig,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.call_ok(&Command::Restore(config), fds)
    }

    /// Pauses the VM.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn pause(&mut self) -> Result<(), ClientError> {
        self.call_ok(&Command::Pause, &[])
    }

    /// Resumes the VM.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn resume(&mut self) -> Result<(), ClientError> {
        self.call_ok(&Command::Resume, &[])
    }

    /// Saves the paused VM to `fds`, in the order of [`Command::Save`].
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn save(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call_ok(&Command::Save, fds)
    }

    /// Copies RAM to `memory` while the VM runs; with `own`, only pages that differ from its
    /// template.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn precopy(&mut self, own: bool, memory: BorrowedFd<'_>) -> Result<Precopied, ClientError> {
        match self.call(&Command::Precopy { own }, &[memory])? {
            Answer::Precopied(done) => Ok(done),
            got => {
                Err(ClientError::Unexpected { expected: "how RAM was copied", got: Box::new(got) })
            }
        }
    }

    /// Saves the running VM to `fds`, in the order of [`Command::Save`].
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn freeze(&mut self, fds: &[BorrowedFd<'_>]) -> Result<Frozen, ClientError> {
        self.stand_still(&Command::Freeze, fds)
    }

    /// Writes the running VM to `fds` for clones that start at once, in the order of
    /// [`Command::Fork`].
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn fork(&mut self, fds: &[BorrowedFd<'_>]) -> Result<Frozen, ClientError> {
        self.stand_still(&Command::Fork, fds)
    }

    fn stand_still(
        &mut self,
        how: &Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Frozen, ClientError> {
        match self.call(how, fds)? {
            Answer::Frozen(done) => Ok(done),
            got => {
                Err(ClientError::Unexpected { expected: "how it was frozen", got: Box::new(got) })
            }
        }
    }

    /// Replaces the lower layers of a disk, as [`Command::Rebase`] describes.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn rebase(&mut self, disk: u8, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call_ok(&Command::Rebase { disk }, fds)
    }

    /// Sets the target of the balloon, if it has a value, and asks for its status.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn balloon(&mut self, target_bytes: Option<u64>) -> Result<BalloonStatus, ClientError> {
        match self.call(&Command::Balloon { target_bytes }, &[])? {
            Answer::Balloon(status) => Ok(status),
            got => Err(ClientError::Unexpected {
                expected: "the status of the balloon",
                got: Box::new(got),
            }),
        }
    }

    /// Ends the VMM.
    ///
    /// # Errors
    /// As [`Client::call`], but [`ClientError::Gone`] counts as success.
    pub fn quit(&mut self) -> Result<(), ClientError> {
        match self.call_ok(&Command::Quit, &[]) {
            Err(ClientError::Gone) => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::message::MAX_MESSAGE_BYTES;
    use std::io::{Read, Write};

    #[test]
    fn an_answer_that_comes_byte_by_byte_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            theirs.read_exact(&mut [0; 4]).unwrap();
            let length = u32::try_from(MAX_MESSAGE_BYTES).unwrap();
            let sent = theirs.write_all(&length.to_le_bytes());
            (0..length).take_while(|_| sent.is_ok() && theirs.write_all(b" ").is_ok()).count()
        });
        // All of these system calls take more than this, and each of them less.
        let mut client = Client::from_stream(ours, Some(Duration::from_millis(1))).unwrap();
        let given_up = client.call(&Command::Status, &[]).unwrap_err();
        assert!(
            matches!(&given_up, ClientError::Wire(WireError::Io(_, e))
                if e.kind() == io::ErrorKind::WouldBlock),
            "{given_up:?}"
        );
        drop(client);
        assert!(server.join().unwrap() < MAX_MESSAGE_BYTES);
    }
}
