//! The system calls of the relay (seccomp(2)). Any other call kills the process; its connections
//! then end, and the daemon starts another one. A process of streams has a filter with fewer calls.
//!
//! The filter has no call that opens a file, makes a thread or a process, executes, signals,
//! mounts, changes a user, or changes a mapping. What it makes of sockets and connections: see
//! [`crate::guests`].

use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, Ge, Le, MaskedEq};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::io;

/// Calls with any arguments.
const CALLS: &[(&str, i64)] = &[
    ("memory", libc::SYS_brk),
    ("locks", libc::SYS_futex),
    ("time", libc::SYS_clock_gettime),
    ("time", libc::SYS_restart_syscall),
    ("signal that stops and continues it", libc::SYS_rt_sigreturn),
    ("end", libc::SYS_rt_sigprocmask),
    ("end", libc::SYS_exit),
    ("end", libc::SYS_exit_group),
    ("identity of a thread", libc::SYS_gettid),
    ("message of a panic", libc::SYS_write),
    ("message of a panic", libc::SYS_writev),
    ("events", libc::SYS_epoll_ctl),
    ("events", libc::SYS_epoll_pwait),
    ("events", libc::SYS_epoll_pwait2),
    ("bytes of a connection", libc::SYS_splice),
];

/// What the process holds, on which bounds of arguments depend.
#[derive(Debug, Clone, Copy)]
pub struct Allowed {
    /// The pointers to the first and the last entry of the table of addresses
    /// ([`crate::guests::Guests::pointers`]).
    pub guests: (u64, u64),
    /// The highest inherited descriptor: ports, and the VMM's pidfd. None of them is ever closed,
    /// so that no socket of the process's own gets its number.
    pub last_inherited: i32,
    /// Whether a port has datagrams.
    pub has_udp: bool,
}

/// A condition: the argument's number, its length, and the comparison.
type Condition = (u8, SeccompCmpArgLen, SeccompCmpOp, u64);
/// A call, and its rows of conditions: all of one row must hold.
type Checked = (i64, Vec<Vec<Condition>>);

const fn bits(flags: libc::c_int) -> u64 {
    flags.cast_unsigned() as u64
}

