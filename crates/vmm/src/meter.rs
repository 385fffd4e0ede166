//! What a VMM counts of its VM for the bill, in the first page of its exit file.
//!
//! The daemon makes the file ([`prepare`]), and the VMM maps the page ([`Meter::map`]). So the
//! figures outlast the VMM, however it ends, and a daemon reads them with the exit record, without
//! asking the VMM. Closer (section IV-B) counts at the border of back end and front end; so do the
//! devices here.
//!
//! | offset | size | content |
//! |---|---|---|
//! | 0 | 8 | [`MAGIC`]; zero as long as no VMM has mapped the page |
//! | 8 | 8 | [`VERSION`] |
//! | 16 | 8 | ns of CPU time of the device thread, since it served the guest first |
//! | 24 | 8 | the same of the disks' thread |
//! | 32 | 8 | the same of the main thread, since the guest ran first |
//! | 40 | 8 | ns of CPU time of the main thread until then: the set-up |
//! | 64 | 40 | packets received, their bytes, packets sent, their bytes, packets refused |
//! | 128 | 256 | for each disk: reads, their bytes, writes, their bytes |
//! | 384 | … | zero |
//! | 4096 | … | the JSON of the [`ExitRecord`](crate::control::ExitRecord), if there is one |
//!
//! All numbers are of 8 bytes, little-endian. A page that is being written has no checksum: any
//! content is valid, because a VMM that its guest took over may write any. The VMM of an earlier
//! version writes the JSON at offset 0.

use crate::config::MAX_DISKS;
use crate::disk::DiskTraffic;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the page, and the offset of the exit record.
pub const METER_BYTES: usize = 4096;
/// The first bytes of a page that a VMM has mapped.
pub const MAGIC: [u8; 8] = *b"DFMeter\n";
/// The version of the layout.
pub const VERSION: u64 = 1;
/// How long a thread may work between two looks at its clock, which is a system call.
const PERIOD: Duration = Duration::from_millis(1);

const WORDS: usize = METER_BYTES / 8;
const SET_UP: usize = 5;
const NET: usize = 8;
const NET_WORDS: usize = 5;
const DISKS: usize = 16;
const DISK_WORDS: usize = 4;

/// A thread whose CPU time is counted; the number of its word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// That of all devices but the disks.
    Devices = 2,
    /// That of the disks.
    Disks = 3,
    /// The main thread.
    Main = 4,
}

/// Packets of a VM, and their bytes without virtio headers, since its VMM was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetTraffic {
    /// Packets that the guest received.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Packets that the guest sent.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Packets of the guest that were dropped: sent before there was a link, not from the guest's
    /// address, or refused by the tap.
    pub refused_packets: u64,
}

/// What a page says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metered {
    /// Microseconds of CPU time of the two device threads.
    pub io_us: u64,
    /// The same of the main thread.
    pub main_us: u64,
    /// The same of the main thread until the guest ran first.
    pub set_up_us: u64,
    /// Packets.
    pub net: NetTraffic,
    /// What each disk has moved; those that the VM does not have are zero.
    pub disks: [DiskTraffic; MAX_DISKS],
}

#[repr(C, align(4096))]
#[derive(Debug)]
struct Page([AtomicU64; WORDS]);

