//! init, start, stop, status, rm: what the host's side does.

use crate::config::InitOptions;
use crate::errors::{InitError, StartError, StopError};
use crate::files::{self, FileError};
use crate::initramfs;
use crate::layout::{Layout, MAX_SOCKET_PATH_BYTES};
use crate::lock;
use crate::qemu;
use crate::supervisor::{Ended, Orders, Report, Running, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a command waits for another on the same machine.
const COMMAND_PATIENCE: Duration = Duration::from_secs(180);
/// How long a machine that runs may take to answer, and its daemon to be there again.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// How often the machine's kernel may crash while it boots before that is an error.
const BOOT_CRASHES: u32 = 3;
/// What a kernel's console says when that has crashed, or part of it (`oops=panic` makes a panic of it, unless nothing goes on any more).
const CRASHES: [&str; 4] = ["Kernel panic", "Oops: ", "exited with irqs disabled", "---[ end trace"];
/// How long the machine may take to become ready.
const START_PATIENCE: Duration = Duration::from_secs(120);

/// How the program that uses this library starts itself again as the supervisor: it must call
/// [`crate::supervisor_main`] with the argument that follows these words.
#[derive(Debug, Clone)]
pub struct Reexec {
    /// The program, usually `/proc/self/exe`.
    pub program: PathBuf,
    /// Its first arguments, e.g. `["machine", "supervise"]`.
    pub words: Vec<OsString>,
}

/// A machine that has been made.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(crate) layout: Layout,
    pub(crate) options: InitOptions,
}

/// What [`Machine::start`] found or did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Started {
    /// It ran already.
    WasRunning,
    /// It was started.
    Fresh {
        /// Milliseconds from the supervisor's start until ready.
        boot_ms: u64,
        /// Why a running machine was restarted, if one was.
        replaced: Option<String>,
    },
}

/// What [`Machine::stop`] found or did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Nothing ran.
    WasStopped,
    /// It synced its disk and powered off.
    Clean,
    /// It was killed, because it did not end in time.
    Killed,
}

/// What became of a machine that seemed to run.
enum Found {
    Ready,
    Gone,
    Silent,
}

impl Machine {
    /// Makes the machine below `home`, or changes what it is made with: a disk that exists is kept. Nothing is started.
    ///
    /// # Errors
    /// [`InitError`]; what was there before stays.
    pub fn init(
        home: &Path,
        options: &InitOptions,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, InitError> {
        check("CPUs", u64::from(options.cpus), 1, 64)?;
        check("NUMA nodes", u64::from(options.numa_nodes), 1, u64::from(options.cpus.min(4)))?;
        check("memory in MiB", options.memory_mib, 512, 1 << 20)?;
        check("disk in bytes", options.disk_bytes, 64 << 20, 16 << 40)?;
        fs::create_dir_all(home).map_err(|e| FileError::new("making", home, e))?;
        let home = home.canonicalize().map_err(|e| FileError::new("resolving", home, e))?;
        if home.to_str().is_none() {
            return Err(FileError::new(
                "using",
                &home,
                io::Error::other("QEMU's options take only UTF-8 paths"),
            )
            .into());
        }
        let layout = Layout::of_home(&home);
        let socket = layout.exec_socket();
        let length = socket.as_os_str().as_bytes().len();
        if length > MAX_SOCKET_PATH_BYTES {
            return Err(InitError::Path { path: socket, length });
        }
        fs::create_dir_all(&layout.folder).map_err(|e| FileError::new("making", &layout.folder, e))?;
        let machine = Self { layout, options: options.clone() };
        let _lock = machine.command(progress)?;
        progress("unpacking the machine's kernel and modules");
        initramfs::ensure(&machine.layout, options, &machine.shares())?;
        if !machine.layout.disk().exists() {
            progress("making the machine's disk");
            machine.make_disk()?;
        }
        files::write_json(&machine.layout.config(), options)?;
        Ok(machine)
    }

    /// The machine below `home`.
    ///
    /// # Errors
    /// [`InitError::None`] when none was made there.
    pub fn open(home: &Path) -> Result<Self, InitError> {
        let none = || InitError::None(home.to_owned());
        let home = home.canonicalize().map_err(|_| none())?;
        let layout = Layout::of_home(&home);
        let options = files::read_json(&layout.config())?.ok_or_else(none)?;
        Ok(Self { layout, options })
    }

    /// What it is made with.
    #[must_use]
    pub fn options(&self) -> &InitOptions {
        &self.options
    }

    /// Where the daemon's API is reached while the machine runs.
    #[must_use]
    pub fn api_socket(&self) -> PathBuf {
        self.layout.api_socket()
    }

    /// Where the exec channel is reached while the machine runs.
    #[must_use]
    pub fn exec_socket(&self) -> PathBuf {
        self.layout.exec_socket()
    }

    /// The folder with everything that is the machine's.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.layout.folder
    }

