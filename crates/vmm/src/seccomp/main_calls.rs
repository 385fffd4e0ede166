//! The list of allowed system calls: the main thread, and the recorder's thread.

use super::bound::{all, bits, low};
use super::call::Stage::{Guest, SetUp};
use super::call::Thread::{Devices, Disks, Main, Recorder, Vcpu};
use super::call::{
    CMSG_CLOEXEC, Call, EVERY, KICK, LONG, MAP_OVER, NOSIGNAL, PUNCH_HOLE, READ_WRITE,
    SOCKET_FLAGS, call, ioctl, named,
};
use super::requests as kvm;
use super::requests::low_half;
use dayfly_sys::uffd;

/// Calls of the main thread, while it restores a VM.
pub(super) const RESTORE: &[Call] = &[
    call(
        named!(SYS_fcntl),
        &[Main],
        SetUp,
        (&[&[low(1, 1030)]], "F_DUPFD_CLOEXEC"),
        "console, files of a recording",
    ),
    call(
        named!(SYS_madvise),
        &[Main],
        SetUp,
        (&[&[low(2, 14)], &[low(2, 15)], &[low(2, 23)]], "(NO)HUGEPAGE, POPULATE_WRITE"),
        "page size of RAM; its working set",
    ),
    call(
        named!(SYS_mmap),
        &[Main],
        SetUp,
        (&[&[all(2, READ_WRITE), all(3, MAP_OVER)]], "READ, WRITE; PRIVATE, FIXED, NORESERVE"),
        "memory files over RAM",
    ),
    call(
        named!(SYS_prlimit64),
        &[Main],
        SetUp,
        (
            &[&[low(0, 0), low(1, 1), all(3, 0)], &[low(0, 0), low(1, 9), all(3, 0)]],
            "own FSIZE, AS",
        ),
        "limits by RAM and disks",
    ),
    call(named!(SYS_recvfrom), &[Main], SetUp, (&[&[low(3, 0)]], "no flag"), "the pager's answer"),
    call(
        named!(SYS_seccomp),
        &[Main, Recorder, Vcpu, Devices, Disks],
        SetUp,
        (&[&[low(0, 1), low(1, 0)]], "SET_MODE_FILTER, no flag"),
        "the next stage's filter",
    ),
    ioctl(
        &[Main],
        SetUp,
        (&[&[low(1, low_half(uffd::UFFDIO_REGISTER))]], "UFFDIO_REGISTER"),
        "RAM that a pager fills",
    ),
    ioctl(
        &[Main],
        SetUp,
        (
            &[
                &[low(1, kvm::SET_CPUID2)],
                &[low(1, kvm::SET_TSC_KHZ)],
                &[low(1, kvm::SET_MP_STATE)],
                &[low(1, kvm::SET_REGS)],
                &[low(1, kvm::SET_SREGS)],
            ],
            "SET_CPUID2, SET_TSC_KHZ, SET_MP_STATE, SET_REGS, SET_SREGS",
        ),
        "saved vCPUs",
    ),
    ioctl(
        &[Main],
        SetUp,
        (
            &[
                &[low(1, kvm::SET_XSAVE)],
                &[low(1, kvm::SET_XCRS)],
                &[low(1, kvm::SET_DEBUGREGS)],
                &[low(1, kvm::SET_LAPIC)],
            ],
            "SET_XSAVE, SET_XCRS, SET_DEBUGREGS, SET_LAPIC",
        ),
        "saved vCPUs",
    ),
    ioctl(
        &[Main],
        SetUp,
        (&[&[low(1, kvm::SET_IRQCHIP)], &[low(1, kvm::SET_PIT2)]], "SET_IRQCHIP, SET_PIT2"),
        "saved interrupt controllers",
    ),
    ioctl(
        &[Main],
        SetUp,
        (&[&[low(1, kvm::PRE_FAULT_MEMORY)]], "PRE_FAULT_MEMORY"),
        "working set, mapped ahead",
    ),
];

/// Calls of the main thread for the control socket.
pub(super) const CONTROL: &[Call] = &[
    call(
        named!(SYS_accept4),
        &[Main],
        Guest,
        (&[&[low(3, SOCKET_FLAGS)]], "NONBLOCK, CLOEXEC"),
        "control connections",
    ),
    call(named!(SYS_getpid), &[Main], Guest, EVERY, "pause: kick of a vCPU"),
    call(named!(SYS_poll), &[Main], Guest, EVERY, "control connections"),
    call(named!(SYS_ppoll), &[Main], Guest, EVERY, "control connections, with a time limit"),
    call(named!(SYS_read), &[Main], Guest, EVERY, "event of a disk that waits for space"),
    call(
        named!(SYS_recvmsg),
        &[Main],
        Guest,
        (&[&[low(2, CMSG_CLOEXEC)]], "CMSG_CLOEXEC"),
        "commands and their descriptors",
    ),
    call(
        named!(SYS_sendmsg),
        &[Main],
        Guest,
        (&[&[low(2, NOSIGNAL)]], "NOSIGNAL"),
        "answers; userfaultfd to the pager",
    ),
    call(
        named!(SYS_setpriority),
        &[Main],
        Guest,
        (&[&[low(0, 0), low(1, 0), low(2, 0)]], "itself, normal"),
        "first start of a VM's guest",
    ),
    call(
        named!(SYS_tgkill),
        &[Main],
        Guest,
        (&[&[low(2, KICK)]], "SIGRTMIN"),
        "pause: kick of a vCPU",
    ),
];

