//! Processes that were started by us or by a daemon before us: finding them again, waiting, ending them.
//!
//! A pid alone names nobody: it is used again after its process ended. A [`ProcessId`] is a pid with the time the process started, which
//! together never come back while the host runs; a [`Process`] holds a pidfd, which always means the same process.

use dayfly_units::VmId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::{Duration, Instant};

/// One process of this host, for as long as the host runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its pid in this process namespace.
    pub pid: u32,
    /// When it started, in clock ticks since the host booted (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: u64,
}

impl ProcessId {
    /// The process that has `pid` now; `None` where there is none. A zombie still is one.
    ///
    /// # Errors
    /// `/proc` cannot be read, or reads strangely.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        let text = match std::fs::read(format!("/proc/{pid}/stat")) {
            Ok(text) => text,
            Err(e) if gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        let start_ticks = start_ticks(&text).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("/proc/{pid}/stat: field 22, the start time, is missing"),
            )
        })?;
        Ok(Some(Self { pid, start_ticks }))
    }

    /// The calling process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id())?
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "/proc/self/stat: is /proc mounted?"))
    }
}

/// Whether an error of reading below `/proc/<pid>` says that the process ended.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Field 22 of a stat line. The program's name, field 2, is in parentheses and may itself hold any byte, parentheses too.
fn start_ticks(stat: &[u8]) -> Option<u64> {
    let name_end = stat.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(stat.get(name_end + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It returned this.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It is gone; only its parent could know how, and that is not us.
    Unknown,
}

/// A process held by a pidfd.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    pidfd: OwnedFd,
}

impl Process {
    /// The process `id`; `None` when it ended (and was reaped), also when another process has its pid now.
    ///
    /// # Errors
    /// The kernel gives no pidfd, or `/proc` cannot be read.
    pub fn open(id: ProcessId) -> io::Result<Option<Self>> {
        let Some(pid) = i32::try_from(id.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(Errno::SRCH) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        // Only now: the pidfd holds whoever has the pid, so a look at /proc before it would say nothing.
        let same = ProcessId::of(id.pid)? == Some(id);
        Ok(same.then_some(Self { id, pidfd }))
    }

    /// A child just started.
    ///
    /// # Errors
    /// `/proc` cannot be read, or the child has been reaped by somebody else.
    pub fn from_child(child: crate::spawn::Child) -> io::Result<Self> {
        let id = ProcessId::of(child.pid)?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("process {} is gone", child.pid))
        })?;
        Ok(Self { id, pidfd: child.pidfd })
    }

    /// Which process.
    #[must_use]
    pub const fn id(&self) -> ProcessId {
        self.id
    }

    /// Whether it has not ended yet (a zombie has).
    ///
    /// # Errors
    /// `poll` fails.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(!self.poll(Some(Duration::ZERO))?)
    }

    /// Sends it a signal. A process that has ended is no error.
    ///
    /// # Errors
    /// It may not be signalled by us.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Ends it at once (`SIGKILL`); [`Self::wait`] says when it is gone.
    ///
    /// # Errors
    /// It may not be signalled by us.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Waits until it ended, at most `timeout` (`None`: for ever), and reaps it where it is our child. `None`: it runs on.
    ///
    /// # Errors
    /// `poll` or `waitid` fail.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<Ended>> {
        if !self.poll(timeout)? {
            return Ok(None);
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(self.pidfd.as_fd()), options)) {
            Ok(Some(status)) => Ok(Some(match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Ended::Code(code),
                (None, Some(signal)) => Ended::Signal(signal),
                (None, None) => Ended::Unknown,
            })),
            // Not our child, or reaped before; NOHANG with nothing to tell cannot be once poll said it ended.
            Ok(None) | Err(Errno::CHILD) => Ok(Some(Ended::Unknown)),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits until the pidfd is readable: the process ended.
    fn poll(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut fds, left.as_ref()) {
                Ok(n) => return Ok(n > 0),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl AsFd for Process {
    /// The pidfd, which becomes readable when the process ends.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// A process that says by its command line which VM it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmProcess {
    /// The process.
    pub process: ProcessId,
    /// The VM after `--id`.
    pub vm: VmId,
}

/// Every live process whose `argv[0]` ends in `program` (as `dayfly-vmm`) and whose command line has `--id <VmId>` (or `--id=<VmId>`).
///
/// Processes that end during the scan, zombies and those of which we may not know are left out.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn scan(program: &str) -> io::Result<Vec<VmProcess>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // The id first: when the pid is used again in between, the id names the process that is gone, and opening it fails.
        let Ok(Some(process)) = ProcessId::of(pid) else { continue };
        if let Some(vm) = command_line(pid).and_then(|line| vm_of(program, &line)) {
            found.push(VmProcess { process, vm });
        }
    }
    Ok(found)
}

/// Whether a process lives whose `argv[0]` is `name`.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn lives(name: &std::path::Path) -> io::Result<bool> {
    use std::os::unix::ffi::OsStrExt;
    let wanted = name.as_os_str().as_bytes();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        if command_line(pid).is_some_and(|line| line.split(|&b| b == 0).next() == Some(wanted)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The command line of a process that has one.
///
/// While a process executes a new program there is a moment in which it has the program but no command line yet (the kernel ends
/// the parent's `vfork` before it writes the arguments), so an empty one of a process with a program is looked at again.
/// Kernel threads and zombies have neither.
fn command_line(pid: u32) -> Option<Vec<u8>> {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        if !line.is_empty() {
            return Some(line);
        }
        std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// The VM that a command line (NUL after every argument) of `program` names.
fn vm_of(program: &str, cmdline: &[u8]) -> Option<VmId> {
    let mut arguments = cmdline.split(|&b| b == 0).map(|a| std::str::from_utf8(a).unwrap_or(""));
    if arguments.next()?.rsplit('/').next()? != program {
        return None;
    }
    while let Some(argument) = arguments.next() {
        if argument == "--id" {
            return arguments.next()?.parse().ok();
        }
        if let Some(id) = argument.strip_prefix("--id=") {
            return id.parse().ok();
        }
    }
    None
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