    fn command(&self, progress: &mut dyn FnMut(&str)) -> Result<File, FileError> {
        lock::exclusive(&self.layout.command_lock(), COMMAND_PATIENCE, || {
            progress("waiting for another command on the machine")
        })
    }

    /// Folders that get a virtiofsd of their own: `/`, and those on other file systems.
    fn shares(&self) -> Vec<PathBuf> {
        // A user namespace may not take a mount apart (mount_namespaces(7), locked mounts), so only root can share `/`.
        if !self.options.host_files
            || !rustix::process::geteuid().is_root()
            || qemu::find_virtiofsd().is_none()
        {
            return Vec::new();
        }
        let device = |path: &Path| fs::metadata(path).map(|m| m.dev()).ok();
        let mut shares = vec![PathBuf::from("/")];
        shares.extend(
            self.options
                .shares
                .iter()
                .filter(|s| device(s).is_some() && device(s) != device(Path::new("/")))
                .cloned(),
        );
        shares
    }

    fn make_disk(&self) -> Result<(), InitError> {
        let path = self.layout.disk();
        let staged = path.with_extension("new");
        let wrong = |why: String| InitError::Disk { path: path.clone(), why };
        let file = File::create(&staged).map_err(|e| FileError::new("making", &staged, e))?;
        file.set_len(self.options.disk_bytes).map_err(|e| FileError::new("making", &staged, e))?;
        // No bad-block reserve; inode tables and journal of a fresh sparse file are zero already.
        let out = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-i", "65536", "-L", "dayfly"])
            .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"])
            .arg(&staged)
            .env("PATH", path_with_sbin())
            .output()
            .map_err(|e| wrong(e.to_string()))?;
        if !out.status.success() {
            return Err(wrong(String::from_utf8_lossy(&out.stderr).trim().to_owned()));
        }
        file.sync_all()
            .and_then(|()| fs::rename(&staged, &path))
            .map_err(|e| FileError::new("making", &path, e).into())
    }

