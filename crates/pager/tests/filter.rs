//! Every system call outside the pager's list, and every argument outside its bounds, kills the
//! process. The tests run on this kernel, in a child for each call.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_pager::filter;
use dayfly_sys::uffd;

/// The number behind the last system call of Linux 6.18, and some more.
const NUMBERS: i64 = 512;
/// uretprobe(2) and uprobe(2), which the kernel lets past every filter: they do nothing outside of
/// the trampolines of probes.
const PROBES: [i64; 2] = [335, 336];
/// The bit of calls of the x32 ABI.
const X32: i64 = 0x4000_0000;

#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The filter killed the process.
    Killed,
    /// The call succeeded (0), or failed with this number.
    Returned(i32),
}

/// Makes a call under the filter, in a child.
fn call(number: i64, arguments: [u64; 6]) -> End {
    let program = filter::compile().unwrap();
    // SAFETY: the child makes system calls and leaves through _exit. It allocates nothing.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the arguments are integers, null pointers, or pointers that the kernel checks.
        unsafe {
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || seccompiler::apply_filter(&program).is_err()
            {
                libc::_exit(255);
            }
            let [a, b, c, d, e, f] = arguments;
            let result = libc::syscall(number, a, b, c, d, e, f);
            libc::_exit(if result < 0 { *libc::__errno_location() } else { 0 })
        }
    }
    let mut status = 0;
    // SAFETY: waits for the child that was made above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    if libc::WIFSIGNALED(status) {
        assert_eq!(libc::WTERMSIG(status), libc::SIGSYS, "call {number}");
        return End::Killed;
    }
    let code = libc::WEXITSTATUS(status);
    assert_ne!(code, 255, "the filter was not installed");
    End::Returned(code)
}

#[test]
fn every_call_outside_the_list_kills() {
    let allowed = filter::calls();
    let refused = |number: &i64| !allowed.contains(number) && !PROBES.contains(number);
    let refused: Vec<i64> = (0..NUMBERS).filter(refused).collect();
    assert!(refused.len() > 400 && allowed.len() < 70, "{} allowed", allowed.len());
    for number in refused {
        assert_eq!(call(number, [0; 6]), End::Killed, "call {number}");
    }
    for number in allowed {
        assert_eq!(call(number | X32, [0; 6]), End::Killed, "x32 call {number}");
    }
}

const NO_FD: u64 = u64::MAX;
const PAGE: u64 = 4096;

