//! The list of allowed system calls: who makes each, with which arguments, and why.
//! `docs/security.md` has this list as a table; a test compares both.

use super::bound::{all, bits, low, low_bits};
use super::call::Stage::{Guest, SetUp};
use super::call::Thread::{self, Devices, Disks, Main, Recorder, Vcpu};
use super::call::{
    Call, DONTWAIT, EVERY, FUTEX_FLAGS, GETEVENTS, MAP_ANONYMOUS, NOSIGNAL, NOWAIT, PEEK,
    PUNCH_HOLE, READ_WRITE, SOCKET_FLAGS, call, ioctl, named,
};
use super::main_calls::{CONTROL, RECORDER, RESTORE, SAVE};
use super::requests as kvm;

const ALL: &[Thread] = &[Vcpu, Devices, Disks, Main, Recorder];
const WORKERS: &[Thread] = &[Vcpu, Devices, Disks];

/// Calls of every thread.
const COMMON: &[Call] = &[
    call(named!(SYS_brk), ALL, Guest, EVERY, "allocator"),
    call(named!(SYS_clock_gettime), ALL, Guest, EVERY, "time"),
    call(named!(SYS_close), ALL, Guest, EVERY, "files and connections that end"),
    call(named!(SYS_exit), ALL, Guest, EVERY, "end of a thread"),
    call(named!(SYS_exit_group), ALL, Guest, EVERY, "end of the VM"),
    call(
        named!(SYS_futex),
        ALL,
        Guest,
        (
            &[
                &[low_bits(1, !FUTEX_FLAGS, 0)],
                &[low_bits(1, !FUTEX_FLAGS, 1)],
                &[low_bits(1, !FUTEX_FLAGS, 9)],
            ],
            "WAIT, WAKE, WAIT_BITSET",
        ),
        "locks",
    ),
    call(named!(SYS_getrandom), ALL, Guest, EVERY, "hash tables, the guest's RNG device"),
    call(named!(SYS_gettid), ALL, Guest, EVERY, "end of the VM"),
    call(
        named!(SYS_madvise),
        ALL,
        Guest,
        (&[&[low(2, 4)]], "DONTNEED"),
        "stack of a thread that ends; RAM that the guest gives back",
    ),
    call(
        named!(SYS_mmap),
        ALL,
        Guest,
        (&[&[bits(2, !READ_WRITE, 0), all(3, MAP_ANONYMOUS)]], "READ, WRITE; PRIVATE, ANONYMOUS"),
        "allocator",
    ),
    call(named!(SYS_munmap), ALL, Guest, EVERY, "allocator; end of a thread"),
    call(named!(SYS_restart_syscall), ALL, Guest, EVERY, "wait that a signal interrupted"),
    call(named!(SYS_rt_sigprocmask), ALL, Guest, EVERY, "end of a thread"),
    call(named!(SYS_rt_sigreturn), ALL, Guest, EVERY, "return from a signal handler"),
    call(named!(SYS_sched_yield), ALL, Guest, EVERY, "locks of channels"),
    call(named!(SYS_sigaltstack), ALL, Guest, EVERY, "end of a thread"),
    call(named!(SYS_write), ALL, Guest, EVERY, "eventfds, console, tap, exit record"),
];

