//! Switches between tasks, as the kernel reports them on each CPU (perf_event_open(2)).
//!
//! The software event "context switches" with a period of 1 writes a sample whenever a CPU leaves a
//! task, with the task's ids and the time. No tracefs is needed, and nothing is left in the kernel
//! when the descriptor is closed, however this process ends. Softirqs are tracepoints, whose
//! numbers only tracefs has.

use crate::prelude::*;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a CPU's ring, a power of two: 32,768 samples of 32 bytes.
const RING_PAGES: usize = 256;
const PAGE: usize = 4096;
const RING_BYTES: usize = RING_PAGES * PAGE;
/// Offsets of `data_head` and `data_tail` in `struct perf_event_mmap_page`.
const HEAD: usize = 1024;
const TAIL: usize = 1032;
/// Bytes of `struct perf_event_attr`, version 5.
const ATTRIBUTES: usize = 112;
const TYPE_SOFTWARE: u32 = 1;
const TYPE_TRACEPOINT: u32 = 2;
const CONTEXT_SWITCHES: u64 = 3;
const SAMPLE_TID_TIME: u64 = 2 | 4;
/// The bit `use_clockid`, for CLOCK_MONOTONIC.
const USE_CLOCK: u64 = 1 << 25;
const RECORD_LOST: u32 = 2;
const RECORD_SAMPLE: u32 = 9;

/// The task that a CPU ran at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// ns of CLOCK_MONOTONIC.
    pub ns: u64,
    /// The process; 0 for the idle task.
    pub pid: u32,
}

/// What is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The CPU leaves the task.
    Switch,
    /// The tracepoint of this number.
    Tracepoint(u64),
}

/// Samples of one CPU.
#[derive(Debug)]
pub struct Samples {
    _fd: OwnedFd,
    ring: NonNull<u8>,
    /// Samples that did not fit into the ring.
    pub lost: u64,
}

impl Drop for Samples {
    fn drop(&mut self) {
        // SAFETY: the mapping of `on`, which nothing uses any more.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), PAGE + RING_BYTES) };
    }
}

/// `struct perf_event_attr`.
fn attributes(what: What) -> [u8; ATTRIBUTES] {
    let (kind, config) = match what {
        What::Switch => (TYPE_SOFTWARE, CONTEXT_SWITCHES),
        What::Tracepoint(number) => (TYPE_TRACEPOINT, number),
    };
    let mut bytes = [0; ATTRIBUTES];
    bytes[..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..8].copy_from_slice(&u32::try_from(ATTRIBUTES).unwrap_or(u32::MAX).to_ne_bytes());
    bytes[8..16].copy_from_slice(&config.to_ne_bytes());
    // Each event is a sample.
    bytes[16..24].copy_from_slice(&1_u64.to_ne_bytes());
    bytes[24..32].copy_from_slice(&SAMPLE_TID_TIME.to_ne_bytes());
    bytes[40..48].copy_from_slice(&USE_CLOCK.to_ne_bytes());
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
        // SAFETY: a new mapping of the event's ring.
        let ring = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE + RING_BYTES,
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
        Ok(Self { _fd: fd, ring, lost: 0 })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of the ring's first page, which the kernel shares.
        unsafe { self.ring.add(offset).cast().as_ref() }
    }

    fn byte(&self, at: u64) -> u8 {
        let at = usize::try_from(at).unwrap_or(0) % RING_BYTES;
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
            let (kind, size) = (word(0), u64::from(word(4) >> 16));
            if size < 8 {
                break;
            }
            match kind {
                RECORD_SAMPLE => to.push(Sample { pid: word(8), ns: long(16) }),
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
        // Tests of other threads count too.
        let pairs = all.windows(2).filter(|pair| pair[1].pid == own);
        let seen: u64 = pairs.map(|pair| pair[1].ns - pair[0].ns).sum();
        let took_ns = u64::try_from(took.as_nanos()).unwrap();
        assert!((took_ns / 2..=100 * took_ns).contains(&seen), "{seen} ns, {took:?}");
    }
}