    /// Starts the machine and returns when it (and the daemon, if there is one) answers. A running machine is left
    /// alone unless what it should boot has changed.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub fn start(&self, reexec: &Reexec, progress: &mut dyn FnMut(&str)) -> Result<Started, StartError> {
        let _lock = self.command(progress)?;
        let build = initramfs::ensure(&self.layout, &self.options, &self.shares())?;
        let mut replaced = None;
        if self.alive() {
            let running: Option<Running> = files::read_json(&self.layout.running())?;
            let reason = running.and_then(|running| self.difference(&running, &build));
            replaced = match reason {
                Some(reason) => Some(reason),
                None => match self.wait_ready()? {
                    Found::Ready => return Ok(Started::WasRunning),
                    Found::Gone => None,
                    Found::Silent => Some("it did not answer".to_owned()),
                },
            };
            if let Some(reason) = &replaced {
                progress(&format!("restarting the machine: {reason}"));
            }
            self.stop_locked(Duration::from_secs(20))?;
        }
        if qemu::find_qemu().is_none() {
            return Err(StartError::Missing { program: "qemu-system-x86_64", package: "qemu-system-x86" });
        }
        self.sweep_locked()?;
        self.check_disk(progress)?;
        self.turn_logs()?;
        let begun = Instant::now();
        // QEMU's emulation (7.2) races when a kernel patches its code while another CPU runs it, and a booting kernel does.
        let mut crashes_left = BOOT_CRASHES;
        while let Err(error) = self.launch(reexec, build.digest.clone(), progress) {
            if crashes_left == 0 || !is_crash(&error.to_string()) {
                return Err(error);
            }
            crashes_left -= 1;
            progress("its kernel crashed while it booted under emulation: once more");
            self.sweep_locked()?;
        }
        Ok(Started::Fresh { boot_ms: millis(begun.elapsed()), replaced })
    }

    /// Why the running machine is not what it should be.
    fn difference(&self, running: &Running, build: &initramfs::Build) -> Option<String> {
        let mut what = Vec::new();
        if running.build_digest != build.digest {
            what.push(
                build
                    .changed
                    .clone()
                    .unwrap_or_else(|| "the carried programs, kernel or settings".to_owned()),
            );
        }
        if (running.options.cpus, running.options.memory_mib) != (self.options.cpus, self.options.memory_mib)
        {
            what.push("CPUs or memory".to_owned());
        }
        (!what.is_empty()).then(|| format!("changed: {}", what.join(", ")))
    }

    /// Whether the machine whose supervisor is there really is: it may have been killed this moment, or be booting by
    /// itself after its starter was killed.
    fn wait_ready(&self) -> Result<Found, StartError> {
        let boot = Instant::now() + START_PATIENCE;
        let mut answer = None;
        while self.alive() {
            let running: Option<Running> = files::read_json(&self.layout.running())?;
            let ready = running.is_some_and(|r| r.ready);
            if ready {
                let deadline = *answer.get_or_insert_with(|| Instant::now() + ANSWER_PATIENCE);
                let daemon = match self.ask_status() {
                    Ok(_) if self.options.daemon.is_none() => return Ok(Found::Ready),
                    Ok(status) => status.daemon.unwrap_or_default(),
                    Err(_) if Instant::now() > deadline => return Ok(Found::Silent),
                    Err(_) => {
                        std::thread::sleep(Duration::from_millis(50));
                        continue;
                    }
                };
                if daemon.answering {
                    return Ok(Found::Ready);
                }
                if Instant::now() > deadline {
                    // Its VMs live on; ending them is not for us to decide.
                    let last = daemon.last_end.unwrap_or_else(|| "it has not ended yet".to_owned());
                    let cause = format!(
                        "its daemon does not answer (started again {} times; {last})",
                        daemon.restarts
                    );
                    return Err(self.failed(cause));
                }
            } else if Instant::now() > boot {
                return Ok(Found::Silent);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Found::Gone)
    }

    /// What is known about a failed start.
    fn failed(&self, cause: String) -> StartError {
        let tail =
            [self.layout.console_log(), self.layout.daemon_log()].map(|log| match files::tail(&log, 20) {
                text if text.is_empty() => String::new(),
                text => format!("\n--- last lines of {}:\n{text}", log.display()),
            });
        StartError::Failed { cause, tail: tail.concat() }
    }

    /// Removes what an unclean end left: socket files, staged files. Mounts and processes went with the supervisor.
    /// Nothing happens while the machine runs, or while another command is at work on it.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn sweep(&self) -> Result<(), FileError> {
        let Ok(_lock) = lock::exclusive(&self.layout.command_lock(), Duration::ZERO, || {}) else {
            return Ok(());
        };
        if self.alive() { Ok(()) } else { self.sweep_locked() }
    }

    fn sweep_locked(&self) -> Result<(), FileError> {
        files::remove(&self.layout.api_socket())?;
        files::remove(&self.layout.exec_socket())?;
        for entry in fs::read_dir(&self.layout.folder)
            .map_err(|e| FileError::new("reading", &self.layout.folder, e))?
        {
            let path = entry.map_err(|e| FileError::new("reading", &self.layout.folder, e))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let staged = name.contains(".new.") || name == "disk.new";
            if staged || (name.starts_with("fs") && name.ends_with(".sock")) {
                files::remove(&path)?;
            }
        }
        Ok(())
    }

    /// Keeps one older version of each log.
    fn turn_logs(&self) -> Result<(), FileError> {
        for log in [self.layout.console_log(), self.layout.daemon_log(), self.layout.supervisor_log()] {
            if log.exists() {
                let old = log.with_extension("log.1");
                fs::rename(&log, &old).map_err(|e| FileError::new("renaming", &log, e))?;
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        reexec: &Reexec,
        build_digest: String,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), StartError> {
        let orders = Orders {
            folder: self.layout.folder.clone(),
            options: self.options.clone(),
            shares: self.shares(),
            build_digest,
        };
        let spawn = |source| StartError::Spawn { program: reexec.program.clone(), source };
        let text = serde_json::to_string(&orders).map_err(|e| spawn(io::Error::from(e)))?;
        let log = self.layout.supervisor_log();
        let log = File::create(&log).map_err(|e| FileError::new("making", &log, e))?;
        let (reader, writer) = io::pipe().map_err(spawn)?;
        let mut child = Command::new(&reexec.program)
            .args(&reexec.words)
            .arg(text)
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(log)
            .current_dir("/")
            .spawn()
            .map_err(spawn)?;
        // Stage one ends as soon as it has forked the supervisor.
        child.wait().map_err(spawn)?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                if let Ok(report) = serde_json::from_str::<Report>(&line)
                    && sender.send(report).is_err()
                {
                    return;
                }
            }
        });
        let deadline = Instant::now() + START_PATIENCE;
        loop {
            let cause = match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Report::Phase(text)) => {
                    progress(&text);
                    continue;
                }
                Ok(Report::Ready) => return Ok(()),
                Ok(Report::Failed(cause)) => cause,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    format!("not ready after {} s", START_PATIENCE.as_secs())
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let said = files::tail(&self.layout.supervisor_log(), 5);
                    format!(
                        "the supervisor ended without a word{}{said}",
                        if said.is_empty() { "" } else { ": " }
                    )
                }
            };
            let error = self.failed(cause);
            self.stop_locked(Duration::ZERO)?;
            return Err(error);
        }
    }

    /// Stops the machine: its processes are told to end, its disk is unmounted, it powers off; after `patience` it is
    /// killed.
    ///
    /// # Errors
    /// [`StopError`]
    pub fn stop(&self, patience: Duration, progress: &mut dyn FnMut(&str)) -> Result<Stopped, StopError> {
        let _lock = self.command(progress)?;
        if self.alive() {
            progress("stopping the machine");
        }
        self.stop_locked(patience)
    }

    fn stop_locked(&self, patience: Duration) -> Result<Stopped, StopError> {
        let life = self.layout.life_lock();
        let mut outcome = Stopped::WasStopped;
        if let Some((pid, handle)) = self.supervisor() {
            let signal = |signal| match pidfd_send_signal(&handle, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
                Err(e) => Err(StopError::Signal { pid, source: e.into() }),
            };
            outcome = Stopped::Clean;
            if !patience.is_zero() {
                signal(Signal::TERM)?;
            }
            if patience.is_zero() || !ended_within(&handle, patience) {
                signal(Signal::KILL)?;
                ended_within(&handle, Duration::from_secs(10));
                outcome = Stopped::Killed;
            }
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while lock::held(&life) {
            if Instant::now() > deadline {
                return Err(StopError::Stuck(life));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if outcome == Stopped::Clean {
            let ended: Option<Ended> = files::read_json(&self.layout.ended())?;
            if !ended.is_some_and(|e| e.clean) {
                outcome = Stopped::Killed;
            }
        }
        // It was asked to end, so it has not crashed.
        files::remove(&self.layout.running())?;
        Ok(outcome)
    }

    /// Whether there is a supervisor. Where the life lock is held without one, it has just been killed and its children
    /// are on their way, or it is about to sign: whichever it is shows at once.
    pub(crate) fn alive(&self) -> bool {
        let life = self.layout.life_lock();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if lock::signer(&life).is_some() {
                return true;
            }
            if !lock::held(&life) || Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The supervisor and a handle that cannot come to mean another process.
    fn supervisor(&self) -> Option<(i32, OwnedFd)> {
        let pid = lock::signer(&self.layout.life_lock())?;
        let handle = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        (lock::signer(&self.layout.life_lock()) == Some(pid)).then_some((pid, handle))
    }

    /// After an unclean end: replays the journal and repairs what is safe to repair. Without e2fsck the mount does the
    /// former.
    fn check_disk(&self, progress: &mut dyn FnMut(&str)) -> Result<(), StartError> {
        let ended: Option<Ended> = files::read_json(&self.layout.ended())?;
        if ended.is_some_and(|e| e.clean) || !self.layout.life_lock().exists() {
            return Ok(());
        }
        progress("checking the machine's disk after an unclean end");
        let disk = self.layout.disk();
        let run = Command::new("e2fsck").arg("-p").arg(&disk).env("PATH", path_with_sbin()).output();
        // 0: clean, 1: repaired; 4 and more: damage that needs a decision.
        match run {
            Ok(out) if out.status.code().is_none_or(|code| code > 2) => Err(StartError::Disk {
                path: disk,
                said: String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).trim().to_owned(),
            }),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Stops the machine and removes it with its disk.
    ///
    /// # Errors
    /// [`StopError`]
    pub fn rm(self, progress: &mut dyn FnMut(&str)) -> Result<(), StopError> {
        let _lock = self.command(progress)?;
        self.stop_locked(Duration::from_secs(5))?;
        fs::remove_dir_all(&self.layout.folder)
            .map_err(|e| FileError::new("removing", &self.layout.folder, e).into())
    }
}

fn check(what: &'static str, got: u64, least: u64, most: u64) -> Result<(), InitError> {
    if (least..=most).contains(&got) {
        return Ok(());
    }
    Err(InitError::Option { what, expected: format!("{least} to {most}"), got })
}

/// Whether a start failed because the machine's kernel crashed.
fn is_crash(told: &str) -> bool {
    CRASHES.iter().any(|mark| told.contains(mark))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// mke2fs is in a folder that a user's PATH may lack.
fn path_with_sbin() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Whether the process ended in time.
fn ended_within(handle: &OwnedFd, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&timespec(left))) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_crashed_is_told_from_a_machine_that_cannot_start() {
        for told in [
            "the machine ended: [    1.9] Kernel panic - not syncing: Fatal exception",
            "not ready within 120 s; its console: [    2.1] Oops: 0002 [#1] PREEMPT SMP NOPTI",
            "[    2.1] note: swapper/0[1] exited with irqs disabled",
        ] {
            assert!(is_crash(told), "{told}");
        }
        for told in
            ["qemu-system-x86_64: cannot set up guest memory", "not ready within 120 s; its console: ", ""]
        {
            assert!(!is_crash(told), "{told}");
        }
    }
}
