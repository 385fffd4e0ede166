//! The daemon's side of the zygote protocol: a small blocking client.

use super::message::{Command, Enter, Report};
use super::name::PLACE;
use crate::config::{Shape, VmmConfig, ZygoteConfig};
use crate::control::wire::{Received, Receiver, WireError, send};
use dayfly_sys::group::Entry;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most VMMs of one zygote: they share its address layout.
pub const MOST_FORKS: u32 = 10_000;

/// Why a zygote gave no VMM.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The conversation failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The zygote ended; its standard error names the cause.
    #[error("the zygote ended")]
    Gone,
    /// A pre-forked VMM came without its two descriptors.
    #[error("zygote: expected a pidfd and a socket with a fork, got {0} descriptors")]
    Descriptors(usize),
    /// The zygote did not send a whole message in time.
    #[error("the zygote did not answer within {} s", .0.as_secs())]
    Timeout(Duration),
    /// The socket's timeouts could not be set.
    #[error("zygote: its socket")]
    Socket(#[source] io::Error),
}

/// A control group for one VMM.
#[derive(Debug)]
pub struct Group<G> {
    /// Owns the group; comes back with the VMM, or is dropped if the VMM is not used.
    pub owner: G,
    /// How the VMM enters it.
    pub entry: Entry,
}

/// A VMM that was configured.
#[derive(Debug)]
pub struct Forked<G> {
    /// Its process id in the zygote's PID namespace.
    pub pid: u32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
    /// The owner of its control group; `None` if it has none.
    pub group: Option<G>,
    /// Microseconds of CPU time that the zygote took to fork it.
    pub cpu_us: u64,
}

/// A pre-forked VMM that waits for its configuration.
#[derive(Debug)]
struct Preforked<G> {
    vmm: Forked<G>,
    stream: UnixStream,
}

/// A connection to a zygote. `G` owns the control group of a VMM.
#[derive(Debug)]
pub struct Client<G> {
    stream: UnixStream,
    receiver: Receiver,
    /// A pre-forked VMM was requested, with this group, and its `Forked` message has not been read
    /// yet.
    asked: Option<Option<G>>,
    preforked: Option<Preforked<G>>,
    /// The shape of the last VM: the hint for the next fork.
    last: Option<Shape>,
    forks: u32,
    within: Duration,
}

impl<G> Client<G> {
    /// The arguments of a zygote whose end of the connection is descriptor `fd`.
    #[must_use]
    pub fn arguments(fd: i32) -> [String; 4] {
        ["--zygote-fd".into(), fd.to_string(), "--id".into(), PLACE.into()]
    }

    /// Configures the zygote at the other end of `stream`, and waits for its first pre-forked VMM.
    /// `within` bounds each send and each answer. An answer that comes byte by byte is given up at
    /// the first byte after that time. `group` makes the control group of that VMM.
    ///
    /// # Errors
    /// [`ClientError`] if the zygote could not get ready.
    pub fn new(
        stream: UnixStream,
        config: &ZygoteConfig,
        kvm: BorrowedFd<'_>,
        within: Duration,
        group: impl FnOnce() -> Option<Group<G>>,
    ) -> Result<Self, ClientError> {
        stream.set_read_timeout(Some(within)).map_err(ClientError::Socket)?;
        stream.set_write_timeout(Some(within)).map_err(ClientError::Socket)?;
        let json = serde_json::to_vec(config).map_err(WireError::Json)?;
        send(&stream, &json, &[kvm])?;
        let receiver = Receiver::default();
        let mut client =
            Self { stream, receiver, asked: None, preforked: None, last: None, forks: 0, within };
        client.prepare(group)?;
        client.preforked = Some(client.next_preforked()?);
        Ok(client)
    }

    /// Requests a pre-forked VMM if there is none, without waiting for it. `group` makes its
    /// control group.
    ///
    /// # Errors
    /// [`ClientError`]; the zygote is then unusable.
    pub fn prepare(&mut self, group: impl FnOnce() -> Option<Group<G>>) -> Result<(), ClientError> {
        if self.preforked.is_none() && self.asked.is_none() {
            self.ask(group(), Vec::new())?;
        }
        Ok(())
    }

    fn ask(&mut self, group: Option<Group<G>>, cpus: Vec<u32>) -> Result<(), ClientError> {
        let (owner, entry) = group.map(|group| (group.owner, group.entry)).unzip();
        let enter = entry.as_ref().map(Enter::of);
        let command = Command::Fork { likely: self.last, group: enter, cpus };
        let json = serde_json::to_vec(&command).map_err(WireError::Json)?;
        let fds = entry.as_ref().map(Entry::fds).unwrap_or_default();
        send(&self.stream, &json, &fds)?;
        self.asked = Some(owner);
        Ok(())
    }

