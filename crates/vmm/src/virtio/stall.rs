//! Disks that wait because the host has no space for a request.
//!
//! The thread of the disks cannot stop the vCPUs, so it raises an event for the main thread, which
//! does.

use super::device::{DeviceError, host};
use crate::disk::NoSpace;
use std::sync::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Why a disk waits, and the event that announces it.
#[derive(Debug)]
pub struct Stall {
    /// Kept beside the disks, because the thread of the disks holds a disk for as long as a
    /// request takes.
    pub(super) why: Mutex<Option<NoSpace>>,
    pub(super) event: EventFd,
}

impl Stall {
    /// No disk waits.
    ///
    /// # Errors
    /// `eventfd2(2)` fails.
    pub fn new() -> Result<Self, DeviceError> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host("eventfd2"))?;
        Ok(Self { why: Mutex::default(), event })
    }
}
