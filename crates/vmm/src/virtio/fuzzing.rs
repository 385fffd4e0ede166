//! Functions for the crate `fuzz`: devices without a VM and without a thread.

use super::device::{DeviceError, VsockSpec, host};
use super::set::DeviceSet;
use crate::config::LinkConfig;
use crate::disk::{DiskSpec, Reads};
use crate::meter::{Thread, ThreadClock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EpollEvent;

pub use super::registers::{register, status};
pub use super::vsock::fuzzing as vsock;

/// All devices; the caller is vCPU and both device threads.
#[derive(Debug)]
pub struct Devices {
    set: DeviceSet,
    pending: Vec<bool>,
    disks_pending: bool,
    reads: Reads,
    clock: ThreadClock,
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
        let clock = ThreadClock::new(&set.meter, Thread::Disks);
        Ok(Self { set, pending, disks_pending: false, reads: Reads::default(), clock })
    }

    /// Has every read of a disk in flight from now on. The calling thread makes all turns.
    pub fn read_in_flight(&mut self) {
        if self.reads.kind().io_uring {
            return;
        }
        self.reads = Reads::always();
        let disks = self.set.slots.iter().filter(|slot| slot.is_disk()).count();
        self.set.disk_kick.iter().for_each(|kick| self.reads.watch(kick, disks));
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

    /// One turn of each device thread at `now`, without a wait. Returns whether work is left.
    ///
    /// # Errors
    /// epoll or the eventfd of the disks fails.
    pub fn turn(&mut self, now: Instant) -> Result<bool, DeviceError> {
        let mut events = [EpollEvent::default(); 64];
        let wait = self.set.epoll.wait(0, &mut events);
        let count = wait.map_err(host("epoll_wait of the fuzzed devices"))?;
        self.set.take(&events[..count], now, &mut self.pending);
        let _deadline = self.set.serve(now, &mut self.pending);
        if let Some(kick) = self.set.disk_kick.as_deref() {
            // SAFETY: the eventfd lives in `self.set`, longer than the borrow.
            let fd = unsafe { BorrowedFd::borrow_raw(kick.as_raw_fd()) };
            let mut kicked = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            let failed = |e: Errno| host("poll of the eventfd of the disks")(e.into());
            if poll(&mut kicked, Some(&Timespec::default())).map_err(failed)? > 0 {
                kick.read().map_err(host("reading the eventfd of the disks"))?;
                self.disks_pending = true;
            }
            self.disks_pending =
                self.disks_pending && self.set.serve_disks(&mut self.reads, &mut self.clock);
        }
        Ok(self.disks_pending || self.pending.contains(&true))
    }
}
