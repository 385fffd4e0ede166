//! The event loop of the device thread.

use super::device::{DeviceError, host};
use super::set::DeviceSet;
use super::tokens::{FIRST_SOCKET, LISTENER, TAP, WAKE};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmm_sys_util::epoll::{EpollEvent, EventSet};

/// Most events taken from epoll at once.
const MAX_EVENTS: usize = 64;

impl DeviceSet {
    /// Serves the devices until [`Self::stop`]; the body of the device thread.
    ///
    /// # Errors
    /// epoll fails. Nothing that a guest does ends the loop.
    pub fn run_loop(&self) -> Result<(), DeviceError> {
        let mut events = [EpollEvent::default(); MAX_EVENTS];
        // Devices with work left from the last turn.
        let mut pending = vec![false; self.slots.len()];
        let mut timeout = 0;
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
        }
    }

    /// Serves the devices that are pending or due at `now`, unless a gate is wanted. Returns when
    /// the next device is due.
    pub(super) fn serve(&self, now: Instant, pending: &mut [bool]) -> Option<Instant> {
        let mut deadline: Option<Instant> = None;
        let shared = (&self.pages, &self.room);
        for (slot, pending) in self.slots.iter().zip(pending) {
            let next = slot.deadline();
            if (*pending || next.is_some_and(|next| next <= now)) && !self.gate.wanted() {
                *pending = slot.serve(&self.mem, &self.writes, shared, now, &|| self.gate.wanted());
                self.note_no_space(slot);
            }
            deadline = deadline.into_iter().chain(slot.deadline()).min();
        }
        deadline
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
                        device.kicks().get(queue).map(vmm_sys_util::eventfd::EventFd::read);
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