/// The calls whose arguments are checked.
fn checked(allowed: &Allowed) -> Vec<Checked> {
    let own = u64::from(allowed.last_inherited.unsigned_abs()) + 1;
    let new = u64::from((SocketFlags::NONBLOCK | SocketFlags::CLOEXEC).bits());
    let sent = u64::from((SendFlags::DONTWAIT | SendFlags::NOSIGNAL).bits());
    let received = u64::from(RecvFlags::DONTWAIT.bits());
    let family = bits(libc::AF_INET);
    let kind = |kind: libc::c_int| {
        vec![(0, Dword, Eq, family), (1, Dword, Eq, bits(kind) | new), (2, Dword, Eq, 0)]
    };
    // Inherited sockets are those of the daemon and of the next relay too.
    let is_own = || (0, Dword, Ge, own);
    let option = |level: libc::c_int, name: libc::c_int| {
        vec![is_own(), (1, Dword, Eq, bits(level)), (2, Dword, Eq, bits(name))]
    };
    let (first, last) = allowed.guests;
    let guest = vec![
        is_own(),
        (1, Qword, Ge, first),
        (1, Qword, Le, last),
        (1, Qword, MaskedEq(crate::guests::ENTRY_BYTES as u64 - 1), 0),
        (2, Dword, Eq, crate::guests::ENTRY_BYTES as u64),
    ];
    // No MSG_FASTOPEN, which connects.
    let mut sends = vec![vec![(3, Dword, Eq, sent), (4, Qword, Eq, 0)]];
    if allowed.has_udp {
        sends.push(vec![(3, Dword, Eq, sent), (0, Dword, Le, own - 1)]);
    }
    let mut all = vec![
        (libc::SYS_accept4, vec![vec![(3, Dword, Eq, new)]]),
        (libc::SYS_socket, vec![kind(libc::SOCK_STREAM), kind(libc::SOCK_DGRAM)]),
        (libc::SYS_connect, vec![guest]),
        (libc::SYS_close, vec![vec![is_own()]]),
        (libc::SYS_shutdown, vec![vec![is_own()]]),
        (libc::SYS_pipe2, vec![vec![(1, Dword, Eq, bits(libc::O_CLOEXEC | libc::O_NONBLOCK))]]),
        (libc::SYS_recvfrom, vec![vec![(3, Dword, Eq, received)]]),
        (libc::SYS_sendto, sends),
        (libc::SYS_getsockopt, vec![option(libc::SOL_SOCKET, libc::SO_ERROR)]),
        (
            libc::SYS_setsockopt,
            vec![
                option(libc::SOL_SOCKET, libc::SO_LINGER),
                option(libc::SOL_SOCKET, libc::SO_KEEPALIVE),
                option(libc::SOL_SOCKET, libc::SO_RCVBUF),
                option(libc::SOL_SOCKET, libc::SO_SNDBUF),
                option(libc::IPPROTO_TCP, libc::TCP_NODELAY),
                option(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
            ],
        ),
    ];
    if cfg!(debug_assertions) {
        // The standard library looks at a descriptor before it closes it.
        all.push((libc::SYS_fcntl, vec![vec![(1, Dword, Eq, bits(libc::F_GETFD))]]));
    }
    all
}

/// The calls of a process of streams ([`crate::streams`]) whose arguments are checked. None makes a
/// socket, connects one, or sends a descriptor. `last_inherited` is the higher of its two inherited
/// descriptors.
fn checked_of_streams(last_inherited: i32) -> Vec<Checked> {
    let own = u64::from(last_inherited.unsigned_abs()) + 1;
    let is_own = || (0, Dword, Ge, own);
    let sent = u64::from((SendFlags::DONTWAIT | SendFlags::NOSIGNAL).bits());
    let received = u64::from(RecvFlags::DONTWAIT.bits());
    let handed = u64::from((RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC).bits());
    let mut all = vec![
        (libc::SYS_recvmsg, vec![vec![(0, Dword, Le, own - 1), (2, Dword, Eq, handed)]]),
        (libc::SYS_close, vec![vec![is_own()]]),
        (libc::SYS_shutdown, vec![vec![is_own()]]),
        (libc::SYS_pipe2, vec![vec![(1, Dword, Eq, bits(libc::O_CLOEXEC | libc::O_NONBLOCK))]]),
        (libc::SYS_recvfrom, vec![vec![is_own(), (3, Dword, Eq, received)]]),
        (libc::SYS_sendto, vec![vec![is_own(), (3, Dword, Eq, sent), (4, Qword, Eq, 0)]]),
    ];
    if cfg!(debug_assertions) {
        // As in `checked`.
        all.push((libc::SYS_fcntl, vec![vec![(1, Dword, Eq, bits(libc::F_GETFD))]]));
    }
    all
}

fn numbers(checked: Vec<Checked>) -> Vec<i64> {
    let any = CALLS.iter().map(|(_, number)| *number);
    any.chain(checked.into_iter().map(|(number, _)| number)).collect()
}

/// The numbers of all calls that do not kill with the right arguments.
#[must_use]
pub fn calls(allowed: &Allowed) -> Vec<i64> {
    numbers(checked(allowed))
}

/// The same of a process of streams.
#[must_use]
pub fn calls_of_streams(last_inherited: i32) -> Vec<i64> {
    numbers(checked_of_streams(last_inherited))
}

/// Compiles the filter.
///
/// # Errors
/// The filter is too long.
pub fn compile(allowed: &Allowed) -> io::Result<BpfProgram> {
    compiled(checked(allowed))
}

/// Compiles the filter of a process of streams.
///
/// # Errors
/// The filter is too long.
pub fn compile_for_streams(last_inherited: i32) -> io::Result<BpfProgram> {
    compiled(checked_of_streams(last_inherited))
}

fn compiled(checked: Vec<Checked>) -> io::Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        CALLS.iter().map(|(_, number)| (*number, Vec::new())).collect();
    let rule = |conditions: Vec<Condition>| {
        let condition = |(argument, length, operator, value): Condition| {
            SeccompCondition::new(argument, length, operator, value)
        };
        SeccompRule::new(conditions.into_iter().map(condition).collect::<Result<_, _>>()?)
    };
    for (number, rows) in checked {
        let rows = rows.into_iter().map(rule).collect::<Result<_, _>>();
        rules.insert(number, rows.map_err(io::Error::other)?);
    }
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, kill, allow, arch).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

/// Installs the filter.
///
/// # Errors
/// The process may gain privileges by exec, or the kernel has no seccomp.
pub fn install(program: &BpfProgram) -> io::Result<()> {
    seccompiler::apply_filter(program).map_err(io::Error::other)
}
