//! The supervisor: init of a process, network and mount namespace, parent of QEMU, virtiofsd and
//! the uplink's program.
//!
//! ```text
//! start() ──spawn──▶ stage one ──unshare, fork──▶ supervisor ──▶ virtiofsd…, QEMU ──▶ ready
//!                                                                                       │
//!                                          gone ◀── one of them ends, or SIGTERM ◀──────┘
//! ```
//! Every end of the supervisor, SIGKILL included, ends everything below it. The kernel kills the
//! processes of a pid namespace with its init, and mounts and network disappear with their last
//! user. Threads that start before the supervisor makes its network namespace stay in the host's:
//! those of the uplink (`uplink`) and of published ports (`ports`). The supervisor owns the sockets
//! that the host connects to, and forwards each connection into the machine.

use crate::config::InitOptions;
use crate::confine::{Jail, bind_read_only, bind_read_write, spawn};
use crate::files;
use crate::forward::{forward, listen};
use crate::layout::Layout;
use crate::lock;
use crate::ports::{self, Outside};
use crate::probe::accelerator;
use crate::progress::{Report, SupervisorError, report, system};
use crate::qemu;
use crate::qmp;
use crate::rights;
use crate::run_state::{Ended, PauseNote, RunState, Running, boot_id, unix_ms};
use crate::share::{Access, Share};
use crate::uplink::{self, Uplink};
use crate::vm_count;
use crate::watch::wait_for_end;
use dayfly_machine_init::{
    API_PORT, EXEC_PORT, GUEST_MASK, MAX_API_CONNECTIONS, MAX_EXEC_CONNECTIONS, Token, open_tap,
    set_address, set_up,
};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::sync::Arc;
use std::time::Duration;

/// The orders of `start`, passed on the command line as one JSON argument.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) folder: PathBuf,
    pub(crate) options: InitOptions,
    /// The shares with absolute paths, outer folders first.
    pub(crate) shares: Vec<Share>,
    pub(crate) build_digest: String,
    /// How often the kernel crashed before this boot, in the same start.
    pub(crate) boot_crashes: u32,
}

/// Runs the supervisor. `orders` is the one argument that [`crate::Machine::start`] appends to the
/// words of [`crate::Reexec`]. The process must not have started a thread yet, because this
/// function unshares and forks.
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

