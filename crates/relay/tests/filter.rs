//! Every system call outside the relay's list, and every argument outside its bounds, kills the
//! process. The tests run on this kernel, in a child for each call.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_relay::filter::{self, Allowed};
use dayfly_relay::guests::Guests;
use std::net::Ipv4Addr;

/// The number behind the last system call of Linux 6.18, and some more.
const NUMBERS: i64 = 512;
/// uretprobe(2) and uprobe(2), which the kernel lets past every filter: they do nothing outside of
/// the trampolines of probes.
const PROBES: [i64; 2] = [335, 336];
/// The bit of calls of the x32 ABI.
const X32: i64 = 0x4000_0000;
const NO_FD: u64 = u64::MAX;

fn allowed(guests: &Guests, has_udp: bool) -> Allowed {
    Allowed { guests: guests.pointers(), last_inherited: 9, has_udp }
}

fn guests() -> Guests {
    Guests::new(Ipv4Addr::LOCALHOST, &[80, 81]).unwrap()
}

/// Whether a call under the filter, in a child, kills it.
fn kills(allowed: &Allowed, number: i64, arguments: [u64; 6]) -> bool {
    killed_by(filter::compile(allowed).unwrap(), number, arguments)
}

/// The same under the filter of a process of streams.
fn kills_streams(number: i64, arguments: [u64; 6]) -> bool {
    killed_by(filter::compile_for_streams(9).unwrap(), number, arguments)
}

fn killed_by(program: seccompiler::BpfProgram, number: i64, arguments: [u64; 6]) -> bool {
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
    let guests = guests();
    let allowed = allowed(&guests, true);
    let calls = filter::calls(&allowed);
    let refused = |number: &i64| !calls.contains(number) && !PROBES.contains(number);
    let refused: Vec<i64> = (0..NUMBERS).filter(refused).collect();
    assert!(refused.len() > 470 && calls.len() < 30, "{} allowed", calls.len());
    for number in refused {
        assert!(kills(&allowed, number, [0; 6]), "call {number}");
    }
    for number in calls {
        assert!(kills(&allowed, number | X32, [0; 6]), "x32 call {number}");
    }
}

fn flags(flags: libc::c_int) -> u64 {
    u64::from(flags.cast_unsigned())
}

