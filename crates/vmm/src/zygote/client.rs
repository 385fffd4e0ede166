//! The daemon's side: a small blocking client.

use super::name::PLACE;
use super::{Command, Told};
use crate::config::{Shape, VmmConfig, ZygoteConfig};
use crate::control::wire::{Received, Receiver, WireError, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How many VMMs may have the addresses of one zygote.
pub const MOST_FORKS: u32 = 10_000;

/// Why there is no new VMM.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The conversation failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The zygote is gone; standard error says why.
    #[error("the zygote ended")]
    Gone,
    /// A spare without its descriptors.
    #[error("zygote: expected a pidfd and a socket with a fork, got {0} descriptors")]
    Descriptors(usize),
    /// Of the socket.
    #[error("zygote: its socket")]
    Socket(#[source] io::Error),
}

/// A process that waits for what it is to become.
#[derive(Debug)]
struct Spare {
    pid: u32,
    pidfd: OwnedFd,
    stream: UnixStream,
}

/// A zygote.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    receiver: Receiver,
    /// A spare was asked for, and not yet told of.
    asked: bool,
    spare: Option<Spare>,
    /// The shape of the last VM.
    last: Option<Shape>,
    forks: u32,
}

impl Client {
    /// The arguments of a zygote whose end of the connection is descriptor `fd`.
    #[must_use]
    pub fn arguments(fd: i32) -> [String; 4] {
        ["--zygote-fd".into(), fd.to_string(), "--id".into(), PLACE.into()]
    }

    /// Configures the zygote at the other end of `stream`, and waits for its first spare. Waits at most `within` for anything.
    ///
    /// # Errors
    /// It could not get ready.
    pub fn new(
        stream: UnixStream,
        config: &ZygoteConfig,
        kvm: BorrowedFd<'_>,
        within: Duration,
    ) -> Result<Self, ClientError> {
        stream.set_read_timeout(Some(within)).map_err(ClientError::Socket)?;
        stream.set_write_timeout(Some(within)).map_err(ClientError::Socket)?;
        let json = serde_json::to_vec(config).map_err(WireError::Json)?;
        send(&stream, &json, &[kvm])?;
        let receiver = Receiver::default();
        let mut client = Self { stream, receiver, asked: false, spare: None, last: None, forks: 0 };
        client.prepare()?;
        client.spare = Some(client.told()?);
        Ok(client)
    }

    /// Asks for a spare, if there is none; does not wait for it.
    ///
    /// # Errors
    /// [`ClientError`]; the zygote is then of no more use.
    pub fn prepare(&mut self) -> Result<(), ClientError> {
        if self.spare.is_none() && !self.asked {
            let json = serde_json::to_vec(&Command::Fork { likely: self.last }).map_err(WireError::Json)?;
            send(&self.stream, &json, &[])?;
            self.asked = true;
        }
        Ok(())
    }

    /// A new VMM: its pid and its pidfd. Descriptors in `config` are numbered by their places in `fds`.
    ///
    /// # Errors
    /// [`ClientError`]; the zygote is then of no more use.
    pub fn fork(
        &mut self,
        config: &VmmConfig,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(u32, OwnedFd), ClientError> {
        let json = serde_json::to_vec(config).map_err(WireError::Json)?;
        self.last = Some(config.start.shape());
        // One that was killed while it was idle has not read anything.
        self.spare.take_if(|spare| !alive(&spare.pidfd));
        self.prepare()?;
        let spare = match self.spare.take() {
            Some(spare) => spare,
            None => self.told()?,
        };
        self.forks += 1;
        send(&spare.stream, &json, fds)?;
        Ok((spare.pid, spare.pidfd))
    }

    /// Ends the zygote and its spare, and waits until the spare has gone, but no longer than `within`.
    pub fn end(mut self, within: Duration) {
        // One that was asked for may be on its way.
        let spare = match self.spare.take() {
            None if self.asked => self.told().ok(),
            spare => spare,
        };
        drop(self);
        if let Some(Spare { pidfd, stream, .. }) = spare {
            drop(stream);
            let within = Timespec::try_from(within).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            // Where it is not gone by then, it is as soon as it looks.
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&within));
        }
    }

    /// Whether another zygote should take its place.
    #[must_use]
    pub fn is_worn(&self) -> bool {
        self.forks >= MOST_FORKS
    }

    fn told(&mut self) -> Result<Spare, ClientError> {
        loop {
            match self.receiver.receive(&self.stream)? {
                Received::Part => {}
                Received::End => return Err(ClientError::Gone),
                Received::Message(json, fds) => {
                    self.asked = false;
                    let Told::Forked { pid } = serde_json::from_slice(&json).map_err(WireError::Json)?;
                    let got = fds.len();
                    let Ok([pidfd, stream]) = <[OwnedFd; 2]>::try_from(fds) else {
                        return Err(ClientError::Descriptors(got));
                    };
                    return Ok(Spare { pid, pidfd, stream: stream.into() });
                }
            }
        }
    }
}

/// Whether the process of a pidfd has not ended.
fn alive(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready == 0)
}
