//! System calls that this room makes, by thread, for the jail's filters.

/// What the device thread calls.
///
/// Memory calls come from the allocator; `connect` and `socket` from the guest's connections to the host.
pub const DEVICE_LOOP_SYSCALLS: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_ctl,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_futex,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_fallocate,
    libc::SYS_accept4,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_rt_sigreturn,
    libc::SYS_exit,
];

/// What a vCPU thread calls in a device's registers: locks, and eventfds.
pub const VCPU_SYSCALLS: &[i64] = &[libc::SYS_futex, libc::SYS_write];

/// What the control thread calls to insert disks, pause, resume, save, freeze and stop.
pub const CONTROL_SYSCALLS: &[i64] = &[
    libc::SYS_futex,
    libc::SYS_write,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_fcntl,
    libc::SYS_lseek,
    libc::SYS_ftruncate,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_close,
    libc::SYS_clock_gettime,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
];
