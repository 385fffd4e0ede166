//! Process 1 of the initramfs.
//!
//! ```text
//!  mounts ──▶ cmdline ──▶ modules ──▶ root device, mount ──▶ mounts in it ──▶ switch root ─┬─▶ init: serve, reap
//!    │                                                                                     └─▶ fork: image's init is 1,
//!    └── any failure: a line on the console, then process 1 ends: the kernel panics,           the agent its child
//!        which pvpanic and `panic=-1` make visible outside
//! ```
//!
//! The stages are types, each made from the one before: no root is mounted before the modules are loaded.

pub mod cmdline;
mod modules;
mod mounts;
mod reaper;
mod root;

use crate::exec::Programs;
use crate::exec::cage::{CGROUP_ROOT, Cages};
use crate::kernel::Linux;
use crate::local;
use crate::server::{Agent, Listener};
use crate::vsock::{VsockListener, connect_host};
use cmdline::Options;
use dayfly_api::agent::{FrameKind, HOST_PORT, PORT, READY_PORT, Reply};
use rustix::io::Errno;
use std::convert::Infallible;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why the machine did not come up.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file system was not mounted.
    #[error("mount {kind} on {at}: {errno}")]
    Mount {
        /// Kind of file system.
        kind: String,
        /// Where.
        at: PathBuf,
        /// Why not.
        errno: Errno,
    },
    /// A file of the initramfs or of /proc cannot be read.
    #[error("{path}: {what}: {errno}")]
    File {
        /// Which.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// The kernel command line does not make sense.
    #[error("kernel command line: {0}")]
    Options(#[from] cmdline::OptionError),
    /// A module was not loaded.
    #[error("module {path}: {errno}{hint}")]
    Module {
        /// Its file.
        path: PathBuf,
        /// Why not.
        errno: Errno,
        /// What that usually means.
        hint: &'static str,
    },
    /// The root device did not appear.
    #[error("root device {device}: expected it within {seconds} s, there are {there}")]
    NoRoot {
        /// The device.
        device: PathBuf,
        /// How long was waited.
        seconds: u64,
        /// Block devices that are there.
        there: String,
    },
    /// The root device does not hold the file system.
    #[error("root device {device}: {expected}, got {got}")]
    BadRoot {
        /// The device.
        device: PathBuf,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// The image's init cannot be run.
    #[error("init {program}: {errno}")]
    Init {
        /// The program.
        program: String,
        /// Why not.
        errno: Errno,
    },
    /// The agent cannot listen.
    #[error("vsock port {PORT}: {source}")]
    Listen {
        /// Why not.
        source: std::io::Error,
    },
}

/// Runs the agent, for good. As process 1 it brings the machine up first.
///
/// # Errors
/// [`BootError`]; process 1 then has to end.
pub fn run() -> Result<Infallible, BootError> {
    prepare_process();
    if !rustix::process::getpid().is_init() {
        return serve(true);
    }
    let options = up()?;
    // An image's own init may leave it to services that the image lacks.
    mounts::loopback_up();
    match options.init {
        None => {
            mounts::hostname();
            serve(false)
        }
        Some(program) => hand_over(&program),
    }
}

/// From the initramfs to the root of the image.
fn up() -> Result<Options, BootError> {
    let early = mounts::early()?;
    let options = early.options()?;
    let loaded = modules::load(early)?;
    let mounted = root::mount(loaded, &options)?;
    mounts::enter(mounted)?;
    Ok(options)
}

/// What holds for the agent, whichever process it is.
fn prepare_process() {
    // SAFETY: called first, before any thread: sets this process's mask, dispositions and limits.
    unsafe {
        // Workers never run a handler, and `spawn` relies on signals being blocked.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        libc::umask(0o022);
        // One heap: after a restore every page that is touched costs a fault.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Replaces this process by the image's own init; the agent lives on in a child.
fn hand_over(program: &str) -> Result<Infallible, BootError> {
    let failed = |errno| BootError::Init { program: program.to_owned(), errno };
    let path = CString::new(program).map_err(|_| failed(Errno::INVAL))?;
    if rustix::fs::access(&*path, rustix::fs::Access::EXEC_OK).is_err() {
        return Err(failed(rustix::fs::stat(&*path).err().unwrap_or(Errno::ACCESS)));
    }
    // SAFETY: no thread was started yet, so the child may go on as any program.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(failed(crate::kernel::last_errno()));
    }
    if pid == 0 {
        let _ = rustix::process::setsid();
        let _ = rustix::thread::set_name(c"dayfly-agent");
        // The image's init must not lose its agent to the out-of-memory killer; `spawn` undoes it for programs.
        let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
        match serve(true) {
            Ok(never) => match never {},
            Err(error) => {
                crate::say!("{error}");
                std::process::exit(1);
            }
        }
    }
    let argv = [path.as_ptr(), std::ptr::null()];
    let env = [c"HOME=/".as_ptr(), c"TERM=linux".as_ptr(), std::ptr::null()];
    // SAFETY: both arrays end with a null pointer and their strings live on; the mask is set back since init expects
    // to start without one.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr());
    }
    Err(failed(crate::kernel::last_errno()))
}

/// Serves, reports that it does, and reaps.
fn serve(mortal: bool) -> Result<Infallible, BootError> {
    let programs = Programs::new("/".into(), Cages::open(Path::new(CGROUP_ROOT)), mortal);
    if !programs.cages.grouped() {
        // Orphans of programs come to the agent, where no control group finds them.
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    }
    let agent = Agent::new("/".into(), Box::new(Linux), programs);
    let listener = VsockListener::bind(PORT).map_err(|errno| BootError::Listen { source: errno.into() })?;
    let listener: Arc<dyn Listener> = Arc::new(listener);
    agent.serve(&listener).map_err(|source| BootError::Listen { source })?;
    if let Err(error) = local::serve(Path::new("/"), Arc::clone(agent.programs()), || connect_host(HOST_PORT))
    {
        crate::say!("programs cannot ask for clones of this machine: {error}");
    }
    report(&agent);
    reaper::run(mortal)
}

/// Tells the host, once. A host that does not listen asks by itself (`Ping`).
fn report(agent: &Agent) {
    let ready = agent.ready();
    let told = connect_host(READY_PORT).and_then(|fd| {
        let body = serde_json::to_vec(&Reply::Ready(ready.clone())).unwrap_or_default();
        let frame = dayfly_api::agent::encode(FrameKind::Reply, &body);
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            let n = rustix::net::send(&fd, rest, rustix::net::SendFlags::NOSIGNAL)?;
            rest = rest.get(n..).unwrap_or_default();
        }
        Ok(())
    });
    match told {
        Ok(()) => crate::say!("ready {} us after the kernel's start", ready.uptime_us),
        Err(errno) => crate::say!(
            "ready {} us after the kernel's start; the host's vsock port {READY_PORT} was not told: {errno}",
            ready.uptime_us
        ),
    }
}
