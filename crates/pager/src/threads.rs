//! The threads that fetch pages: fault threads, and the prefetcher.
//!
//! All fault threads share one epoll(7) of the clones' userfaultfds. A clone's faults go to one
//! thread at a time, which serves the clone until no fault is left: two threads on one clone only
//! take CPUs from the guest. If pages come slowly, the thread re-arms the clone before it reads, so
//! that another thread can serve its other faults. No fault is handed from thread to thread; while
//! one thread waits for a slow read, the others serve.
//!
//! A clone may fault without end, so it does not decide how long it is served. After [`QUANTUM`]
//! faults it goes to the end of the epoll's queue, and all fault threads but one may serve it at
//! the same time. A clone with absurdly many faults is killed ([`Clone::count_fault`]).
//!
//! On a disk that seeks, a random read costs much more than a sequential one. Then the rest of the
//! working set is read in one sweep. A fault on a batch that the sweep will reach soon waits for
//! the sweep, because seeking there and back is slower for all clones.

use crate::clones::Clone;
use crate::order::Order;
use crate::pace::Pace;
use crate::source::Source;
use crate::template::{Brought, Template};
use crate::wire::Settings;
use dayfly_sys::ioprio;
use dayfly_units::sync::lock;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::time::Timespec;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The epoll data of `stopped`, at which a fault thread ends.
pub const STOP: u64 = u64::MAX;
/// How long a fault thread spins for the next fault before it sleeps. Waking a thread takes longer
/// than many guests take to their next fault. If waking takes 15 us, a single fault takes 55 us
/// with 20 us, and 29 us with 50, 100 or 200 (`dayfly-bench faults`).
const LINGER: Duration = Duration::from_micros(50);
/// The most faults of a clone that a thread serves before it looks for those of other clones. At
/// its end the clone is re-armed, which costs two system calls.
pub const QUANTUM: u32 = 32;
/// ONESHOT, so that only one thread gets a clone's faults.
const WATCHED: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);
/// For at most this long, once, faults wait while the prefetcher reads batches in a row.
const FIND_OUT: Duration = Duration::from_millis(100);
/// The prefetcher's pause after a batch that could not be fetched.
const REST: Duration = Duration::from_millis(500);

/// The state that all threads share.
pub struct Shared<S> {
    pub template: Template<S>,
    pub order: Mutex<Order>,
    /// Notified if `order` has more batches, or if `stop` is set.
    pub more: Condvar,
    pub faults: OwnedFd,
    /// An eventfd, readable if the prefetcher has taken the last batch of the working set, or if
    /// everything is present.
    pub news: OwnedFd,
    pub stop: AtomicBool,
    pub began: Instant,
    /// For each fault thread the milliseconds after `began` at which its current fault began; 0 if
    /// it has none.
    pub busy: Vec<AtomicU64>,
    /// An eventfd, readable if fault threads must end.
    pub stopped: OwnedFd,
    pub pace: Pace,
    /// When faults began to wait for the prefetcher ([`FIND_OUT`]).
    pub puzzled: OnceLock<Instant>,
    pub settings: Settings,
}

