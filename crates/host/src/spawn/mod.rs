//! Starting a process with exactly the descriptors that it is given, in new namespaces.
//!
//! ```text
//! Spawn ──run──▶ parent: blocks signals, makes a stack, clone3(CLONE_VM | CLONE_VFORK | …)
//!                  │ suspended (this thread only)    child: own stack, the parent's memory
//!                  │                                   setsid, default signals, descriptors,
//!                  │                                   chdir, execveat
//!                  ◀── resumes when the child has executed or ended; reads the failed step, if any
//!                Child { pid, pidfd }
//! ```
//!
//! The child shares the caller's memory until it executes (as with `vfork`), so the cost does not
//! grow with the caller's memory. The child writes a failed step to a place where the caller reads
//! it. Until execve the child makes system calls only: no allocation, no lock, no libc function
//! that takes a lock. Any thread of a multi-threaded program may therefore call [`Spawn::run`].
//!
//! The new process is a session leader, has every signal at its default and none blocked, and
//! outlives the caller.

mod child;
mod numbers;

pub use numbers::{END_FD, FIRST_FD};

use child::{Plan, Step};
use dayfly_sys::group::Entry;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Namespaces to create for a new process (namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Namespaces(u64);

impl Namespaces {
    /// No new namespace: the process shares those of the caller.
    pub const NONE: Self = Self(0);
    /// A new PID namespace, in which the process is PID 1.
    pub const PID: Self = Self(libc::CLONE_NEWPID as u64);
    /// A new mount namespace, a copy of the caller's.
    pub const MOUNT: Self = Self(libc::CLONE_NEWNS as u64);
    /// A new network namespace, with only a loopback that is down.
    pub const NET: Self = Self(libc::CLONE_NEWNET as u64);
    /// A new IPC namespace (System V and POSIX queues).
    pub const IPC: Self = Self(libc::CLONE_NEWIPC as u64);
    /// A new UTS namespace (host name).
    pub const UTS: Self = Self(libc::CLONE_NEWUTS as u64);
    /// All of the above, for a VMM that is started without a zygote.
    pub const ALL: Self =
        Self(Self::PID.0 | Self::MOUNT.0 | Self::NET.0 | Self::IPC.0 | Self::UTS.0);

    /// The union of both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What to execute.
#[derive(Debug)]
pub enum Program {
    /// An open ELF file (`execveat(2)` with `AT_EMPTY_PATH`). The file cannot be replaced between
    /// check and use.
    Fd(OwnedFd),
    /// A path, absolute or relative to [`Spawn::cwd`]; `PATH` is not searched.
    Path(PathBuf),
}

/// One of a new process's three standard streams.
#[derive(Debug, Default)]
pub enum Stdio {
    /// `/dev/null`.
    #[default]
    Null,
    /// The caller's stream of the same number.
    Inherit,
    /// The given descriptor.
    Fd(OwnedFd),
}

/// A process to start. Build it with [`Spawn::new`] and set the fields that differ from the
/// default.
#[derive(Debug)]
pub struct Spawn {
    /// What to execute.
    pub program: Program,
    /// The command line, including `argv[0]`.
    pub argv: Vec<OsString>,
    /// The whole environment as `NAME=value`; nothing is inherited.
    pub env: Vec<OsString>,
    /// Namespaces to create for the process.
    pub namespaces: Namespaces,
    /// Descriptors and their numbers in the process, [`FIRST_FD`]..[`END_FD`], each number once.
    /// Apart from these and stdio, no descriptor is open in the process.
    pub fds: Vec<(OwnedFd, i32)>,
    /// The control group in which the process starts; `None`: the caller's.
    pub group: Option<Entry>,
    /// The working folder; `/` by default.
    pub cwd: PathBuf,
    /// Standard input.
    pub stdin: Stdio,
    /// Standard output.
    pub stdout: Stdio,
    /// Standard error.
    pub stderr: Stdio,
}

/// A process that has executed its program.
#[derive(Debug)]
pub struct Child {
    /// The pid in the caller's PID namespace.
    pub pid: u32,
    /// Becomes readable when the process ends; see [`crate::process`].
    pub pidfd: OwnedFd,
}

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// An argument, a variable or a path contains a NUL byte.
    #[error("starting {program}: {what} contains a NUL byte")]
    Nul {
        /// The program.
        program: String,
        /// Which text contains the byte.
        what: &'static str,
    },
    /// A descriptor number is outside [`FIRST_FD`]..[`END_FD`], or is given twice.
    #[error("starting {program}: descriptor number {number}: expected 3 to 511, each once")]
    FdNumber {
        /// The program.
        program: String,
        /// The number.
        number: i32,
    },
    /// The kernel made no process, or a resource for the start was missing.
    #[error("starting {program}: {what}")]
    Clone {
        /// The program.
        program: String,
        /// The call that failed.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A step in the new process failed; the process has ended and was reaped.
    #[error("starting {program}: in the new process, {step}")]
    Child {
        /// The program.
        program: String,
        /// The step that failed.
        step: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl SpawnError {
    /// Whether all steps before the execution of the program succeeded.
    #[must_use]
    pub fn is_of_execution(&self) -> bool {
        matches!(self, Self::Child { step, .. } if *step == Step::Execute.text())
    }
}

impl Spawn {
    /// A process with `argv0` as its whole command line: no environment, no new namespaces, no
    /// descriptors, stdio on `/dev/null`, working folder `/`.
    #[must_use]
    pub fn new(program: Program, argv0: impl Into<OsString>) -> Self {
        Self {
            program,
            argv: vec![argv0.into()],
            env: Vec::new(),
            namespaces: Namespaces::NONE,
            fds: Vec::new(),
            group: None,
            cwd: PathBuf::from("/"),
            stdin: Stdio::Null,
            stdout: Stdio::Null,
            stderr: Stdio::Null,
        }
    }

    fn shown(&self) -> String {
        match &self.program {
            Program::Path(path) => path.display().to_string(),
            Program::Fd(_) => self
                .argv
                .first()
                .map_or_else(|| "a program".to_owned(), |a| a.to_string_lossy().into_owned()),
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

    /// Starts the process, and returns after it has executed its program with its descriptors in
    /// place. (For some microseconds more, `/proc` may show an empty command line.)
    ///
    /// # Errors
    /// [`SpawnError`]; no process remains.
    pub fn run(self) -> Result<Child, SpawnError> {
        self.check_numbers()?;
        let shown = self.shown();
        let text = |what: &'static str, text: &OsStr| {
            CString::new(text.as_bytes())
                .map_err(|_| SpawnError::Nul { program: shown.clone(), what })
        };
        let failed = |what: &'static str| {
            let program = shown.clone();
            move |source: io::Error| SpawnError::Clone { program, what, source }
        };
        let argv =
            self.argv.iter().map(|a| text("an argument", a)).collect::<Result<Vec<_>, _>>()?;
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
        let mut moves = vec![
            (stdio(&self.stdin, 0), 0),
            (stdio(&self.stdout, 1), 1),
            (stdio(&self.stderr, 2), 2),
        ];
        moves.extend(self.fds.iter().map(|(fd, number)| (fd.as_raw_fd(), *number)));
        let mut plan = Plan::new(program_fd, program_path, argv, env, cwd, moves);
        plan.enter(self.group.as_ref().map_or(&[], Entry::tasks));
        let folder = self.group.as_ref().and_then(Entry::folder);
        let (pid, pidfd) =
            child::start(&mut plan, self.namespaces.0, folder).map_err(failed("clone3"))?;
        // SAFETY: `start` succeeded, so the kernel stored a fresh descriptor in `pidfd`
        // (CLONE_PIDFD), and nothing else owns that descriptor.
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

/// Waits for a child that is about to end, so that no zombie remains.
fn reap(pidfd: &OwnedFd) {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let fd: BorrowedFd<'_> = rustix::fd::AsFd::as_fd(pidfd);
    while matches!(waitid(WaitId::PidFd(fd), WaitIdOptions::EXITED), Err(rustix::io::Errno::INTR)) {
    }
}

impl Step {
    const fn text(self) -> &'static str {
        match self {
            Self::Group => "entering its control group",
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
