//! The process that serves the files of one volume to one guest.
//!
//! It gets the stream to the guest and the open folder, and needs nothing of the daemon after that.
//! It ends when its stream ends, that is with its VM.

use crate::base::caller::Caller;
use crate::base::config::{Config, VOLUME_NAME, VmDir};
use dayfly_host::process::{Ended, Process, ProcessId};
use dayfly_host::spawn::{FIRST_FD, Program, Spawn, SpawnError, Stdio};
use dayfly_units::sync::lock;
use dayfly_units::text::{SHORT, escaped};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::time::Timespec;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// What the process writes to its standard output when it serves.
const READY: &[u8] = b"ready\n";
/// Bytes of a log that are looked at.
const LOG_BYTES: u64 = 4096;
/// Order of the kernel's OOM killer: as VMMs, before the daemon.
const OOM_SCORE: &str = "500";

/// The servers whose end a task of this daemon waits for.
#[derive(Debug, Default)]
pub struct Watched(Mutex<BTreeSet<ProcessId>>);

impl Watched {
    /// Adds a server.
    pub fn add(&self, server: ProcessId) {
        lock(&self.0).insert(server);
    }

    /// Removes a server, which has ended.
    pub fn remove(&self, server: ProcessId) {
        lock(&self.0).remove(&server);
    }

    /// Whether a task waits for its end.
    #[must_use]
    pub fn has(&self, server: ProcessId) -> bool {
        lock(&self.0).contains(&server)
    }
}

/// Why a volume is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A file or a descriptor.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The process could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The process ended before it served.
    #[error("{VOLUME_NAME} ended before it was ready: {why}")]
    Refused {
        /// How it ended, and the last line of its log.
        why: String,
    },
    /// The process was not ready in time.
    #[error("{VOLUME_NAME}: not ready after {} s", .0.as_secs())]
    Late(Duration),
}

/// What a process needs to serve a volume.
#[derive(Debug)]
pub struct Order<'a> {
    /// The stream to the guest's agent, which carries FUSE messages.
    pub stream: OwnedFd,
    /// The folder.
    pub folder: OwnedFd,
    /// With whose rights the files are opened.
    pub owner: &'a Caller,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The VM's folder.
    pub dir: &'a VmDir,
    /// The number of the volume among those of the VM.
    pub number: usize,
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> ServerError {
    move |source| ServerError::Io { what, source }
}

/// The program, which is beside that of VMMs.
#[must_use]
pub fn program(config: &Config) -> PathBuf {
    config.vmm.with_file_name(VOLUME_NAME)
}

/// Starts the process, and returns when it serves. Blocks, at most for `within`.
///
/// # Errors
/// [`ServerError`]; no process is left.
pub fn start(config: &Config, order: Order<'_>, within: Duration) -> Result<Process, ServerError> {
    let Order { stream, folder, owner, read_only, dir, number } = order;
    let log_path = dir.volume_log(number);
    let log = File::options().create(true).append(true).mode(0o600).open(&log_path);
    let log = log.map_err(failed("its log"))?;
    let (ready, theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed("a pipe")(e.into()))?;
    let mut spawn = Spawn::new(Program::Path(program(config)), dir.volume_server());
    spawn.argv.extend(arguments(owner, read_only));
    spawn.fds = vec![(stream, FIRST_FD), (folder, FIRST_FD + 1)];
    spawn.stdout = Stdio::Fd(theirs);
    spawn.stderr = Stdio::Fd(log.into());
    let process = Process::from_child(spawn.run()?).map_err(failed("the process"))?;
    let served = wait_until_ready(&process, ready, &log_path, within);
    if served.is_err() {
        let _ = process.kill().and_then(|()| process.wait(Some(within)));
        return served.map(|()| process);
    }
    // Otherwise it has the daemon's protection. A process that has ended has no such file.
    let _ = std::fs::write(format!("/proc/{}/oom_score_adj", process.id().pid), OOM_SCORE);
    Ok(process)
}

/// The option by which `dayflyd` joins two streams, and does nothing else ([`join_streams`]).
pub const JOIN: &str = "--join-streams";

/// Starts a process that joins the stream to a guest's agent with that to a server on another host.
/// It is the program of this process. Blocks.
///
/// # Errors
/// [`ServerError`]; no process is left.
pub fn join(dir: &VmDir, stream: OwnedFd, server: OwnedFd) -> Result<Process, ServerError> {
    let own = File::open("/proc/self/exe").map_err(failed("this program"))?;
    let mut spawn = Spawn::new(Program::Fd(own.into()), dir.volume_server());
    spawn.argv.push(JOIN.into());
    spawn.fds = vec![(stream, FIRST_FD), (server, FIRST_FD + 1)];
    let process = Process::from_child(spawn.run()?).map_err(failed("the process"))?;
    let _ = std::fs::write(format!("/proc/{}/oom_score_adj", process.id().pid), OOM_SCORE);
    Ok(process)
}

