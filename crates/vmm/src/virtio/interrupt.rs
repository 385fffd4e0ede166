//! A device's interrupt: the status that the driver reads and acknowledges, and the line.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The device used a buffer (virtio 1.2 section 4.2.2, InterruptStatus bit 0).
pub const USED_BUFFER: u32 = 1;
/// The configuration or the device's status changed (bit 1).
pub const CONFIG_CHANGE: u32 = 2;

/// InterruptStatus and an edge-triggered line. Neither needs a lock, so a vCPU can acknowledge
/// while the device works.
#[derive(Debug)]
pub struct Interrupt {
    status: AtomicU32,
    line: EventFd,
}

impl Interrupt {
    /// A device's interrupt, not pending.
    ///
    /// # Errors
    /// `eventfd2(2)` fails.
    pub fn new() -> io::Result<Self> {
        Ok(Self { status: AtomicU32::new(0), line: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    /// The eventfd that KVM_IRQFD watches.
    pub const fn line(&self) -> &EventFd {
        &self.line
    }

    /// Sets `bits` in the status, then raises the line.
    pub fn raise(&self, bits: u32) {
        self.status.fetch_or(bits, Ordering::SeqCst);
        self.edge();
    }

    /// Raises the line again if the driver has not acknowledged everything, because an edge may be
    /// lost between save and load. A surplus edge is harmless: the driver reads the status.
    pub fn raise_again(&self) {
        if self.status() != 0 {
            self.edge();
        }
    }

    fn edge(&self) {
        // The write fails only if the counter is at its maximum, and then the line is raised
        // already.
        let _ = self.line.write(1);
    }

    /// Value of InterruptStatus.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// Clears `bits`: the driver wrote them to InterruptACK.
    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Sets the status, for reset and load, without raising the line.
    pub fn set_status(&self, bits: u32) {
        self.status.store(bits, Ordering::SeqCst);
    }
}
