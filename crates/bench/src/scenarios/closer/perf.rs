//! Switches between tasks, as the kernel reports them on each CPU (perf_event_open(2)).
//!
//! An event with the bit `context_switch` gets a record whenever a CPU leaves a task, and whenever
//! it begins one, with the task's ids and the time. No tracefs is needed, and nothing is left in
//! the kernel when the descriptor is closed, however this process ends. Softirqs are tracepoints,
//! whose numbers only tracefs has.
//!
//! The software event "context switches" does not do: of five switches away from the idle task, the
//! kernel (6.18) reported one, and the idle time was that of the task after it.

use crate::prelude::*;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;
/// Offsets of `data_head` and `data_tail` in `struct perf_event_mmap_page`.
const HEAD: usize = 1024;
const TAIL: usize = 1032;
/// Bytes of `struct perf_event_attr`, version 5.
const ATTRIBUTES: usize = 112;
const TYPE_SOFTWARE: u32 = 1;
const TYPE_TRACEPOINT: u32 = 2;
/// PERF_COUNT_SW_DUMMY: an event that never happens, and has other records.
const DUMMY: u64 = 9;
const SAMPLE_TID_TIME: u64 = 2 | 4;
/// The bit `sample_id_all`: other records than samples end with the task's ids and the time.
const ID_IN_ALL: u64 = 1 << 18;
/// The bit `context_switch`.
const SWITCHES: u64 = 1 << 26;
/// The bit `use_clockid`, for CLOCK_MONOTONIC.
const USE_CLOCK: u64 = 1 << 25;
const RECORD_LOST: u32 = 2;
const RECORD_SAMPLE: u32 = 9;
/// PERF_RECORD_SWITCH_CPU_WIDE.
const RECORD_SWITCH: u32 = 15;
/// PERF_RECORD_MISC_SWITCH_OUT.
const OUT: u32 = 1 << 13;

/// The task that a CPU ran at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// ns of CLOCK_MONOTONIC.
    pub ns: u64,
    /// The process; 0 for the idle task.
    pub pid: u32,
    /// Whether the CPU begins the task here.
    pub begins: bool,
}

/// What is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The CPU leaves the task, or begins it.
    Switch,
    /// The tracepoint of this number.
    Tracepoint(u64),
}

impl What {
    /// Bytes of a CPU's ring; its pages are a power of two. A record has 32 bytes. VMs that write
    /// to disks make 100,000 switches a second, and this process may have to wait for a CPU.
    const fn ring_bytes(self) -> usize {
        match self {
            Self::Switch => 4096 * PAGE,
            Self::Tracepoint(_) => 256 * PAGE,
        }
    }
}

/// Samples of one CPU.
#[derive(Debug)]
pub struct Samples {
    _fd: OwnedFd,
    /// A page of the kernel's, and behind it the ring.
    ring: NonNull<u8>,
    ring_bytes: usize,
    /// Samples that did not fit into the ring.
    pub lost: u64,
}

impl Drop for Samples {
    fn drop(&mut self) {
        // SAFETY: the mapping of `on`, which nothing uses any more.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), PAGE + self.ring_bytes) };
    }
}

/// `struct perf_event_attr`.
fn attributes(what: What) -> [u8; ATTRIBUTES] {
    let (kind, config, flags) = match what {
        What::Switch => (TYPE_SOFTWARE, DUMMY, USE_CLOCK | ID_IN_ALL | SWITCHES),
        What::Tracepoint(number) => (TYPE_TRACEPOINT, number, USE_CLOCK),
    };
    let mut bytes = [0; ATTRIBUTES];
    bytes[..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..8].copy_from_slice(&u32::try_from(ATTRIBUTES).unwrap_or(u32::MAX).to_ne_bytes());
    bytes[8..16].copy_from_slice(&config.to_ne_bytes());
    // Each event is a sample.
    bytes[16..24].copy_from_slice(&1_u64.to_ne_bytes());
    bytes[24..32].copy_from_slice(&SAMPLE_TID_TIME.to_ne_bytes());
    bytes[40..48].copy_from_slice(&flags.to_ne_bytes());
    bytes[92..96].copy_from_slice(&libc::CLOCK_MONOTONIC.to_ne_bytes());
    bytes
}