/// Joins the descriptors that [`join`] gives this process, as a user without rights, until both
/// have ended. Call it before this process has threads.
///
/// # Errors
/// The user cannot be changed, or a stream breaks.
pub fn join_streams() -> io::Result<()> {
    const UNPRIVILEGED: libc::uid_t = 65_534;
    // So that pkill(1) of the daemon by its name ends no volume.
    rustix::thread::set_name(c"dayfly-volume")?;
    // SAFETY: `join` passes these two descriptors for this use alone.
    let [stream, server] = [FIRST_FD, FIRST_FD + 1].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    // SAFETY: plain calls that change this process's ids; no other thread exists.
    let changed = unsafe {
        libc::setgroups(0, std::ptr::null())
            | libc::setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
            | libc::setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    };
    if changed != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::thread::set_no_new_privs(true)?;
    dayfly_machine_init::join_streams(&stream, &server)
}

fn arguments(owner: &Caller, read_only: bool) -> Vec<OsString> {
    let Caller { uid, gid, groups } = owner;
    let mut arguments = vec![
        "--stream".to_owned(),
        FIRST_FD.to_string(),
        "--folder".to_owned(),
        (FIRST_FD + 1).to_string(),
        "--uid".to_owned(),
        uid.to_string(),
        "--gid".to_owned(),
        gid.to_string(),
    ];
    if !groups.is_empty() {
        let groups: Vec<String> = groups.iter().map(ToString::to_string).collect();
        arguments.extend(["--groups".to_owned(), groups.join(",")]);
    }
    if read_only {
        arguments.push("--read-only".to_owned());
    }
    arguments.into_iter().map(OsString::from).collect()
}

/// Waits for the process's line.
fn wait_until_ready(
    process: &Process,
    ready: OwnedFd,
    log: &Path,
    within: Duration,
) -> Result<(), ServerError> {
    let deadline = Instant::now() + within;
    let mut ready = File::from(ready);
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line != READY {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|e| failed("waiting")(io::Error::other(e)))?;
        let mut fds = [PollFd::new(&ready, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(0) => return Err(ServerError::Late(within)),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(e) => return Err(failed("waiting")(e.into())),
        }
        if ready.read(&mut byte).map_err(failed("waiting"))? == 0 || line.len() >= READY.len() {
            // It has ended, or writes something else.
            let _ = process.kill();
            let ended = process.wait(Some(within)).map_err(failed("waiting"))?;
            return Err(ServerError::Refused { why: explained(ended, log) });
        }
        line.extend(byte);
    }
    Ok(())
}

/// How a process ended, with the last line of its log.
#[must_use]
pub fn explained(ended: Option<Ended>, log: &Path) -> String {
    let how = match ended {
        Some(Ended::Code(code)) => format!("exit code {code}"),
        Some(Ended::Signal(libc::SIGSYS)) => {
            "the kernel killed it for a forbidden system call (SIGSYS)".to_owned()
        }
        Some(Ended::Signal(signal)) => format!("signal {signal}"),
        Some(Ended::Unknown) | None => "how is not known".to_owned(),
    };
    match last_line(log) {
        Some(line) => format!("{how}: {}", escaped(&line, SHORT)),
        None => how,
    }
}

fn last_line(log: &Path) -> Option<String> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::open(log).ok()?;
    let end = file.seek(SeekFrom::End(0)).ok()?;
    file.seek(SeekFrom::Start(end.saturating_sub(LOG_BYTES))).ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    text.lines().rev().find(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use dayfly_units::VmId;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::unix::fs::PermissionsExt;

    /// Starts a script in the place of the server.
    fn started(script: &str, owner: &Caller) -> (Result<Process, ServerError>, String) {
        let folder = tempfile::tempdir().unwrap();
        let mut config = fixture::config(folder.path());
        config.vmm = folder.path().join("dayfly-vmm");
        std::fs::write(program(&config), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(program(&config), PermissionsExt::from_mode(0o755)).unwrap();
        let dir = config.vm(VmId::random());
        std::fs::create_dir_all(dir.path()).unwrap();
        let (stream, _guest) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let shared = File::open(folder.path()).unwrap().into();
        let order = Order { stream, folder: shared, owner, read_only: true, dir: &dir, number: 3 };
        let process = start(&config, order, Duration::from_secs(60));
        let log = std::fs::read_to_string(dir.volume_log(3)).unwrap_or_default();
        (process, log)
    }

    #[test]
    fn a_server_gets_its_descriptors_and_its_user_and_serves_when_it_is_ready() {
        let owner = Caller { uid: 5, gid: 6, groups: vec![7, 8] };
        let script = "echo \"$0 $*\" >&2; test -d /proc/self/fd/4 && echo ready; exec sleep 1000";
        let (process, log) = started(script, &owner);
        let process = process.unwrap();
        assert!(process.is_alive().unwrap());
        let words = "--stream 3 --folder 4 --uid 5 --gid 6 --groups 7,8 --read-only";
        assert!(log.trim_end().ends_with(words), "{log}");
        let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", process.id().pid));
        assert_eq!(score.unwrap().trim(), OOM_SCORE);
        process.kill().unwrap();
        process.wait(None).unwrap();
    }

    #[test]
    fn a_server_that_refuses_is_quoted() {
        for (script, says) in [
            ("echo no >&2; echo 'this folder is on /proc' >&2; exit 1", "1: this folder is on"),
            ("kill -9 $$", "signal 9"),
            ("echo something else; exec sleep 1000", "signal 9"),
        ] {
            let (process, _) = started(script, &Caller::default());
            let refused = process.unwrap_err().to_string();
            assert!(refused.contains("before it was ready") && refused.contains(says), "{refused}");
        }
    }
}
