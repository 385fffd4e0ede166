//! Every system call outside the server's list, and every argument outside its bounds, kills the
//! process. The tests run on this kernel, in a child for each call.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_volume::filter;

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
        // SAFETY: the arguments are integers, null pointers, or pointers that the kernel checks.
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
    let allowed = filter::calls();
    let refused = |number: &i64| !allowed.contains(number) && !PROBES.contains(number);
    let refused: Vec<i64> = (0..NUMBERS).filter(refused).collect();
    assert!(refused.len() > 400 && allowed.len() < 60, "{} allowed", allowed.len());
    for number in refused {
        assert!(kills(number, [0; 6]), "call {number}");
    }
    for number in allowed {
        assert!(kills(number | X32, [0; 6]), "x32 call {number}");
    }
}

#[test]
fn bounds_of_arguments() {
    let anonymous = u64::from((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned());
    let mode = |kind: u32| [NO_FD, 0, u64::from(kind | 0o600), 0, 0, 0];
    for (number, killed, arguments) in [
        (libc::SYS_mmap, false, [0, 4096, 3, anonymous, NO_FD, 0]),
        (libc::SYS_mmap, true, [0, 4096, 5, anonymous, NO_FD, 0]),
        (libc::SYS_mprotect, false, [0, 0, 1, 0, 0, 0]),
        (libc::SYS_mprotect, true, [0, 0, 4, 0, 0, 0]),
        (libc::SYS_madvise, false, [0, 0, 4, 0, 0, 0]),
        (libc::SYS_madvise, true, [0, 0, 9, 0, 0, 0]),
        (libc::SYS_mknodat, false, mode(libc::S_IFREG)),
        (libc::SYS_mknodat, false, mode(libc::S_IFIFO)),
        (libc::SYS_mknodat, false, mode(libc::S_IFSOCK)),
        (libc::SYS_mknodat, true, mode(libc::S_IFCHR)),
        (libc::SYS_mknodat, true, mode(libc::S_IFBLK)),
        (libc::SYS_mknodat, true, mode(0)),
    ] {
        assert_eq!(kills(number, arguments), killed, "call {number} of {arguments:?}");
    }
}
