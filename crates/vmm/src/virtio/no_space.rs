//! Disks of a device set that wait for space of the host: announced, and tried again.

use super::set::DeviceSet;
use super::slot::Slot;
use crate::disk::{NoSpace, Room};
use dayfly_units::sync::lock;
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd};

impl DeviceSet {
    /// Limits the growth of the disks' writable layers. Call it before the guest runs.
    pub fn limit_growth(&self, limits: File) {
        *lock(&self.room) = Room::limited(limits);
    }

    /// Announces that the disk of `slot` waits, if it does. Only the thread of the disks calls it,
    /// after it has served the slot of a disk that did not wait before.
    pub(super) fn note_no_space(&self, slot: &Slot) {
        if let Some(why) = slot.waits() {
            *lock(&self.stall.why) = Some(why);
            // The write fails only if the counter is at its maximum, and then the main thread
            // learns it already.
            let _ = self.stall.event.write(1);
        }
    }

    /// A descriptor that is readable after a disk has begun to wait, until [`Self::take_stall`].
    #[must_use]
    pub fn stall_event(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd lives in `self`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.stall.event.as_raw_fd()) }
    }

    /// Takes the event. Returns whether a disk waits.
    pub fn take_stall(&self) -> bool {
        // The read fails only if there is no event.
        let _ = self.stall.event.read();
        let _turn = self.turns.take();
        let why = self.slots.iter().find_map(Slot::waits);
        *lock(&self.stall.why) = why;
        why.is_some()
    }

    /// Why a disk waits for space of the host; `None`: none waits. Never waits for a device.
    #[must_use]
    pub fn no_space(&self) -> Option<NoSpace> {
        *lock(&self.stall.why)
    }

    /// Makes the disks that wait try their requests again.
    pub fn retry(&self) {
        // First, so that a disk that has no space again is noted after this.
        *lock(&self.stall.why) = None;
        let _turn = self.turns.take();
        self.slots.iter().for_each(Slot::retry);
    }
}