impl<S: Source> Shared<S> {
    pub fn order(&self) -> MutexGuard<'_, Order> {
        lock(&self.order)
    }

    fn notify(&self) {
        // Fails only if the counter is at its maximum; then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.news, &1_u64.to_ne_bytes());
    }

    /// The most threads that serve one clone at the same time: all but one, so that a clone that
    /// keeps them busy does not keep all.
    fn most_servers(&self) -> u32 {
        u32::try_from(self.busy.len()).unwrap_or(u32::MAX).saturating_sub(1).max(1)
    }

    /// Adds a clone to the epoll. Its faults go to one thread, until that thread calls
    /// [`Self::watch_again`].
    pub fn watch(&self, id: u64, clone: &Arc<Clone>) -> io::Result<()> {
        self.template.clones.insert(id, Arc::clone(clone));
        Ok(epoll::add(&self.faults, clone.uffd().fd(), EventData::new_u64(id), WATCHED)?)
    }

    /// Re-arms the clone: its next fault, or one that waits already, goes to any free thread.
    fn watch_again(&self, id: u64, clone: &Clone) {
        // Fails only if the clone was forgotten meanwhile.
        let _ = epoll::modify(&self.faults, clone.uffd().fd(), EventData::new_u64(id), WATCHED);
    }

    /// Removes a clone that has ended and whose memory is gone.
    pub fn forget(&self, id: u64, clone: &Clone) {
        let _ = epoll::delete(&self.faults, clone.uffd().fd());
        self.template.clones.remove(id);
    }

    /// Re-arms killed clones. A fault thread does not do that if a killed clone's descriptor
    /// reports an error, because it would do so without end.
    pub fn watch_killed(&self) {
        for (id, clone) in self.template.clones.all() {
            if clone.is_killed() {
                self.watch_again(id, &clone);
            }
        }
    }

    /// The loop of a fault thread, until `stopped`.
    pub fn serve_faults(&self, thread: usize) {
        let mut events = Vec::with_capacity(1);
        loop {
            events.clear();
            match epoll::wait(&self.faults, spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return say!("waiting for faults: {e}"),
            }
            for event in &events {
                let (id, flags) = (event.data.u64(), event.flags);
                if id == STOP {
                    return;
                }
                let clone = self.template.clones.get(id);
                if let (Some(clone), Some(busy)) = (clone, self.busy.get(thread)) {
                    self.turn(id, &clone, busy, flags.contains(EventFlags::ERR));
                }
            }
        }
    }

    /// Serves a clone for a quantum, unless enough threads serve it: the last of those re-arms it.
    /// If its VMM has made the descriptor blocking, which a VMM has no reason for, the clone is
    /// killed: the kernel reports no faults for such a descriptor.
    fn turn(&self, id: u64, clone: &Arc<Clone>, busy: &AtomicU64, is_blocking: bool) {
        let was_killed = is_blocking && kill_blocking(clone);
        if !clone.enter(self.most_servers()) {
            return;
        }
        self.template.counters.turns.fetch_add(1, Ordering::Relaxed);
        self.serve_clone(id, clone, busy);
        clone.leave();
        if !was_killed {
            self.watch_again(id, clone);
        }
    }

    /// Reads the faults that wait and notes them, for the time in which no fault thread does: every
    /// one of them waits for its read. The deadline then holds for these faults too. Batches are
    /// fetched by the prefetcher if it can.
    pub fn note_faults(&self) {
        let mut events = Vec::with_capacity(1);
        // As many as clones, so that a clone that faults without end does not keep this thread.
        for _ in self.template.clones.all() {
            events.clear();
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if epoll::wait(&self.faults, spare_capacity(&mut events), Some(&now)).is_err() {
                return;
            }
            let Some(event) = events.first() else { return };
            let (id, flags) = (event.data.u64(), event.flags);
            let Some(clone) = self.template.clones.get(id) else { return };
            let was_killed = flags.contains(EventFlags::ERR) && kill_blocking(&clone);
            for _ in 0..QUANTUM {
                let Ok(Some(address)) = clone.uffd().next() else { break };
                let mut wanted = None;
                let comes = |batch| {
                    wanted = Some(batch);
                    true
                };
                self.template.fault(&clone, address, comes, |_| Vec::new());
                if let Some(batch) = wanted {
                    self.order().later(batch);
                }
            }
            if !was_killed {
                self.watch_again(id, &clone);
            }
        }
    }

    fn serve_clone(&self, id: u64, clone: &Arc<Clone>, busy: &AtomicU64) {
        // The loop checks `stop`, because a clone that faults without end must not prevent the end
        // of the pager.
        let (mut last, mut served): (Option<Instant>, u32) = (None, 0);
        while served < QUANTUM && !self.stop.load(Ordering::Acquire) {
            match clone.uffd().next() {
                Ok(Some(address)) => {
                    let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    busy.store(now.max(1), Ordering::Relaxed);
                    served += 1;
                    if !self.pace.is_quick() && clone.has_room(self.most_servers()) {
                        self.watch_again(id, clone);
                    }
                    self.find_out();
                    let began = Instant::now();
                    let with = |batch| {
                        let missing = |n: u32| !self.template.has(n);
                        self.order().with(self.template.layout(), batch, missing)
                    };
                    let fetched =
                        self.template.fault(clone, address, |batch| self.comes(batch), with);
                    let ended = Instant::now();
                    last = Some(ended);
                    busy.store(0, Ordering::Relaxed);
                    if let Some(batch) = fetched {
                        self.pace.jumped(ended - began, ended - self.began);
                        // Notified only if there is more to fetch: otherwise the prefetcher would
                        // take a CPU from the guest for nothing.
                        if self.order().asked(self.template.layout(), batch, self.pace.worth()) {
                            self.more.notify_one();
                        }
                        self.look();
                    }
                }
                Ok(None) if last.is_some_and(|last| last.elapsed() < LINGER) => {
                    std::hint::spin_loop()
                }
                Ok(None) => return,
                Err(e) => {
                    clone.kill(&format!("its page faults cannot be read: {e}"));
                    return;
                }
            }
        }
    }

    /// Waits, if needed, until the prefetcher has read enough batches in a row to know their cost.
    fn find_out(&self) {
        let reads = || self.settings.ahead_bytes_per_s == 0 && self.order().left() > 0;
        while self.pace.is_puzzled() && !self.stop.load(Ordering::Acquire) && reads() {
            if self.puzzled.get_or_init(Instant::now).elapsed() > FIND_OUT {
                return;
            }
            self.more.notify_one();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the prefetcher will fetch a batch sooner than this thread could.
    fn comes(&self, batch: u32) -> bool {
        self.settings.ahead_bytes_per_s == 0 && self.pace.seeks() && {
            let order = self.order();
            order
                .comes_after(batch)
                .is_some_and(|batches| self.pace.waits(batches, self.left(&order)))
        }
    }

    /// Number of batches still to be fetched ahead; some may be present already.
    fn left(&self, order: &Order) -> usize {
        order.left().min(self.template.missing() as usize)
    }

    /// Signals `news` if everything is present.
    pub fn look(&self) {
        if self.template.missing() == 0 {
            self.notify();
        }
    }

    /// Pauses for `time`, or until `stop` is set.
    fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut order = self.order();
        while !self.stop.load(Ordering::Acquire) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // A notification about more work does not end the pause.
            order = self.more.wait_timeout(order, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The loop of the prefetcher, until `stop` is set.
    pub fn fetch_ahead(&self) {
        // Not the idle class: a fault may wait for the sweep, and a busy disk may serve that class
        // never. Not SCHED_IDLE: this thread takes locks that fault threads need.
        if let Err(e) = ioprio::lowest_best_effort() {
            say!("the priority of reads ahead of faults: {e}");
        }
        let Settings { ahead_bytes_per_s: rate, .. } = self.settings;
        let (began, mut bytes, mut swept) = (Instant::now(), 0_u64, false);
        // The last batch, and the number of fetches for faults at that time.
        let (mut last, asked) = (None, &self.template.counters.asked);
        while !self.stop.load(Ordering::Acquire) {
            let next = {
                let mut order = self.order();
                let lead = order.lead();
                let next = order.take();
                if lead > 0 && order.lead() == 0 {
                    self.notify();
                }
                if next.is_none() && !self.stop.load(Ordering::Acquire) {
                    let waited = self.more.wait_timeout(order, Duration::from_millis(100));
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                }
                next
            };
            let Some(batch) = next else { continue };
            if self.template.has(batch) {
                continue;
            }
            let (at, read) = (Instant::now(), self.template.read_bytes());
            // A fetch for a fault that is in progress has moved the disk's head.
            let alone = self.pace.jumps() == asked.load(Ordering::Relaxed);
            let brought = self.template.ahead(batch);
            let (took, jumps) = (at.elapsed(), asked.load(Ordering::Relaxed));
            let in_a_row = alone && last == Some((batch.wrapping_sub(1), jumps));
            last = Some((batch, jumps));
            match brought {
                Brought::Done => {
                    self.pace.went_on(took, in_a_row, self.template.read_bytes() > read);
                    if !swept && self.pace.seeks() {
                        swept = true;
                        self.order().sweep();
                    }
                    if swept && self.settings.policy.background {
                        let mut order = self.order();
                        if self.pace.all_is_sooner(order.lead(), self.left(&order)) {
                            order.sweep_all();
                        }
                    }
                    self.look();
                }
                // A clone that touches it gets the error.
                Brought::Lost => {}
                Brought::Failed => {
                    if self.settings.policy.background {
                        self.order().later(batch);
                    }
                    self.rest(REST);
                }
            }
            let frames = self.template.layout().batches.get(batch as usize).map_or(0, |b| b.frames);
            bytes += u64::from(frames) * dayfly_units::PAGE_SIZE;
            if rate > 0 {
                let due = Duration::from_secs_f64(bytes_f64(bytes) / bytes_f64(rate));
                self.rest(due.saturating_sub(began.elapsed()));
            }
        }
    }
}

/// Kills a clone whose descriptor was made blocking, and makes it non-blocking again, because a
/// kernel thread may still wait for a page. Returns whether the clone had been killed before.
fn kill_blocking(clone: &Clone) -> bool {
    let was_killed = clone.is_killed();
    clone.kill("its VMM made its userfaultfd blocking");
    // Without effect the descriptor reports an error again.
    let _ = clone.uffd().make_nonblocking();
    was_killed
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
const fn bytes_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
