//! The seccomp filters, run by the kernel: every system call outside the list, and every argument
//! outside its bounds, ends the process; every call of the list passes.

#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_vmm::disk::room::Limits;
use dayfly_vmm::disk::{Disk, DiskSpec, IoList, Room};
use dayfly_vmm::jail;
use dayfly_vmm::seccomp::{Bound, Call, Filters, Stage, Thread, ThreadFilter, Width, calls};
use std::cell::RefCell;
use std::collections::BTreeMap;

const THREADS: [Thread; 5] =
    [Thread::Vcpu, Thread::Devices, Thread::Disks, Thread::Main, Thread::Recorder];
const STAGES: [Stage; 2] = [Stage::SetUp, Stage::Guest];
/// One more than the highest number of Linux 6.18's system calls.
const NUMBERS: i64 = 471;
/// uretprobe and uprobe, which only the kernel's trampolines may call. Linux 6.14 and 6.18 pass
/// them by all filters; any other caller gets SIGILL or ENXIO.
const PROBES: [i64; 2] = [335, 336];
/// The bit of a call of the x32 ABI.
const X32: i64 = 0x4000_0000;

/// How a process ended that made one system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The kernel killed it for the call.
    Refused,
    /// It went on, or the call itself ended it.
    Passed,
    /// It waited until its alarm.
    Hung,
}

/// Runs `act` in a child under the filters of a thread up to `stage`.
fn confined(filter: &ThreadFilter, stage: Stage, act: impl Fn()) -> End {
    confined_after(filter, stage, || (), act)
}

/// As [`confined`]; runs `before` in the child without filters.
fn confined_after(filter: &ThreadFilter, stage: Stage, before: impl Fn(), act: impl Fn()) -> End {
    // SAFETY: the child makes system calls and leaves through _exit. It allocates nothing.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: integers, and a structure that lives during the call.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
            libc::alarm(60);
        }
        before();
        if jail::no_new_privileges().is_ok() {
            filter.enter(Stage::SetUp);
            if stage == Stage::Guest {
                filter.enter(Stage::Guest);
            }
            act();
        }
        // SAFETY: ends the child without running destructors.
        unsafe { libc::_exit(42) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was made above.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid);
    match libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)) {
        Some(libc::SIGSYS) => End::Refused,
        Some(libc::SIGALRM) => End::Hung,
        _ => End::Passed,
    }
}

fn make(number: i64, arguments: [u64; 6]) {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: a call in a child that ends at once. Its pointers are null or invalid, so that the
    // kernel reads and writes nothing of this process.
    unsafe { libc::syscall(number, a, b, c, d, e, f) };
}

/// Arguments that no call can use, but within `bounds`.
fn within(bounds: &[Bound]) -> [u64; 6] {
    let mut arguments = [u64::MAX, 1, 0, 0, 0, 0];
    for bound in bounds {
        let argument = &mut arguments[usize::from(bound.argument)];
        *argument = *argument & !bound.mask | bound.value;
    }
    arguments
}

/// The lowest, the highest and a middle bit of a mask.
fn bits(mask: u64) -> [u32; 3] {
    let (lowest, highest) = (mask.trailing_zeros(), 63 - mask.leading_zeros());
    let middle = (lowest..highest).find(|bit| *bit > 5 && mask >> bit & 1 == 1);
    [lowest, middle.unwrap_or(lowest), highest]
}

/// The lists of bounds of one call, for one thread in one stage; an empty list: no bounds.
fn lists(thread: Thread, stage: Stage) -> BTreeMap<i64, Vec<&'static [Bound]>> {
    let mut all: BTreeMap<i64, Vec<&'static [Bound]>> = BTreeMap::new();
    for call in calls().filter(|call| call.is_for(thread, stage)) {
        let lists = all.entry(call.number).or_default();
        let unbounded: &[&[Bound]] = &[&[]];
        lists.extend(if call.within.is_empty() { unbounded } else { call.within });
    }
    all
}

