//! The VMM's side of the control protocol: one thread, at most `MAX_CONNECTIONS` connections, one
//! command at a time.
//!
//! During a command that takes long (`Precopy`, the page map of `Freeze`) the thread looks at its
//! connections now and then, and answers `Status` only. Other commands keep their order.

use super::message::{Answer, Command, ExitReason, MAX_MESSAGE_BYTES, Status};
use super::wire::{Received, Receiver, WireError, send_within};
use crate::config::{FdNumber, RestoreConfig};
use crate::exit;
use crate::fds::{self, Descriptors as _, FdError};
use crate::memory::backing::{Backing, BackingError};
use crate::meter::{Meter, Thread, ThreadClock};
use crate::vm::{BuildError, Files, Vm, WarmVmm};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// The most connections at once; the server closes further ones at once.
const MAX_CONNECTIONS: usize = 32;
/// How long the server accepts no connection while descriptors are short.
const STARVED: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// No wait at all.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// How long a client may leave the server's answer unread.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// What this process hosts: a warm VMM that waits for its guest, or a VM.
pub enum Hosted {
    /// A warm VMM, which accepts `Restore`.
    WarmVmm(Box<WarmVmm>),
    /// A VM with a guest, running or paused.
    Vm(Box<Vm>),
    /// Neither, during a restore.
    Nothing,
}

impl Hosted {
    /// Whether a guest has run.
    const fn has_run(&self) -> bool {
        matches!(self, Self::Vm(vm) if vm.has_run())
    }

    /// A descriptor that is readable when a disk of the VM has no space on the host.
    fn stall_event(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Vm(vm) => Some(vm.stall_event()),
            Self::WarmVmm(_) | Self::Nothing => None,
        }
    }

    /// Stops a VM of which a disk has no space on the host.
    fn stall(&mut self) {
        if let Self::Vm(vm) = self {
            // If a vCPU does not stop, it goes on until it needs the disk.
            let _ = vm.stall();
        }
    }

    /// Restores a guest. If the restore fails, the process ends and its exit record names the
    /// cause.
    fn restore(&mut self, config: &RestoreConfig, fds: Vec<OwnedFd>) -> Result<(), &'static str> {
        match std::mem::replace(self, Self::Nothing) {
            Self::WarmVmm(warm) => match restored(*warm, config, fds) {
                Ok(vm) => *self = Self::Vm(Box::new(vm)),
                Err(error) => exit::fail(&error),
            },
            other => {
                *self = other;
                return Err("restore: expected a warm VMM without a guest, got a VM");
            }
        }
        Ok(())
    }
}

