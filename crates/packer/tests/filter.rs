//! Every system call outside the packer's list, and every argument outside its bounds, kills the
//! process. The tests run on this kernel, in a child for each call.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_packer::filter;

/// The number behind the last system call of Linux 6.18, and some more.
const NUMBERS: i64 = 512;
/// uretprobe(2) and uprobe(2), which the kernel lets past every filter: they do nothing outside of
/// the trampolines of probes.
const PROBES: [i64; 2] = [335, 336];
/// The bit of calls of the x32 ABI.
const X32: i64 = 0x4000_0000;
const NO_FD: u64 = u64::MAX;

/// Whether a call under the filter, in a child, kills it.
fn kills(number: i64, arguments: [u64; 6]) -> bool {
    let program = filter::compile().unwrap();
    // SAFETY: the child makes system calls and leaves through _exit. It allocates nothing.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the arguments are integers, or null pointers.
        unsafe {
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || seccompiler::apply_filter(&program).is_err()
            {
                libc::_exit(255);
            }
            let [a, b, c, d, e, f] = arguments;
            libc::syscall(number, a, b, c, d, e, f);
            libc::_exit(0)
        }
    }
    let mut status = 0;
    // SAFETY: waits for the child that was made above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    if libc::WIFSIGNALED(status) {
        assert_eq!(libc::WTERMSIG(status), libc::SIGSYS, "call {number}");
        return true;
    }
    assert_ne!(libc::WEXITSTATUS(status), 255, "the filter was not installed");
    false
}

#[test]
fn every_call_outside_the_list_kills() {
    let calls = filter::calls();
    let refused = |number: &i64| !calls.contains(number) && !PROBES.contains(number);
    let refused: Vec<i64> = (0..NUMBERS).filter(refused).collect();
    // docs/security.md has the number; a debug build asks for descriptors' flags too.
    assert_eq!(calls.len(), 37 + usize::from(cfg!(debug_assertions)));
    assert!(refused.len() > 460);
    for number in refused {
        assert!(kills(number, [0; 6]), "call {number}");
    }
    for number in calls {
        assert!(kills(number | X32, [0; 6]), "x32 call {number}");
    }
}

fn flags(flags: libc::c_int) -> u64 {
    u64::from(flags.cast_unsigned())
}

#[test]
fn bounds_of_arguments() {
    let thread = flags(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND);
    let executable = flags(libc::PROT_EXEC);
    for (number, killed, arguments) in [
        (libc::SYS_mmap, true, [0, 0, executable, 0, 0, 0]),
        (libc::SYS_mmap, false, [0, 0, 0, 0, NO_FD, 0]),
        (libc::SYS_mprotect, true, [0, 0, executable, 0, 0, 0]),
        (libc::SYS_clone, true, [flags(libc::SIGCHLD), 0, 0, 0, 0, 0]),
        (libc::SYS_clone, true, [thread | flags(libc::CLONE_NEWUSER), 0, 0, 0, 0, 0]),
        (libc::SYS_madvise, true, [0, 0, flags(libc::MADV_REMOVE), 0, 0, 0]),
        (libc::SYS_statx, true, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_statx, false, [NO_FD, 0, flags(libc::AT_EMPTY_PATH), 0, 0, 0]),
        (libc::SYS_write, true, [1, 0, 0, 0, 0, 0]),
        (libc::SYS_write, false, [2, 0, 0, 0, 0, 0]),
        (libc::SYS_pwrite64, true, [2, 0, 0, 0, 0, 0]),
        (libc::SYS_pwrite64, true, [2 | 1 << 32, 0, 0, 0, 0, 0]),
        (libc::SYS_pwrite64, false, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_pread64, true, [2, 0, 0, 0, 0, 0]),
        (libc::SYS_read, true, [2, 0, 0, 0, 0, 0]),
        (libc::SYS_lseek, true, [2, 0, 0, 0, 0, 0]),
        (libc::SYS_lseek, false, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_rt_sigaction, true, [flags(libc::SIGTERM), 0, 0, 8, 0, 0]),
        (libc::SYS_prctl, true, [flags(libc::PR_SET_DUMPABLE), 1, 0, 0, 0, 0]),
        // They fail.
        (libc::SYS_openat, false, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_clone3, false, [0, 0, 0, 0, 0, 0]),
    ] {
        assert_eq!(kills(number, arguments), killed, "call {number} of {arguments:?}");
    }
}
