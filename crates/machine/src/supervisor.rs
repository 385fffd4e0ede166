//! The supervisor: init of its own process, network and mount namespaces, parent of QEMU and virtiofsd.
//!
//! ```text
//! start() ──spawn──▶ stage one ──unshare, fork──▶ supervisor ──▶ virtiofsd…, QEMU ──▶ ready ──▶ one of them ends, or SIGTERM ──▶ gone
//! ```
//! Whatever ends the supervisor, SIGKILL included, ends everything below it: the kernel kills the processes of a pid
//! namespace with its init, and the mounts and the network go with their last user. It owns the sockets that the host
//! connects to and forwards each connection into the machine.

use crate::config::InitOptions;
use crate::files::{self, FileError};
use crate::layout::Layout;
use crate::lock;
use crate::net;
use crate::proto::{API_PORT, EXEC_PORT};
use crate::qemu;
use crate::streams::{join_streams, widen};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::mount::{MountFlags, MountPropagationFlags, mount_bind, mount_change, mount_remount};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How soon QEMU must be seen to end for another child's end to be its doing.
const QEMU_FOLLOWS: Duration = Duration::from_millis(500);

/// How long QEMU may take to end after it has let go of its devices.
const QEMU_ENDS: Duration = Duration::from_secs(15);

/// How often the machine is told the time.
const TIME_EVERY: Duration = Duration::from_secs(30);

/// What the caller of `start` passes on its command line, as one JSON argument.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) folder: PathBuf,
    pub(crate) options: InitOptions,
    pub(crate) shares: Vec<PathBuf>,
    pub(crate) build_digest: String,
}

/// A line of the report pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Phase(String),
    Ready,
    Failed(String),
}

/// `running.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Running {
    pub(crate) since_unix_ms: u64,
    pub(crate) ready: bool,
    pub(crate) build_digest: String,
    pub(crate) options: InitOptions,
}

/// `ended.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) at_unix_ms: u64,
    /// Whether it was asked to end and the disk was unmounted.
    pub(crate) clean: bool,
    pub(crate) cause: String,
}

pub(crate) fn timespec(time: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Debug, thiserror::Error)]
enum SupervisorError {
    #[error("orders: {0}")]
    Orders(#[source] serde_json::Error),
    #[error("{what}: {source}")]
    System { what: String, source: io::Error },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{program}: not found (Debian package {package})")]
    Missing { program: &'static str, package: &'static str },
    #[error("{0}")]
    Ended(String),
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> SupervisorError {
    let what = what.into();
    move |source| SupervisorError::System { what, source }
}

/// Runs the supervisor; `orders` is the one argument that [`crate::Machine::start`] put behind the caller's own
/// [`crate::Reexec`] words. Must be called before the process has started any thread: it unshares and forks.
#[must_use]
pub fn supervisor_main(orders: &str) -> ExitCode {
    match stage_one(orders) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            report(&Report::Failed(e.to_string()));
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// One line to `start`, which may have gone.
fn report(line: &Report) {
    if let Ok(mut text) = serde_json::to_vec(line) {
        text.push(b'\n');
        drop(io::stdout().write_all(&text).and_then(|()| io::stdout().flush()));
    }
}

fn stage_one(orders: &str) -> Result<(), SupervisorError> {
    // Whatever else the caller's caller left open (a make's pipes, a script's lock) must not live on in us.
    // SAFETY: nothing in this fresh process has opened a descriptor above 2 that it will use again.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    let orders: Orders = serde_json::from_str(orders).map_err(SupervisorError::Orders)?;
    rustix::process::setsid().map_err(|e| system("new session")(e.into()))?;
    let root = rustix::process::geteuid().is_root();
    let mut namespaces = UnshareFlags::NEWPID | UnshareFlags::NEWNET | UnshareFlags::NEWNS;
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    if !root {
        namespaces |= UnshareFlags::NEWUSER;
    }
    // SAFETY: no descriptor table is unshared, which is what makes unshare unsafe; this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }.map_err(|e| {
        let hint =
            if root { "" } else { " (this user may not make user namespaces; run as root or allow them)" };
        system(format!("new process, network and mount namespaces{hint}"))(e.into())
    })?;
    if !root {
        let write = |path: &str, text: String| fs::write(path, text).map_err(system(path));
        write("/proc/self/setgroups", "deny".to_owned())?;
        write("/proc/self/uid_map", format!("0 {uid} 1"))?;
        write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    }
    // SAFETY: this process has one thread, so the child may go on running ordinary code.
    match unsafe { libc::fork() } {
        -1 => Err(system("fork")(io::Error::last_os_error())),
        0 => {
            let layout = Layout { folder: orders.folder.clone() };
            let code = match supervise(&layout, &orders) {
                Ok(()) => 0,
                Err(e) => {
                    let text = e.to_string();
                    let ended = Ended { at_unix_ms: unix_ms(), clean: false, cause: text.clone() };
                    drop(files::write_json(&layout.ended(), &ended));
                    report(&Report::Failed(text.clone()));
                    eprintln!("{text}");
                    1
                }
            };
            std::process::exit(code)
        }
        _ => Ok(()),
    }
}

/// Blocks the signals that [`wait_for_end`] reads, in this thread and all it starts (children get an empty mask back).
fn signals() -> Result<OwnedFd, SupervisorError> {
    // SAFETY: `set` is initialised by sigemptyset before use, and all calls get valid pointers to it.
    let fd = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC)
    };
    if fd < 0 {
        return Err(system("signalfd")(io::Error::last_os_error()));
    }
    // SAFETY: `fd` was returned by signalfd(2) just above and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Starts a child that inherits `keep` (and nothing else) under the same numbers.