/// Checks one call of the list, within and outside its bounds.
fn check_call(
    number: i64,
    lists: &[&'static [Bound]],
    confined: &dyn Fn(i64, [u64; 6]) -> End,
    place: &str,
) {
    let holds = |arguments: &[u64; 6]| {
        lists.iter().any(|bounds| bounds.iter().all(|bound| bound.holds(arguments)))
    };
    for bounds in lists {
        let good = within(bounds);
        if number == libc::SYS_rt_sigreturn {
            // It needs the frame of a handler: `a_handler_returns`.
            continue;
        }
        assert_eq!(confined(number, good), End::Passed, "{place}: call {number}, {good:x?}");
        for bound in *bounds {
            for bit in bits(bound.mask) {
                let mut bad = good;
                bad[usize::from(bound.argument)] ^= 1 << bit;
                if !holds(&bad) {
                    let end = confined(number, bad);
                    assert_eq!(end, End::Refused, "{place}: call {number}, {bad:x?}");
                }
            }
            // The kernel ignores the high half of an int, so a filter must not refuse it.
            if bound.width == Width::Bits32 {
                let mut same = good;
                same[usize::from(bound.argument)] |= 1 << 40;
                let end = confined(number, same);
                assert_eq!(end, End::Passed, "{place}: call {number}, {same:x?}");
            }
        }
    }
}

fn check_thread(thread: Thread, stage: Stage) {
    let filters = Filters::new().unwrap();
    let filter = filters.of(thread);
    let lists = lists(thread, stage);
    let place = format!("{thread:?} thread, {stage:?}");
    let of = |number, arguments| confined(filter, stage, || make(number, arguments));
    for number in 0..NUMBERS {
        match lists.get(&number) {
            Some(lists) => check_call(number, lists, &of, &place),
            None => {
                let end = of(number, [u64::MAX; 6]);
                let probe = PROBES.contains(&number) && end == End::Passed;
                assert!(end == End::Refused || probe, "{place}: call {number}: {end:?}");
            }
        }
    }
    // The same calls by the x32 ABI, its own calls, and numbers that are none.
    let x32 = lists.keys().map(|number| number | X32).chain((512..548).map(|n| n | X32));
    for number in x32.chain([NUMBERS, 0x7fff_ffff, 0xffff_ffff, -1]) {
        assert_eq!(of(number, within(&[])), End::Refused, "{place}: call {number:#x}");
    }
}

#[test]
fn vcpu_threads_make_the_calls_of_the_list_and_no_other() {
    STAGES.into_iter().for_each(|stage| check_thread(Thread::Vcpu, stage));
}

#[test]
fn device_threads_make_the_calls_of_the_list_and_no_other() {
    STAGES.into_iter().for_each(|stage| check_thread(Thread::Devices, stage));
}

#[test]
fn disk_threads_make_the_calls_of_the_list_and_no_other() {
    STAGES.into_iter().for_each(|stage| check_thread(Thread::Disks, stage));
}

/// The filter has what the code of a disk calls, and not only what the list says.
#[test]
fn a_disk_reads_writes_zeroes_and_discards_within_the_filter_of_its_thread() {
    use std::os::unix::fs::FileExt as _;
    const BLOCK: u64 = 4096;
    let file = || tempfile::tempfile().unwrap();
    let (base, layer, limits) = (file(), file(), file());
    base.write_all_at(&[7; 16 * 4096], 0).unwrap();
    let bounds = Limits { share_bytes: BLOCK, quota_bytes: u64::MAX, floor_bytes: 0 };
    limits.write_all_at(&bounds.encode(), 0).unwrap();
    let spec = DiskSpec {
        size_bytes: 64 * BLOCK,
        base: base.into(),
        layers: Vec::new(),
        writable: Some(layer.try_clone().unwrap().into()),
        trees: Vec::new(),
    };
    let disk = RefCell::new((Disk::open(spec).unwrap(), Room::limited(limits)));
    let all = || -> Option<()> {
        let (disk, room) = &mut *disk.try_borrow_mut().ok()?;
        let mut bytes = [9; 2 * 4096];
        // More than the share, so that the free space is asked for.
        disk.check_room(room, 0, 0, 8 * BLOCK).ok()?;
        disk.write(2 * BLOCK, &IoList::of(&mut bytes)).ok()?;
        disk.read(BLOCK, &IoList::of(&mut bytes)).ok()?;
        // Zeroes are written where the base has data, and else are holes.
        disk.zero(3 * BLOCK + 512, 40 * BLOCK).ok()?;
        disk.discard(0, 64 * BLOCK).ok()?;
        disk.write(60 * BLOCK, &IoList::of(&mut bytes)).ok()
    };
    let filters = Filters::new().unwrap();
    let end = confined(filters.of(Thread::Disks), Stage::Guest, || {
        let _done = all();
    });
    assert_eq!(end, End::Passed);
    let mut last = [0; 2 * 4096];
    layer.read_exact_at(&mut last, 60 * BLOCK).unwrap();
    assert!(last[..4096] == [7; 4096] && last[4096..] == [9; 4096], "not all was done");
}

#[test]
fn main_threads_make_the_calls_of_the_list_and_no_other() {
    STAGES.into_iter().for_each(|stage| check_thread(Thread::Main, stage));
}

#[test]
fn recorder_threads_make_the_calls_of_the_list_and_no_other() {
    STAGES.into_iter().for_each(|stage| check_thread(Thread::Recorder, stage));
}

extern "C" fn does_nothing(_: i32) {}

#[test]
fn a_handler_returns() {
    let filters = Filters::new().unwrap();
    let set = |how: i32| {
        // SAFETY: a zeroed set is a valid one; the calls change only this thread's mask.
        unsafe {
            let mut usr1: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut usr1, libc::SIGUSR1);
            libc::sigprocmask(how, &raw const usr1, std::ptr::null_mut());
        }
    };
    // SAFETY: a handler that does nothing.
    unsafe { libc::signal(libc::SIGUSR1, does_nothing as extern "C" fn(i32) as usize) };
    set(libc::SIG_BLOCK);
    for (thread, stage) in THREADS.into_iter().flat_map(|t| STAGES.map(|stage| (t, stage))) {
        let before = || {
            // Pending in the child until it is unblocked, under the filter.
            // SAFETY: raises a blocked signal.
            unsafe { libc::raise(libc::SIGUSR1) };
        };
        let end = confined_after(filters.of(thread), stage, before, || set(libc::SIG_UNBLOCK));
        assert_eq!(end, End::Passed, "{thread:?}, {stage:?}");
    }
}