/// Why a restore failed.
#[derive(Debug, thiserror::Error)]
enum RestoreError {
    #[error("restore")]
    Fd(#[from] FdError),
    #[error("restore")]
    Backing(#[from] BackingError),
    #[error(transparent)]
    Build(#[from] BuildError),
}

fn backing(fds: &mut fds::Received, config: &RestoreConfig) -> Result<Backing, RestoreError> {
    let file = fds.take("the memory", config.memory_fd)?.into();
    let Some(shared) = &config.shared else { return Ok(Backing::of(file)) };
    let list = File::from(fds.take("the list of shared pages", shared.list_fd)?);
    let other = |number: &FdNumber| Ok(fds.take("a file of shared pages", *number)?.into());
    let others = shared.file_fds.iter().map(other).collect::<Result<_, FdError>>()?;
    Ok(Backing::sharing(file, &list, others)?)
}

fn restored(warm: WarmVmm, config: &RestoreConfig, fds: Vec<OwnedFd>) -> Result<Vm, RestoreError> {
    let mut fds = fds::Received::new(fds);
    let files = Files {
        state: fds.take("the state", config.state_fd)?.into(),
        memory: backing(&mut fds, config)?,
        working_set: match config.working_set_fd {
            Some(number) => Some(fds.take("the working set", number)?.into()),
            None => None,
        },
        disks: config.disks.iter().map(|disk| fds.take_disk(disk)).collect::<Result<_, _>>()?,
        pager: config.pager_fd.map(|number| fds.take("the pager", number)).transpose()?,
    };
    Ok(warm.restore(config, files)?)
}

/// A connection of a client.
struct Connection {
    stream: UnixStream,
    receiver: Receiver,
    /// A message that came during a long command and waits for its turn.
    waiting: Option<(Vec<u8>, Vec<OwnedFd>)>,
    /// Whether there is something to read, or a message waits.
    ready: bool,
    open: bool,
}

/// The control socket and its connections.
pub struct Server {
    listener: UnixListener,
    connections: Vec<Connection>,
    /// Descriptors were short when a connection was to be accepted.
    starved: bool,
    meter: Meter,
}

impl Server {
    /// A server of the connections of `listener`, and of `link` if there is one. Makes both
    /// non-blocking, which the seccomp filters forbid later. `meter` counts what the thread works.
    ///
    /// # Errors
    /// The error of ioctl(2).
    pub fn new(listener: UnixListener, link: Option<UnixStream>, meter: Meter) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        if let Some(stream) = &link {
            stream.set_nonblocking(true)?;
        }
        let connections = link.into_iter().map(Connection::new).collect();
        Ok(Self { listener, connections, starved: false, meter })
    }

    /// Serves commands until `Quit` or the end of the guest.
    ///
    /// # Errors
    /// When the listener fails.
    pub fn run(mut self, hosted: &mut Hosted) -> io::Result<()> {
        let mut clock = ThreadClock::new(&self.meter, Thread::Main);
        loop {
            // After the answer to the command that had the guest run, because it is a system call.
            if hosted.has_run() {
                clock.look();
            }
            let within = if self.starved { Some(&STARVED) } else { None };
            if self.wait(within, hosted.stall_event())? {
                hosted.stall();
            }
            while let Some(at) = self.connections.iter().position(|c| c.ready) {
                // Taken out, so that a long command can serve the others.
                let mut connection = self.connections.remove(at);
                connection.turn(hosted, &mut |status| self.serve_status(status));
                if connection.open {
                    self.connections.insert(at.min(self.connections.len()), connection);
                }
            }
        }
    }

    /// Waits until a connection or `event` is ready, at most `within`, and accepts new connections.
    /// Returns whether `event` is ready.
    fn wait(
        &mut self,
        within: Option<&Timespec>,
        event: Option<BorrowedFd<'_>>,
    ) -> io::Result<bool> {
        // While descriptors are short, new connections wait: poll(2) would report the listener as
        // ready without a pause.
        let events = if self.starved { PollFlags::empty() } else { PollFlags::IN };
        let mut polled = vec![PollFd::new(&self.listener, events)];
        polled.extend(self.connections.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)));
        polled.extend(event.map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN)));
        match poll(&mut polled, within) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
        let happened = event.is_some() && ready.last() == Some(&true);
        for (connection, ready) in self.connections.iter_mut().zip(&ready[1..]) {
            connection.ready |= *ready;
        }
        if ready[0] || self.starved {
            self.starved = !accept(&self.listener, &mut self.connections);
        }
        Ok(happened)
    }

    /// Answers `Status` with `status` on the other connections, during a long command. Other
    /// messages wait for their turn. Never waits.
    fn serve_status(&mut self, status: &Status) {
        // An error is met again after the command.
        let _ = self.wait(Some(&AT_ONCE), None);
        for connection in self.connections.iter_mut().filter(|c| c.ready) {
            connection.serve_status(status);
        }
        self.connections.retain(|c| c.open);
    }
}

