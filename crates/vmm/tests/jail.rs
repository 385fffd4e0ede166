//! How a process ends that its filter or its limits refuse something, and what is recorded.

#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_vmm::control::{ExitReason, ExitRecord};
use dayfly_vmm::seccomp::{Filters, Stage, ThreadFilter};
use dayfly_vmm::{exit, jail, limits};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Continues in a child that is the first process of a PID namespace, as a VMM is: the kernel
/// protects such a process from most signals. This process ends as the child does.
fn first_of_a_namespace() {
    // SAFETY: as in `confined`. If the namespace is refused, because the caller is not root, the
    // child stays in the caller's.
    unsafe {
        libc::unshare(libc::CLONE_NEWPID);
        let pid = libc::fork();
        if pid == 0 {
            return;
        }
        let mut status = 0;
        libc::waitpid(pid, &raw mut status, 0);
        if libc::WIFSIGNALED(status) {
            let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
            libc::signal(libc::WTERMSIG(status), libc::SIG_DFL);
            libc::raise(libc::WTERMSIG(status));
        }
        libc::_exit(libc::WEXITSTATUS(status));
    }
}

/// Runs `act` in a child under `filter`, in the guest stage; returns the child's wait status and
/// its exit record.
fn confined(filter: &ThreadFilter, act: impl Fn()) -> (i32, Option<ExitRecord>) {
    let mut file = tempfile::tempfile().unwrap();
    // SAFETY: the child makes system calls and leaves through _exit. It allocates at most through
    // glibc, which keeps its locks usable across fork(2).
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        first_of_a_namespace();
        exit::set_file(file.as_raw_fd());
        exit::install_handlers();
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the structure lives during the call.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
            libc::alarm(600);
        }
        if jail::no_new_privileges().is_ok() {
            filter.enter(Stage::SetUp);
            limits::of_vm(1 << 40, 0, &[]);
            filter.enter(Stage::Guest);
            act();
        }
        // SAFETY: ends the child without running destructors.
        unsafe { libc::_exit(42) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was made above.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let mut json = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut json).unwrap();
    (status, serde_json::from_str(&json).ok())
}

#[test]
fn a_refused_system_call_kills_whatever_the_handler_of_its_signal_would_do() {
    let main = Filters::new().unwrap().main;
    extern "C" fn goes_on(_: i32) {}
    // SAFETY: the handler does nothing. Only the children of this test get the signal.
    unsafe { libc::signal(libc::SIGSYS, goes_on as extern "C" fn(i32) as usize) };
    let (status, record) = confined(&main, || {
        // SAFETY: a call without arguments; it is refused.
        unsafe { libc::syscall(libc::SYS_fork) };
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS, "{status:#x}");
    assert_eq!(record, None);
    let (status, record) = confined(&main, || {
        // SAFETY: a call without arguments.
        unsafe { libc::syscall(libc::SYS_gettid) };
    });
    assert_eq!((libc::WEXITSTATUS(status), record), (42, None), "what is allowed goes on");
}

#[test]
fn a_write_past_the_largest_file_is_recorded_and_ends_the_process() {
    let main = Filters::new().unwrap().main;
    let file: File = tempfile::tempfile().unwrap();
    let most = limits::file_bytes(0, &[]);
    let (status, record) = confined(&main, || {
        let _ = file.write_all_at(b"last byte", most - 9);
    });
    assert_eq!((libc::WEXITSTATUS(status), record), (42, None));
    let (status, record) = confined(&main, || {
        let _ = file.write_all_at(b"too far", most);
    });
    let record = record.unwrap();
    assert_eq!((libc::WEXITSTATUS(status), record.reason), (1, ExitReason::Failed));
    assert!(record.message.contains("limit on a file's size"), "{}", record.message);
    assert_eq!(file.metadata().unwrap().len(), most);
}

#[test]
fn address_space_past_the_limit_is_refused() {
    let main = Filters::new().unwrap().main;
    let (status, _) = confined(&main, || {
        let map = |bytes: usize| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0) }
        };
        let (little, much) = (map(1 << 20), map(2 << 40));
        let as_meant = little != libc::MAP_FAILED && much == libc::MAP_FAILED;
        // SAFETY: ends the child without running destructors.
        unsafe { libc::_exit(if as_meant { 7 } else { 8 }) };
    });
    assert_eq!(libc::WEXITSTATUS(status), 7);
}

#[test]
fn a_panic_of_any_thread_is_recorded_and_ends_the_process() {
    let main = Filters::new().unwrap().main;
    let (status, record) = confined(&main, || panic!("on purpose"));
    let record = record.unwrap();
    assert_eq!((libc::WEXITSTATUS(status), record.reason), (1, ExitReason::Failed));
    assert!(
        record.message.contains("on purpose") && record.message.contains("a bug in dayfly-vmm")
    );
}

#[test]
fn a_pagemap_that_was_opened_without_the_capability_hides_frames_and_shows_pages() {
    use dayfly_sys::pagemap::{Entry, read_at};
    let page = vec![7_u8; 3 * 4096];
    let open = |file: &File| {
        let mut entries = [Entry::default(); 1];
        read_at(file, page.as_ptr().wrapping_add(4096), &mut entries).unwrap();
        entries[0]
    };
    let path = "/proc/self/pagemap".as_ref();
    let (with, without) =
        (open(&File::open(path).unwrap()), open(&jail::open_without_admin(path).unwrap()));
    assert!(with.is_own() && without.is_own());
    assert_eq!(without.frame(), 0);
    if dayfly_units::needs::root() {
        assert!(with.frame() != 0, "this thread kept the capability");
    }
}