/// Calls of the main thread for pausing, saving and forking.
pub(super) const SAVE: &[Call] = &[
    call(
        named!(SYS_fallocate),
        &[Main],
        Guest,
        (&[&[low(1, PUNCH_HOLE)]], "PUNCH_HOLE, KEEP_SIZE"),
        "saved RAM: pages of zeroes",
    ),
    call(
        named!(SYS_fcntl),
        &[Main],
        Guest,
        (&[&[low(1, 3)], &[low(1, 1034)]], "F_GETFL, F_GET_SEALS"),
        "checks of a command's files; whether RAM is whole",
    ),
    call(named!(SYS_fstat), &[Main], Guest, EVERY, "checks of a command's files"),
    call(
        named!(SYS_ftruncate),
        &[Main],
        Guest,
        (&[&[bits(1, LONG, 0)]], "below 2 TiB"),
        "new writable layer, saved RAM",
    ),
    call(
        named!(SYS_lseek),
        &[Main],
        Guest,
        (&[&[low(2, 3)], &[low(2, 4)]], "SEEK_DATA, SEEK_HOLE"),
        "holes of saved RAM and of layers",
    ),
    call(named!(SYS_pread64), &[Main], Guest, EVERY, "state, lists, pagemap"),
    call(named!(SYS_preadv), &[Main], Guest, EVERY, "maps of layers"),
    call(named!(SYS_pwrite64), &[Main], Guest, EVERY, "saved RAM"),
    call(named!(SYS_pwritev), &[Main], Guest, EVERY, "maps of layers"),
    ioctl(
        &[Main],
        Guest,
        (
            &[
                &[low(1, kvm::SET_CLOCK)],
                &[low(1, kvm::GET_CLOCK)],
                &[low(1, kvm::SET_DEVICE_ATTR)],
                &[low(1, kvm::GET_DEVICE_ATTR)],
            ],
            "SET_CLOCK, GET_CLOCK, SET_DEVICE_ATTR, GET_DEVICE_ATTR",
        ),
        "clocks of a clone",
    ),
    ioctl(
        &[Main],
        Guest,
        (
            &[
                &[low(1, kvm::SET_MSRS)],
                &[low(1, kvm::GET_MSRS)],
                &[low(1, kvm::GET_TSC_KHZ)],
                &[low(1, kvm::SET_VCPU_EVENTS)],
            ],
            "SET_MSRS, GET_MSRS, GET_TSC_KHZ, SET_VCPU_EVENTS",
        ),
        "clocks; saved state",
    ),
    ioctl(&[Main], Guest, (&[&[low(1, kvm::KVMCLOCK_CTRL)]], "KVMCLOCK_CTRL"), "end of a pause"),
    ioctl(
        &[Main],
        Guest,
        (
            &[
                &[low(1, kvm::GET_MP_STATE)],
                &[low(1, kvm::GET_REGS)],
                &[low(1, kvm::GET_SREGS)],
                &[low(1, kvm::GET_XSAVE2)],
            ],
            "GET_MP_STATE, GET_REGS, GET_SREGS, GET_XSAVE2",
        ),
        "saved state",
    ),
    ioctl(
        &[Main],
        Guest,
        (
            &[
                &[low(1, kvm::GET_XCRS)],
                &[low(1, kvm::GET_DEBUGREGS)],
                &[low(1, kvm::GET_LAPIC)],
                &[low(1, kvm::GET_VCPU_EVENTS)],
            ],
            "GET_XCRS, GET_DEBUGREGS, GET_LAPIC, GET_VCPU_EVENTS",
        ),
        "saved state",
    ),
    ioctl(
        &[Main],
        Guest,
        (
            &[&[low(1, kvm::GET_CPUID2)], &[low(1, kvm::GET_IRQCHIP)], &[low(1, kvm::GET_PIT2)]],
            "GET_CPUID2, GET_IRQCHIP, GET_PIT2",
        ),
        "saved state",
    ),
    ioctl(
        &[Main],
        Guest,
        (
            &[&[low(1, kvm::SET_USER_MEMORY_REGION)], &[low(1, kvm::GET_DIRTY_LOG)]],
            "SET_USER_MEMORY_REGION, GET_DIRTY_LOG",
        ),
        "live copy: the guest's writes",
    ),
];

/// Calls of the recorder's thread.
pub(super) const RECORDER: &[Call] = &[
    call(named!(SYS_pread64), &[Recorder], Guest, EVERY, "pages of the snapshot"),
    call(named!(SYS_read), &[Recorder], Guest, EVERY, "page faults"),
    ioctl(
        &[Recorder],
        SetUp,
        (&[&[low(1, low_half(uffd::UFFDIO_REGISTER))]], "UFFDIO_REGISTER"),
        "RAM that is recorded",
    ),
    ioctl(
        &[Recorder],
        Guest,
        (
            &[&[low(1, low_half(uffd::UFFDIO_COPY))], &[low(1, low_half(uffd::UFFDIO_WAKE))]],
            "UFFDIO_COPY, UFFDIO_WAKE",
        ),
        "pages that the guest touches",
    ),
];
