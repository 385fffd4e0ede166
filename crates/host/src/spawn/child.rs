//! The steps between `clone3` and `execveat`: system calls only, in memory shared with the
//! suspended parent.

use super::numbers::END_FD;
use dayfly_sys::clone3::{self, CLONE_CLEAR_SIGHAND, CloneArgs};
use dayfly_sys::group;
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

/// Bytes of stack for the child, which needs less than one page.
const STACK_BYTES: usize = 64 << 10;

/// A step of the child that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Group,
    Session,
    CloseOnExec,
    Duplicate,
    Place,
    Folder,
    Signals,
    Execute,
}

/// Everything that the child needs, allocated before the clone, and the place for the failed step.
pub(super) struct Plan {
    program_fd: i32,
    program: CString,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    cwd: CString,
    /// (the caller's descriptor, the child's number). The child overwrites the first with its
    /// duplicate.
    moves: Vec<(i32, i32)>,
    /// The files `tasks` of the cgroup v1 that the child enters.
    tasks: Vec<i32>,
    failure: Option<(Step, i32)>,
    /// Owns the texts that `argv` and `env` point to.
    _texts: [Vec<CString>; 2],
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|t| t.as_ptr()).chain([ptr::null()]).collect()
}

impl Plan {
    pub(super) fn new(
        program_fd: i32,
        program: CString,
        argv: Vec<CString>,
        env: Vec<CString>,
        cwd: CString,
        moves: Vec<(i32, i32)>,
    ) -> Self {
        let (argv_ptrs, env_ptrs) = (pointers(&argv), pointers(&env));
        Self {
            program_fd,
            program,
            argv: argv_ptrs,
            env: env_ptrs,
            cwd,
            moves,
            tasks: Vec::new(),
            failure: None,
            _texts: [argv, env],
        }
    }

    /// Has the child enter the groups of these files.
    pub(super) fn enter(&mut self, tasks: &[OwnedFd]) {
        self.tasks = tasks.iter().map(AsRawFd::as_raw_fd).collect();
    }

    pub(super) const fn failure(&self) -> Option<(Step, i32)> {
        self.failure
    }
}

/// Makes the process and returns its pid and pidfd after it has executed or ended; see
/// [`Plan::failure`].
pub(super) fn start(
    plan: &mut Plan,
    namespaces: u64,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<(u32, i32)> {
    let mut stack: Vec<u128> = vec![0; STACK_BYTES / size_of::<u128>()];
    let mut pidfd: i32 = -1;
    let mut args = CloneArgs::new(libc::CLONE_VM | libc::CLONE_VFORK, &mut pidfd)
        .with_flags(CLONE_CLEAR_SIGHAND | namespaces)
        .with_stack(&mut stack);
    if let Some(folder) = cgroup {
        args = args.with_cgroup(folder);
    }
    let blocked = block_signals();
    // SAFETY: `args` has a stack that nothing else uses. CLONE_VFORK suspends this thread until the
    // child has left this memory, so `plan`, `stack` and `pidfd` stay in place. Signals are
    // blocked, so no signal handler runs in the child. `child` makes only system calls.
    let result = unsafe { clone3::vfork(&args, child, ptr::from_mut(plan)) };
    restore_signals(&blocked);
    drop(stack);
    result.map(|pid| (pid, pidfd))
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: sigset_t is plain integers; both sets are local and live across the calls, which only
    // read and write them.
    unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    }
}

fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: `old` is a set from pthread_sigmask; a null pointer requests no old mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, ptr::from_ref(old), ptr::null_mut()) };
}

/// The child's entry. Ends by executing, or by `_exit` after writing [`Plan::failure`].
extern "C" fn child(plan: *mut Plan) -> ! {
    // SAFETY: `start` passes a valid plan, and its thread is suspended until this process executes
    // or ends.
    let plan = unsafe { &mut *plan };
    let (step, errno) = prepare_and_execute(plan);
    plan.failure = Some((step, errno));
    // SAFETY: _exit only ends the process; it runs no exit handlers.
    unsafe { libc::_exit(127) }
}

fn errno() -> i32 {
    // SAFETY: the thread-local errno of the suspended parent thread; only this child uses it now.
    unsafe { *libc::__errno_location() }
}

/// Returns only if a step failed. Every call is async-signal-safe (signal-safety(7)) or a bare
/// system call.
fn prepare_and_execute(plan: &mut Plan) -> (Step, i32) {
    // First, so that all of its work is charged to its group.
    if !plan.tasks.iter().all(|&tasks| group::enter(tasks).is_ok()) {
        return (Step::Group, errno());
    }
    // SAFETY: no arguments.
    if unsafe { libc::setsid() } < 0 {
        return (Step::Session, errno());
    }
    default_signals();
    // SAFETY: plain integers; the call closes nothing and marks every descriptor from 3 on
    // close-on-exec.
    let marked =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked < 0 {
        return (Step::CloseOnExec, errno());
    }
    // First duplicates every source above all targets, so that no target overwrites a source that
    // is still needed.
    for entry in &mut plan.moves {
        // SAFETY: plain integers.
        let fd = unsafe { libc::fcntl(entry.0, libc::F_DUPFD_CLOEXEC, END_FD) };
        if fd < 0 {
            return (Step::Duplicate, errno());
        }
        entry.0 = fd;
    }
    let mut program_fd = plan.program_fd;
    if program_fd >= 0 {
        // SAFETY: plain integers.
        program_fd = unsafe { libc::fcntl(program_fd, libc::F_DUPFD_CLOEXEC, END_FD) };
        if program_fd < 0 {
            return (Step::Duplicate, errno());
        }
    }
    for &(fd, number) in &plan.moves {
        // SAFETY: plain integers; the new descriptor is not close-on-exec.
        if unsafe { libc::dup2(fd, number) } < 0 {
            return (Step::Place, errno());
        }
    }
    // SAFETY: a NUL-terminated path that the plan owns.
    if unsafe { libc::chdir(plan.cwd.as_ptr()) } < 0 {
        return (Step::Folder, errno());
    }
    if !unblock_signals() {
        return (Step::Signals, errno());
    }
    let program: &CStr = &plan.program;
    // SAFETY: a NUL-terminated path; argv and env are arrays of NUL-terminated texts with a null
    // pointer at the end; the plan owns all of them. An empty path with AT_EMPTY_PATH means
    // `program_fd`.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program_fd,
            program.as_ptr(),
            plan.argv.as_ptr(),
            plan.env.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    (Step::Execute, errno())
}

/// Resets ignored signals. CLONE_CLEAR_SIGHAND resets handlers but leaves ignored signals ignored,
/// and Rust programs ignore SIGPIPE.
fn default_signals() {
    // The kernel's struct sigaction: handler SIG_DFL, no flags, no restorer, an empty mask.
    static DEFAULT: [u64; 4] = [0; 4];
    for signal in 1..=64 {
        // SAFETY: reads 32 bytes of a static and changes a disposition of this process only (no
        // CLONE_SIGHAND); for KILL and STOP the call fails and changes nothing. A bare system call,
        // because libc's function takes a lock in some versions.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                &raw const DEFAULT,
                ptr::null::<u64>(),
                size_of::<u64>(),
            );
        }
    }
}

fn unblock_signals() -> bool {
    // SAFETY: sigset_t is plain integers and local; sigprocmask reads it.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) == 0
    }
}
