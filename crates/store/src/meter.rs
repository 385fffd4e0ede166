//! How far a long operation is, and whether anybody still wants it.

use crate::errors::{IoError, IoResult};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Read by who shows progress while the store works; costs the work one atomic addition for each piece of some hundred KiB.
#[derive(Debug, Default)]
pub struct Meter {
    part: Mutex<(&'static str, u64)>,
    done: AtomicU64,
    stopped: AtomicBool,
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reading {
    /// What is being done, for people; empty before it has begun.
    pub part: &'static str,
    /// Bytes of this part so far.
    pub done: u64,
    /// Of so many; 0 where that is not known. An estimate: files may come and go meanwhile.
    pub total: u64,
}

impl Meter {
    /// How far it is now.
    #[must_use]
    pub fn reading(&self) -> Reading {
        let (part, total) = *self.part.lock().unwrap_or_else(PoisonError::into_inner);
        Reading { part, done: self.done.load(Ordering::Relaxed), total }
    }

    /// Nobody waits any more: [`crate::Store::verify`] and [`crate::Store::gc_pages_of`] end soon, with an `Io` error of kind
    /// `Interrupted`. Everything else goes on.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Another part begins, of so many bytes.
    pub(crate) fn begin(&self, part: &'static str, total: u64) {
        *self.part.lock().unwrap_or_else(PoisonError::into_inner) = (part, total);
        self.done.store(0, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// As [`Self::add`], for work that ends when it was stopped.
    pub(crate) fn step(&self, bytes: u64) -> io::Result<()> {
        self.add(bytes);
        if self.stopped.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "nobody waits for it any more"));
        }
        Ok(())
    }

    /// As [`Self::step`], naming the file that was next.
    pub(crate) fn step_at(&self, bytes: u64, path: &Path) -> IoResult<()> {
        self.step(bytes).map_err(IoError::new("stopping before", path))
    }
}
