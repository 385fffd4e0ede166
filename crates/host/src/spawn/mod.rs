//! Starting a process with exactly the descriptors it is meant to have, in namespaces of its own.
//!
//! ```text
//! Spawn ──run──▶ parent: blocks signals, makes a stack, clone3(CLONE_VM | CLONE_VFORK | …)
//!                  │ suspended (this thread only)        child: on its own stack, in the parent's memory
//!                  │                                       setsid, default signals, stdio, descriptors, chdir, execveat
//!                  ◀── goes on when the child has executed or ended; reads what failed, if anything did
//!                Child { pid, pidfd }
//! ```
//!
//! The child shares the caller's memory until it executes (as `vfork`), so the cost does not grow with the caller's
//! memory, and a failed step is simply written where the caller reads it. Until then the child makes system calls only: no allocation,
//! no lock, no libc function that takes one. It may therefore be called from any thread of a multi-threaded program.
//! The new process is a session leader, has every signal at its default, no signal blocked, and outlives the caller.

mod child;

use child::{Plan, Step};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The lowest descriptor number that [`Spawn::fds`] may ask for; 0, 1 and 2 are stdin, stdout and stderr.
pub const FIRST_FD: i32 = 3;
/// One more than the highest descriptor number that [`Spawn::fds`] may ask for.
pub const END_FD: i32 = 512;

/// Namespaces that a new process gets for itself (namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Namespaces(u64);

impl Namespaces {
    /// None: those of the caller.
    pub const NONE: Self = Self(0);
    /// It is process 1 of a new process namespace.
    pub const PID: Self = Self(libc::CLONE_NEWPID as u64);
    /// Its own table of mounts, a copy of the caller's.
    pub const MOUNT: Self = Self(libc::CLONE_NEWNS as u64);
    /// A network with nothing but a loopback that is down.
    pub const NET: Self = Self(libc::CLONE_NEWNET as u64);
    /// Its own System V and POSIX queues.
    pub const IPC: Self = Self(libc::CLONE_NEWIPC as u64);
    /// Its own host name.
    pub const UTS: Self = Self(libc::CLONE_NEWUTS as u64);
    /// All of the above: what a VMM gets that is started without a zygote.
    pub const ALL: Self = Self(Self::PID.0 | Self::MOUNT.0 | Self::NET.0 | Self::IPC.0 | Self::UTS.0);

