//! How a process ends that two threads want to end: the first one's record is whole.

#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_vmm::control::{ExitReason, ExitRecord};
use dayfly_vmm::exit;
use dayfly_vmm::heap::WithoutRemap;
use dayfly_vmm::seccomp::{Filters, Stage};
use std::io::{BufRead, BufReader, Read, Write, pipe};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The allocator of a VMM: the filters forbid mremap(2).
#[global_allocator]
static ALLOCATOR: WithoutRemap = WithoutRemap;

/// Runs `act` in a child of this process; returns the child's pid.
fn child(act: impl FnOnce()) -> i32 {
    // SAFETY: the child ends through _exit. It allocates and makes threads only through glibc,
    // which keeps its locks usable across fork(2).
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid != 0 {
        return pid;
    }
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure lives during the call. The alarm ends a child that hangs. One arena for
    // all threads, as in a VMM: another one would need calls that the filters forbid.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
        libc::alarm(600);
    }
    exit::install_handlers();
    act();
    // SAFETY: ends the child without running destructors.
    unsafe { libc::_exit(42) };
}

/// The wait status of a child; `None` if it has not ended and `flags` has WNOHANG.
fn ended(pid: i32, flags: i32) -> Option<i32> {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    (unsafe { libc::waitpid(pid, &raw mut status, flags) } == pid).then_some(status)
}

/// Whether a thread sleeps in its handler of SIGSEGV, during which the kernel blocks that signal.
fn sleeps_in_handler(pid: i32, thread: &str) -> bool {
    let path = format!("/proc/{pid}/task/{thread}/status");
    let status = std::fs::read_to_string(path).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let blocked = u64::from_str_radix(&field("SigBlk:"), 16).unwrap_or_default();
    blocked >> (libc::SIGSEGV - 1) & 1 == 1 && field("State:").starts_with('S')
}

/// Looks again and again until `there` holds, or the child has ended; returns its wait status.
fn wait_until(pid: i32, there: impl Fn() -> bool) -> Option<i32> {
    loop {
        let status = ended(pid, libc::WNOHANG);
        if status.is_some() || there() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_thread_that_faults_waits_for_the_record_that_another_thread_is_writing() {
    let filters = Filters::new().unwrap();
    let (mut record, record_end) = pipe().unwrap();
    let (mut go_end, mut go) = pipe().unwrap();
    let (names, mut name_end) = pipe().unwrap();
    // Longer than a pipe holds: the first thread waits in the middle of its record.
    let message = "x".repeat(200_000);
    let expected = ExitRecord { reason: ExitReason::PowerOff, message: message.clone() };
    let pid = child(move || {
        exit::set_file(record_end.as_raw_fd());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                filters.vcpu.enter(Stage::SetUp);
                filters.vcpu.enter(Stage::Guest);
                exit::end(ExitReason::PowerOff, &message);
            });
            scope.spawn(|| {
                filters.devices.enter(Stage::SetUp);
                filters.devices.enter(Stage::Guest);
                // SAFETY: a call without arguments.
                let thread = unsafe { libc::syscall(libc::SYS_gettid) };
                let _ = writeln!(name_end, "{thread}");
                let _ = go_end.read_exact(&mut [0]);
                // SAFETY: nothing is mapped at this address; the fault is what is tested.
                unsafe { std::ptr::without_provenance::<u8>(8).read_volatile() };
            });
        });
    });
    let mut thread = String::new();
    BufReader::new(names).read_line(&mut thread).unwrap();
    let capacity = rustix::pipe::fcntl_getpipe_size(&record).unwrap() as u64;
    let early = wait_until(pid, || rustix::io::ioctl_fionread(&record).unwrap() == capacity);
    assert_eq!(early, None, "the first thread waits");
    go.write_all(&[1]).unwrap();
    let early = wait_until(pid, || sleeps_in_handler(pid, thread.trim()));
    let mut json = String::new();
    record.read_to_string(&mut json).unwrap();
    let got: ExitRecord = serde_json::from_str(&json).expect("a whole record");
    assert_eq!((early, got), (None, expected));
    assert_eq!(ended(pid, 0), Some(0), "the first thread's status");
}

#[test]
fn a_thread_whose_own_record_cannot_be_written_ends_the_process() {
    let file = tempfile::tempfile().unwrap();
    let pid = child(|| {
        exit::set_file(file.as_raw_fd());
        let few = libc::rlimit { rlim_cur: 9, rlim_max: 9 };
        // SAFETY: the structure lives during the call.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const few) };
        exit::end(ExitReason::PowerOff, "more than nine bytes");
    });
    assert_eq!(ended(pid, 0), Some(1 << 8), "ended by its handler of SIGXFSZ, not by its alarm");
}
