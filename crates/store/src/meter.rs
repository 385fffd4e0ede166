//! Progress of a long operation, and a way to stop it.

use crate::errors::{IoError, IoResult};
use dayfly_units::sync::lock;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Progress of one operation, written by the store and read by the code that shows it. The
/// operation pays one atomic addition per piece of some hundred KiB.
#[derive(Debug, Default)]
pub struct Meter {
    part: Mutex<(&'static str, u64)>,
    done: AtomicU64,
    stopped: AtomicBool,
}

/// The progress of an operation at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reading {
    /// Name of the current part, for people; empty before the operation begins.
    pub part: &'static str,
    /// Bytes of this part that are done.
    pub done: u64,
    /// Bytes of this part in all; 0 if unknown. An estimate, because files may come and go
    /// meanwhile.
    pub total: u64,
}

impl Meter {
    /// The progress now.
    #[must_use]
    pub fn reading(&self) -> Reading {
        let (part, total) = *lock(&self.part);
        Reading { part, done: self.done.load(Ordering::Relaxed), total }
    }

    /// Asks the operation to stop. [`crate::Store::verify`] and [`crate::Store::gc_pages_of`] then
    /// end soon with an `Io` error of kind `Interrupted`. All other operations continue, but a
    /// [`crate::RamWork`] may ask [`Self::is_stopped`] and fail.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether [`Self::stop`] was called.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Begins another part, of `total` bytes.
    pub(crate) fn begin(&self, part: &'static str, total: u64) {
        *lock(&self.part) = (part, total);
        self.done.store(0, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// As [`Self::add`], but fails with `Interrupted` after [`Self::stop`].
    pub(crate) fn step(&self, bytes: u64) -> io::Result<()> {
        self.add(bytes);
        if self.is_stopped() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the caller stopped it"));
        }
        Ok(())
    }

    /// As [`Self::step`]; the error names the file that was next.
    pub(crate) fn step_at(&self, bytes: u64, path: &Path) -> IoResult<()> {
        self.step(bytes).map_err(IoError::new("stopping before", path))
    }
}