fn spawn(program: &Path, arguments: &[std::ffi::OsString], keep: &[RawFd]) -> Result<Child, SupervisorError> {
    let keep = keep.to_vec();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    // SAFETY: fcntl(2) is async-signal-safe and `keep` was allocated before the fork.
    unsafe {
        command.pre_exec(move || {
            for fd in &keep {
                if libc::fcntl(*fd, libc::F_SETFD, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command.spawn().map_err(system(format!("starting {}", program.display())))
}

fn listen(path: &Path) -> Result<UnixListener, SupervisorError> {
    files::remove(path)?;
    let listener = UnixListener::bind(path).map_err(system(path.display().to_string()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(system(path.display().to_string()))?;
    Ok(listener)
}

/// The network between supervisor and machine; nothing else is on it.
fn network() -> Result<OwnedFd, SupervisorError> {
    net::set_up("lo").map_err(system("interface lo"))?;
    // Without router solicitations the network is silent until it is used. Not all kernels have IPv6.
    drop(fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
    let tap = net::open_tap("machine").map_err(system("a tap interface (/dev/net/tun)"))?;
    net::set_address("machine", qemu::HOST_ADDRESS, qemu::GUEST_MASK)
        .map_err(system("the tap interface's address"))?;
    net::set_up("machine").map_err(system("the tap interface"))?;
    Ok(tap)
}

fn supervise(layout: &Layout, orders: &Orders) -> Result<(), SupervisorError> {
    // The socket files are this user's only, from the moment they exist.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let life = lock::exclusive(&layout.life_lock(), Duration::from_secs(10), || {})?;
    lock::sign(&life).map_err(system("signing the life lock"))?;
    let signals = signals()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|e| system("making mounts private")(e.into()))?;
    let tap = network()?;
    let mut running = Running {
        since_unix_ms: unix_ms(),
        ready: false,
        build_digest: orders.build_digest.clone(),
        options: orders.options.clone(),
    };
    files::write_json(&layout.running(), &running)?;
    files::remove(&layout.ended())?;

    let mut children = BTreeMap::new();
    for (index, share) in orders.shares.iter().enumerate() {
        let program = qemu::find_virtiofsd()
            .ok_or(SupervisorError::Missing { program: "virtiofsd", package: "qemu-system-common" })?;
        let at = layout.share_mount(index);
        fs::create_dir_all(&at).map_err(system(at.display().to_string()))?;
        // Not recursive: what is mounted below would be other devices to the machine's overlayfs, which refuses them.
        let bound = |e: rustix::io::Errno| system(format!("binding {}", share.display()))(e.into());
        mount_bind(share, &at).map_err(bound)?;
        // Whoever breaks out of a VM into the machine still writes nothing here.
        let read_only = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        mount_remount(&at, read_only, c"").map_err(bound)?;
        let socket = listen(&layout.share_socket(index))?;
        let arguments = qemu::virtiofsd_arguments(&at, socket.as_raw_fd());
        let child = spawn(&program, &arguments, &[socket.as_raw_fd(), life.as_raw_fd()])?;
        children.insert(child.id(), format!("virtiofsd for {}", share.display()));
    }
    let program = qemu::find_qemu()
        .ok_or(SupervisorError::Missing { program: "qemu-system-x86_64", package: "qemu-system-x86" })?;
    let (mut control, machine_end) = UnixStream::pair().map_err(system("control line"))?;
    // A machine that hangs and reads nothing must not make us hang.
    control.set_nonblocking(true).map_err(system("control line"))?;
    let options = qemu::QemuOptions {
        cpus: orders.options.cpus,
        memory_mib: orders.options.memory_mib,
        numa_nodes: orders.options.numa_nodes,
        shares: orders.shares.len(),
        control_fd: machine_end.as_raw_fd(),
        tap_fd: tap.as_raw_fd(),
        process_name: "dayfly-machine",
    };
    let child = spawn(
        &program,
        &qemu::arguments(layout, &options),
        &[machine_end.as_raw_fd(), tap.as_raw_fd(), life.as_raw_fd()],
    )?;
    drop((machine_end, tap));
    let qemu_pid = child.id();
    report(&Report::Phase("booting the machine's kernel".to_owned()));
    forward(listen(&layout.api_socket())?, API_PORT);
    forward(listen(&layout.exec_socket())?, EXEC_PORT);

    let mut ready = || -> Result<(), SupervisorError> {
        running.ready = true;
        files::write_json(&layout.running(), &running)?;
        report(&Report::Ready);
        // `start` reads until the pipe ends.
        let null = File::open("/dev/null").map_err(system("/dev/null"))?;
        rustix::stdio::dup2_stdout(&null).map_err(|e| system("/dev/null")(e.into()))
    };
    let mut end = wait_for_end(&signals, &mut control, qemu_pid, &children, &mut ready)?;
    let last = files::tail(&layout.console_log(), 1);
    if !end.clean && !last.is_empty() {
        end.cause = format!("{}; the console's last line: {last}", end.cause);
    }
    for path in [layout.api_socket(), layout.exec_socket()] {
        files::remove(&path)?;
    }
    for index in 0..orders.shares.len() {
        files::remove(&layout.share_socket(index))?;
    }
    files::write_json(&layout.ended(), &end)?;
    if end.clean {
        files::remove(&layout.running())?;
        return Ok(());
    }
    Err(SupervisorError::Ended(end.cause))
}

/// Hands each connection of a socket on the host to a port of the machine.
fn forward(listener: UnixListener, port: u16) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Out of descriptors: connections that end will free some.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            drop(thread.spawn(move || -> io::Result<()> {
                let machine = TcpStream::connect((qemu::GUEST_ADDRESS, port))?;
                machine.set_nodelay(true)?;
                widen(&stream);
                widen(&machine);
                join_streams(&stream, &machine)
            }));
        }
    });
}

/// Returns when the machine has ended, and how.
fn wait_for_end(
    signals: &OwnedFd,
    control: &mut UnixStream,
    qemu_pid: u32,
    children: &BTreeMap<u32, String>,
    ready: &mut dyn FnMut() -> Result<(), SupervisorError>,
) -> Result<Ended, SupervisorError> {
    let mut lines = Lines::default();
    let mut control_open = true;
    let (mut asked, mut bye) = (false, false);
    let mut lost: Option<(Instant, String)> = None;
    let (mut is_ready, mut next_time) = (false, Instant::now() + TIME_EVERY);
    let ended = |clean, cause: String| Ended { at_unix_ms: unix_ms(), clean, cause };
    loop {
        let mut wait = vec![PollFd::new(signals, PollFlags::IN)];
        if control_open {
            wait.push(PollFd::new(&*control, PollFlags::IN));
        }
        let until = lost.as_ref().map_or(next_time, |(until, _)| *until);
        match poll(&mut wait, Some(&timespec(until.saturating_duration_since(Instant::now())))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(system("poll")(e.into())),
        }
        if let Some((until, cause)) = &lost
            && Instant::now() >= *until
        {
            return Ok(ended(false, cause.clone()));
        }
        let (signalled, spoken) =
            (!wait[0].revents().is_empty(), wait.get(1).is_some_and(|w| !w.revents().is_empty()));
        drop(wait);
        if Instant::now() >= next_time {
            next_time = Instant::now() + TIME_EVERY;
            if is_ready {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                drop(control.write_all(format!("time {}\n", now.as_nanos()).as_bytes()));
            }
        }
        if spoken {
            let (new, open) = lines.read(control);
            control_open = open;
            for line in new {
                match line.split_once(' ').unwrap_or((&line, "")) {
                    ("phase", text) => report(&Report::Phase(text.to_owned())),
                    ("failed", text) => {
                        return Ok(ended(false, format!("the machine's start failed: {text}")));
                    }
                    ("ready", _) => {
                        ready()?;
                        (is_ready, next_time) = (true, Instant::now());
                    }
                    ("bye", _) => bye = true,
                    _ => eprintln!("control line: unknown {line:?}"),
                }
            }
        }
        if !signalled {
            continue;
        }
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        rustix::io::read(signals, &mut info).map_err(|e| system("signalfd")(e.into()))?;
        let number = u32::from_ne_bytes(info[..4].try_into().unwrap_or_default());
        if i32::try_from(number).is_ok_and(|n| n != libc::SIGCHLD) {
            if !asked {
                asked = true;
                drop(control.write_all(b"poweroff\n"));
            }
            continue;
        }
        while let Some((pid, how)) = reap() {
            if pid == qemu_pid {
                // QEMU's end ends virtiofsd, which may be seen first: it is the cause.
                return Ok(if asked && bye {
                    ended(true, "stopped".to_owned())
                } else {
                    ended(false, format!("QEMU ended unexpectedly: {how}"))
                });
            }
            if let Some(name) = children.get(&pid) {
                // virtiofsd ends in order when QEMU has closed its connection, which takes a while to give back its memory.
                let patience = if how == "code 0" { QEMU_ENDS } else { QEMU_FOLLOWS };
                lost.get_or_insert_with(|| {
                    (Instant::now() + patience, format!("{name} ended unexpectedly: {how}"))
                });
            }
        }
    }
}

/// One ended child or orphan, and how it ended.
fn reap() -> Option<(u32, String)> {
    let mut status = 0;
    // SAFETY: `status` outlives the call; no other thread of the supervisor waits for children.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0)?;
    let how = if libc::WIFSIGNALED(status) {
        format!("signal {}", libc::WTERMSIG(status))
    } else {
        format!("code {}", libc::WEXITSTATUS(status))
    };
    Some((pid, how))
}

/// Cuts the control line's bytes into lines.
#[derive(Default)]
struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// No line of ours is longer; more without a newline is dropped.
    const MAX_LINE_BYTES: usize = 4096;

    /// Whole lines that have come, and whether more can.
    fn read(&mut self, from: &mut UnixStream) -> (Vec<String>, bool) {
        let mut buffer = [0; 1024];
        let count = match from.read(&mut buffer) {
            Ok(count) => count,
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                return (Vec::new(), true);
            }
            Err(_) => 0,
        };
        self.rest.extend_from_slice(buffer.get(..count).unwrap_or_default());
        let mut lines = Vec::new();
        while let Some(at) = self.rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=at).collect();
            lines.push(String::from_utf8_lossy(line.trim_ascii_end()).into_owned());
        }
        if self.rest.len() > Self::MAX_LINE_BYTES {
            self.rest.clear();
        }
        (lines, count > 0)
    }
}
