//! The threads that bring pages: those that serve faults, and one that fetches ahead.
//!
//! Fault threads share one epoll(7) of all clones' userfaultfds. A clone's faults are told to one of them at a time, which serves it until it is quiet: two that
//! look at one clone only take CPUs from the guest. Where pages come slowly it lets another look before it
//! reads. Nothing is handed from thread to thread on the way of a fault; while one waits for a slow read, others serve.
//!
//! Where a page that is asked for costs much more than one that comes in a row (a disk that seeks), what is left of the working set is read in one sweep,
//! and who waits for what the sweep is about to reach waits for that: to jump there and back is slower for everybody.

use crate::clones::Clone;
use crate::order::Order;
use crate::pace::Pace;
use crate::source::Source;
use crate::template::{Brought, Template};
use crate::wire::Settings;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::{Duration, Instant};

/// The number under which fault threads are told to end.
pub const STOP: u64 = u64::MAX;
/// So long after a fault its thread looks for the next before it sleeps: to wake one takes longer than many a guest takes to its next fault. Where a
/// thread is woken in 15 us, a single fault takes 55 us with 20, 29 with 50, 100 or 200 (`dayfly-bench faults`).
const LINGER: Duration = Duration::from_micros(50);
/// How a clone's faults are told.
const WATCHED: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);
/// For so long nobody jumps at most, once, so that some are read in a row.
const FIND_OUT: Duration = Duration::from_millis(100);
/// How long fetching ahead rests after a batch that could not be had.
const REST: Duration = Duration::from_millis(500);

/// What all threads have.
pub struct Shared<S> {
    pub template: Template<S>,
    pub order: Mutex<Order>,
    /// There is more in `order`, or it is time to end.
    pub more: Condvar,
    pub clones: RwLock<HashMap<u64, Arc<Clone>>>,
    pub faults: OwnedFd,
    /// Readable when there is something to tell: what was to come first is there, or everything is.
    pub news: OwnedFd,
    pub stop: AtomicBool,
    pub began: Instant,
    /// For each thread for faults, since when it is at one: milliseconds after `began`, 0 where it is at none.
    pub busy: Vec<AtomicU64>,
    /// Readable when fault threads are to end.
    pub stopped: OwnedFd,
    pub pace: Pace,
    /// Since when nobody jumped, for a moment.
    pub puzzled: OnceLock<Instant>,
    pub settings: Settings,
}