#[derive(Debug)]
enum Place {
    /// Of this process alone, for tests and for a file without the page.
    Own(Box<Page>),
    /// Mapped until the process ends.
    Mapped(&'static Page),
}

/// The page, as the VMM writes it. No figure goes down.
#[derive(Debug, Clone)]
pub struct Meter(Arc<Place>);

impl Default for Meter {
    /// In memory of this process alone.
    fn default() -> Self {
        Self(Arc::new(Place::Own(Box::new(Page([const { AtomicU64::new(0) }; WORDS])))))
    }
}

/// Makes the page of an empty exit file that is open for appending.
///
/// The zeros are written, because a file that is only extended gets its page with the first store:
/// if the file system is full then, that ends the VMM (SIGBUS).
///
/// # Errors
/// The file system has no room for the page, or another error of it.
pub fn prepare(mut exit: &File) -> io::Result<()> {
    exit.write_all(&[0; METER_BYTES]).map_err(|e| {
        let message = format!("writing {METER_BYTES} bytes, the page of the VM's bill: {e}");
        io::Error::new(e.kind(), message)
    })
}

/// Divides the content of an exit file into what was counted and the JSON of the exit record, which
/// is empty if there is none.
#[must_use]
pub fn split(file: &[u8]) -> (Option<Metered>, &[u8]) {
    let Some((page, record)) = file.split_at_checked(METER_BYTES) else { return (None, file) };
    match page.first_chunk() {
        Some(&MAGIC) => (Metered::decode(page), record),
        Some(&[0, ..]) => (None, record),
        _ => (None, file),
    }
}

impl NetTraffic {
    fn max(self, other: Self) -> Self {
        Self {
            received_packets: self.received_packets.max(other.received_packets),
            received_bytes: self.received_bytes.max(other.received_bytes),
            sent_packets: self.sent_packets.max(other.sent_packets),
            sent_bytes: self.sent_bytes.max(other.sent_bytes),
            refused_packets: self.refused_packets.max(other.refused_packets),
        }
    }
}

impl Metered {
    /// The higher one of each figure. A VMM that its guest took over may lower what it has written.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            io_us: self.io_us.max(other.io_us),
            main_us: self.main_us.max(other.main_us),
            set_up_us: self.set_up_us.max(other.set_up_us),
            net: self.net.max(other.net),
            disks: std::array::from_fn(|number| {
                let (one, two) = (self.disks[number], other.disks[number]);
                DiskTraffic {
                    reads: one.reads.max(two.reads),
                    read_bytes: one.read_bytes.max(two.read_bytes),
                    writes: one.writes.max(two.writes),
                    written_bytes: one.written_bytes.max(two.written_bytes),
                }
            }),
        }
    }

    /// Decodes a page. `None` if it is too short, or of another version.
    #[must_use]
    pub fn decode(page: &[u8]) -> Option<Self> {
        let words = page.get(..METER_BYTES)?.as_chunks::<8>().0;
        let word = |at: usize| words.get(at).map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if words.first() != Some(&MAGIC) || word(1) != VERSION {
            return None;
        }
        let us = |at: usize| word(at) / 1000;
        let disk = |number: usize| {
            let [reads, read_bytes, writes, written_bytes] =
                [0, 1, 2, 3].map(|n| word(DISKS + number * DISK_WORDS + n));
            DiskTraffic { reads, read_bytes, writes, written_bytes }
        };
        let [received_packets, received_bytes, sent_packets, sent_bytes, refused_packets] =
            [0, 1, 2, 3, 4].map(|n| word(NET + n));
        Some(Self {
            io_us: us(Thread::Devices as usize).saturating_add(us(Thread::Disks as usize)),
            main_us: us(Thread::Main as usize),
            set_up_us: us(SET_UP),
            net: NetTraffic {
                received_packets,
                received_bytes,
                sent_packets,
                sent_bytes,
                refused_packets,
            },
            disks: std::array::from_fn(disk),
        })
    }
}

impl Meter {
    /// Maps the page of the exit file `exit`, which [`prepare`] has made.
    ///
    /// # Errors
    /// The file cannot be mapped for reading and writing.
    pub fn map(exit: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses; it is never unmapped.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                METER_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                exit.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a page that stays mapped, of words that are only read and written as atomics. If
        // the file is shorter, an access ends the process with an exit record (SIGBUS).
        let page: &'static Page = unsafe { &*page.cast() };
        page.0[1].store(VERSION.to_le(), Ordering::Relaxed);
        page.0[0].store(u64::from_ne_bytes(MAGIC), Ordering::Release);
        Ok(Self(Arc::new(Place::Mapped(page))))
    }