#[test]
fn bounds_of_arguments() {
    let guests = guests();
    let (first, last) = guests.pointers();
    let new = flags(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let (tcp, udp) = (flags(libc::SOCK_STREAM) | new, flags(libc::SOCK_DGRAM) | new);
    let (inet, unix) = (flags(libc::AF_INET), flags(libc::AF_UNIX));
    let sent = flags(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    let open = flags(libc::MSG_FASTOPEN);
    let socket = flags(libc::SOL_SOCKET);
    for (number, killed, arguments) in [
        (libc::SYS_connect, false, [NO_FD, first, 16, 0, 0, 0]),
        (libc::SYS_connect, false, [NO_FD, last, 16, 0, 0, 0]),
        (libc::SYS_connect, true, [NO_FD, first - 16, 16, 0, 0, 0]),
        (libc::SYS_connect, true, [NO_FD, last + 16, 16, 0, 0, 0]),
        (libc::SYS_connect, true, [NO_FD, first + 8, 16, 0, 0, 0]),
        (libc::SYS_connect, true, [NO_FD, first, 28, 0, 0, 0]),
        (libc::SYS_socket, false, [inet, tcp, 0, 0, 0, 0]),
        (libc::SYS_socket, false, [inet, udp, 0, 0, 0, 0]),
        (libc::SYS_socket, true, [unix, tcp, 0, 0, 0, 0]),
        (libc::SYS_socket, true, [flags(libc::AF_NETLINK), udp, 0, 0, 0, 0]),
        (libc::SYS_socket, true, [flags(libc::AF_INET6), tcp, 0, 0, 0, 0]),
        (libc::SYS_socket, true, [inet, flags(libc::SOCK_RAW) | new, 0, 0, 0, 0]),
        (libc::SYS_socket, true, [inet, tcp, flags(libc::IPPROTO_MPTCP), 0, 0, 0]),
        (libc::SYS_sendto, false, [NO_FD, 0, 0, sent, 0, 0]),
        (libc::SYS_sendto, true, [NO_FD, 0, 0, sent | open, 0, 0]),
        (libc::SYS_sendto, false, [9, 0, 0, sent, first, 16]),
        (libc::SYS_sendto, true, [10, 0, 0, sent, first, 16]),
        (libc::SYS_close, true, [9, 0, 0, 0, 0, 0]),
        (libc::SYS_shutdown, true, [9, 2, 0, 0, 0, 0]),
        (libc::SYS_shutdown, false, [NO_FD, 2, 0, 0, 0, 0]),
        (libc::SYS_connect, true, [9, first, 16, 0, 0, 0]),
        (libc::SYS_setsockopt, true, [9, socket, flags(libc::SO_RCVBUF), 0, 0, 0]),
        (libc::SYS_close, false, [1000, 0, 0, 0, 0, 0]),
        (libc::SYS_setsockopt, false, [NO_FD, socket, flags(libc::SO_LINGER), 0, 0, 0]),
        (libc::SYS_setsockopt, true, [NO_FD, socket, flags(libc::SO_BINDTODEVICE), 0, 0, 0]),
        (libc::SYS_setsockopt, true, [NO_FD, 0, flags(libc::IP_TRANSPARENT), 0, 0, 0]),
    ] {
        let kills = kills(&allowed(&guests, true), number, arguments);
        assert_eq!(kills, killed, "call {number} of {arguments:?}");
    }
    // Without a UDP port, no datagram has an address.
    assert!(kills(&allowed(&guests, false), libc::SYS_sendto, [9, 0, 0, sent, first, 16]));
}

#[test]
fn a_process_of_streams_makes_no_connection_and_sends_no_descriptor() {
    let calls = filter::calls_of_streams(9);
    let refused = |number: &i64| !calls.contains(number) && !PROBES.contains(number);
    let refused: Vec<i64> = (0..NUMBERS).filter(refused).collect();
    assert!(refused.len() > 470 && calls.len() < 25, "{} allowed", calls.len());
    for number in refused {
        assert!(kills_streams(number, [0; 6]), "call {number}");
    }
    for number in [
        libc::SYS_socket,
        libc::SYS_socketpair,
        libc::SYS_connect,
        libc::SYS_accept4,
        libc::SYS_sendmsg,
        libc::SYS_setsockopt,
    ] {
        assert!(kills_streams(number, [0; 6]), "call {number}");
    }
    let sent = flags(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    let received = flags(libc::MSG_DONTWAIT);
    let handed = flags(libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC);
    for (number, killed, arguments) in [
        (libc::SYS_recvmsg, false, [9, 0, handed, 0, 0, 0]),
        (libc::SYS_recvmsg, true, [10, 0, handed, 0, 0, 0]),
        (libc::SYS_recvmsg, true, [9, 0, received, 0, 0, 0]),
        (libc::SYS_sendto, false, [NO_FD, 0, 0, sent, 0, 0]),
        (libc::SYS_sendto, true, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_sendto, true, [NO_FD, 0, 0, sent, 4096, 16]),
        (libc::SYS_sendto, true, [9, 0, 0, sent, 0, 0]),
        (libc::SYS_recvfrom, false, [NO_FD, 0, 0, received, 0, 0]),
        (libc::SYS_recvfrom, true, [NO_FD, 0, 0, 0, 0, 0]),
        (libc::SYS_close, true, [9, 0, 0, 0, 0, 0]),
        (libc::SYS_close, false, [1000, 0, 0, 0, 0, 0]),
        (libc::SYS_shutdown, true, [9, 2, 0, 0, 0, 0]),
    ] {
        let kills = kills_streams(number, arguments);
        assert_eq!(kills, killed, "call {number} of {arguments:?}");
    }
}

#[test]
fn the_table_of_addresses_cannot_be_written() {
    let guests = guests();
    let (first, _) = guests.pointers();
    let (from, into) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&into, &[1; 16]).unwrap();
    use std::os::fd::AsRawFd;
    // SAFETY: the kernel checks the pointer. It refuses to write there.
    let count = unsafe { libc::read(from.as_raw_fd(), first as *mut libc::c_void, 16) };
    assert_eq!(count, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
}