impl<S: Source> Shared<S> {
    pub fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        // Fails only where it stands at the most that it counts to, and is readable then.
        let _ = rustix::io::write(&self.news, &1_u64.to_ne_bytes());
    }

    /// Those that are served.
    pub fn clones(&self) -> RwLockReadGuard<'_, HashMap<u64, Arc<Clone>>> {
        self.clones.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Self::clones`], to change them.
    pub fn clones_mut(&self) -> RwLockWriteGuard<'_, HashMap<u64, Arc<Clone>>> {
        self.clones.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the clone's faults are told, to one thread until that calls [`Self::watch_again`].
    pub fn watch(&self, id: u64, clone: &Arc<Clone>) -> io::Result<()> {
        self.clones_mut().insert(id, Arc::clone(clone));
        Ok(epoll::add(&self.faults, clone.uffd().fd(), EventData::new_u64(id), WATCHED)?)
    }

    /// The clone's next fault is told to whichever thread is free, now if it is there already.
    fn watch_again(&self, id: u64, clone: &Clone) {
        // One that has ended is not watched any more.
        let _ = epoll::modify(&self.faults, clone.uffd().fd(), EventData::new_u64(id), WATCHED);
    }

    /// The clone has ended, and its memory is gone.
    pub fn forget(&self, id: u64, clone: &Clone) {
        let _ = epoll::delete(&self.faults, clone.uffd().fd());
        self.clones_mut().remove(&id);
    }

    /// A thread for faults, until it is told to stop.
    pub fn serve_faults(&self, thread: usize) {
        let mut events = Vec::with_capacity(1);
        loop {
            events.clear();
            match epoll::wait(&self.faults, spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return eprintln!("dayfly-pager: waiting for faults: {e}"),
            }
            for event in &events {
                let id = event.data.u64();
                if id == STOP {
                    return;
                }
                let clone = self.clones().get(&id).cloned();
                if let (Some(clone), Some(busy)) = (clone, self.busy.get(thread)) {
                    self.serve_clone(id, &clone, busy);
                    self.watch_again(id, &clone);
                }
            }
        }
    }

    fn serve_clone(&self, id: u64, clone: &Arc<Clone>, busy: &AtomicU64) {
        // One that faults without end must not keep the others, nor the end of this process.
        let mut last: Option<Instant> = None;
        while !self.stop.load(Ordering::Acquire) {
            match clone.uffd().next() {
                Ok(Some(address)) => {
                    let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    busy.store(now.max(1), Ordering::Relaxed);
                    if !self.pace.is_quick() {
                        self.watch_again(id, clone);
                    }
                    self.find_out();
                    let began = Instant::now();
                    let with = |batch| {
                        let missing = |n: u32| !self.template.has(n);
                        self.order().with(self.template.layout(), batch, missing)
                    };
                    let fetched = self.template.fault(clone, address, |batch| self.comes(batch), with);
                    let ended = Instant::now();
                    last = Some(ended);
                    busy.store(0, Ordering::Relaxed);
                    if let Some(batch) = fetched {
                        self.pace.jumped(ended - began, ended - self.began);
                        // Woken for nothing, who fetches ahead would only take a CPU from the guest.
                        if self.order().asked(self.template.layout(), batch, self.pace.worth()) {
                            self.more.notify_one();
                        }
                        self.look();
                    }
                }
                Ok(None) if last.is_some_and(|last| last.elapsed() < LINGER) => std::hint::spin_loop(),
                Ok(None) => return,
                Err(e) => {
                    clone.kill(&format!("its page faults cannot be read: {e}"));
                    return;
                }
            }
        }
    }

    /// Lets who fetches ahead read some in a row, where it is not known what these take.
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

    /// Whether who fetches ahead is about to bring a batch sooner than one could go there.
    fn comes(&self, batch: u32) -> bool {
        self.settings.ahead_bytes_per_s == 0 && self.pace.seeks() && {
            let order = self.order();
            order.comes_after(batch).is_some_and(|batches| self.pace.waits(batches, self.left(&order)))
        }
    }

    /// How many that come unasked are still to come; some of these may be there already.
    fn left(&self, order: &Order) -> usize {
        order.left().min(self.template.missing() as usize)
    }

    /// Tells if all is there.
    pub fn look(&self) {
        if self.template.missing() == 0 {
            self.tell();
        }
    }

    /// Waits so long, or until it is time to end.
    fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut order = self.order();
        while !self.stop.load(Ordering::Acquire) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // Woken, too, when there is more to do: that has its time.
            order = self.more.wait_timeout(order, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The thread that fetches ahead, until it is told to stop.
    pub fn fetch_ahead(&self) {
        let Settings { ahead_bytes_per_s: rate, .. } = self.settings;
        let (began, mut bytes, mut swept) = (Instant::now(), 0_u64, false);
        // The last batch, and how many others had asked for by then.
        let (mut last, asked) = (None, &self.template.counters.asked);
        while !self.stop.load(Ordering::Acquire) {
            let next = {
                let mut order = self.order();
                let lead = order.lead();
                let next = order.take();
                if lead > 0 && order.lead() == 0 {
                    self.tell();
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
            // One that is under way has the disk elsewhere.
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
                // Whoever touches it learns that it is damaged.
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

#[expect(clippy::cast_precision_loss, reason = "a rate")]
const fn bytes_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
