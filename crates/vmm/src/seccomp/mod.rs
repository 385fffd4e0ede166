//! Which system calls each kind of thread may make (seccomp(2)); everything else is the end of the VM, with a record that
//! names the call.
//!
//! Four kinds: vCPU threads run the guest, so they may ask of KVM only KVM_RUN, KVM_KVMCLOCK_CTRL and registers for a last
//! message; the device thread moves bytes between guest memory, disks and sockets; the main thread serves the control socket,
//! loads and saves; the recorder of a rehearsal gives pages. The filters are applied after all set-up: no thread may open a file, map memory executable, or start another
//! process or thread.

mod tree;

pub use tree::TreeError;

use crate::memory::lazy;
use crate::virtio;
use std::sync::Arc;
use tree::{Calls, Condition};

/// A compiled filter.
pub type Program = seccompiler::BpfProgram;

/// One filter for each kind of thread.
#[derive(Debug, Clone)]
pub struct Filters {
    /// For vCPU threads.
    pub vcpu: Option<Arc<Program>>,
    /// For the device thread.
    pub devices: Option<Arc<Program>>,
    /// For the main thread.
    pub main: Option<Arc<Program>>,
    /// For the recorder's thread.
    pub recorder: Option<Arc<Program>>,
}

/// A filter could not be made.
#[derive(Debug, thiserror::Error)]
#[error("seccomp filter of {0} threads")]
pub struct FilterError(&'static str, #[source] TreeError);

// ioctl(2) requests of KVM (include/uapi/linux/kvm.h); the type is 0xAE.
const KVM_RUN: u32 = 0xae80;
const KVM_GET_REGS: u32 = 0x8090_ae81;
const KVM_GET_SREGS: u32 = 0x8138_ae83;
const KVM_TYPE: u32 = 0xae;
const FIONBIO: u32 = 0x5421;
const AF_UNIX: u32 = 1;

/// The 32 bits of an ioctl's number.
#[expect(clippy::cast_possible_truncation, reason = "as the kernel takes it: unsigned int")]
const fn low(request: u64) -> u32 {
    request as u32
}

/// Calls that every thread needs: memory, locks, time, its end.
const EVERYONE: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_write,
];

/// What a thread of the crew calls once, to become the VM's user ([`crate::crew`]); without capabilities these change nothing.
const BECOME_USER: &[i64] =
    &[libc::SYS_capset, libc::SYS_setgroups, libc::SYS_setresgid, libc::SYS_setresuid];

/// What the main thread needs besides [`EVERYONE`] and [`virtio::CONTROL_SYSCALLS`]: its sockets, and writing a snapshot.
const MAIN: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_copy_file_range,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_setpriority,
    libc::SYS_setsockopt,
    libc::SYS_statx,
];

/// The low half of `argument` is exactly `value`: no argument that is told apart here has a high one that the kernel looks at.
const fn equals(argument: u8, value: u32) -> Condition {
    Condition { argument, mask: u32::MAX, value }
}

/// The bits of `mask` in `argument` are exactly `value`.
const fn masked(argument: u8, mask: u32, value: u32) -> Condition {
    Condition { argument, mask, value }
}

fn filter(calls: &[&[i64]], ioctls: Vec<Condition>) -> Result<Program, TreeError> {
    const PROT_EXEC: u32 = 4;
    let number = |call: i64| u32::try_from(call).map_err(|_| TreeError::Number(call));
    let mut all = Calls::new();
    for call in EVERYONE.iter().chain(calls.iter().copied().flatten()) {
        let conditions = if *call == libc::SYS_socket { vec![equals(0, AF_UNIX)] } else { Vec::new() };
        all.insert(number(*call)?, conditions);
    }
    // The allocator maps and protects memory; never executable.
    all.insert(number(libc::SYS_mmap)?, vec![masked(2, PROT_EXEC, 0)]);
    all.insert(number(libc::SYS_mprotect)?, vec![masked(2, PROT_EXEC, 0)]);
    if !ioctls.is_empty() {
        all.insert(number(libc::SYS_ioctl)?, ioctls);
    }
    // What is not allowed traps rather than kills: the handler of SIGSYS writes the exit record, then ends the process.
    tree::compile(&all)
}

impl Filters {
    /// All of them.
    ///
    /// # Errors
    /// When one is too long.
    pub fn new() -> Result<Self, FilterError> {
        let non_blocking = equals(1, FIONBIO);
        let runs = vec![equals(1, KVM_RUN), equals(1, KVM_GET_REGS), equals(1, KVM_GET_SREGS)];
        let vcpu = filter(&[BECOME_USER, virtio::VCPU_SYSCALLS], runs);
        let devices = filter(&[BECOME_USER, virtio::DEVICE_LOOP_SYSCALLS], vec![non_blocking]);
        // The main thread saves: any ioctl of KVM's type; and restores, perhaps memory that a pager fills.
        let kvm = masked(1, 0xff00, KVM_TYPE << 8);
        let lazy = equals(1, low(lazy::UFFDIO_REGISTER));
        let main = filter(&[MAIN, virtio::CONTROL_SYSCALLS], vec![non_blocking, kvm, lazy]);
        let serves = [lazy::UFFDIO_REGISTER, lazy::UFFDIO_COPY, lazy::UFFDIO_WAKE];
        let serves = serves.into_iter().map(|request| equals(1, low(request))).collect();
        let recorder = filter(&[&[libc::SYS_read, libc::SYS_pread64]], serves);
        let named = |kind, program: Result<Program, _>| {
            program.map(|p| Some(Arc::new(p))).map_err(|e| FilterError(kind, e))
        };
        Ok(Self {
            vcpu: named("vCPU", vcpu)?,
            devices: named("device", devices)?,
            main: named("main", main)?,
            recorder: named("recorder", recorder)?,
        })
    }
}

/// Applies `filter` to this thread, for ever. A failure is the end of the process: nothing runs unfiltered.
pub fn apply(filter: Option<&Program>) {
    let Some(filter) = filter else { return };
    if let Err(error) = seccompiler::apply_filter(filter) {
        crate::exit::fail(&error);
    }
}
