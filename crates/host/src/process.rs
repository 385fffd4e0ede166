//! Processes that this daemon or an earlier daemon started: finding, awaiting and killing them.
//!
//! A pid alone does not identify a process, because the kernel reuses pids. A [`ProcessId`] is a
//! pid plus the process's start time, which together are unique until the host reboots. A
//! [`Process`] holds a pidfd, which always refers to one process.

use dayfly_units::VmId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Identifies one process of this host until the host reboots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessId {
    /// The pid in this PID namespace.
    pub pid: u32,
    /// Start time in clock ticks since the host's boot (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: u64,
}

impl ProcessId {
    /// The process that has `pid` now; `None` if there is none. A zombie counts as a process.
    ///
    /// # Errors
    /// `/proc` cannot be read, or its text has an unexpected form.
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

    /// When the process started, in microseconds since the host's boot.
    #[must_use]
    pub fn started_us(self) -> u64 {
        // SAFETY: sysconf(3) with a constant; it reads nothing of this process.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        // Linux on x86-64 has 100 ticks in a second.
        let ticks = u128::try_from(ticks).unwrap_or(100).max(1);
        u64::try_from(u128::from(self.start_ticks) * 1_000_000 / ticks).unwrap_or(u64::MAX)
    }

    /// The calling process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id())?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "/proc/self/stat: is /proc mounted?")
        })
    }
}

/// Whether an error of a read below `/proc/<pid>` means that the process ended.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// A field of a stat line after the second, by its number in proc_pid_stat(5). Field 2, the
/// program's name in parentheses, may hold any byte, parentheses included.
fn field(stat: &[u8], number: usize) -> Option<&str> {
    let name_end = stat.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(stat.get(name_end + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(number.checked_sub(3)?)
}

fn start_ticks(stat: &[u8]) -> Option<u64> {
    field(stat, 22)?.parse().ok()
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Exit code.
    Code(i32),
    /// Number of the signal that killed the process.
    Signal(i32),
    /// The exit status is unknown, because the process was not a child of this process or was
    /// reaped.
    Unknown,
}

/// Makes the kernel end other processes before this one if the host is out of memory
/// (oom_score_adj, proc_pid_oom_score_adj(5)). Its children inherit that, unless they change it.
///
/// # Errors
/// The kernel refuses; it requires CAP_SYS_RESOURCE.
pub fn keep_for_oom() -> io::Result<()> {
    // A part of the score of a process is its share of the memory, in thousandths: this one goes
    // before none that takes less than nine tenths.
    std::fs::write("/proc/self/oom_score_adj", "-900")
}

/// The id of the host's current boot (random(4)). A [`ProcessId`] of another boot names no process.
///
/// # Errors
/// `/proc` cannot be read.
pub fn boot_id() -> io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim_end().to_owned())
}

/// The real user id of process `pid`.
///
/// # Errors
/// `/proc` cannot be read: `NotFound` if there is no such process.
pub fn uid_of(pid: u32) -> io::Result<u32> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path)?;
    let uid = text.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next());
    uid.and_then(|uid| uid.parse().ok()).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{path}: expected a line Uid:, got none"),
        )
    })
}

/// A process referred to by a pidfd.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    pidfd: OwnedFd,
}

