//! The loops of the two device threads: one serves the disks, the other all other devices.
//!
//! A request of a disk may take as long as the host's disk does. The thread of the other devices
//! takes no lock of a disk, so packets and connections go on meanwhile.

use super::device::{DeviceError, host};
use super::set::DeviceSet;
use super::slot::Slot;
use super::tokens::{FIRST_SOCKET, LISTENER, TAP, WAKE};
use crate::disk::{DiskReads, Reads};
use crate::meter::{Thread, ThreadClock};
use dayfly_units::sync::lock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmm_sys_util::epoll::{EpollEvent, EventSet};

/// Most events taken from epoll at once.
const MAX_EVENTS: usize = 64;

impl DeviceSet {
    /// Serves all devices but the disks until [`Self::stop`]; the body of their thread.
    ///
    /// # Errors
    /// epoll fails. Nothing that a guest does ends the loop.
    pub fn run_loop(&self) -> Result<(), DeviceError> {
        let mut events = [EpollEvent::default(); MAX_EVENTS];
        // Devices with work left from the last turn.
        let mut pending = vec![false; self.slots.len()];
        let mut timeout = 0;
        let mut clock = ThreadClock::new(&self.meter, Thread::Devices);
        loop {
            let count = match self.epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(host("epoll_wait of the device thread")(e)),
            };
            let Some(now) = self.gate.enter() else {
                return Ok(());
            };
            if self.loaded.swap(false, Ordering::SeqCst) {
                self.slots.iter().for_each(|slot| slot.interrupt().raise_again());
            }
            self.take(&events[..count], now, &mut pending);
            let deadline = self.serve(now, &mut pending);
            self.gate.leave();
            timeout = if pending.contains(&true) { 0 } else { milliseconds(deadline, now) };
            clock.look();
        }
    }

    /// Serves the devices but disks that are pending or due at `now`, unless a gate is wanted.
    /// Returns when the next device is due.
    pub(super) fn serve(&self, now: Instant, pending: &mut [bool]) -> Option<Instant> {
        let (mut deadline, stop) = (None::<Instant>, || self.gate.wanted());
        for (slot, pending) in self.slots.iter().zip(pending) {
            let next = slot.deadline();
            if (*pending || next.is_some_and(|next| next <= now)) && !self.gate.wanted() {
                *pending = slot.serve(&self.mem, &self.writes, &self.pages, now, &stop);
            }
            deadline = deadline.into_iter().chain(slot.deadline()).min();
        }
        deadline
    }

    /// Serves the disks until [`Self::stop`]; the body of their thread. Returns at once if there
    /// are no disks.
    ///
    /// One eventfd wakes the thread, for whichever disk is kicked: to look at a queue in which
    /// nothing is new costs less than the system calls that say which queue it is. If work may be
    /// left, because a gate is wanted or other disks had a turn, the thread does not sleep.
    ///
    /// `reads` was made by the calling thread.
    ///
    /// # Errors
    /// The eventfd cannot be read. Nothing that a guest does ends the loop.
    pub fn run_disks(&self, mut reads: Reads) -> Result<(), DeviceError> {
        let Some(kick) = &self.disk_kick else { return Ok(()) };
        reads.watch(kick, self.disks().count());
        let mut kind = self.note_reads(&reads);
        // True at first, so that the thread of a paused VM waits at the gate, and kicks before the
        // VM runs need not wake it.
        let mut more = true;
        let mut clock = ThreadClock::new(&self.meter, Thread::Disks);
        loop {
            if !more {
                match kick.read() {
                    Ok(_) => {}
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(host("reading the eventfd of the disks")(e)),
                }
            }
            if self.gate.enter().is_none() {
                return Ok(());
            }
            more = self.serve_disks(&mut reads, &mut clock);
            self.gate.leave();
            clock.look();
            if kind != reads.kind() {
                kind = self.note_reads(&reads);
            }
        }
    }

    /// Has [`Self::disk_reads`] say how the disks are read from now on.
    fn note_reads(&self, reads: &Reads) -> DiskReads {
        let kind = reads.kind();
        *lock(&self.disk_reads) = Some(kind);
        kind
    }

    /// Serves a part of each disk's queue, unless a gate is wanted. Returns whether work may be
    /// left, of any disk if `reads` has emptied the eventfd of the disks.
    pub(super) fn serve_disks(&self, reads: &mut Reads, clock: &mut ThreadClock) -> bool {
        let (mut more, shared) = (false, (&self.pages, &self.room, &self.meter));
        for slot in self.disks() {
            self.turns.give(|| self.gate.wanted());
            if self.gate.wanted() {
                return true;
            }
            let stop = || self.gate.wanted() || self.turns.wanted();
            let waited = slot.waits().is_some();
            more |= slot.serve_disk(&self.mem, &self.writes, shared, (reads, clock), &stop);
            if !waited {
                self.note_no_space(slot);
            }
        }
        more | reads.take_kicked()
    }

    fn disks(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(|slot| slot.is_disk())
    }

    /// Marks in `pending` the devices that `events` concern, and drains the eventfds.
    pub(super) fn take(&self, events: &[EpollEvent], now: Instant, pending: &mut [bool]) {
        for event in events {
            match event.data() {
                // The thread has passed the gate again, which is all that a wake is for.
                WAKE => drop(self.wake.read()),
                LISTENER => self.vsock_event(pending, |vsock| vsock.accept(now)),
                TAP => {
                    for (slot, pending) in self.slots.iter().zip(&mut *pending) {
                        *pending |= slot.is_net();
                    }
                }
                token if token >= FIRST_SOCKET => {
                    let set = EventSet::from_bits_truncate(event.events());
                    self.vsock_event(pending, |vsock| vsock.event(token, set, now));
                }
                token => {
                    let slot = usize::try_from(token >> 8).unwrap_or(usize::MAX);
                    let queue = usize::try_from(token & 0xff).unwrap_or(usize::MAX);
                    if let (Some(device), Some(pending)) =
                        (self.slots.get(slot), pending.get_mut(slot))
                    {
                        *pending = true;
                        // Read before the queue is looked at, so that a later kick wakes the thread
                        // again.
                        device.kicks().get(queue).map(|kick| kick.read());
                    }
                }
            }
        }
    }

    fn vsock_event(&self, pending: &mut [bool], act: impl FnOnce(&mut super::vsock::Vsock)) {
        let mut act = Some(act);
        for (slot, pending) in self.slots.iter().zip(pending) {
            let done = slot.with_vsock(|vsock| act.take().map(|act| act(vsock)));
            *pending |= done.is_some();
        }
    }
}

/// The timeout for epoll: milliseconds up to the deadline, rounded up; −1 without a deadline.
fn milliseconds(deadline: Option<Instant>, now: Instant) -> i32 {
    let Some(deadline) = deadline else { return -1 };
    let left = deadline.saturating_duration_since(now) + Duration::from_millis(1);
    i32::try_from(left.as_millis()).unwrap_or(i32::MAX)
}
