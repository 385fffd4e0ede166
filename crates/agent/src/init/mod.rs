//! PID 1 of the initramfs.
//!
//! ```text
//!  mounts ──▶ cmdline ──▶ modules ──▶ mount the root device ──▶ mounts in it ──▶ switch root
//!    │                                                                             │
//!    │                    serve and reap as PID 1 ◀── no image init ───────────────┤
//!    │           fork: image's init is PID 1, the agent its child ◀── image init ──┘
//!    │
//!    └── any failure: a line on the console, then PID 1 ends: the kernel panics,
//!        which pvpanic and `panic=-1` make visible outside
//! ```
//!
//! The stages are types, each made from the one before. For example, no root is mounted before the
//! modules are loaded.

pub mod cmdline;
mod early;
mod error;
mod kernel_modules;
mod modules;
mod mount;
mod mounts;
mod reaper;
mod root;

pub use error::BootError;

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
use std::path::Path;
use std::sync::Arc;

/// Runs the agent forever. As PID 1, it boots the machine first.
///
/// # Errors
/// [`BootError`]; PID 1 must then end.
pub fn run() -> Result<Infallible, BootError> {
    prepare_process();
    if !rustix::process::getpid().is_init() {
        return serve(true);
    }
    let options = up()?;
    // Before the image's own init, which may leave it to services that the image lacks.
    mounts::loopback_up();
    mounts::ports_and_ping_for_all();
    if let Some(device) = &options.modules {
        kernel_modules::mount(device);
    }
    match options.init {
        None => {
            mounts::hostname();
            serve(false)
        }
        Some(program) => hand_over(&program),
    }
}

/// From the initramfs to the image's root.
fn up() -> Result<Options, BootError> {
    let early = early::mount()?;
    let options = early.options()?;
    let loaded = modules::load(early)?;
    let mounted = root::mount(loaded, &options)?;
    mounts::enter(mounted)?;
    Ok(options)
}

/// Settings of the agent's process, whether or not it is PID 1.
fn prepare_process() {
    // SAFETY: called first, before any thread exists; sets this process's signal mask, umask and
    // allocator options.
    unsafe {
        // Worker threads never run a signal handler, and `spawn` requires that signals are blocked.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        libc::umask(0o022);
        // One heap, because after a restore every touched page costs a page fault.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Replaces this process by the image's own init; the agent continues in a child.
fn hand_over(program: &str) -> Result<Infallible, BootError> {
    let failed = |errno| BootError::Init { program: program.to_owned(), errno };
    let path = CString::new(program).map_err(|_| failed(Errno::INVAL))?;
    if rustix::fs::access(&*path, rustix::fs::Access::EXEC_OK).is_err() {
        return Err(failed(rustix::fs::stat(&*path).err().unwrap_or(Errno::ACCESS)));
    }
    // SAFETY: no thread exists yet, so the child may continue as any program.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(failed(crate::kernel::last_errno()));
    }
    if pid == 0 {
        let _ = rustix::process::setsid();
        let _ = rustix::thread::set_name(c"dayfly-agent");
        // Protects the agent from the out-of-memory killer; `spawn` resets this for programs.
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
    // SAFETY: both arrays end with a null pointer, and their strings live on. The signal mask is
    // emptied, because init expects to start without one.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr());
    }
    Err(failed(crate::kernel::last_errno()))
}

/// Serves, reports readiness to the host, and reaps.
fn serve(mortal: bool) -> Result<Infallible, BootError> {
    let programs = Programs::new("/".into(), Cages::open(Path::new(CGROUP_ROOT)), mortal);
    if !programs.cages.grouped() {
        // Without cgroups: orphans of programs become children of the agent, which reaps them.
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    }
    let agent = Agent::new("/".into(), Box::new(Linux), programs);
    let listener =
        VsockListener::bind(PORT).map_err(|errno| BootError::Listen { source: errno.into() })?;
    let listener: Arc<dyn Listener> = Arc::new(listener);
    agent.serve(&listener).map_err(|source| BootError::Listen { source })?;
    if let Err(error) =
        local::serve(Path::new("/"), Arc::clone(agent.programs()), || connect_host(HOST_PORT))
    {
        crate::say!("programs cannot ask for clones of this machine: {error}");
    }
    report(&agent);
    reaper::run(mortal)
}

/// Reports readiness to the host, once. A host that does not listen sends `Ping` later.
fn report(agent: &Agent) {
    let ready = agent.ready();
    let sent = connect_host(READY_PORT).and_then(|fd| {
        let body = serde_json::to_vec(&Reply::Ready(ready.clone())).unwrap_or_default();
        let frame = dayfly_api::agent::encode(FrameKind::Reply, &body);
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            let n = rustix::net::send(&fd, rest, rustix::net::SendFlags::NOSIGNAL)?;
            rest = rest.get(n..).unwrap_or_default();
        }
        Ok(())
    });
    match sent {
        Ok(()) => crate::say!("ready {} us after the kernel's start", ready.uptime_us),
        Err(errno) => crate::say!(
            "ready {} us after the kernel's start; the host's vsock port {READY_PORT} got no \
             report: {errno}",
            ready.uptime_us
        ),
    }
}