/// Calls of vCPU threads and of the two device threads.
const DEVICES: &[Call] = &[
    call(named!(SYS_capset), WORKERS, SetUp, EVERY, "change to the VM's user"),
    call(
        named!(SYS_setgroups),
        WORKERS,
        SetUp,
        (&[&[low(0, 0)]], "no group"),
        "change to the VM's user",
    ),
    call(named!(SYS_setresgid), WORKERS, SetUp, EVERY, "change to the VM's user"),
    call(named!(SYS_setresuid), WORKERS, SetUp, EVERY, "change to the VM's user"),
    ioctl(
        &[Vcpu],
        Guest,
        (
            &[&[low(1, kvm::RUN)], &[low(1, kvm::GET_REGS)], &[low(1, kvm::GET_SREGS)]],
            "RUN, GET_REGS, GET_SREGS",
        ),
        "the guest; registers for a last message",
    ),
    call(
        named!(SYS_ftruncate),
        &[Vcpu],
        Guest,
        (&[&[all(1, 0)]], "length 0"),
        "the console's other file",
    ),
    call(
        named!(SYS_accept4),
        &[Devices],
        Guest,
        (&[&[low(3, SOCKET_FLAGS)]], "NONBLOCK, CLOEXEC"),
        "vsock: connections of the host",
    ),
    call(named!(SYS_connect), &[Devices], Guest, EVERY, "vsock: connections of the guest"),
    call(
        named!(SYS_epoll_ctl),
        &[Devices],
        Guest,
        (&[&[low(1, 1)]], "ADD"),
        "tap and vsock connections",
    ),
    call(named!(SYS_epoll_wait), &[Devices], Guest, EVERY, "events of all devices but disks"),
    call(
        named!(SYS_fallocate),
        &[Disks],
        Guest,
        (&[&[low(1, PUNCH_HOLE)]], "PUNCH_HOLE, KEEP_SIZE"),
        "disk: discarded blocks",
    ),
    call(named!(SYS_fstat), &[Disks], Guest, EVERY, "disk: space that a layer has"),
    call(named!(SYS_fstatfs), &[Disks], Guest, EVERY, "disk: space that the host has"),
    call(
        named!(SYS_lseek),
        &[Disks],
        Guest,
        (&[&[low(2, 3)], &[low(2, 4)]], "SEEK_DATA, SEEK_HOLE"),
        "disk: data below zeroed blocks",
    ),
    call(
        named!(SYS_io_uring_enter),
        &[Disks],
        Guest,
        (&[&[low(3, GETEVENTS), all(4, 0)]], "GETEVENTS, no signal mask"),
        "disk: reads in flight, by a restricted ring",
    ),
    call(named!(SYS_preadv), &[Disks], Guest, EVERY, "disk, and its limits"),
    call(
        named!(SYS_preadv2),
        &[Disks],
        Guest,
        (&[&[low(5, NOWAIT)]], "NOWAIT"),
        "disk: reads of cached data",
    ),
    call(named!(SYS_pwritev), &[Disks], Guest, EVERY, "disk"),
    call(named!(SYS_read), &[Devices, Disks], Guest, EVERY, "eventfds, tap"),
    call(
        named!(SYS_recvfrom),
        &[Devices],
        Guest,
        (&[&[low(3, DONTWAIT)], &[low(3, DONTWAIT | PEEK)]], "DONTWAIT, PEEK"),
        "vsock: a caller's first line",
    ),
    call(
        named!(SYS_recvmsg),
        &[Devices],
        Guest,
        (&[&[low(2, DONTWAIT)]], "DONTWAIT"),
        "vsock: bytes from the host",
    ),
    call(
        named!(SYS_sendmsg),
        &[Devices],
        Guest,
        (&[&[low(2, DONTWAIT | NOSIGNAL)]], "DONTWAIT, NOSIGNAL"),
        "vsock: bytes to the host",
    ),
    call(
        named!(SYS_shutdown),
        &[Devices],
        Guest,
        (&[&[low_bits(1, !1, 0)]], "RD, WR"),
        "vsock: one direction ends",
    ),
    call(
        named!(SYS_socket),
        &[Devices],
        Guest,
        (
            &[&[low(0, 1), low(1, SOCKET_FLAGS | 1), low(2, 0)]],
            "UNIX; STREAM, NONBLOCK, CLOEXEC; 0",
        ),
        "vsock: connections of the guest",
    ),
    call(named!(SYS_writev), &[Devices], Guest, EVERY, "tap: a packet in pieces"),
];

/// The whole list.
pub fn calls() -> impl Iterator<Item = &'static Call> {
    [COMMON, DEVICES, RESTORE, CONTROL, SAVE, RECORDER].into_iter().flatten()
}
