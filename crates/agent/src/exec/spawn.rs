//! Starting a program: one `clone3(2)` with `CLONE_VM | CLONE_VFORK`, so that the kernel copies
//! nothing of the agent, directly into the program's cgroup if there is one.
//!
//! The child runs on a stack within the parent's memory while the calling thread is suspended. So
//! the child may only make system calls on data prepared before: no allocation, no locks, no panic.
//! It writes a failed step to a field that both see, so a failed `execve(2)` is known before the
//! reply is sent.

use dayfly_sys::clone3::{self, CloneArgs};
use rustix::io::Errno;
use std::ffi::{CStr, CString, c_char};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Bytes of stack for the child between clone and exec. Its deepest frame makes only system calls.
const STACK_BYTES: usize = 16 << 10;

/// What to run, prepared for system calls.
pub struct Plan<'a> {
    /// Paths to try, in order; more than one if PATH is searched.
    pub programs: &'a [CString],
    /// Arguments, beginning with the program's name.
    pub argv: &'a [CString],
    /// The environment as `NAME=value`.
    pub env: &'a [CString],
    /// Working directory.
    pub cwd: &'a CStr,
    /// The working directory if `cwd` cannot be entered.
    pub cwd_fallback: Option<&'a CStr>,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: &'a [u32],
    /// Descriptors for 0, 1 and 2; each is 3 or more, or is 1 or 2 already in place.
    pub streams: [BorrowedFd<'a>; 3],
    /// Whether stream 0 is a terminal that becomes the controlling terminal.
    pub terminal: bool,
    /// The folder of the cgroup in which the program starts.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// Whether to reset oom_score_adj, which protects the agent from the out-of-memory killer.
    pub mortal: bool,
}

/// A started program.
#[derive(Debug)]
pub struct Child {
    /// The pid, which is also the id of its session and process group.
    pub pid: u32,
    /// Readable once the program has ended.
    pub pidfd: OwnedFd,
}

/// A step between clone and exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The clone itself.
    Clone,
    /// Creating a session.
    Session,
    /// Setting the controlling terminal.
    Terminal,
    /// Setting the standard streams.
    Streams,
    /// Setting groups and user.
    User,
    /// Changing to the working directory.
    Cwd,
    /// Executing: no candidate could be run.
    Exec,
}

/// Why a program did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawnError {
    /// The failed step.
    pub step: Step,
    /// The kernel's error.
    pub errno: Errno,
}

/// Data for the child, and the place for the failed step.
struct Shared<'a> {
    plan: &'a Plan<'a>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    failed: Option<(Step, i32)>,
}

#[repr(C, align(16))]
struct Stack([std::mem::MaybeUninit<u8>; STACK_BYTES]);

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain(std::iter::once(ptr::null())).collect()
}

/// Starts a program. The calling thread must have every signal blocked, because a signal handler
/// would run in the child too.
///
/// # Errors
/// [`SpawnError`]; no process remains.
pub fn spawn(plan: &Plan<'_>) -> Result<Child, SpawnError> {
    let mut shared =
        Shared { plan, argv: pointers(plan.argv), env: pointers(plan.env), failed: None };
    let mut stack = [Stack([std::mem::MaybeUninit::uninit(); STACK_BYTES])];
    let mut pidfd: libc::c_int = -1;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK;
    let mut args = CloneArgs::new(flags, &mut pidfd).with_stack(&mut stack);
    if let Some(cgroup) = plan.cgroup {
        args = args.with_cgroup(cgroup);
    }
    let shared_at = &raw mut shared;
    // SAFETY: `args`, `stack`, `pidfd` and `shared` outlive the call, because CLONE_VFORK suspends
    // this thread until the child has called execve or _exit. `child` only makes system calls and
    // never returns.
    let result = unsafe { clone3::vfork(&args, child, shared_at) };
    // SAFETY: the child is gone or has its own memory, so nothing else writes to `shared`.
    let failed = unsafe { ptr::read_volatile(&raw const (*shared_at).failed) };
    let pid = result.map_err(|e| SpawnError {
        step: Step::Clone,
        errno: Errno::from_io_error(&e).unwrap_or(Errno::IO),
    })?;
    // SAFETY: CLONE_PIDFD stored a new close-on-exec descriptor there, and nothing else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    if let Some((step, errno)) = failed {
        // The child has called _exit: reap it.
        let options = rustix::process::WaitIdOptions::EXITED;
        let _ = rustix::process::waitid(
            rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&pidfd)),
            options,
        );
        return Err(SpawnError { step, errno: Errno::from_raw_os_error(errno) });
    }
    Ok(Child { pid, pidfd })
}

