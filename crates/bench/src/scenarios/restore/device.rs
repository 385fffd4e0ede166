//! A source with a given speed: what the papers' disk or a network would add to what
//! this host's page cache gives.
//!
//! One device: who reads waits for who came before. Batches are numbered as they lie, so reading on
//! costs nothing but the bytes, and a way forward is read through where that is shorter than a
//! seek. No reader sees a page before its time.

use crate::prelude::*;
use dayfly_pager::source::{Layout, Put, Source, SourceError};
use dayfly_pager::stored::Stored;
use dayfly_units::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// How fast it is.
#[derive(Debug, Clone, Copy)]
pub struct Speed {
    pub name: &'static str,
    /// 0: no limit.
    pub bytes_per_s: u64,
    /// To get somewhere else.
    pub seek_us: u64,
    /// From the last byte to its reader; other readers are served meanwhile.
    pub delay_us: u64,
    /// What is read ahead (Linux's own read-ahead for a
    /// disk).
    pub ahead_bytes: u64,
}

/// The disk of "Efficiently Restoring Virtual Machines", section 5.1.
pub const DISK: Speed = Speed {
    name: "disk",
    bytes_per_s: 170_000_000,
    seek_us: 8_000,
    delay_us: 0,
    ahead_bytes: 128 << 10,
};
/// 1 Gb/s.
pub const NETWORK: Speed =
    Speed { name: "network", bytes_per_s: 125_000_000, seek_us: 0, delay_us: 100, ahead_bytes: 0 };
/// This host's page cache.
pub const HOST: Speed =
    Speed { name: "host", bytes_per_s: 0, seek_us: 0, delay_us: 0, ahead_bytes: 0 };

#[derive(Debug)]
struct Head {
    /// The batch behind which it stands.
    at: u32,
    /// When it has done all that it was asked for.
    free: Instant,
}

/// A store behind a device.
#[derive(Debug)]
pub struct Slow {
    stored: Stored,
    speed: Speed,
    head: Mutex<Head>,
    fetches: AtomicU32,
    /// Which batches are there.
    pub there: Arc<Vec<AtomicBool>>,
    /// Bytes that were read.
    pub read: Arc<AtomicU64>,
    pub began: Instant,
}

impl Slow {
    pub fn new(stored: Stored, speed: Speed) -> Self {
        let there = stored.layout().batches.iter().map(|_| AtomicBool::new(false)).collect();
        let began = Instant::now();
        // It stands far away.
        let head = Mutex::new(Head { at: u32::MAX, free: began });
        Self {
            stored,
            speed,
            head,
            fetches: AtomicU32::new(0),
            there: Arc::new(there),
            read: Arc::default(),
            began,
        }
    }

    /// When bytes that were asked for now are there; `batches` are the lowest and the highest of
    /// what they are.
    fn due(
        &self,
        head: &mut Head,
        batches: [u32; 2],
        bytes: u64,
        batch_bytes: u64,
        stream: bool,
    ) -> Instant {
        let Speed { bytes_per_s, seek_us, ahead_bytes, .. } = self.speed;
        let now = Instant::now();
        if bytes_per_s == 0 {
            return now;
        }
        let time =
            |bytes: u64| Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / bytes_per_s);
        let [lowest, highest] = batches;
        let skipped = lowest.checked_sub(head.at);
        let start = if skipped == Some(0) || stream {
            // It has read on already.
            let ahead =
                if stream { head.free } else { now.checked_sub(time(ahead_bytes)).unwrap_or(now) };
            head.free.max(ahead)
        } else {
            let through = skipped.map(|n| time(u64::from(n) * batch_bytes));
            let seek = Duration::from_micros(seek_us);
            head.free.max(now) + through.map_or(seek, |through| through.min(seek))
        };
        head.at = highest.saturating_add(1);
        head.free = start + time(bytes);
        head.free
    }

    /// Reads batches at once; `stream` for who reads everything as it lies and has asked for it
    /// beforehand.
    pub fn read(
        &self,
        batches: &[u32],
        stream: bool,
        put: &mut Put<'_>,
    ) -> Result<(), SourceError> {
        let mut pages: Vec<(u32, Vec<u8>)> = Vec::new();
        let lowest = batches.iter().min().copied().unwrap_or(0);
        let highest = batches.iter().max().copied().unwrap_or(0);
        let due = {
            let mut head = lock(&self.head);
            let before = self.stored.read_bytes();
            self.stored.fetch_all(batches, &mut |frame, bytes| {
                pages.push((frame, bytes.to_vec()));
                Ok(())
            })?;
            let read = self.stored.read_bytes();
            self.read.store(read, Ordering::Relaxed);
            let mean = read / u64::from(self.fetches.fetch_add(1, Ordering::Relaxed) + 1);
            // What the pager still has of an earlier read is not read again.
            (read > before)
                .then(|| self.due(&mut head, [lowest, highest], read - before, mean, stream))
        };
        if let Some(due) = due.filter(|_| self.speed.bytes_per_s > 0) {
            // Who streams is not held up by every batch: only when it is ahead of the device by
            // more than a sleep's error.
            let wait = due + Duration::from_micros(if stream { 0 } else { self.speed.delay_us });
            let left = wait.saturating_duration_since(Instant::now());
            if !stream || left > Duration::from_millis(1) {
                sleep_until(wait);
            }
        }
        for (frame, bytes) in pages {
            put(frame, &bytes).map_err(SourceError::Install)?;
        }
        batches.iter().for_each(|batch| self.there[*batch as usize].store(true, Ordering::Release));
        Ok(())
    }

    /// When `bytes` of a file that is read as it lies are there.
    pub fn stream(&self, bytes: u64) -> Instant {
        let mut head = lock(&self.head);
        self.due(&mut head, [0, 0], bytes, 0, true)
    }

    /// When the device has given all that was asked of it.
    pub fn done(&self) -> Instant {
        lock(&self.head).free
    }
}

/// Sleeps, without the scheduler's slack at the end.
pub fn sleep_until(then: Instant) {
    const SLACK: Duration = Duration::from_micros(80);
    let left = then.saturating_duration_since(Instant::now());
    if left > SLACK {
        std::thread::sleep(left - SLACK);
    }
    while Instant::now() < then {
        std::hint::spin_loop();
    }
}

impl Source for Slow {
    fn layout(&self) -> &Layout {
        self.stored.layout()
    }

    fn read_bytes(&self) -> u64 {
        self.stored.read_bytes()
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        self.read(&[batch], false, put)
    }

    fn fetch_all(&self, batches: &[u32], put: &mut Put<'_>) -> Result<(), SourceError> {
        self.read(batches, false, put)
    }
}
