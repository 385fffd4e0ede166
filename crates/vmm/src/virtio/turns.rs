//! Turns at the disks for other threads than theirs.
//!
//! The thread of the disks holds locks while it serves a queue, and takes them again at once if a
//! guest keeps the queue full. A mutex is not fair, so another thread might never get them. The
//! main thread asks for a turn, and so does a vCPU thread that accesses a register of a disk.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of threads that want, or have, a lock of a disk.
#[derive(Debug, Default)]
pub struct Turns(AtomicUsize);

/// The wish of one thread, and then its turn; it ends when this is dropped.
#[derive(Debug)]
pub struct Turn<'t>(&'t Turns);

impl Turns {
    /// Asks for a turn. The caller then takes the locks, and drops both soon, because the disks
    /// wait. It must not pause the devices meanwhile: the thread of the disks waits inside the
    /// gate.
    pub fn take(&self) -> Turn<'_> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Turn(self)
    }

    /// Whether a thread wants a turn.
    pub fn wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Waits until no thread wants a turn, or until `stop`: a guest whose vCPUs access registers
    /// without end must not hold up a pause. The caller has no lock of a disk.
    pub fn give(&self, stop: impl Fn() -> bool) {
        while self.0.load(Ordering::SeqCst) > 0 && !stop() {
            std::thread::yield_now();
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}
