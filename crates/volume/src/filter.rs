//! The system calls of the server (seccomp(2)). Any other call kills the process; the stream then
//! ends, and the guest's programs get ENOTCONN.
//!
//! The filter is installed on all threads before the first message is read. It has no call that
//! makes a thread, a process or a socket, executes, signals, mounts, or changes a user.

use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::io;

/// What a call is needed for, and the call's number.
type Call = (&'static str, i64);

/// Calls with any arguments.
const CALLS: &[Call] = &[
    ("memory", libc::SYS_brk),
    ("memory", libc::SYS_mremap),
    ("memory", libc::SYS_munmap),
    ("locks", libc::SYS_futex),
    ("locks", libc::SYS_sched_yield),
    ("time", libc::SYS_clock_gettime),
    ("time", libc::SYS_restart_syscall),
    ("end of a thread", libc::SYS_rt_sigprocmask),
    ("end of a thread", libc::SYS_rt_sigreturn),
    ("end of a thread", libc::SYS_sigaltstack),
    ("end of a thread", libc::SYS_exit),
    ("end of a thread", libc::SYS_exit_group),
    ("identity of a thread", libc::SYS_getpid),
    ("identity of a thread", libc::SYS_gettid),
    ("seeds of hash tables", libc::SYS_getrandom),
    ("messages", libc::SYS_read),
    ("messages", libc::SYS_write),
    ("messages", libc::SYS_shutdown),
    ("descriptors", libc::SYS_close),
    ("attributes", libc::SYS_statx),
    ("attributes", libc::SYS_fstatfs),
    ("attributes", libc::SYS_fchmodat),
    ("attributes", libc::SYS_fchownat),
    ("attributes", libc::SYS_utimensat),
    ("attributes", libc::SYS_faccessat),
    ("extended attributes", libc::SYS_getxattr),
    ("extended attributes", libc::SYS_setxattr),
    ("extended attributes", libc::SYS_listxattr),
    ("extended attributes", libc::SYS_removexattr),
    ("names", libc::SYS_readlinkat),
    ("names", libc::SYS_symlinkat),
    ("names", libc::SYS_mkdirat),
    ("names", libc::SYS_unlinkat),
    ("names", libc::SYS_renameat2),
    ("names", libc::SYS_linkat),
    ("opening", libc::SYS_openat),
    ("opening", libc::SYS_openat2),
    ("folders", libc::SYS_getdents64),
    ("data", libc::SYS_lseek),
    ("data", libc::SYS_pread64),
    ("data", libc::SYS_pwrite64),
    ("data", libc::SYS_pwritev2),
    ("data", libc::SYS_ftruncate),
    ("data", libc::SYS_fallocate),
    ("data", libc::SYS_copy_file_range),
    ("data", libc::SYS_fsync),
    ("data", libc::SYS_fdatasync),
];

/// A condition: the argument's number, its length, and the comparison.
type Condition = (u8, SeccompCmpArgLen, SeccompCmpOp, u64);

const fn bits(flags: libc::c_int) -> u64 {
    flags.cast_unsigned() as u64
}

const PROT_EXEC: u64 = bits(libc::PROT_EXEC);
const TYPE: u64 = libc::S_IFMT as u64;

/// Calls whose arguments are checked: all conditions of one of the rows must hold.
const CHECKED: &[(&str, i64, &[&[Condition]])] = &[
    ("memory, never executable", libc::SYS_mmap, &[&[(2, Qword, MaskedEq(PROT_EXEC), 0)]]),
    ("memory, never executable", libc::SYS_mprotect, &[&[(2, Qword, MaskedEq(PROT_EXEC), 0)]]),
    ("memory", libc::SYS_madvise, &[&[(2, Dword, Eq, bits(libc::MADV_DONTNEED))]]),
    (
        "no devices",
        libc::SYS_mknodat,
        &[
            &[(2, Dword, MaskedEq(TYPE), libc::S_IFREG as u64)],
            &[(2, Dword, MaskedEq(TYPE), libc::S_IFIFO as u64)],
            &[(2, Dword, MaskedEq(TYPE), libc::S_IFSOCK as u64)],
        ],
    ),
    // The standard library looks at a descriptor before it closes it.
    #[cfg(debug_assertions)]
    ("debug assertions", libc::SYS_fcntl, &[&[(1, Dword, Eq, bits(libc::F_GETFD))]]),
];

/// The numbers of all calls that do not kill with the right arguments.
#[must_use]
pub fn calls() -> Vec<i64> {
    let any = CALLS.iter().map(|(_, number)| *number);
    any.chain(CHECKED.iter().map(|(_, number, _)| *number)).collect()
}

/// Compiles the filter.
///
/// # Errors
/// The filter is too long.
pub fn compile() -> io::Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        CALLS.iter().map(|(_, number)| (*number, Vec::new())).collect();
    let rule = |conditions: &[Condition]| {
        let condition = |(argument, length, operator, value): &Condition| {
            SeccompCondition::new(*argument, length.clone(), operator.clone(), *value)
        };
        SeccompRule::new(conditions.iter().map(condition).collect::<Result<_, _>>()?)
    };
    for (_, number, rows) in CHECKED {
        let rows = rows.iter().map(|row| rule(row)).collect::<Result<_, _>>();
        rules.insert(*number, rows.map_err(io::Error::other)?);
    }
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, kill, allow, arch).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

/// Installs the filter for all threads.
///
/// # Errors
/// The process may gain privileges by exec, or the kernel has no seccomp.
pub fn install() -> io::Result<()> {
    seccompiler::apply_filter_all_threads(&compile()?).map_err(io::Error::other)
}
