//! A device's interrupt: the status the driver reads and acknowledges, and the line.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The device used a buffer (virtio 1.2 section 4.2.2, InterruptStatus bit 0).
pub const USED_BUFFER: u32 = 1;
/// The configuration or the device's status changed (bit 1).
pub const CONFIG_CHANGE: u32 = 2;

/// InterruptStatus and an edge-triggered line. Free of locks: a vCPU acknowledges while the device works.
#[derive(Debug)]
pub struct Interrupt {
    status: AtomicU32,
    line: EventFd,
}

impl Interrupt {
    /// No interrupt pending.
    ///
    /// # Errors
    /// What `eventfd2(2)` says.
    pub fn new() -> io::Result<Self> {
        Ok(Self { status: AtomicU32::new(0), line: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    /// What KVM_IRQFD is told to watch.
    pub const fn line(&self) -> &EventFd {
        &self.line
    }

    /// Sets bits of the status, then raises the line.
    pub fn raise(&self, bits: u32) {
        self.status.fetch_or(bits, Ordering::SeqCst);
        self.edge();
    }

    /// Raises the line again where the driver has not acknowledged everything: an edge may have been lost between
    /// save and load. One too many is harmless, the driver finds what it has to do by the status.
    pub fn raise_again(&self) {
        if self.status() != 0 {
            self.edge();
        }
    }

    fn edge(&self) {
        // Fails only where the counter is at its end, and then the line is raised already.
        let _ = self.line.write(1);
    }

    /// InterruptStatus.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// InterruptACK.
    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Reset, and load.
    pub fn set_status(&self, bits: u32) {
        self.status.store(bits, Ordering::SeqCst);
    }
}