impl Process {
    /// Opens the process `id`. `None` if the process ended and was reaped, even if another process
    /// has its pid now.
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
        // The check must follow pidfd_open: before it, the pid could still pass to another process.
        let same = ProcessId::of(id.pid)? == Some(id);
        Ok(same.then_some(Self { id, pidfd }))
    }

    /// Takes over a child that was just started.
    ///
    /// # Errors
    /// `/proc` cannot be read, or the child was already reaped elsewhere.
    pub fn from_child(child: crate::spawn::Child) -> io::Result<Self> {
        let id = ProcessId::of(child.pid)?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("process {} is gone", child.pid))
        })?;
        Ok(Self { id, pidfd: child.pidfd })
    }

    /// The identity of the process.
    #[must_use]
    pub const fn id(&self) -> ProcessId {
        self.id
    }

    /// Whether the process has not ended yet. A zombie has ended.
    ///
    /// # Errors
    /// `poll` fails.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(!self.poll(Some(Duration::ZERO))?)
    }

    /// Sends a signal. A process that has ended is no error.
    ///
    /// # Errors
    /// This process may not signal it.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Sends `SIGKILL`; [`Self::wait`] reports when the process has ended.
    ///
    /// # Errors
    /// This process may not signal it.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Waits until the process ends, at most `timeout` (`None`: without limit), and reaps it if it
    /// is a child. Returns `None` if the process still runs.
    ///
    /// # Errors
    /// `poll` or `waitid` fail.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<Ended>> {
        if !self.poll(timeout)? {
            return Ok(None);
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(self.pidfd.as_fd()), options)) {
            Ok(Some(status)) => {
                Ok(Some(match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => Ended::Code(code),
                    (None, Some(signal)) => Ended::Signal(signal),
                    (None, None) => Ended::Unknown,
                }))
            }
            // Not a child, or already reaped. `Ok(None)` cannot occur after poll reported the end.
            Ok(None) | Err(Errno::CHILD) => Ok(Some(Ended::Unknown)),
            Err(e) => Err(e.into()),
        }
    }

    /// The signal that killed the process, which has ended and need not be a child. `None` if none
    /// did, or if the kernel does not say so: before Linux 6.15 of a process that was reaped, or if
    /// this process may not see its status and it is not reaped `within` that time.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn killed_by(&self, within: Duration) -> io::Result<Option<i32>> {
        let mut status = self.exit_status()?;
        if status.flatten().is_none()
            && let Some(zombie) = self.zombie_status()?
        {
            status = Some(Some(zombie));
        }
        if status == Some(None) {
            // Once the process is reaped, the pidfd reports that too.
            let within = Timespec::try_from(within).map_err(io::Error::other)?;
            let mut fds = [PollFd::new(&self.pidfd, PollFlags::HUP)];
            loop {
                match poll(&mut fds, Some(&within)) {
                    Ok(n) if n == 0 || fds[0].revents().contains(PollFlags::HUP) => break,
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            status = self.exit_status()?;
        }
        let status = status.flatten();
        Ok(status.filter(|status| libc::WIFSIGNALED(*status)).map(|status| libc::WTERMSIG(status)))
    }

    /// The wait status of the process, by PIDFD_GET_INFO (ioctl_pidfd(2)): `None` if the kernel
    /// cannot give it, `Some(None)` if the process is not reaped yet.
    fn exit_status(&self) -> io::Result<Option<Option<i32>>> {
        // linux/pidfd.h: _IOWR(0xff, 11, struct pidfd_info), whose first version has 64 bytes.
        const PIDFD_GET_INFO: libc::Ioctl = 0xc040_ff0b;
        const PIDFD_INFO_EXIT: u64 = 1 << 3;
        #[repr(C)]
        struct Info {
            mask: u64,
            cgroup: u64,
            ids: [u32; 11],
            exit_code: i32,
        }
        let ask = || {
            let mut info = Info { mask: PIDFD_INFO_EXIT, cgroup: 0, ids: [0; 11], exit_code: 0 };
            let pidfd = self.pidfd.as_raw_fd();
            // SAFETY: the kernel reads and writes one struct pidfd_info of the size in the
            // request's number, which `info` is laid out as.
            let result = unsafe { libc::ioctl(pidfd, PIDFD_GET_INFO, &raw mut info) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
            let known = info.mask & PIDFD_INFO_EXIT != 0;
            Ok(known.then_some(info.exit_code))
        };
        let answer = match ask() {
            // Reaped between the kernel's look for the status and its look for the process. The
            // status is there now.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => ask(),
            answer => answer,
        };
        match answer {
            Ok(status) => Ok(Some(status)),
            // An older kernel has no such ioctl, or gives no status.
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL | libc::ESRCH)) =>
            {
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// The wait status of the process while it is a zombie: its parent may reap it late. `None` if
    /// it is none, or if the kernel does not show the status.
    fn zombie_status(&self) -> io::Result<Option<i32>> {
        let stat = match std::fs::read(format!("/proc/{}/stat", self.id.pid)) {
            Ok(stat) => stat,
            Err(e) if gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        // Another process may have the pid by now. A status that may not be seen is shown as 0.
        let same = start_ticks(&stat) == Some(self.id.start_ticks) && field(&stat, 3) == Some("Z");
        let status = field(&stat, 52).filter(|_| same).and_then(|code| code.parse().ok());
        Ok(status.filter(|status| *status != 0))
    }

    /// Waits until the pidfd is readable, which means that the process ended.
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

/// A process whose command line names the VM that it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmProcess {
    /// The process.
    pub process: ProcessId,
    /// The value of `--id`.
    pub vm: VmId,
}

/// Every live process whose `argv[0]` has the file name `program` (such as `dayfly-vmm`) and whose
/// command line has `--id <VmId>` (or `--id=<VmId>`).
///
/// Processes that end during the scan, zombies, and processes that this user may not inspect are
/// left out.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn scan(program: &str) -> io::Result<Vec<VmProcess>> {
    scan_by(|cmdline| vm_of(program, cmdline))
}

/// Every live process whose `argv[0]` is `<folder>/<VmId>/<program>`. Left out are those that
/// [`scan`] leaves out.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn scan_below(folder: &Path, program: &str) -> io::Result<Vec<VmProcess>> {
    scan_by(|cmdline| {
        let own = Path::new(OsStr::from_bytes(cmdline.split(|&b| b == 0).next()?));
        let of_vm = own.strip_prefix(folder).ok()?;
        let id = of_vm.parent()?.to_str()?.parse().ok()?;
        (of_vm.file_name()? == program).then_some(id)
    })
}

/// Processes with a certain form of `argv[0]`.
#[derive(Debug, Clone)]
pub enum Named {
    /// The name itself.
    Exactly(PathBuf),
    /// `<folder>/<VmId>/<program>`.
    OfVms(PathBuf, &'static str),
}

impl Named {
    /// The pids of those that live.
    ///
    /// # Errors
    /// `/proc` cannot be listed.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        match self {
            Self::Exactly(name) => named(&[name]),
            Self::OfVms(folder, program) => {
                let found = scan_below(folder, program)?;
                Ok(found.into_iter().map(|of_vm| of_vm.process.pid).collect())
            }
        }
    }
}