fn stage_one(orders: &str) -> Result<(), SupervisorError> {
    // Descriptors that other processes left open (a make's pipes, a script's lock) must not stay
    // open in this one. SAFETY: nothing in this fresh process has opened a descriptor above 2 that
    // it will use again.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    let orders: Orders = serde_json::from_str(orders).map_err(SupervisorError::Orders)?;
    rustix::process::setsid().map_err(|e| system("new session")(e.into()))?;
    let root = rustix::process::geteuid().is_root();
    let mut namespaces = UnshareFlags::NEWPID | UnshareFlags::NEWNS;
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    if !root {
        namespaces |= UnshareFlags::NEWUSER;
    }
    // SAFETY: unshare is unsafe because it can split the descriptor table; these flags leave that
    // table alone. This process has one thread.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }.map_err(|e| {
        let hint = if root {
            ""
        } else {
            " (this user may not make user namespaces; run as root or allow them)"
        };
        system(format!("new process and mount namespaces{hint}"))(e.into())
    })?;
    if !root {
        let write = |path: &str, text: String| fs::write(path, text).map_err(system(path));
        write("/proc/self/setgroups", "deny".to_owned())?;
        write("/proc/self/uid_map", format!("0 {uid} 1"))?;
        write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    }
    // SAFETY: this process has one thread, so the child may run ordinary code.
    match unsafe { libc::fork() } {
        -1 => Err(system("fork")(io::Error::last_os_error())),
        0 => {
            let layout = Layout { folder: orders.folder.clone() };
            let code = match supervise(&layout, &orders) {
                Ok(()) => 0,
                Err(e) => {
                    let text = e.to_string();
                    if !layout.ended().exists() {
                        let ended = Ended::now(false, text.clone());
                        drop(files::write_json(&layout.ended(), &ended));
                    }
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

/// Raises the soft limit of open files to the hard limit, because each connection to a published
/// port takes two.
fn more_descriptors() -> Result<(), SupervisorError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .map_err(|e| system("limit of open files")(e.into()))
}

/// Blocks the signals that [`wait_for_end`] reads, in this thread and in all threads that it
/// starts. Child processes get an empty mask.
fn signals() -> Result<OwnedFd, SupervisorError> {
    // SAFETY: `set` is initialised by sigemptyset before use, and all calls get valid pointers to
    // it.
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
    // SAFETY: `fd` was returned by signalfd(2) just above, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the network between supervisor and machine, which has no other hosts. The calling thread,
/// and all threads that it starts from then on, leave the host's network.
fn network() -> Result<OwnedFd, SupervisorError> {
    // SAFETY: NEWNET leaves the table of descriptors alone.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(|e| system("a new network namespace")(e.into()))?;
    set_up("lo").map_err(system("interface lo"))?;
    // Without router solicitations the network is silent until it is used. The file is missing on
    // kernels without IPv6.
    drop(fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
    let tap = open_tap("machine").map_err(|e| {
        let command = rights::tun_command(e.kind());
        system(format!("a tap interface of /dev/net/tun (as root, run: {command})"))(e)
    })?;
    set_address("machine", qemu::HOST_ADDRESS, GUEST_MASK)
        .map_err(system("the tap interface's address"))?;
    set_up("machine").map_err(system("the tap interface"))?;
    Ok(tap)
}

/// Starts the uplink, if the machine is to have one. Returns QEMU's end of it.
fn start_uplink(
    layout: &Layout,
    orders: &Orders,
    state: &Arc<RunState>,
) -> Result<Option<UnixStream>, SupervisorError> {
    if !orders.options.network {
        state.change(|running| running.uplink = Some(Uplink::Off))?;
        return Ok(None);
    }
    let (machine, qemu_end) = UnixStream::pair().map_err(system("the uplink"))?;
    let state = Arc::clone(state);
    uplink::start(&layout.folder, &uplink::Kind::ALL, machine, move |now| {
        if let Err(e) = state.change(|running| running.uplink = Some(now)) {
            eprintln!("the uplink's state: {e}");
        }
    })?;
    Ok(Some(qemu_end))
}

/// Starts the virtiofsd of a share, whose folder is bound at `at`. Returns a socket that is
/// connected to it.
fn serve_share(
    at: &Path,
    share: &Share,
    life: &File,
) -> Result<(Child, UnixStream), SupervisorError> {
    let program = qemu::find_virtiofsd()
        .ok_or(SupervisorError::Missing { program: "virtiofsd", package: "qemu-system-common" })?;
    fs::create_dir_all(at).map_err(system(at.display().to_string()))?;
    // The bind is not recursive, because mounts below the folder are not part of the share.
    let bound = match share.access {
        // Even a machine that was taken over cannot write here.
        Access::ReadOnly => bind_read_only(&share.path, at),
        Access::ReadWrite => bind_read_write(&share.path, at),
    };
    bound.map_err(system(format!("share {share}: binding the folder")))?;
    let socket = || -> io::Result<(UnixListener, UnixStream)> {
        // Abstract names belong to this network namespace, which no other process uses.
        let name = format!("dayfly-share-{}", share.name);
        let address = SocketAddr::from_abstract_name(name.as_bytes())?;
        Ok((UnixListener::bind_addr(&address)?, UnixStream::connect_addr(&address)?))
    };
    let (listener, connected) = socket().map_err(system(format!("share {share}: socket")))?;
    let arguments = qemu::virtiofsd_arguments(at, listener.as_raw_fd());
    let keep = [listener.as_raw_fd(), life.as_raw_fd()];
    let child = spawn(&program, &arguments, &keep, None);
    Ok((child.map_err(system(format!("starting {}", program.display())))?, connected))
}

/// QEMU's ends of the connections with the supervisor and with virtiofsd.
struct QemuEnds {
    control: UnixStream,
    monitor: UnixStream,
    tap: OwnedFd,
    uplink: Option<UnixStream>,
    /// Each share's tag, with its socket.
    shares: Vec<(String, UnixStream)>,
}

/// Starts QEMU in its jail, or without a jail if the host allows none.
fn start_qemu(
    layout: &Layout,
    orders: &Orders,
    life: &File,
    ends: &QemuEnds,
) -> Result<Child, SupervisorError> {
    let program = qemu::find_qemu().ok_or(SupervisorError::Missing {
        program: "qemu-system-x86_64",
        package: "qemu-system-x86",
    })?;
    let (kernel, initramfs) = (layout.vmlinux(), layout.initramfs());
    let accelerator = accelerator();
    let jail =
        Jail::make(&layout.folder, &layout.jail(), &program, &kernel, &initramfs, accelerator)?;
    if let Err(why) = &jail {
        eprintln!("QEMU has no jail and no separate user, only its system call filter: {why}");
    }
    let jail = jail.ok();
    let open = |path: &Path, options: &OpenOptions| {
        options.open(path).map_err(system(path.display().to_string()))
    };
    let disk = open(&layout.disk(), OpenOptions::new().read(true).write(true))?;
    let [console, log] = [layout.console_log(), layout.daemon_log()]
        .map(|path| open(&path, OpenOptions::new().write(true).create(true).truncate(true)));
    let (console, log) = (console?, log?);
    let (kernel, initramfs) = jail.as_ref().map_or((kernel, initramfs), Jail::boot_files);
    let options = qemu::QemuOptions {
        accelerator,
        cpus: orders.options.cpus,
        memory_mib: orders.options.memory_mib,
        numa_nodes: orders.options.numa_nodes,
        folder: &layout.folder,
        kernel,
        initramfs,
        disk_fd: disk.as_raw_fd(),
        console_fd: console.as_raw_fd(),
        log_fd: log.as_raw_fd(),
        control_fd: ends.control.as_raw_fd(),
        monitor_fd: ends.monitor.as_raw_fd(),
        tap_fd: ends.tap.as_raw_fd(),
        uplink_fd: ends.uplink.as_ref().map(AsRawFd::as_raw_fd),
        shares: ends.shares.iter().map(|(tag, socket)| (tag.clone(), socket.as_raw_fd())).collect(),
        process_name: "dayfly-machine",
    };
    let mut keep: Vec<RawFd> = ends.shares.iter().map(|(_, socket)| socket.as_raw_fd()).collect();
    keep.extend([&disk, &console, &log, life].map(AsRawFd::as_raw_fd));
    keep.extend([&ends.control, &ends.monitor].map(AsRawFd::as_raw_fd));
    keep.push(ends.tap.as_raw_fd());
    keep.extend(options.uplink_fd);
    spawn(&program, &qemu::arguments(&options), &keep, jail.as_ref())
        .map_err(system(format!("starting {}", program.display())))
}

fn supervise(layout: &Layout, orders: &Orders) -> Result<(), SupervisorError> {
    // Only this user can access the socket files, from their creation on.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    more_descriptors()?;
    let life = lock::exclusive(&layout.life_lock(), Duration::from_secs(10), || {})?;
    lock::sign(&life).map_err(system("signing the life lock"))?;
    let signals = signals()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|e| system("making mounts private")(e.into()))?;
    let running = Running {
        since_unix_ms: unix_ms(),
        ready: false,
        build_digest: orders.build_digest.clone(),
        options: orders.options.clone(),
        boot_id: boot_id(),
        boot_crashes: orders.boot_crashes,
        vms: None,
        uplink: None,
    };
    let state = Arc::new(RunState::new(layout, running)?);
    let uplink = start_uplink(layout, orders, &state)?;
    let outside = Outside::start(orders.options.network)?;
    let tap = network()?;
    let pause_note = PauseNote::new(layout)?;
    files::remove(&layout.ended())?;

    let mut children = BTreeMap::new();
    let mut shares = Vec::new();
    for (index, share) in orders.shares.iter().enumerate() {
        let (child, socket) = serve_share(&layout.share_mount(index), share, &life)?;
        children.insert(child.id(), format!("virtiofsd of share {}", share.name));
        shares.push((share.tag(), socket));
    }
    let (mut control, machine_end) = UnixStream::pair().map_err(system("control line"))?;
    let (monitor, qemu_end) = UnixStream::pair().map_err(system("QEMU's monitor"))?;
    let ends = QemuEnds { control: machine_end, monitor: qemu_end, tap, uplink, shares };
    let qemu_pid = start_qemu(layout, orders, &life, &ends)?.id();
    drop(ends);
    qmp::keep(monitor, pause_note, layout.disk());
    let token = Token::random().map_err(system("the token"))?;
    // The machine has not opened its end yet, so the line waits in the socket's buffer.
    control
        .write_all(format!("token {}\n", token.to_hex()).as_bytes())
        .map_err(system("control line"))?;
    // A machine that hangs and reads nothing must not block the supervisor.
    control.set_nonblocking(true).map_err(system("control line"))?;
    report(&Report::Phase("booting the machine's kernel".to_owned()));
    forward(listen(&layout.api_socket())?, API_PORT, &token, MAX_API_CONNECTIONS);
    forward(listen(&layout.exec_socket())?, EXEC_PORT, &token, MAX_EXEC_CONNECTIONS);

    let mut ready = || -> Result<(), SupervisorError> {
        state.change(|running| running.ready = true)?;
        if orders.options.daemon.is_some() {
            vm_count::keep(Arc::clone(&state), token.clone());
            ports::keep(outside.clone(), &token);
        }
        report(&Report::Ready);
        // `start` reads until the pipe ends.
        let null = File::open("/dev/null").map_err(system("/dev/null"))?;
        rustix::stdio::dup2_stdout(&null).map_err(|e| system("/dev/null")(e.into()))
    };
    let mut end = wait_for_end(&signals, &mut control, qemu_pid, &children, &mut ready)?;
    end.vms = state.close().and_then(|running| running.vms);
    let last = files::tail(&layout.console_log(), 1);
    if !end.clean && !last.is_empty() {
        end.cause = format!("{}; the console's last line: {last}", end.cause);
    }
    for path in [layout.api_socket(), layout.exec_socket()] {
        files::remove(&path)?;
    }
    files::write_json(&layout.ended(), &end)?;
    if end.clean {
        files::remove(&layout.running())?;
        return Ok(());
    }
    Err(SupervisorError::Ended(end.cause))
}
