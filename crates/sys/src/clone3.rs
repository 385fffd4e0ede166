//! clone3(2), which glibc does not wrap: forks with namespaces, a cgroup and a pidfd.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Resets signal handlers in the child. This flag and the next one do not fit into libc's type of
/// clone flags.
pub const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Argument of clone3(2): linux/sched.h `struct clone_args`, version 2 (88 bytes, Linux 5.7).
#[derive(Debug, Default)]
#[repr(C)]
pub struct CloneArgs {
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

impl CloneArgs {
    /// A child with `flags` (CLONE_PIDFD is added). Its parent gets SIGCHLD at its end. The kernel
    /// stores the child's pidfd, which is close-on-exec, in `pidfd`.
    #[must_use]
    pub fn new(flags: i32, pidfd: &mut i32) -> Self {
        Self {
            flags: u64::from((flags | libc::CLONE_PIDFD).cast_unsigned()),
            pidfd: std::ptr::from_mut(pidfd).expose_provenance() as u64,
            exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
            ..Self::default()
        }
    }

    /// Adds flags, which may be above 32 bits.
    #[must_use]
    pub const fn with_flags(mut self, flags: u64) -> Self {
        self.flags |= flags;
        self
    }

    /// The child starts on this stack, whose ends are aligned to 16 bytes (System V ABI).
    #[must_use]
    pub fn with_stack<T>(mut self, stack: &mut [T]) -> Self {
        const { assert!(align_of::<T>() >= 16 && size_of::<T>().is_multiple_of(16)) };
        self.stack_size = size_of_val(stack) as u64;
        self.stack = stack.as_mut_ptr().expose_provenance() as u64;
        self
    }

    /// The child starts in the cgroup of this folder.
    #[must_use]
    pub fn with_cgroup(mut self, folder: BorrowedFd<'_>) -> Self {
        self.flags |= CLONE_INTO_CGROUP;
        self.cgroup = u64::from(folder.as_raw_fd().cast_unsigned());
        self
    }

    /// The kernel stores the thread's id at this address in the child, and clears it at the end of
    /// the thread.
    #[must_use]
    pub fn with_child_tid(mut self, address: u64) -> Self {
        let flags = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID;
        self.flags |= u64::from(flags.cast_unsigned());
        self.child_tid = address;
        self
    }
}

/// Forks this process, as fork(2) does. Returns 0 in the child and its pid in the parent.
///
/// # Errors
/// The kernel refuses.
///
/// # Safety
/// As of fork(2): no other thread may have a lock that the child takes. `args` has no CLONE_VM and
/// no stack; the addresses in it are valid.
#[inline]
pub unsafe fn fork(args: &CloneArgs) -> io::Result<u32> {
    // SAFETY: the kernel reads `args` and writes where the caller vouches for. The child continues
    // on its copy of this stack.
    let result = unsafe {
        libc::syscall(libc::SYS_clone3, std::ptr::from_ref(args), size_of::<CloneArgs>())
    };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Makes a child that calls `child` with `data` on its own stack instead of returning. Returns the
/// child's pid.
///
/// # Errors
/// The kernel refuses.
///
/// # Safety
/// `args` has CLONE_VM, CLONE_VFORK and a stack that is aligned to 16 bytes and that nothing else
/// uses. `data` is valid and nothing else uses it. Signals are blocked, because a handler would run
/// in the child too. `child` makes only system calls: it allocates nothing and takes no lock.
#[inline]
pub unsafe fn vfork<T>(
    args: &CloneArgs,
    child: extern "C" fn(*mut T) -> !,
    data: *mut T,
) -> io::Result<u32> {
    let mut result = libc::SYS_clone3;
    // SAFETY: system calls keep every register but rax, rcx and r11. The child's registers are
    // copies, so r12 and r13 have the function and its argument. The child starts with rsp at the
    // top of its stack, aligned to 16, so `call` gives `child` the alignment that the ABI requires;
    // `child` never returns. In the parent only rax, rcx and r11 change. Without `nomem` the
    // compiler assumes that memory was written, because the child may write to `data`.
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
            inlateout("rax") result,
            in("rdi") std::ptr::from_ref(args),
            in("rsi") size_of::<CloneArgs>(),
            in("r12") child as *const (),
            in("r13") data,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    u32::try_from(result)
        .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL)))
}
