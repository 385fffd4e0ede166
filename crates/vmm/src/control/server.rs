//! The VMM's side: one thread, any number of connections up to a cap, one command at a time.

use super::wire::{Received, Receiver, WireError, send};
use super::{Answer, Command, ExitReason, MAX_MESSAGE_BYTES};
use crate::config::{FdNumber, RestoreConfig};
use crate::exit;
use crate::fds::{self, Descriptors as _, FdError};
use crate::memory::backing::{Backing, BackingError};
use crate::vm::{BuildError, Files, Shell, Vm};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Most connections at once; more are closed at once.
const MAX_CONNECTIONS: usize = 32;
/// How long callers wait while descriptors are short.
const STARVED: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long a client may keep the VMM waiting for room in its socket.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// What this process has: a shell that waits for its guest, or a VM.
pub enum Hosted {
    /// Waits for `Restore`.
    Shell(Box<Shell>),
    /// Runs, or stands.
    Vm(Box<Vm>),
    /// Neither: a restore is under way.
    Nothing,
}

impl Hosted {
    /// Restores; a failure is the end of the process, which writes down why.
    fn restore(&mut self, config: &RestoreConfig, fds: Vec<OwnedFd>) -> Result<(), &'static str> {
        match std::mem::replace(self, Self::Nothing) {
            Self::Shell(shell) => match restored(*shell, config, fds) {
                Ok(vm) => *self = Self::Vm(Box::new(vm)),
                Err(error) => exit::fail(&error),
            },
            other => {
                *self = other;
                return Err("restore: expected a shell without a guest, got a VM");
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

fn restored(shell: Shell, config: &RestoreConfig, fds: Vec<OwnedFd>) -> Result<Vm, RestoreError> {
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
    Ok(shell.restore(config, files)?)
}

struct Connection {
    stream: UnixStream,
    receiver: Receiver,
    open: bool,
}

/// Serves commands until `Quit` or the guest's end: of whoever connects, and over `link` if there is one.
///
/// # Errors
/// When the listener fails.
pub fn serve(listener: &UnixListener, link: Option<UnixStream>, hosted: &mut Hosted) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut connections: Vec<Connection> = Vec::new();
    if let Some(stream) = link {
        stream.set_nonblocking(true)?;
        connections.push(Connection::new(stream));
    }
    let mut starved = false;
    loop {
        // While descriptors are short, callers wait: a listener that cannot be served would be ready for ever.
        let events = if starved { PollFlags::empty() } else { PollFlags::IN };
        let mut polled = vec![PollFd::new(listener, events)];
        polled.extend(connections.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)));
        match poll(&mut polled, starved.then_some(&STARVED)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
        for (connection, _) in connections.iter_mut().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            connection.turn(hosted);
        }
        connections.retain(|c| c.open);
        if ready[0] || starved {
            starved = !accept(listener, &mut connections);
        }
    }
}

/// Takes every caller; says whether there were descriptors for all.
fn accept(listener: &UnixListener, connections: &mut Vec<Connection>) -> bool {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let fits = connections.len() < MAX_CONNECTIONS;
                if fits && stream.set_nonblocking(true).is_ok() {
                    connections.push(Connection::new(stream));
                }
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::ECONNABORTED) => {}
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => return false,
                _ => return true,
            },
        }
    }
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        Self { stream, receiver: Receiver::default(), open: true }
    }

    /// Reads what is there and answers at most one message.
    fn turn(&mut self, hosted: &mut Hosted) {
        match self.receiver.receive(&self.stream) {
            Ok(Received::Part) => {}
            Ok(Received::End) => self.open = false,
            Ok(Received::Message(json, fds)) => {
                let (answer, quit) = answer(hosted, &json, fds);
                self.open = self.reply(&answer).is_ok();
                if quit {
                    exit::end(ExitReason::Quit, "Quit was asked for over the control socket");
                }
            }
            Err(WireError::Io(_, error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                let _ = self.reply(&Answer::Err { message: exit::chain(&error) });
                self.open = false;
            }
        }
    }

    fn reply(&self, answer: &Answer) -> Result<(), WireError> {
        let json = serde_json::to_vec(answer).map_err(WireError::Json)?;
        let io = |error| WireError::Io("answering", error);
        self.stream.set_nonblocking(false).map_err(io)?;
        self.stream.set_write_timeout(Some(SEND_TIMEOUT)).map_err(io)?;
        send(&self.stream, &json, &[])?;
        self.stream.set_nonblocking(true).map_err(io)
    }
}

fn answer(hosted: &mut Hosted, json: &[u8], fds: Vec<OwnedFd>) -> (Answer, bool) {
    let refused = |error: &dyn std::error::Error| {
        let mut message = exit::chain(error);
        // An answer has to fit a message, escapes included.
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
        (Command::Status, Hosted::Shell(shell)) => return (Answer::Status(shell.status()), false),
        (_, Hosted::Shell(_) | Hosted::Nothing) => return refuse(no_guest),
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
        (Command::Precopy { own }, Hosted::Vm(vm)) => match vm.precopy(own, fds) {
            Ok(done) => return (Answer::Precopied(done), false),
            Err(error) => return (refused(&error), false),
        },
        (Command::Freeze, Hosted::Vm(vm)) => match vm.freeze(fds) {
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
