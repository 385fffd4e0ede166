//! Functions for the crate `fuzz`: devices without a VM and without a thread.

use super::device::{DeviceError, VsockSpec, host};
use super::set::DeviceSet;
use crate::config::LinkConfig;
use crate::disk::DiskSpec;
use std::os::fd::OwnedFd;
use std::time::Instant;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EpollEvent;

pub use super::registers::{register, status};
pub use super::vsock::fuzzing as vsock;

/// All devices; the caller is vCPU and device thread.
#[derive(Debug)]
pub struct Devices {
    set: DeviceSet,
    pending: Vec<bool>,
}

impl Devices {
    /// Disks with these media, vsock, rng, and `nets` network devices, in this order.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(
        mem: GuestMemoryMmap,
        disks: Vec<DiskSpec>,
        nets: u8,
        vsock: VsockSpec,
    ) -> Result<Self, DeviceError> {
        let count = u8::try_from(disks.len()).unwrap_or(u8::MAX);
        let set = DeviceSet::without_vm(mem, count, nets, vsock)?;
        set.insert_disks(disks)?;
        let pending = vec![false; set.slots.len()];
        Ok(Self { set, pending })
    }

    /// The devices as a VM has them.
    #[must_use]
    pub const fn set(&self) -> &DeviceSet {
        &self.set
    }

    /// Connects the network devices.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn connect(&self, link: &LinkConfig, tap: Option<OwnedFd>) -> Result<(), DeviceError> {
        self.set.connect(link, tap)
    }

    /// One turn of the device thread at `now`, without a wait. Returns whether work is left.
    ///
    /// # Errors
    /// epoll fails.
    pub fn turn(&mut self, now: Instant) -> Result<bool, DeviceError> {
        let mut events = [EpollEvent::default(); 64];
        let wait = self.set.epoll.wait(0, &mut events);
        let count = wait.map_err(host("epoll_wait of the fuzzed devices"))?;
        self.set.take(&events[..count], now, &mut self.pending);
        let _deadline = self.set.serve(now, &mut self.pending);
        Ok(self.pending.contains(&true))
    }
}
