//! A VMM that its guest took over hurts only its guest.
//!
//! Threads of a real `dayfly-vmm` make hostile system calls ([`Taken`]): in their jail, under their
//! filters, with their descriptors. A second test does what a filter would forbid, by duplicates of
//! those descriptors (pidfd_getfd(2)), as if the filters had failed too.

use crate::ops::create::forking::{end, forked, generations, says};
use crate::ops::create::harness::{Room, WITHIN};
use crate::vm::Vm;
use dayfly_hostile::takeover::{Fate, Taken};
use dayfly_pager::wire::Settings;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;

/// An open descriptor of a process.
struct Open {
    number: u64,
    /// What it is: the target of its link in `/proc/<pid>/fd`.
    what: String,
}

fn open_descriptors(pid: u32) -> Vec<Open> {
    let folder = format!("/proc/{pid}/fd");
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.unwrap();
            let number = entry.file_name().to_string_lossy().parse().unwrap();
            // Threads that are not stopped may have closed it meanwhile.
            let what = std::fs::read_link(entry.path()).ok()?;
            Some(Open { number, what: what.to_string_lossy().into_owned() })
        })
        .collect();
    found.sort_by_key(|open| open.number);
    found
}

/// One descriptor of each kind, since filters do not know one socket from another.
fn of_each_kind(open: Vec<Open>) -> Vec<Open> {
    let mut seen = BTreeSet::new();
    let kind = |open: &Open| open.what.split(':').next().unwrap_or_default().to_owned();
    open.into_iter().filter(|open| seen.insert(kind(open))).collect()
}

/// A system call that a VMM has no reason to make.
struct Attack {
    what: String,
    number: i64,
    arguments: [u64; 6],
}

impl Attack {
    fn new(what: impl Into<String>, number: i64, arguments: &[u64]) -> Self {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        Self { what: what.into(), number, arguments: all }
    }
}

/// The ring of io_uring of a VMM with disks: there is one, which its thread `disks` has made.
fn ring_of(open: &[Open]) -> u64 {
    let rings: Vec<_> = open.iter().filter(|open| open.what.contains("[io_uring]")).collect();
    let [ring] = rings[..] else { panic!("expected one ring, got {}", rings.len()) };
    ring.number
}

/// The calls of the thread `kind` that would attack a VMM's ring. Only the thread of the disks may
/// enter it, without a mask of signals and without flags but GETEVENTS.
fn attacks_on_ring(kind: Option<&str>, ring: u64, scratch: u64) -> Vec<Attack> {
    const REGISTER_FILES: u64 = 2;
    const GETEVENTS: u64 = 1;
    const SQ_WAKEUP: u64 = 2;
    let enter = libc::SYS_io_uring_enter;
    let mut attacks = vec![
        Attack::new("another ring", libc::SYS_io_uring_setup, &[8, scratch]),
        Attack::new(
            "files for the ring",
            libc::SYS_io_uring_register,
            &[ring, REGISTER_FILES, scratch, 1],
        ),
        Attack::new("the ring woken", enter, &[ring, 1, 0, GETEVENTS | SQ_WAKEUP]),
        Attack::new("the ring with a mask", enter, &[ring, 0, 0, GETEVENTS, scratch, 8]),
    ];
    if kind != Some("disks") {
        attacks.push(Attack::new("the ring entered", enter, &[ring, 0, 0, GETEVENTS]));
    }
    attacks
}