    fn word(&self, at: usize) -> Option<&AtomicU64> {
        match &*self.0 {
            Place::Own(page) => page.0.get(at),
            Place::Mapped(page) => page.0.get(at),
        }
    }

    fn now(&self, at: usize) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Adds to a figure. It wraps after 2^64, which no VM reaches.
    fn add(&self, at: usize, n: u64) {
        if let Some(word) = self.word(at) {
            word.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Counts a request of disk `number` that has read `bytes`.
    pub fn read(&self, number: u8, bytes: usize) {
        self.disk(number, 0, bytes);
    }

    /// Counts a request of disk `number` that has written `bytes`.
    pub fn written(&self, number: u8, bytes: usize) {
        self.disk(number, 2, bytes);
    }

    fn disk(&self, number: u8, first: usize, bytes: usize) {
        let number = usize::from(number);
        if number < MAX_DISKS {
            let at = DISKS + number * DISK_WORDS + first;
            self.add(at, 1);
            self.add(at + 1, bytes as u64);
        }
    }

    /// Counts a packet that the guest has received, of `bytes` without its virtio header.
    pub fn received(&self, bytes: u64) {
        self.add(NET, 1);
        self.add(NET + 1, bytes);
    }

    /// Counts a packet that the guest has sent.
    pub fn sent(&self, bytes: u64) {
        self.add(NET + 2, 1);
        self.add(NET + 3, bytes);
    }

    /// Counts a packet of the guest that was dropped.
    pub fn refused(&self) {
        self.add(NET + NET_WORDS - 1, 1);
    }

    /// The packets so far.
    #[must_use]
    pub fn net(&self) -> NetTraffic {
        let [received_packets, received_bytes, sent_packets, sent_bytes, refused_packets] =
            [0, 1, 2, 3, 4].map(|n| self.now(NET + n));
        NetTraffic { received_packets, received_bytes, sent_packets, sent_bytes, refused_packets }
    }

    /// The figures of the first `disks` disks.
    #[must_use]
    pub fn disks(&self, disks: usize) -> Vec<DiskTraffic> {
        let disk = |number: usize| {
            let [reads, read_bytes, writes, written_bytes] =
                [0, 1, 2, 3].map(|n| self.now(DISKS + number * DISK_WORDS + n));
            DiskTraffic { reads, read_bytes, writes, written_bytes }
        };
        (0..disks.min(MAX_DISKS)).map(disk).collect()
    }
}

/// The CPU time of one thread, which the thread itself notes.
#[derive(Debug)]
pub struct ThreadClock {
    meter: Meter,
    thread: Thread,
    /// CPU time of the thread before it served the guest, in ns; `None` before the first look.
    before_ns: Option<u64>,
    looked: Instant,
}

impl ThreadClock {
    /// A clock of the calling thread, which counts from the first [`Self::look`] on.
    #[must_use]
    pub fn new(meter: &Meter, thread: Thread) -> Self {
        Self { meter: meter.clone(), thread, before_ns: None, looked: Instant::now() }
    }

    /// Notes the CPU time, if the last look was long ago. Call it before the thread sleeps: what is
    /// not noted then is less than 1 ms.
    pub fn look(&mut self) {
        let now = Instant::now();
        if self.before_ns.is_some() && now.duration_since(self.looked) < PERIOD {
            return;
        }
        let all = cpu_ns();
        let note = |at: usize, ns: u64| {
            if let Some(word) = self.meter.word(at) {
                word.store(ns, Ordering::Relaxed);
            }
        };
        match self.before_ns {
            Some(before) => note(self.thread as usize, all.saturating_sub(before)),
            None => {
                self.before_ns = Some(all);
                if self.thread == Thread::Main {
                    note(SET_UP, all);
                }
            }
        }
        self.looked = now;
    }
}

/// CPU time of the calling thread, in ns.
fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec. Each thread has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
#[path = "meter_tests.rs"]
mod tests;
