//! What a thread may not do ends the process with a record that says what it was.

#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_vmm::control::{ExitReason, ExitRecord};
use dayfly_vmm::seccomp::{Filters, Program};
use dayfly_vmm::{exit, jail, seccomp};
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;

/// Runs `act` in a child that has entered `filter`; gives the child's exit status and its exit record.
fn confined(filter: &Program, act: fn()) -> (i32, Option<ExitRecord>) {
    let mut file = tempfile::tempfile().unwrap();
    // SAFETY: the child makes system calls, allocates at most through glibc, which keeps its locks usable across fork(2),
    // and leaves through _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        exit::set_file(file.as_raw_fd());
        exit::install_handlers();
        if jail::no_new_privileges().is_ok() {
            seccomp::apply(Some(filter));
            act();
        }
        // SAFETY: as meant.
        unsafe { libc::_exit(42) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let mut json = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut json).unwrap();
    (libc::WEXITSTATUS(status), serde_json::from_str(&json).ok())
}

fn call(number: i64, first: i64, second: i64, third: i64) {
    // SAFETY: the calls of this file take integers or null pointers and fail or do nothing.
    unsafe { libc::syscall(number, first, second, third, 0, 0, 0) };
}

#[test]
fn a_refused_system_call_is_named_in_the_exit_record() {
    let filters = Filters::new().unwrap();
    let kinds = [&filters.vcpu, &filters.devices, &filters.main].map(|filter| filter.clone().unwrap());
    let acts: [(i64, fn()); 6] = [
        (libc::SYS_execve, || call(libc::SYS_execve, 0, 0, 0)),
        (libc::SYS_openat, || call(libc::SYS_openat, -1, 0, 0)),
        (libc::SYS_fork, || call(libc::SYS_fork, 0, 0, 0)),
        (libc::SYS_ptrace, || call(libc::SYS_ptrace, 0, 0, 0)),
        // Executable memory, and an ioctl that is not KVM's.
        (libc::SYS_mmap, || call(libc::SYS_mmap, 0, 4096, 7)),
        (libc::SYS_ioctl, || call(libc::SYS_ioctl, 1, 0x5412, 0)),
    ];
    for (kind, filter) in ["vcpu", "devices", "main"].iter().zip(&kinds) {
        for (number, act) in acts {
            let (status, record) = confined(filter, act);
            let record =
                record.unwrap_or_else(|| panic!("{kind}: call {number}: no record, status {status}"));
            assert_eq!((status, record.reason), (1, ExitReason::Failed));
            let expected = format!("the seccomp filter refused system call {number}");
            assert_eq!(record.message, expected, "{kind}");
        }
        let (status, record) = confined(filter, || call(libc::SYS_gettid, 0, 0, 0));
        assert_eq!((status, record), (42, None), "{kind}: what is allowed goes on");
    }
}

#[test]
fn a_socket_is_a_unix_socket_and_only_the_device_thread_makes_one() {
    let filters = Filters::new().unwrap();
    let [vcpu, devices] = [&filters.vcpu, &filters.devices].map(|filter| filter.clone().unwrap());
    let unix: fn() = || call(libc::SYS_socket, 1, 1, 0);
    let inet: fn() = || call(libc::SYS_socket, 2, 1, 0);
    assert_eq!(confined(&devices, unix).0, 42);
    assert_eq!(confined(&devices, inet).0, 1);
    assert_eq!(confined(&vcpu, unix).0, 1);
}

#[test]
fn a_panic_of_any_thread_is_recorded_and_ends_the_process() {
    let filters = Filters::new().unwrap();
    let main = filters.main.clone().unwrap();
    let (status, record) = confined(&main, || panic!("on purpose"));
    let record = record.unwrap();
    assert_eq!((status, record.reason), (1, ExitReason::Failed));
    assert!(record.message.contains("on purpose") && record.message.contains("a bug in dayfly-vmm"));
}
