//! Starting a program: one `clone3(2)` with `CLONE_VM | CLONE_VFORK`, so that nothing of the agent is copied, straight
//! into its control group where there is one.
//!
//! The child runs on a piece of the parent's stack, in the parent's memory, while the calling thread is suspended. It
//! may therefore do nothing but system calls on what was prepared before: no allocation, no locks, no panic. What goes
//! wrong in it is written to a field that both see, so a failed `execve(2)` is known before anything is answered.

use rustix::io::Errno;
use std::ffi::{CStr, CString, c_char};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// `CLONE_INTO_CGROUP` of linux/sched.h: beyond what libc's type for clone(2) flags holds.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// Stack of the child between clone and exec. Its deepest frame is a handful of system calls.
const STACK_BYTES: usize = 16 << 10;

/// What to run, all of it ready for system calls.
pub struct Plan<'a> {
    /// Paths to try, in order: more than one where PATH is searched.
    pub programs: &'a [CString],
    /// Arguments, the program's name first.
    pub argv: &'a [CString],
    /// `NAME=value`.
    pub env: &'a [CString],
    /// Working directory.
    pub cwd: &'a CStr,
    /// Used where `cwd` is missing.
    pub cwd_fallback: Option<&'a CStr>,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'a [u32],
    /// What becomes 0, 1 and 2; each is 3 or more, or is 1 or 2 already in place.
    pub streams: [BorrowedFd<'a>; 3],
    /// Whether stream 0 is a terminal that becomes the controlling one.
    pub terminal: bool,
    /// The folder of the control group to start in.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// Whether to undo the agent's own protection from the out-of-memory killer.
    pub mortal: bool,
}

/// A started program.
#[derive(Debug)]
pub struct Child {
    /// Its process id, which is its session's and its process group's too.
    pub pid: u32,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
}

/// What failed between clone and exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The clone itself.
    Clone,
    /// A session of its own.
    Session,
    /// The controlling terminal.
    Terminal,
    /// Standard streams.
    Streams,
    /// Groups and user.
    User,
    /// The working directory.
    Cwd,
    /// No candidate could be run.
    Exec,
}

/// A program that did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawnError {
    /// Where it stopped.
    pub step: Step,
    /// Why.
    pub errno: Errno,
}

/// Argument of clone3(2), linux/sched.h `struct clone_args`, version 2 (88 bytes, Linux 5.7).
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// What the child reads, and where it writes why it failed.
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

/// Starts a program. The calling thread must have every signal blocked: a handler would run in the child too.
///
/// # Errors
/// [`SpawnError`]; nothing is left running then.
pub fn spawn(plan: &Plan<'_>) -> Result<Child, SpawnError> {
    let mut shared = Shared { plan, argv: pointers(plan.argv), env: pointers(plan.env), failed: None };
    let mut stack = Stack([std::mem::MaybeUninit::uninit(); STACK_BYTES]);
    let mut pidfd: libc::c_int = -1;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
    let mut args = CloneArgs {
        flags: u64::from(flags.unsigned_abs()),
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        exit_signal: u64::from(libc::SIGCHLD.unsigned_abs()),
        stack: (&raw mut stack).expose_provenance() as u64,
        stack_size: STACK_BYTES as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = plan.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(cgroup.as_raw_fd().unsigned_abs());
    }
    let shared_at = &raw mut shared;
    // SAFETY: `args`, `stack`, `pidfd` and `shared` outlive the call, since CLONE_VFORK suspends this thread until the
    // child has called execve or _exit; `child` keeps to system calls and never returns.
    let result = unsafe { clone3(&args, shared_at) };
    // SAFETY: as above: the child is gone or has its own memory, nobody else writes to `shared`.
    let failed = unsafe { ptr::read_volatile(&raw const (*shared_at).failed) };
    let pid = match u32::try_from(result) {
        Ok(pid) if pid > 0 => pid,
        _ => {
            let errno = i32::try_from(-result).unwrap_or(libc::EIO);
            return Err(SpawnError { step: Step::Clone, errno: Errno::from_raw_os_error(errno) });
        }
    };
    // SAFETY: CLONE_PIDFD stored a new descriptor there, close-on-exec, that only we have.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    if let Some((step, errno)) = failed {
        // It has called _exit; reap it.
        let options = rustix::process::WaitIdOptions::EXITED;
        let _ = rustix::process::waitid(
            rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&pidfd)),
            options,
        );
        return Err(SpawnError { step, errno: Errno::from_raw_os_error(errno) });
    }
    Ok(Child { pid, pidfd })
}