/// The calls that a VMM's descriptors and memory would be attacked with.
fn attacks(open: &[Open], scratch: u64, ram: u64) -> Vec<Attack> {
    const FIONBIO: u64 = 0x5421;
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    const UFFDIO_UNREGISTER: u64 = 0x8010_aa01;
    const KVM_CREATE_VM: u64 = 0xae01;
    const KVM_CREATE_DEVICE: u64 = 0xc00c_aee0;
    const KVM_SET_IDENTITY_MAP_ADDR: u64 = 0x4008_ae48;
    const TUNSETIFF: u64 = 0x4004_54ca;
    const FICLONE: u64 = 0x4004_9409;
    const SHARED: u64 = libc::MAP_SHARED as u64;
    const PRIVATE: u64 = libc::MAP_PRIVATE as u64;
    let mut attacks = vec![
        Attack::new("an executable mapping", libc::SYS_mmap, &[0, PAGE, 7, PRIVATE | 0x20, !0, 0]),
        Attack::new("executable memory", libc::SYS_mprotect, &[scratch & !(PAGE - 1), PAGE, 5]),
        Attack::new("RAM moved", libc::SYS_mremap, &[ram, PAGE, PAGE, 1]),
        Attack::new("RAM grown", libc::SYS_mremap, &[ram, PAGE, 1 << 30, 1]),
        Attack::new("a file opened", libc::SYS_openat, &[!99, scratch, 0]),
        Attack::new("a signal to all", libc::SYS_kill, &[!0, 9]),
        Attack::new("another process's memory", libc::SYS_process_vm_readv, &[1, 0, 0, 0, 0, 0]),
        Attack::new("another's descriptor", libc::SYS_pidfd_getfd, &[3, 0, 0]),
        Attack::new("a new process", libc::SYS_clone, &[17]),
        Attack::new("a new userfaultfd", libc::SYS_userfaultfd, &[0]),
        Attack::new("a network socket", libc::SYS_socket, &[2, 1, 0]),
        Attack::new("a namespace", libc::SYS_unshare, &[0x1000_0000]),
        Attack::new("a program", libc::SYS_execve, &[scratch, 0, 0]),
        Attack::new("a BPF program", libc::SYS_bpf, &[0]),
    ];
    for &Open { number, ref what } in open {
        let mut add = |how: &str, call, arguments: &[u64]| {
            attacks.push(Attack::new(format!("{how} on {number} ({what})"), call, arguments));
        };
        let fcntl = libc::SYS_fcntl;
        add("FIONBIO", libc::SYS_ioctl, &[number, FIONBIO, scratch]);
        add("F_SETFL", fcntl, &[number, libc::F_SETFL as u64, libc::O_DIRECT as u64]);
        add("F_SETLEASE", fcntl, &[number, 1024, 0]);
        add("F_OFD_SETLK", fcntl, &[number, 37, scratch]);
        add("a shared mapping", libc::SYS_mmap, &[0, PAGE, 1, SHARED, number, 0]);
        add("a private mapping", libc::SYS_mmap, &[0, PAGE, 1, PRIVATE, number, 0]);
        add("UFFDIO_REGISTER", libc::SYS_ioctl, &[number, UFFDIO_REGISTER, scratch]);
        add("UFFDIO_UNREGISTER", libc::SYS_ioctl, &[number, UFFDIO_UNREGISTER, scratch]);
        add("KVM_CREATE_VM", libc::SYS_ioctl, &[number, KVM_CREATE_VM, 0]);
        add("KVM_CREATE_DEVICE", libc::SYS_ioctl, &[number, KVM_CREATE_DEVICE, scratch]);
        add("an identity map", libc::SYS_ioctl, &[number, KVM_SET_IDENTITY_MAP_ADDR, scratch]);
        add("TUNSETIFF", libc::SYS_ioctl, &[number, TUNSETIFF, scratch]);
        add("FICLONE", libc::SYS_ioctl, &[number, FICLONE, number]);
        add("fchmod", libc::SYS_fchmod, &[number, 0o666]);
        add("flock", libc::SYS_flock, &[number, 2]);
    }
    attacks
}

/// Where the VMM has its guest's RAM: its largest mapping.
fn ram_of(pid: u32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let ranges = maps.lines().filter_map(|line| line.split_whitespace().next()?.split_once('-'));
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let ranges = ranges.map(|(from, to)| (number(from), number(to)));
    ranges.max_by_key(|(from, to)| to - from).unwrap().0
}

fn pid_of(vm: &Vm) -> u32 {
    vm.process().unwrap().id().pid
}

/// The kinds of thread; the main thread has the program's name.
const THREADS: [Option<&str>; 4] = [None, Some("devices"), Some("disks"), Some("vcpu0")];

