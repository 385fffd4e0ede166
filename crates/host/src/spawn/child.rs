//! What happens between `clone3` and `execveat`: system calls only, in memory shared with the suspended parent.

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::ptr;

/// Bytes of stack for the child; it needs less than one page.
const STACK_BYTES: usize = 64 << 10;

/// Flags of clone3 above 32 bits (linux/sched.h), which the libc crate has as truncated `int`s.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A step of the child that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Session,
    CloseOnExec,
    Duplicate,
    Place,
    Folder,
    Signals,
    Execute,
}

/// Everything the child needs, made before it exists; and the place where it says what failed.
pub(super) struct Plan {
    program_fd: i32,
    program: CString,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    cwd: CString,
    /// (the caller's descriptor, the child's number); the child overwrites the first with its duplicate.
    moves: Vec<(i32, i32)>,
    failure: Option<(Step, i32)>,
    /// What `argv` and `env` point into.
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
            failure: None,
            _texts: [argv, env],
        }
    }

    pub(super) const fn failure(&self) -> Option<(Step, i32)> {
        self.failure
    }
}

/// Makes the process and gives its pid and pidfd, once it has executed or ended; see [`Plan::failure`].
pub(super) fn start(plan: &mut Plan, namespaces: u64, cgroup: Option<i32>) -> io::Result<(u32, i32)> {
    let mut stack: Vec<u128> = vec![0; STACK_BYTES / size_of::<u128>()];
    let mut pidfd: i32 = -1;
    // SAFETY: clone_args is plain integers, for which all-zero is a valid value (clone(2): absent options are 0).
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    let vfork = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
    args.flags = u64::from(vfork.cast_unsigned()) | CLONE_CLEAR_SIGHAND | namespaces;
    args.pidfd = ptr::from_mut(&mut pidfd).addr() as u64;
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    args.stack = stack.as_mut_ptr().addr() as u64;
    args.stack_size = STACK_BYTES as u64;
    if let Some(fd) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(fd.cast_unsigned());
    }
    let blocked = block_signals();
    // SAFETY: `args` is a valid clone_args with a stack of its own that nothing else uses; CLONE_VFORK keeps this
    // thread, and so `plan`, `stack` and `pidfd`, where they are until the child has left this memory. Signals are
    // blocked, so no handler of ours runs in the child.
    let result = unsafe { clone3(&raw const args, ptr::from_mut(plan)) };
    restore_signals(&blocked);
    drop(stack);
    match u32::try_from(result) {
        Ok(pid) => Ok((pid, pidfd)),
        Err(_) => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL))),
    }
}

/// `clone3`; in the child, calls [`child`] on the new stack. Gives the pid or a negated errno.
///
/// # Safety
/// `args` has a stack aligned to 16 bytes, and CLONE_VM with CLONE_VFORK; `plan` is valid and used by nobody else.
unsafe fn clone3(args: *const libc::clone_args, plan: *mut Plan) -> i64 {
    let mut result = libc::SYS_clone3;
    // SAFETY: system calls keep every register but rax, rcx and r11. The child starts with rsp at the top of its own
    // stack, aligned to 16, and `call` gives `child` the alignment the ABI wants; `child` never returns. In the
    // parent nothing but rax, rcx, r11 changes; memory is clobbered, as the child wrote to `plan`.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r8",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") result,
            in("rdi") args,
            in("rsi") size_of::<libc::clone_args>(),
            in("r8") plan,
            in("r9") child as extern "C" fn(*mut Plan) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: sigset_t is plain integers; both sets are ours and live across the calls, which only read and write them.
    unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    }
}

fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: `old` is a set that pthread_sigmask gave; no old mask is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, ptr::from_ref(old), ptr::null_mut()) };
}

/// The child. Ends by executing, or by `_exit` after writing to [`Plan::failure`].
extern "C" fn child(plan: *mut Plan) -> ! {
    // SAFETY: `start` passes a valid plan, and its thread is suspended until this process executes or ends.
    let plan = unsafe { &mut *plan };
    let (step, errno) = prepare_and_execute(plan);
    plan.failure = Some((step, errno));
    // SAFETY: _exit only ends the process; it runs no handlers of the memory's owner.
    unsafe { libc::_exit(127) }
}

fn errno() -> i32 {
    // SAFETY: the thread-local errno of the suspended parent thread, which nothing else touches now.
    unsafe { *libc::__errno_location() }
}

/// Returns only what failed. Every call is async-signal-safe (signal-safety(7)) or a bare system call.
fn prepare_and_execute(plan: &mut Plan) -> (Step, i32) {
    // SAFETY: no arguments.
    if unsafe { libc::setsid() } < 0 {
        return (Step::Session, errno());
    }
    default_signals();
    // SAFETY: plain integers; closes nothing, marks every descriptor from 3 on as close-on-exec.
    let marked = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked < 0 {
        return (Step::CloseOnExec, errno());
    }
    // Out of the way of every target first, so that no target overwrites a source that is still needed.
    for entry in &mut plan.moves {
        // SAFETY: plain integers.
        let fd = unsafe { libc::fcntl(entry.0, libc::F_DUPFD_CLOEXEC, super::END_FD) };
        if fd < 0 {
            return (Step::Duplicate, errno());
        }
        entry.0 = fd;
    }
    let mut program_fd = plan.program_fd;
    if program_fd >= 0 {
        // SAFETY: plain integers.
        program_fd = unsafe { libc::fcntl(program_fd, libc::F_DUPFD_CLOEXEC, super::END_FD) };
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
    // SAFETY: a NUL-terminated path; argv and env are arrays of NUL-terminated texts that end with a null pointer, all owned
    // by the plan. An empty path with AT_EMPTY_PATH means `program_fd` itself.
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

/// CLONE_CLEAR_SIGHAND reset handlers, but leaves ignored signals ignored: Rust programs ignore SIGPIPE.
fn default_signals() {
    // The kernel's struct sigaction: handler SIG_DFL, no flags, no restorer, an empty mask.
    static DEFAULT: [u64; 4] = [0; 4];
    for signal in 1..=64 {
        // SAFETY: reads 32 bytes of ours and changes a disposition of this process only (no CLONE_SIGHAND); for KILL and
        // STOP it fails and changes nothing. The bare call, as libc's takes a lock in some versions.
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
    // SAFETY: sigset_t is plain integers and ours; sigprocmask reads it.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) == 0
    }
}