    /// As [`Self::fork`], with a VMM that is forked now into `group`, and restricts itself to
    /// `cpus`. A pre-forked VMM, which is in another group, goes on waiting.
    ///
    /// # Errors
    /// As [`Self::fork`].
    pub fn fork_on(
        &mut self,
        config: &VmmConfig,
        fds: &[BorrowedFd<'_>],
        group: Group<G>,
        cpus: Vec<u32>,
    ) -> Result<Forked<G>, ClientError> {
        let json = serde_json::to_vec(config).map_err(WireError::Json)?;
        self.last = Some(config.start.shape());
        // Its answer would be read in place of this one's.
        if self.asked.is_some() {
            self.preforked = Some(self.next_preforked()?);
        }
        self.ask(Some(group), cpus)?;
        let new = self.next_preforked()?;
        self.forks += 1;
        send(&new.stream, &json, fds)?;
        Ok(new.vmm)
    }

    /// Makes a VMM of `config`. Descriptors in `config` are numbered by their places in `fds`. If
    /// no VMM was pre-forked, `group` makes its control group.
    ///
    /// # Errors
    /// [`ClientError`]; the zygote is then unusable.
    pub fn fork(
        &mut self,
        config: &VmmConfig,
        fds: &[BorrowedFd<'_>],
        group: impl FnOnce() -> Option<Group<G>>,
    ) -> Result<Forked<G>, ClientError> {
        let json = serde_json::to_vec(config).map_err(WireError::Json)?;
        self.last = Some(config.start.shape());
        // A pre-forked VMM that was killed while idle has not read a configuration: replace it.
        self.preforked.take_if(|preforked| !alive(&preforked.vmm.pidfd));
        self.prepare(group)?;
        let preforked = match self.preforked.take() {
            Some(preforked) => preforked,
            None => self.next_preforked()?,
        };
        self.forks += 1;
        send(&preforked.stream, &json, fds)?;
        Ok(preforked.vmm)
    }

    /// Ends the zygote and its pre-forked VMM. Waits until the pre-forked VMM has ended, at most
    /// `within`.
    pub fn end(mut self, within: Duration) {
        // A pre-forked VMM that was requested may be on its way.
        let preforked = match self.preforked.take() {
            None if self.asked.is_some() => self.next_preforked().ok(),
            preforked => preforked,
        };
        drop(self);
        if let Some(Preforked { vmm, stream }) = preforked {
            drop(stream);
            let within = Timespec::try_from(within).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            // If it has not ended by then, it ends as soon as it reads from its socket.
            let _ = poll(&mut [PollFd::new(&vmm.pidfd, PollFlags::IN)], Some(&within));
        }
    }

    /// Whether the zygote has made [`MOST_FORKS`] VMMs and should be replaced.
    #[must_use]
    pub fn is_worn(&self) -> bool {
        self.forks >= MOST_FORKS
    }

    fn next_preforked(&mut self) -> Result<Preforked<G>, ClientError> {
        let began = Instant::now();
        loop {
            match self.receiver.receive(&self.stream)? {
                Received::Part if began.elapsed() > self.within => {
                    return Err(ClientError::Timeout(self.within));
                }
                Received::Part => {}
                Received::End => return Err(ClientError::Gone),
                Received::Message(json, fds) => {
                    let group = self.asked.take().flatten();
                    let Report::Forked { pid, cpu_us } =
                        serde_json::from_slice(&json).map_err(WireError::Json)?;
                    let got = fds.len();
                    let Ok([pidfd, stream]) = <[OwnedFd; 2]>::try_from(fds) else {
                        return Err(ClientError::Descriptors(got));
                    };
                    let vmm = Forked { pid, pidfd, group, cpu_us };
                    return Ok(Preforked { vmm, stream: stream.into() });
                }
            }
        }
    }
}

/// Whether the process of `pidfd` has not ended.
fn alive(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    /// The length of a message.
    const LENGTH: u32 = 60_000;

    #[test]
    fn an_answer_that_comes_byte_by_byte_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let sent = theirs.write_all(&LENGTH.to_le_bytes());
            (0..LENGTH).take_while(|_| sent.is_ok() && theirs.write_all(b" ").is_ok()).count()
        });
        let config =
            ZygoteConfig { folder: "/".into(), cpus: Vec::new(), vmm_cpus: Vec::new(), node: None };
        let file = tempfile::tempfile().unwrap();
        // All of these system calls take more than this, and each of them less.
        let within = Duration::from_millis(1);
        let none = || None::<Group<()>>;
        let given_up = Client::new(ours, &config, file.as_fd(), within, none).unwrap_err();
        let timed_out = match &given_up {
            ClientError::Timeout(_) => true,
            // The other thread had not begun to write.
            ClientError::Wire(WireError::Io(_, e)) => e.kind() == io::ErrorKind::WouldBlock,
            _ => false,
        };
        assert!(timed_out, "{given_up:?}");
        assert!(server.join().unwrap() < LENGTH as usize);
    }
}