/// Every live process in whose command line `vm_of` finds a VM.
fn scan_by(vm_of: impl Fn(&[u8]) -> Option<VmId>) -> io::Result<Vec<VmProcess>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        // The id first: if the pid is reused before the next read, the id names the process that
        // ended, and opening it fails.
        let Ok(Some(process)) = ProcessId::of(pid) else { continue };
        if let Some(vm) = command_line(pid).and_then(|line| vm_of(&line)) {
            found.push(VmProcess { process, vm });
        }
    }
    Ok(found)
}

/// Whether a live process has `name` as its `argv[0]`.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn lives(name: &Path) -> io::Result<bool> {
    Ok(!named(&[name])?.is_empty())
}

/// The live processes whose `argv[0]` is one of `names`.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn named(names: &[impl AsRef<Path>]) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let line = command_line(pid).unwrap_or_default();
        let own = line.split(|&b| b == 0).next().unwrap_or_default();
        if names.iter().any(|name| name.as_ref().as_os_str().as_bytes() == own) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// The command line of a process; `None` for kernel threads and zombies, which have neither a
/// program nor a command line.
///
/// During execve a process briefly has its new program but no command line, because the kernel ends
/// the parent's `vfork` before it writes the arguments. So an empty command line of a process with
/// a program is read again.
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

/// The VM that a command line of `program` names. A NUL byte ends every argument.
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
