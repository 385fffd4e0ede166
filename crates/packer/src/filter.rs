//! The system calls that a packer may make (seccomp(2)). Any other call kills the process, and the
//! snapshot fails with that cause.
//!
//! The filter is installed before the first message of the daemon is read, and all threads inherit
//! it. It has no call that names a process, a user or a file by path, none that executes, and none
//! that makes a socket or signals.

use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
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
    ("start of a thread", libc::SYS_rseq),
    ("start of a thread", libc::SYS_rt_sigprocmask),
    ("start of a thread", libc::SYS_sched_getaffinity),
    ("start of a thread", libc::SYS_set_robust_list),
    ("start of a thread", libc::SYS_sigaltstack),
    ("identity of a thread", libc::SYS_getpid),
    ("identity of a thread", libc::SYS_gettid),
    ("end of a thread", libc::SYS_exit),
    ("end of a thread", libc::SYS_exit_group),
    ("end of a thread", libc::SYS_rt_sigreturn),
    ("seeds of hash tables", libc::SYS_getrandom),
    ("messages", libc::SYS_recvmsg),
    ("messages", libc::SYS_sendmsg),
    ("descriptors", libc::SYS_close),
    ("packs", libc::SYS_fdatasync),
];

const STDERR: u64 = 2;
/// What makes a thread of this process, and nothing else.
const THREAD: u64 = bits(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND);
/// All that would make another process, or another view of the host.
const NO_THREAD: u64 = bits(
    libc::CLONE_VFORK
        | libc::CLONE_PTRACE
        | libc::CLONE_PARENT
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET,
);

const fn bits(flags: libc::c_int) -> u64 {
    flags.cast_unsigned() as u64
}

/// A condition: the argument's number, its length, and the comparison.
type Condition = (u8, SeccompCmpArgLen, SeccompCmpOp, u64);

/// Calls whose arguments are checked: all conditions of one of the rows must hold. Arguments that
/// the kernel takes as ints are compared in their low half.
const CHECKED: &[(&str, i64, &[&[Condition]])] = &[
    ("memory, never executable", libc::SYS_mmap, &[&[(2, Qword, MaskedEq(PROT_EXEC), 0)]]),
    ("memory, never executable", libc::SYS_mprotect, &[&[(2, Qword, MaskedEq(PROT_EXEC), 0)]]),
    ("memory", libc::SYS_madvise, &[&[(2, Dword, Eq, bits(libc::MADV_DONTNEED))]]),
    ("start of a thread", libc::SYS_clone, &[&[(0, Qword, MaskedEq(THREAD | NO_THREAD), THREAD)]]),
    // Two signals that glibc reserves for its threads.
    ("start of a thread", libc::SYS_rt_sigaction, &[&[(0, Dword, Eq, 32)], &[(0, Dword, Eq, 33)]]),
    ("name of a thread", libc::SYS_prctl, &[&[(0, Dword, Eq, bits(libc::PR_SET_NAME))]]),
    // The standard library looks at a descriptor before it closes it.
    #[cfg(debug_assertions)]
    ("descriptors", libc::SYS_fcntl, &[&[(1, Dword, Eq, bits(libc::F_GETFD))]]),
    ("open files", libc::SYS_statx, &[&[(2, Dword, MaskedEq(EMPTY_PATH), EMPTY_PATH)]]),
    ("open files", libc::SYS_newfstatat, &[&[(3, Dword, MaskedEq(EMPTY_PATH), EMPTY_PATH)]]),
    ("the log", libc::SYS_write, &[&[(0, Dword, Eq, STDERR)]]),
    // The log is the daemon's, and may be open for more than appending to it.
    ("holes of RAM", libc::SYS_lseek, NO_LOG),
    ("RAM, disks and the sheet", libc::SYS_pread64, NO_LOG),
    ("block indexes", libc::SYS_read, NO_LOG),
    ("packs", libc::SYS_pwrite64, NO_LOG),
];

/// Any descriptor but that of the log.
const NO_LOG: &[&[Condition]] = &[&[(0, Dword, Ne, STDERR)]];
const PROT_EXEC: u64 = bits(libc::PROT_EXEC);
const EMPTY_PATH: u64 = bits(libc::AT_EMPTY_PATH);

/// Calls that fail instead of killing: glibc tries them and does without.
const FAILING: &[(i64, libc::c_int)] = &[
    // The arguments are in memory, where the filter cannot check them; glibc then uses clone(2).
    (libc::SYS_clone3, libc::ENOSYS),
    // The allocator reads /proc/sys/vm/overcommit_memory before it returns memory, and the standard
    // library the group's limit of CPU time before it counts the CPUs.
    (libc::SYS_openat, libc::ENOENT),
];

/// The numbers of all calls that do not kill with the right arguments, or that fail.
#[must_use]
pub fn calls() -> Vec<i64> {
    let any = CALLS.iter().map(|(_, number)| *number);
    let checked = CHECKED.iter().map(|(_, number, _)| *number);
    let failing = FAILING.iter().map(|(number, _)| *number);
    any.chain(checked).chain(failing).collect()
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
    let allowed: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    Ok(failing()?.into_iter().chain(allowed).collect())
}

/// The instructions for [`FAILING`], before the rest of the filter.
fn failing() -> io::Result<BpfProgram> {
    // linux/bpf_common.h, linux/seccomp.h: the number is the first word of struct seccomp_data.
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ERRNO: u32 = 0x0005_0000;
    let mut program = vec![sock_filter { code: LOAD_WORD, jt: 0, jf: 0, k: 0 }];
    for (number, errno) in FAILING {
        let number = u32::try_from(*number).map_err(io::Error::other)?;
        program.push(sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: number });
        program.push(sock_filter { code: RETURN, jt: 0, jf: 0, k: ERRNO | errno.cast_unsigned() });
    }
    Ok(program)
}

/// Installs the filter for the calling thread, and for all threads that it starts.
///
/// # Errors
/// The process may gain privileges by exec, or the kernel has no seccomp.
pub fn install() -> io::Result<()> {
    seccompiler::apply_filter(&compile()?).map_err(io::Error::other)
}