    /// These and those.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What to execute.
#[derive(Debug)]
pub enum Program {
    /// An opened ELF file (`execveat(2)` with `AT_EMPTY_PATH`); it cannot be exchanged between check and use.
    Fd(OwnedFd),
    /// A path, absolute or from [`Spawn::cwd`]; `PATH` is not searched.
    Path(PathBuf),
}

/// One of a new process's three standard streams.
#[derive(Debug, Default)]
pub enum Stdio {
    /// `/dev/null`.
    #[default]
    Null,
    /// The caller's own.
    Inherit,
    /// This.
    Fd(OwnedFd),
}

/// A process to start. Build it with [`Spawn::new`] and set the fields that differ from the default.
#[derive(Debug)]
pub struct Spawn {
    /// What to execute.
    pub program: Program,
    /// The command line, its own name included.
    pub argv: Vec<OsString>,
    /// The whole environment, `NAME=value`; nothing is inherited.
    pub env: Vec<OsString>,
    /// Namespaces of its own.
    pub namespaces: Namespaces,
    /// Descriptors and the numbers they get, [`FIRST_FD`]..[`END_FD`], each number once. Nothing else is open in the new process but its stdio.
    pub fds: Vec<(OwnedFd, i32)>,
    /// A cgroup v2 folder that it starts in (`CLONE_INTO_CGROUP`).
    pub cgroup: Option<OwnedFd>,
    /// Its working folder; `/` by default.
    pub cwd: PathBuf,
    /// Standard input.
    pub stdin: Stdio,
    /// Standard output.
    pub stdout: Stdio,
    /// Standard error.
    pub stderr: Stdio,
}

/// A process that was started and has executed its program.
#[derive(Debug)]
pub struct Child {
    /// Its process id, as the caller sees it.
    pub pid: u32,
    /// Becomes readable when it ends; see [`crate::process`].
    pub pidfd: OwnedFd,
}

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// An argument, variable or path with a NUL byte in it.
    #[error("starting {program}: {what} contains a NUL byte")]
    Nul {
        /// The program.
        program: String,
        /// Which text.
        what: &'static str,
    },
    /// A descriptor number outside [`FIRST_FD`]..[`END_FD`], or asked for twice.
    #[error("starting {program}: descriptor number {number}: expected 3 to 511, each once")]
    FdNumber {
        /// The program.
        program: String,
        /// The number.
        number: i32,
    },
    /// The kernel made no process, or something needed for it could not be had.
    #[error("starting {program}: {what}")]
    Clone {
        /// The program.
        program: String,
        /// What was asked of the kernel.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The new process could not get ready, or not execute; it has ended and was reaped.
    #[error("starting {program}: in the new process, {step}")]
    Child {
        /// The program.
        program: String,
        /// What it was doing.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl Spawn {
    /// `argv[0]` of `program` alone: no environment, no namespaces, no descriptors, stdio on `/dev/null`, folder `/`.
    #[must_use]
    pub fn new(program: Program, argv0: impl Into<OsString>) -> Self {
        Self {
            program,
            argv: vec![argv0.into()],
            env: Vec::new(),
            namespaces: Namespaces::NONE,
            fds: Vec::new(),
            cgroup: None,
            cwd: PathBuf::from("/"),
            stdin: Stdio::Null,
            stdout: Stdio::Null,
            stderr: Stdio::Null,
        }
    }

    fn shown(&self) -> String {
        match &self.program {
            Program::Path(path) => path.display().to_string(),
            Program::Fd(_) => {
                self.argv.first().map_or_else(|| "a program".to_owned(), |a| a.to_string_lossy().into_owned())
            }
        }
    }

    fn check_numbers(&self) -> Result<(), SpawnError> {
        for (i, &(_, number)) in self.fds.iter().enumerate() {
            let twice = self.fds[..i].iter().any(|&(_, n)| n == number);
            if twice || !(FIRST_FD..END_FD).contains(&number) {
                return Err(SpawnError::FdNumber { program: self.shown(), number });
            }
        }
        Ok(())
    }

    /// Starts it, and returns when it has executed its program, its descriptors in place. (For some microseconds more, `/proc` may
    /// show an empty command line.)
    ///
    /// # Errors
    /// [`SpawnError`]; there is no process then.
    pub fn run(self) -> Result<Child, SpawnError> {
        self.check_numbers()?;
        let shown = self.shown();
        let text = |what: &'static str, text: &OsStr| {
            CString::new(text.as_bytes()).map_err(|_| SpawnError::Nul { program: shown.clone(), what })
        };
        let failed = |what: &'static str| {
            let program = shown.clone();
            move |source: io::Error| SpawnError::Clone { program, what, source }
        };
        let argv = self.argv.iter().map(|a| text("an argument", a)).collect::<Result<Vec<_>, _>>()?;
        let env = self.env.iter().map(|e| text("a variable", e)).collect::<Result<Vec<_>, _>>()?;
        let cwd = text("the folder", self.cwd.as_os_str())?;
        let (program_fd, program_path) = match &self.program {
            Program::Fd(fd) => (fd.as_raw_fd(), c"".to_owned()),
            Program::Path(path) => (libc::AT_FDCWD, text("the program", path.as_os_str())?),
        };
        let null = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .map_err(failed("opening /dev/null"))?;
        let stdio = |stdio: &Stdio, own: i32| match stdio {
            Stdio::Null => null.as_raw_fd(),
            Stdio::Inherit => own,
            Stdio::Fd(fd) => fd.as_raw_fd(),
        };
        let mut moves =
            vec![(stdio(&self.stdin, 0), 0), (stdio(&self.stdout, 1), 1), (stdio(&self.stderr, 2), 2)];
        moves.extend(self.fds.iter().map(|(fd, number)| (fd.as_raw_fd(), *number)));
        let mut plan = Plan::new(program_fd, program_path, argv, env, cwd, moves);
        let cgroup = self.cgroup.as_ref().map(AsRawFd::as_raw_fd);
        let (pid, pidfd) = child::start(&mut plan, self.namespaces.0, cgroup).map_err(failed("clone3"))?;
        // SAFETY: `start` succeeded, so the kernel stored a fresh descriptor, owned by nobody else (CLONE_PIDFD), in `pidfd`.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        match plan.failure() {
            None => Ok(Child { pid, pidfd }),
            Some((step, errno)) => {
                reap(&pidfd);
                let (step, source) = (step.text(), io::Error::from_raw_os_error(errno));
                Err(SpawnError::Child { program: shown, step, source })
            }
        }
    }
}

/// Waits for a child that is about to end, so that it does not stay as a zombie.
fn reap(pidfd: &OwnedFd) {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let fd: BorrowedFd<'_> = rustix::fd::AsFd::as_fd(pidfd);
    while matches!(waitid(WaitId::PidFd(fd), WaitIdOptions::EXITED), Err(rustix::io::Errno::INTR)) {}
}

impl Step {
    const fn text(self) -> &'static str {
        match self {
            Self::Session => "setsid",
            Self::CloseOnExec => "close_range of what it does not need",
            Self::Duplicate => "duplicating a descriptor (is it open?)",
            Self::Place => "giving a descriptor its number",
            Self::Folder => "changing to its folder",
            Self::Signals => "unblocking signals",
            Self::Execute => "executing the program",
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