/// The bare system call. In the child, which starts with an empty stack, it calls [`child`] instead of returning.
///
/// # Safety
/// `args` must name a stack that is not in use, and memory that lives until the child has called execve or _exit.
unsafe fn clone3(args: &CloneArgs, shared: *mut Shared<'_>) -> i64 {
    let result: i64;
    // SAFETY: the child's registers are copies of ours, so r12 and r13 hold the function and its argument there; the
    // stack it gets is 16-byte aligned as a call needs; `child` does not return. In the parent only the registers
    // named change. The compiler treats memory as written (no `nomem`), as it may be.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_ref(args),
            in("rsi") size_of::<CloneArgs>(),
            in("r12") child as *const (),
            in("r13") shared,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// The child, from clone to exec.
extern "C" fn child(shared: *mut Shared<'_>) -> ! {
    // SAFETY: `spawn` passes a Shared that lives until this ends, and its thread is suspended: nobody else uses it.
    let shared = unsafe { &mut *shared };
    shared.failed = Some(prepare_and_exec(shared));
    // SAFETY: _exit ends this process without running anything of the agent's.
    unsafe { libc::_exit(127) }
}

fn errno() -> i32 {
    // SAFETY: errno's location is this thread's own memory; the suspended parent shares it and does not look.
    unsafe { *libc::__errno_location() }
}

/// Does not return but with what failed.
fn prepare_and_exec(shared: &Shared<'_>) -> (Step, i32) {
    let plan = shared.plan;
    // SAFETY: plain system calls on descriptors, numbers and strings that `plan` keeps alive. The raw ones are raw
    // because libc's setgroups, setresgid and setresuid would make every thread of the agent change with this one.
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
        // All of the agent's are close-on-exec; what it was itself started with need not be.
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if plan.mortal {
            let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if fd >= 0 {
                libc::write(fd, c"0".as_ptr().cast(), 1);
                libc::close(fd);
            }
        }
        if libc::syscall(libc::SYS_setgroups, plan.groups.len(), plan.groups.as_ptr()) != 0
            || libc::syscall(libc::SYS_setresgid, plan.gid, plan.gid, plan.gid) != 0
            || libc::syscall(libc::SYS_setresuid, plan.uid, plan.uid, plan.uid) != 0
        {
            return (Step::User, errno());
        }
        if libc::chdir(plan.cwd.as_ptr()) != 0 {
            let why = errno();
            match plan.cwd_fallback {
                Some(other) if libc::chdir(other.as_ptr()) == 0 => {}
                _ => return (Step::Cwd, why),
            }
        }
        // The agent gives way to programs (`priority`); these do not.
        let usual = libc::sched_param { sched_priority: 0 };
        libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const usual);
        // The agent ignores SIGPIPE and blocks every signal; a program starts with neither.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let none: u64 = 0;
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, ptr::null::<u64>(), 8);
        let mut why = libc::ENOENT;
        for program in plan.programs {
            libc::execve(program.as_ptr(), shared.argv.as_ptr(), shared.env.as_ptr());
            match errno() {
                // As execvp(3): look on, but remember that something was there.
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => why = libc::EACCES,
                other => return (Step::Exec, other),
            }
        }
        (Step::Exec, why)
    }
}