#[test]
fn a_call_of_the_32_bit_abi_ends_the_process() {
    let filters = Filters::new().unwrap();
    for (thread, stage) in THREADS.into_iter().zip(STAGES.into_iter().cycle()) {
        let end = confined(filters.of(thread), stage, || {
            // SAFETY: getpid of i386 (20), which is open, accept4 or writev of x86-64's tables. If
            // the kernel has no such ABI, the instruction raises SIGSEGV.
            unsafe {
                std::arch::asm!("int 0x80", inout("eax") 20 => _, out("r8") _, out("r9") _,
                    out("r10") _, out("r11") _);
                libc::_exit(42);
            }
        });
        if std::path::Path::new("/proc/sys/abi/vsyscall32").exists() {
            assert_eq!(end, End::Refused, "{thread:?}");
        }
    }
}

#[test]
fn what_a_taken_over_process_could_use_against_others_is_not_in_the_guest_stage() {
    let number = |call: &Call| call.number;
    let guest = |call: &&Call| call.until == Stage::Guest;
    let all: Vec<i64> = calls().filter(guest).map(number).collect();
    for forbidden in [
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_openat,
        libc::SYS_statx,
        libc::SYS_setsockopt,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::SYS_execve,
        libc::SYS_rt_sigaction,
        libc::SYS_userfaultfd,
        libc::SYS_seccomp,
        libc::SYS_prctl,
        libc::SYS_setresuid,
        libc::SYS_copy_file_range,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_register,
    ] {
        assert!(!all.contains(&forbidden), "call {forbidden}");
    }
    // In numbers, because the list names them by constants.
    let ioctls = [0x5421_u64, 0xae01, 0xc00c_aee0, 0xc020_aa00, 0x8010_aa01, 0xc018_aa3f];
    for thread in THREADS {
        let lists = lists(thread, Stage::Guest);
        let lists = lists.get(&libc::SYS_ioctl).cloned().unwrap_or_default();
        for request in ioctls {
            let arguments = [0, request, 0, 0, 0, 0];
            let holds = lists.iter().any(|list| list.iter().all(|bound| bound.holds(&arguments)));
            assert!(!holds, "{thread:?}: ioctl {request:#x}");
        }
        // F_SETFL, F_SETOWN, F_SETSIG, F_SETLEASE, F_DUPFD_CLOEXEC, F_ADD_SEALS.
        let fcntl = calls().filter(|call| call.number == libc::SYS_fcntl);
        for call in fcntl.filter(|call| call.is_for(thread, Stage::Guest)) {
            for command in [4, 8, 10, 1024, 1030, 1033] {
                let arguments = [0, command, 0, 0, 0, 0];
                let any = call.within.iter().any(|list| list.iter().all(|b| b.holds(&arguments)));
                assert!(!any && !call.within.is_empty(), "{thread:?}: fcntl {command}");
            }
        }
    }
}

/// The list as a table of `docs/security.md`.
fn table() -> Vec<String> {
    let row = |call: &Call| {
        let threads: Vec<_> = if call.threads.len() == THREADS.len() {
            vec!["all"]
        } else {
            let name = |thread: &Thread| match thread {
                Thread::Vcpu => "vCPU",
                Thread::Devices => "devices",
                Thread::Disks => "disks",
                Thread::Main => "main",
                Thread::Recorder => "recorder",
            };
            call.threads.iter().map(name).collect()
        };
        let threads = threads.join(", ");
        let until = if call.until == Stage::SetUp { ", set-up" } else { "" };
        let name = if call.bounds.is_empty() {
            call.name.to_owned()
        } else {
            format!("{}: {}", call.name, call.bounds)
        };
        format!("| {name} | {threads}{until} | {} |", call.reason)
    };
    calls().map(row).collect()
}

#[test]
fn the_documented_list_is_the_codes() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/security.md");
    let page = std::fs::read_to_string(page).unwrap();
    let head = "| system call: bounds of its arguments | threads | reason |";
    let (_, documented) = page.split_once(head).unwrap();
    let rows = documented.lines().skip(2).take_while(|line| line.starts_with('|'));
    let (documented, code): (Vec<_>, _) = (rows.collect(), table());
    assert!(documented == code, "docs/security.md should have:\n{}", code.join("\n"));
}