/// The child, from clone to exec.
extern "C" fn child(shared: *mut Shared<'_>) -> ! {
    // SAFETY: `spawn` passes a Shared that lives until this function ends; its thread is suspended,
    // so nothing else uses it.
    let shared = unsafe { &mut *shared };
    shared.failed = Some(prepare_and_exec(shared));
    // SAFETY: _exit ends this process without running any code of the agent.
    unsafe { libc::_exit(127) }
}

fn errno() -> i32 {
    // SAFETY: errno's location is the memory of the suspended parent thread, which does not read it
    // meanwhile.
    unsafe { *libc::__errno_location() }
}

/// Returns only if a step failed.
fn prepare_and_exec(shared: &Shared<'_>) -> (Step, i32) {
    let plan = shared.plan;
    // SAFETY: plain system calls on descriptors, numbers and strings that `plan` keeps alive.
    // setgroups, setresgid and setresuid are bare system calls, because libc's functions would
    // change every thread of the agent.
    unsafe {
        if libc::setsid() < 0 {
            return (Step::Session, errno());
        }
        let [input, output, errors] = plan.streams;
        if plan.terminal && libc::ioctl(input.as_raw_fd(), libc::TIOCSCTTY, 0) != 0 {
            return (Step::Terminal, errno());
        }
        for (fd, at) in [(input.as_raw_fd(), 0), (output.as_raw_fd(), 1), (errors.as_raw_fd(), 2)] {
            if libc::dup2(fd, at) < 0 {
                return (Step::Streams, errno());
            }
        }
        // All descriptors of the agent are close-on-exec, except perhaps those that it inherited.
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if plan.mortal {
            let fd =
                libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if fd >= 0 {
                libc::write(fd, c"0".as_ptr().cast(), 1);
                libc::close(fd);
            }
        }
        // As container runtimes do it: root changes to a folder that was asked for, and the user
        // tries only where root may not, as on some network file systems.
        let asked = plan.cwd_fallback.is_none();
        let there = asked && libc::chdir(plan.cwd.as_ptr()) == 0;
        if asked && !there && errno() != libc::EACCES {
            return (Step::Cwd, errno());
        }
        if libc::syscall(libc::SYS_setgroups, plan.groups.len(), plan.groups.as_ptr()) != 0
            || libc::syscall(libc::SYS_setresgid, plan.gid, plan.gid, plan.gid) != 0
            || libc::syscall(libc::SYS_setresuid, plan.uid, plan.uid, plan.uid) != 0
        {
            return (Step::User, errno());
        }
        if !there && libc::chdir(plan.cwd.as_ptr()) != 0 {
            let why = errno();
            match plan.cwd_fallback {
                Some(other) if libc::chdir(other.as_ptr()) == 0 => {}
                _ => return (Step::Cwd, why),
            }
        }
        // Undoes the agent's SCHED_BATCH (`priority`).
        let usual = libc::sched_param { sched_priority: 0 };
        libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const usual);
        // The agent ignores SIGPIPE and blocks every signal; a program starts with neither.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let none: u64 = 0;
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const none,
            ptr::null::<u64>(),
            8,
        );
        let mut why = libc::ENOENT;
        for program in plan.programs {
            libc::execve(program.as_ptr(), shared.argv.as_ptr(), shared.env.as_ptr());
            match errno() {
                // As execvp(3): try the next path, but remember EACCES.
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => why = libc::EACCES,
                other => return (Step::Exec, other),
            }
        }
        (Step::Exec, why)
    }
}
