//! `freeze_cost`: how long a guest would be paused for a copy of its memory, for several methods,
//! and the cost of a page that it writes afterwards. RAM is a private mapping of a memfd, as a
//! clone's is. A tenth of 1.5 GiB was written, for any size of RAM. Prints medians; no guest runs.
#![allow(clippy::unwrap_used, reason = "a tool for developers; it stops at the first surprise")]

use dayfly_vmm::memory::pages::Pages;
use dayfly_vmm::memory::{YieldPoints, anonymous, backing::Backing, lay_over, live};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const WRITTEN: u64 = 150 * MIB / PAGE;
const TIMES: usize = 7;
/// The number of pages that are left when rounds of copying end.
const LEFT: u64 = 256;

// userfaultfd(2), linux/userfaultfd.h
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;
const WP_SHMEM: u64 = 1 << 12;

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn median(mut of: impl FnMut() -> f64) -> f64 {
    let mut times: Vec<f64> = (0..TIMES).map(|_| of()).collect();
    times.sort_by(f64::total_cmp);
    times[TIMES / 2]
}

/// RAM with written pages, spread evenly, and the numbers of these pages.
fn ram(bytes: u64) -> (GuestMemoryMmap, Vec<u64>) {
    let file =
        File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    let memory = anonymous(bytes).unwrap();
    lay_over(&memory, &Backing::of(file), bytes, &[], true).unwrap();
    // In rows of 64, as in a guest's memory.
    let step = bytes / PAGE / (WRITTEN / 64);
    let written: Vec<u64> =
        (0..WRITTEN).map(|n| (n / 64 * step + n % 64) * PAGE).map(beyond_hole).collect();
    written.iter().for_each(|at| memory.write_obj(1_u8, GuestAddress(*at)).unwrap());
    (memory, written)
}

fn beyond_hole(at: u64) -> u64 {
    if at < 3 << 30 { at } else { at + (1 << 30) }
}

fn write_again(memory: &GuestMemoryMmap, written: &[u64]) {
    written.iter().step_by(8).for_each(|at| memory.write_obj(2_u8, GuestAddress(*at)).unwrap());
}

/// fork(2), `TIMES` times; the child does nothing.
fn fork(memory: &GuestMemoryMmap, written: &[u64]) -> (f64, f64) {
    let mut after = Vec::new();
    let pause = median(|| {
        let began = Instant::now();
        // SAFETY: the child calls only pause(2), until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::pause() };
        }
        let took = ms(began);
        let began = Instant::now();
        write_again(memory, written);
        after.push(ms(began) * 1e3 / (written.len() / 8) as f64);
        // SAFETY: the child of this process, reaped once.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        took
    });
    (pause, median_of(after))
}

fn median_of(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn ioctl<T>(fd: &OwnedFd, request: u64, argument: &mut T) {
    // SAFETY: each request takes a struct of the size that its number names, which `T` is.
    let got = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    assert!(got >= 0, "{}", std::io::Error::last_os_error());
}

/// Write-protection of all of RAM. Later writes would wait for a thread; that time is not counted.
fn protect(memory: &GuestMemoryMmap) -> f64 {
    // SAFETY: the call returns a new descriptor, or a negative number.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    // SAFETY: the descriptor is new, so nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) };
    ioctl(&fd, UFFDIO_API, &mut [0xaa_u64, WP_SHMEM, 0]);
    let ranges: Vec<[u64; 2]> = memory
        .iter()
        .map(|region| {
            use vm_memory::GuestMemoryRegion;
            let host = region.get_host_address(vm_memory::MemoryRegionAddress(0)).unwrap();
            [host.addr() as u64, region.len()]
        })
        .collect();
    ranges.iter().for_each(|[at, len]| ioctl(&fd, UFFDIO_REGISTER, &mut [*at, *len, 2, 0]));
    let each = |mode: u64| {
        let began = Instant::now();
        ranges.iter().for_each(|[at, len]| ioctl(&fd, UFFDIO_WRITEPROTECT, &mut [*at, *len, mode]));
        ms(began)
    };
    median(|| {
        let took = each(1);
        each(0);
        took
    })
}

fn main() {
    println!(
        "| RAM | fork(2) | then a write | write-protection | the last {LEFT} pages of copying |"
    );
    println!("|---|---|---|---|---|");
    for mib in [256, 1536, 4096] {
        let bytes = mib * MIB;
        let (memory, written) = ram(bytes);
        let (forked, after) = fork(&memory, &written);
        let protected = protect(&memory);
        let target =
            File::from(rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        target.set_len(bytes).unwrap();
        let mut pages = Pages::none(bytes);
        (0..LEFT).for_each(|n| pages.insert(n * (bytes / PAGE / LEFT)));
        let copied = median(|| {
            let began = Instant::now();
            live::copy(&memory, bytes, &pages, &target, &mut YieldPoints::none()).unwrap();
            ms(began)
        });
        println!(
            "| {mib} MiB | {forked:.1} ms | {after:.1} us | {protected:.1} ms | {copied:.2} ms |"
        );
    }
}
