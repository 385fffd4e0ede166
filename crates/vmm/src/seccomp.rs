//! Which system calls each kind of thread may make (seccomp(2)); everything else is the end of the VM, with a record that
//! names the call.
//!
//! Four kinds: vCPU threads run the guest, so they may ask of KVM only KVM_RUN, KVM_KVMCLOCK_CTRL and registers for a last
//! message; the device thread moves bytes between guest memory, disks and sockets; the main thread serves the control socket,
//! loads and saves; the recorder of a rehearsal gives pages. The filters are applied after all set-up: no thread may open a file, map memory executable, or start another
//! process or thread.

use crate::memory::recorder;
use crate::virtio;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A compiled filter.
pub type Program = BpfProgram;

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
pub struct FilterError(&'static str, #[source] seccompiler::BackendError);

// ioctl(2) requests of KVM (include/uapi/linux/kvm.h); the type is 0xAE.
const KVM_RUN: u64 = 0xae80;
const KVM_GET_REGS: u64 = 0x8090_ae81;
const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_TYPE: u64 = 0xae;

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

/// What the main thread needs besides [`EVERYONE`] and [`virtio::CONTROL_SYSCALLS`]: its sockets, and writing a snapshot.
const MAIN: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_copy_file_range,
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
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_setpriority,
    libc::SYS_setsockopt,
    libc::SYS_statx,
];

/// `argument` is exactly `value`.
fn equals(argument: u8, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?])
}

/// The bits of `mask` in `argument` are exactly `value`.
fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(
        argument,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::MaskedEq(mask),
        value,
    )?])
}

fn filter(calls: &[&[i64]], ioctls: Vec<SeccompRule>) -> Result<Program, seccompiler::BackendError> {
    const PROT_EXEC: u64 = 4;
    let calls = EVERYONE.iter().chain(calls.iter().copied().flatten());
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.map(|call| (*call, Vec::new())).collect();
    if let Some(socket) = rules.get_mut(&libc::SYS_socket) {
        socket.push(equals(0, 1)?); // AF_UNIX
    }
    // The allocator maps and protects memory; never executable.
    rules.insert(libc::SYS_mmap, vec![masked(2, PROT_EXEC, 0)?]);
    rules.insert(libc::SYS_mprotect, vec![masked(2, PROT_EXEC, 0)?]);
    rules.insert(libc::SYS_ioctl, ioctls);
    // Trap rather than kill: the handler of SIGSYS writes the exit record, then ends the process.
    SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

impl Filters {
    /// All of them.
    ///
    /// # Errors
    /// When seccompiler refuses a rule.
    pub fn new() -> Result<Self, FilterError> {
        let non_blocking = || equals(1, libc::FIONBIO);
        let vcpu = (|| {
            let ioctls = vec![equals(1, KVM_RUN)?, equals(1, KVM_GET_REGS)?, equals(1, KVM_GET_SREGS)?];
            filter(&[virtio::VCPU_SYSCALLS], ioctls)
        })();
        let devices = non_blocking().and_then(|rule| filter(&[virtio::DEVICE_LOOP_SYSCALLS], vec![rule]));
        // The main thread saves: any ioctl of KVM's type.
        let main = (|| {
            let ioctls = vec![non_blocking()?, masked(1, 0xff00, KVM_TYPE << 8)?];
            filter(&[MAIN, virtio::CONTROL_SYSCALLS], ioctls)
        })();
        let recorder = (|| {
            let ioctls = [recorder::UFFDIO_REGISTER, recorder::UFFDIO_COPY, recorder::UFFDIO_WAKE];
            let ioctls = ioctls.into_iter().map(|request| equals(1, request)).collect::<Result<_, _>>()?;
            filter(&[&[libc::SYS_read, libc::SYS_pread64]], ioctls)
        })();
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