/// Takes a thread of a VMM. A new thread has its name once it runs.
fn taken(pid: u32, kind: Option<&str>) -> Taken {
    let begun = Instant::now();
    loop {
        match Taken::thread(pid, kind) {
            Ok(taken) => return taken,
            Err(e) => assert!(begun.elapsed() < WITHIN, "{kind:?}: {e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A room whose snapshot's memory has not arrived.
async fn slow_room() -> Room {
    let settings = Settings { ahead_bytes_per_s: 4096, ..Settings::default() };
    Room::with(0, settings, &generations("800", "10"), true).await
}

/// Asserts that `vm`'s guest, and a new clone, have the memory that they should have.
async fn unharmed(room: &Room, vm: &Arc<Vm>) {
    assert!(room.pager().is_filling(), "the pager has ended");
    let (children, _) = forked(room, vm, 1).await;
    let child = &children[0];
    says(child, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    end(room, child).await;
    let clone = room.create(&"after".parse().unwrap()).await.unwrap().keep();
    says(&clone, "verify ok seed 8\nready").await;
    end(room, &clone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_hostile_call_of_a_vmm_is_refused_and_ends_it_alone() {
    let room = slow_room().await;
    let sibling = room.create(&"sibling".parse().unwrap()).await.unwrap().keep();
    says(&sibling, "verify ok seed 8\nready").await;
    let mut next = 0;
    let mut done = 0;
    for kind in THREADS {
        let mut at = 0;
        loop {
            next += 1;
            let name = format!("evil{next}").parse().unwrap();
            let evil = room.create(&name).await.unwrap().keep();
            let pid = pid_of(&evil);
            let refused = tokio::task::spawn_blocking(move || -> Option<String> {
                let mut taken = taken(pid, kind);
                let open = open_descriptors(pid);
                let (ring, scratch) = (ring_of(&open), taken.scratch());
                let mut attacks = attacks(&of_each_kind(open), scratch, ram_of(pid));
                attacks.extend(attacks_on_ring(kind, ring, scratch));
                let attack = attacks.get(at)?;
                let fate = taken.call(attack.number, attack.arguments).unwrap();
                assert_eq!(fate, Fate::Refused, "{kind:?}: {}", attack.what);
                Some(attack.what.clone())
            });
            let Some(what) = refused.await.unwrap() else {
                end(&room, &evil).await;
                break;
            };
            tokio::time::timeout(WITHIN, evil.wait_gone()).await.unwrap();
            let message = evil.live().exit.unwrap().message;
            assert!(message.contains("seccomp"), "{what}: cause {message:?}");
            end(&room, &evil).await;
            (at, done) = (at + 1, done + 1);
        }
    }
    println!("{done} hostile calls, each refused");
    unharmed(&room, &sibling).await;
    end(&room, &sibling).await;
    room.empty().await;
}

/// Duplicates a descriptor of another process: the same description.
fn duplicate(pid: u32, number: u64) -> Option<OwnedFd> {
    // SAFETY: system calls with integers; a new descriptor is owned by what is returned.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        assert!(pidfd >= 0);
        let pidfd = OwnedFd::from_raw_fd(i32::try_from(pidfd).unwrap());
        let got = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0);
        (got >= 0).then(|| OwnedFd::from_raw_fd(i32::try_from(got).unwrap()))
    }
}

/// What a program could do with a descriptor if no filter held it back.
fn abuse(open: &Open, fd: &OwnedFd) {
    let raw = fd.as_raw_fd();
    // SAFETY: system calls on an owned descriptor with integers, or with addresses of locals and of
    // a mapping of one page made here.
    unsafe {
        if open.what.starts_with('/') || open.what.contains("memfd") {
            let junk = [0xa5_u8; 4096];
            for block in 0..64 {
                libc::pwrite(raw, junk.as_ptr().cast(), junk.len(), block * 4096);
            }
        }
        // Reading a mapped memfd makes pages of zeroes in a template that fills. The filters keep a
        // VMM from that; the pager's part is tested in crates/pager (`hostile_tests.rs`).
        if open.what.starts_with('/') {
            for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
                let mut stat: libc::stat = std::mem::zeroed();
                libc::fstat(raw, &raw mut stat);
                let length = usize::try_from(stat.st_size).unwrap();
                let at = libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, flags, raw, 0);
                if at != libc::MAP_FAILED {
                    for page in (0..length).step_by(4096) {
                        std::ptr::read_volatile(at.cast::<u8>().add(page));
                    }
                    libc::munmap(at, length);
                }
            }
        }
        let mut off: libc::c_int = 0;
        libc::ioctl(raw, libc::FIONBIO, &raw mut off);
        libc::fcntl(raw, libc::F_SETFL, libc::O_DIRECT);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_vmm_does_with_its_descriptors_hurts_no_other_vm() {
    let room = slow_room().await;
    let sibling = room.create(&"sibling".parse().unwrap()).await.unwrap().keep();
    says(&sibling, "verify ok seed 8\nready").await;
    let evil = room.create(&"evil".parse().unwrap()).await.unwrap().keep();
    says(&evil, "ready").await;
    // What it froze belongs to its clones too.
    let (children, _) = forked(&room, &evil, 1).await;
    let pid = pid_of(&evil);
    for open in open_descriptors(pid) {
        let Some(fd) = duplicate(pid, open.number) else { continue };
        // Its standard descriptors are those of this test.
        if open.number > 2 {
            abuse(&open, &fd);
        }
    }
    let child = &children[0];
    says(child, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    unharmed(&room, &sibling).await;
    for vm in [child, &evil, &sibling] {
        end(&room, vm).await;
    }
    room.empty().await;
}