/// Calls with arguments inside and outside of their bounds.
fn bounds() -> Vec<(i64, bool, [u64; 6])> {
    let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
    let thread = (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND).cast_unsigned();
    let (thread, fork) = (u64::from(thread), u64::from(libc::SIGCHLD.cast_unsigned()));
    let empty = u64::from(libc::AT_EMPTY_PATH.cast_unsigned());
    let new_user = u64::from(libc::CLONE_NEWUSER.cast_unsigned());
    let own =
        u64::from((libc::O_CLOEXEC | libc::O_NONBLOCK | uffd::USER_MODE_ONLY).cast_unsigned());
    let high = 1 << 32;
    let mut all = vec![
        (libc::SYS_mmap, true, [0, PAGE, 3, anonymous.into(), NO_FD, 0]),
        (libc::SYS_mmap, false, [0, PAGE, 5, anonymous.into(), NO_FD, 0]),
        (libc::SYS_mprotect, true, [0, 0, 1, 0, 0, 0]),
        (libc::SYS_mprotect, false, [0, 0, 4, 0, 0, 0]),
        (libc::SYS_madvise, true, [0, 0, 4, 0, 0, 0]),
        (libc::SYS_madvise, false, [0, 0, 9, 0, 0, 0]),
        (libc::SYS_rt_sigaction, true, [33, 0, 0, 8, 0, 0]),
        (libc::SYS_rt_sigaction, false, [31, 0, 0, 8, 0, 0]),
        (libc::SYS_rt_sigaction, false, [11, 0, 0, 8, 0, 0]),
        (libc::SYS_clone, false, [fork, 0, 0, 0, 0, 0]),
        (libc::SYS_clone, false, [thread | new_user, 0, 0, 0, 0, 0]),
        (libc::SYS_clone, false, [thread & !0x100, 0, 0, 0, 0, 0]),
        (libc::SYS_prctl, true, [15, 0, 0, 0, 0, 0]),
        (libc::SYS_prctl, false, [4, 1, 0, 0, 0, 0]),
        (libc::SYS_ioprio_set, true, [1, 0, 2 << 13 | 7, 0, 0, 0]),
        (libc::SYS_ioprio_set, false, [1, 1, 2 << 13 | 7, 0, 0, 0]),
        (libc::SYS_ioprio_set, false, [3, 0, 2 << 13 | 7, 0, 0, 0]),
        (libc::SYS_prlimit64, true, [0, 4, 0, 0, 0, 0]),
        (libc::SYS_prlimit64, false, [1, 4, 0, 0, 0, 0]),
        (libc::SYS_userfaultfd, true, [own, 0, 0, 0, 0, 0]),
        (libc::SYS_userfaultfd, false, [own & !1, 0, 0, 0, 0, 0]),
        (libc::SYS_statx, true, [NO_FD, 0, empty, 0, 0, 0]),
        (libc::SYS_statx, false, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_newfstatat, true, [NO_FD, 0, 0, empty, 0, 0]),
        (libc::SYS_newfstatat, false, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_write, true, [2, 0, 0, 0, 0, 0]),
        (libc::SYS_write, true, [NO_FD, 0, 8, 0, 0, 0]),
        (libc::SYS_write, false, [NO_FD, 0, 9, 0, 0, 0]),
        (libc::SYS_write, false, [NO_FD, 0, high | 8, 0, 0, 0]),
        (libc::SYS_pwrite64, true, [NO_FD, 0, 64 << 10, 0, 0, 0]),
        (libc::SYS_pwrite64, false, [NO_FD, 0, 1 + (64 << 10), 0, 0, 0]),
        (libc::SYS_pwrite64, false, [NO_FD, 0, high, 0, 0, 0]),
        (libc::SYS_pwrite64, false, [NO_FD, 0, 1, 1, 0, 0]),
        (libc::SYS_pwrite64, false, [NO_FD, 0, 1, high, 0, 0]),
        (libc::SYS_pidfd_send_signal, true, [NO_FD, 9, 0, 0, 0, 0]),
        (libc::SYS_pidfd_send_signal, false, [NO_FD, 15, 0, 0, 0, 0]),
        (libc::SYS_pidfd_send_signal, false, [NO_FD, 9, 8, 0, 0, 0]),
        (libc::SYS_pidfd_send_signal, false, [NO_FD, 9, high, 0, 0, 0]),
        // A whole process group.
        (libc::SYS_pidfd_send_signal, false, [NO_FD, 9, 0, 4, 0, 0]),
        (libc::SYS_ioctl, false, [NO_FD, 0x5412, 0, 0, 0, 0]),
        // UFFDIO_MOVE and UFFDIO_CONTINUE.
        (libc::SYS_ioctl, false, [NO_FD, 0xc028_aa05, 0, 0, 0, 0]),
        (libc::SYS_ioctl, false, [NO_FD, 0xc020_aa07, 0, 0, 0, 0]),
    ];
    let requests = [
        uffd::UFFDIO_API,
        uffd::UFFDIO_COPY,
        uffd::UFFDIO_REGISTER,
        uffd::UFFDIO_UNREGISTER,
        uffd::UFFDIO_WAKE,
        uffd::UFFDIO_WRITEPROTECT,
        uffd::UFFDIO_ZEROPAGE,
        libc::FIONBIO,
    ];
    all.extend(requests.map(|request| (libc::SYS_ioctl, true, [NO_FD, request, 0, 0, 0, 0])));
    let commands = (0..1100_i32).filter(|command| ![1030, 1033].contains(command));
    let commands = commands.filter(|command| command % 50 < 20 || *command > 1000);
    all.extend(commands.map(|command| {
        (libc::SYS_fcntl, false, [NO_FD, u64::from(command.cast_unsigned()), 0, 0, 0, 0])
    }));
    all.extend([1030, 1033].map(|command| (libc::SYS_fcntl, true, [NO_FD, command, 0, 0, 0, 0])));
    all
}

#[test]
fn every_argument_outside_its_bounds_kills() {
    for (number, inside, arguments) in bounds() {
        let end = call(number, arguments);
        assert_eq!(end != End::Killed, inside, "call {number} with {arguments:x?}: {end:?}");
    }
}

#[test]
fn calls_that_glibc_does_without_fail() {
    assert_eq!(call(libc::SYS_clone3, [0; 6]), End::Returned(libc::ENOSYS));
    assert_eq!(call(libc::SYS_openat, [0; 6]), End::Returned(libc::ENOENT));
}