impl Samples {
    /// Begins to sample `cpu`.
    ///
    /// # Errors
    /// The kernel refuses (CAP_PERFMON, perf_event_paranoid).
    pub fn on(cpu: u32, what: What) -> Result<Self> {
        let attributes = attributes(what);
        let failed = || format!("perf_event_open of {what:?} on CPU {cpu}");
        // SAFETY: reads the attributes, whose length is in them.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                attributes.as_ptr(),
                -1,
                i32::try_from(cpu)?,
                -1,
                8, // PERF_FLAG_FD_CLOEXEC
            )
        };
        let fd = i32::try_from(fd).unwrap_or(-1);
        if fd < 0 {
            return Err(io::Error::last_os_error()).with_context(failed);
        }
        // SAFETY: the kernel has just made the descriptor.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let ring_bytes = what.ring_bytes();
        // SAFETY: a new mapping of the event's ring.
        let ring = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE + ring_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if ring == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).with_context(failed);
        }
        let ring = NonNull::new(ring.cast()).context("a ring at address 0")?;
        Ok(Self { _fd: fd, ring, ring_bytes, lost: 0 })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of the ring's first page, which the kernel shares.
        unsafe { self.ring.add(offset).cast().as_ref() }
    }

    fn byte(&self, at: u64) -> u8 {
        let at = usize::try_from(at).unwrap_or(0) % self.ring_bytes;
        // SAFETY: inside the mapping, behind its first page. The kernel writes no byte between tail
        // and head.
        unsafe { self.ring.add(PAGE + at).read() }
    }

    /// Moves all samples that wait to the end of `to`, in the order of time.
    pub fn take(&mut self, to: &mut Vec<Sample>) {
        let head = self.word(HEAD).load(Ordering::Acquire);
        let mut tail = self.word(TAIL).load(Ordering::Relaxed);
        while tail + 8 <= head {
            let word = |offset: u64| {
                u32::from_ne_bytes([0, 1, 2, 3].map(|n| self.byte(tail + offset + n)))
            };
            let long = |offset| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
            let (kind, misc, size) = (word(0), word(4) & 0xffff, u64::from(word(4) >> 16));
            if size < 8 {
                break;
            }
            match kind {
                RECORD_SAMPLE => to.push(Sample { pid: word(8), ns: long(16), begins: false }),
                // Behind the ids of the other task.
                RECORD_SWITCH => {
                    to.push(Sample { pid: word(16), ns: long(24), begins: misc & OUT == 0 });
                }
                RECORD_LOST => self.lost += long(16),
                _ => {}
            }
            tail += size;
        }
        self.word(TAIL).store(tail, Ordering::Release);
    }
}

/// The number of a tracepoint such as `irq/softirq_entry`; `None` if tracefs is not mounted.
pub fn tracepoint(name: &str) -> Option<u64> {
    let path = format!("/sys/kernel/tracing/events/{name}/id");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_spins_and_sleeps_is_seen_for_as_long_as_it_says() {
        let Ok(mut samples) = Samples::on(0, What::Switch) else {
            assert!(!rustix::process::geteuid().is_root(), "root may sample");
            return;
        };
        let (own, mut all) = (std::process::id(), Vec::new());
        dayfly_host::numa::stay_on(&[0]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        // The last of these is the start of the time that is asserted.
        samples.take(&mut all);
        let begun = dayfly_host::cpu_time::own();
        while dayfly_host::cpu_time::own() < begun + Duration::from_millis(20) {}
        std::thread::sleep(Duration::from_millis(1));
        let took = dayfly_host::cpu_time::own() - begun;
        samples.take(&mut all);
        assert!(all.is_sorted_by_key(|sample| sample.ns));
        assert!(all.iter().any(|sample| sample.pid == own), "{own} in {} samples", all.len());
        assert_eq!(samples.lost, 0);
        let (ins, outs): (Vec<&Sample>, Vec<&Sample>) =
            all.iter().partition(|sample| sample.begins);
        assert!(ins.len().abs_diff(outs.len()) <= 1, "{} begun, {} left", ins.len(), outs.len());
        // Tests of other threads count too.
        let pairs = all.windows(2).filter(|pair| pair[1].pid == own && !pair[1].begins);
        let seen: u64 = pairs.map(|pair| pair[1].ns - pair[0].ns).sum();
        let took_ns = u64::try_from(took.as_nanos()).unwrap();
        assert!((took_ns / 2..=100 * took_ns).contains(&seen), "{seen} ns, {took:?}");
    }
}