/// Accepts every waiting connection; false if descriptors were short.
fn accept(listener: &UnixListener, connections: &mut Vec<Connection>) -> bool {
    loop {
        match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(stream) if connections.len() < MAX_CONNECTIONS => {
                connections.push(Connection::new(stream.into()));
            }
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => return false,
            Err(_) => return true,
        }
    }
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        Self { stream, receiver: Receiver::default(), waiting: None, ready: false, open: true }
    }

    /// Reads once and answers at most one message. `serve` is called now and then meanwhile.
    fn turn(&mut self, hosted: &mut Hosted, serve: &mut dyn FnMut(&Status)) {
        self.ready = false;
        let Some((json, fds)) = self.waiting.take().or_else(|| self.receive()) else { return };
        let (answer, quit) = answer(hosted, &json, fds, serve);
        self.open = self.reply(&answer, SEND_TIMEOUT).is_ok();
        if quit {
            exit::end(ExitReason::Quit, "Quit was asked for over the control socket");
        }
    }

    /// Reads one message, at most, during a long command. Answers `Status` with `status`; another
    /// message waits, and so do all that come after it on this connection.
    fn serve_status(&mut self, status: &Status) {
        if self.waiting.is_some() {
            return;
        }
        self.ready = false;
        // A message takes at least two reads: of its length, and of its JSON.
        let Some((json, fds)) = self.receive().or_else(|| self.receive()) else { return };
        if matches!(serde_json::from_slice(&json), Ok(Command::Status)) {
            self.open = self.reply(&Answer::Status(status.clone()), Duration::ZERO).is_ok();
        } else {
            (self.waiting, self.ready) = (Some((json, fds)), true);
        }
    }

    /// Reads once, without waiting. Returns a message if it is whole.
    fn receive(&mut self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        if !self.open {
            return None;
        }
        match self.receiver.receive(&self.stream) {
            Ok(Received::Part) => {}
            Ok(Received::End) => self.open = false,
            Ok(Received::Message(json, fds)) => return Some((json, fds)),
            Err(WireError::Io(_, error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                let message = dayfly_units::error::chain(&error);
                let _ = self.reply(&Answer::Err { message }, Duration::ZERO);
                self.open = false;
            }
        }
        None
    }

    fn reply(&self, answer: &Answer, within: Duration) -> Result<(), WireError> {
        let json = serde_json::to_vec(answer).map_err(WireError::Json)?;
        send_within(&self.stream, &json, within)
    }
}

/// Performs a command; returns the answer, and whether to end the process after it. `serve` is
/// called now and then during a command that takes long.
fn answer(
    hosted: &mut Hosted,
    json: &[u8],
    fds: Vec<OwnedFd>,
    serve: &mut dyn FnMut(&Status),
) -> (Answer, bool) {
    let refused = |error: &dyn std::error::Error| {
        let mut message = dayfly_units::error::chain(error);
        // The answer has to fit a message, with its JSON escapes.
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES / 8));
        Answer::Err { message }
    };
    let command = match serde_json::from_slice::<Command>(json) {
        Ok(command) => command,
        Err(error) => return (refused(&WireError::Json(error)), false),
    };
    let refuse = |message: &str| (Answer::Err { message: message.to_owned() }, false);
    let no_guest = "there is no guest yet: restore one first";
    let done = match (command, hosted) {
        (Command::Quit, _) => return (Answer::Ok, true),
        (Command::Restore(config), hosted) => {
            return match hosted.restore(&config, fds) {
                Ok(()) => (Answer::Ok, false),
                Err(message) => refuse(message),
            };
        }
        (Command::Status, Hosted::WarmVmm(warm)) => return (Answer::Status(warm.status()), false),
        (_, Hosted::WarmVmm(_) | Hosted::Nothing) => return refuse(no_guest),
        (Command::Status, Hosted::Vm(vm)) => return (Answer::Status(vm.status()), false),
        (Command::Pause, Hosted::Vm(vm)) => vm.pause(),
        (Command::Resume, Hosted::Vm(vm)) => vm.resume(),
        (Command::WorkingSet, Hosted::Vm(vm)) => match vm.write_working_set(fds) {
            Ok(()) => return (Answer::Ok, false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Rebase { disk }, Hosted::Vm(vm)) => match vm.rebase(disk, fds) {
            Ok(()) => return (Answer::Ok, false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Connect(link), Hosted::Vm(vm)) => match vm.connect(&link, fds) {
            Ok(()) => return (Answer::Ok, false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Balloon { target_bytes }, Hosted::Vm(vm)) => match vm.balloon(target_bytes) {
            Ok(status) => return (Answer::Balloon(status), false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Precopy { own }, Hosted::Vm(vm)) => match vm.precopy(own, fds, serve) {
            Ok(done) => return (Answer::Precopied(done), false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Freeze, Hosted::Vm(vm)) => match vm.freeze(fds, serve) {
            Ok(done) => return (Answer::Frozen(done), false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Fork, Hosted::Vm(vm)) => match vm.fork(fds) {
            Ok(done) => return (Answer::Frozen(done), false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Save, Hosted::Vm(vm)) => match vm.save(fds) {
            Ok(()) => return (Answer::Ok, false),
            Err(error) => return (refused(&error), false),
        },
    };
    match done {
        Ok(()) => (Answer::Ok, false),
        Err(error) => (refused(&error), false),
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
