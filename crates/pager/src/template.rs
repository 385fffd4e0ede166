//! The memfd that clones map, which of its batches are there, and who waits for which.

use crate::clones::Clone;
use crate::source::{ELSEWHERE, Layout, Source, SourceError, ZERO};
use crate::uffd::Uffd;
use dayfly_units::PAGE_SIZE;
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const ABSENT: u8 = 0;
const COMING: u8 = 1;
const PRESENT: u8 = 2;

/// How often a batch that somebody waits for is tried to be read.
const TRIES: u32 = 5;

/// A clone that waits for a batch.
struct Waiter {
    clone: Arc<Clone>,
    address: u64,
    since: Instant,
}

impl Waiter {
    /// Ends the clone, and lets go whoever waits in its name: a thread of the kernel's own takes no signal, and the end of the process waits for
    /// it. Nothing of the clone runs any more that could see the zeroes.
    fn kill(&self, cause: &str) {
        self.clone.kill(cause);
        self.clone.zero(self.address);
    }
}

/// What was done.
#[derive(Debug, Default)]
pub struct Counters {
    /// Faults that were read.
    pub faults: AtomicU64,
    /// Of these, on frames that read as zeroes.
    pub zero_faults: AtomicU64,
    /// Of these, on batches that somebody was fetching already, or that were there by then.
    pub late_faults: AtomicU64,
    /// Batches that were fetched because of a fault, and that were fetched ahead.
    pub asked: AtomicU64,
    /// See `asked`.
    pub ahead: AtomicU64,
    /// Bytes put into the template.
    pub bytes: AtomicU64,
    /// Nanoseconds of all faults from reading to waking, and of the longest.
    pub fault_ns: AtomicU64,
    /// See `fault_ns`.
    pub longest_fault_ns: AtomicU64,
}

/// What became of an attempt to have a batch.
#[derive(Debug, PartialEq, Eq)]
pub enum Brought {
    /// It is there, or somebody else brings it.
    Done,
    /// It could not be had this time.
    Failed,
    /// It is damaged, and will not be had.
    Lost,
}

/// A template that is being filled.
pub struct Template<S> {
    memory: File,
    /// Where all of it is mapped in this process, to be filled; nobody reads it there.
    mapping: u64,
    bytes: u64,
    uffd: Uffd,
    source: S,
    states: Vec<AtomicU8>,
    missing: AtomicU32,
    waiting: Mutex<HashMap<u32, Vec<Waiter>>>,
    /// How long is waited before a batch that cannot be read is tried again.
    pause: Duration,
    /// What was done so far.
    pub counters: Counters,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl<S: Source> Template<S> {
    /// An empty one.
    ///
    /// # Errors
    /// `memory` is not as long as the source's RAM, or the kernel refuses to map or to watch it.
    pub fn new(memory: File, source: S) -> io::Result<Self> {
        let layout = source.layout();
        let (bytes, expected) = (memory.metadata()?.len(), layout.batch_of.len() as u64 * PAGE_SIZE);
        if bytes != expected {
            let text = format!("the template's memory: expected {expected} bytes, got {bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let uffd = Uffd::own()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let mapping =
            unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &memory, 0)? };
        let mapping = mapping.expose_provenance() as u64;
        uffd.register(mapping, bytes)?;
        let states = layout.batches.iter().map(|_| AtomicU8::new(ABSENT)).collect();
        let missing = AtomicU32::new(u32::try_from(layout.batches.len()).map_err(io::Error::other)?);
        let (waiting, counters, pause) = (Mutex::default(), Counters::default(), Duration::ZERO);
        Ok(Self { memory, mapping, bytes, uffd, source, states, missing, waiting, pause, counters })
    }

    /// With so long a pause before a batch that cannot be read is tried again.
    pub fn retrying(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }

    /// Which frames come at once.
    pub fn layout(&self) -> &Layout {
        self.source.layout()
    }

    /// Bytes that were read for it.
    pub fn read_bytes(&self) -> u64 {
        self.source.read_bytes()
    }

    /// Length of RAM.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Batches that are not there yet.
    pub fn missing(&self) -> u32 {
        self.missing.load(Ordering::Acquire)
    }

    /// Whether a batch is there.
    pub fn has(&self, batch: u32) -> bool {
        self.states.get(batch as usize).is_some_and(|state| state.load(Ordering::Acquire) == PRESENT)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u32, Vec<Waiter>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that `clone` goes on at `address`: its page is there, or somebody brings it, or the clone is killed. Gives the batch if it had to be
    /// fetched for it. Of a batch that nobody brings, `comes` says whether who fetches ahead is going to, and it can be waited for; if not, `with` says
    /// which others come with it.
    pub fn fault(
        &self,
        clone: &Arc<Clone>,
        address: u64,
        comes: impl FnOnce(u32) -> bool,
        with: impl FnOnce(u32) -> Vec<u32>,
    ) -> Option<u32> {
        let since = Instant::now();
        count(&self.counters.faults, 1);
        if clone.is_killed() {
            // It will not run any more; the kernel may still wait in its name.
            clone.zero(address);
            return None;
        }
        let Some(&batch) = clone.frame(address).and_then(|frame| self.layout().batch_of.get(frame as usize))
        else {
            clone.kill(&format!("a page fault at {address:#x}, which is no memory of the guest's"));
            return None;
        };
        if batch == ZERO {
            count(&self.counters.zero_faults, 1);
            clone.zero(address);
            return None;
        }
        if batch == ELSEWHERE {
            clone.kill(&format!("a page fault at {address:#x}, which it has from another template"));
            clone.zero(address);
            return None;
        }
        let state = &self.states[batch as usize];
        {
            // Whoever brings a batch takes its waiters under this lock, after it has become present.
            let mut waiting = self.waiting();
            if state.load(Ordering::Acquire) == PRESENT {
                drop(waiting);
                count(&self.counters.late_faults, 1);
                clone.wake(address);
                return None;
            }
            waiting.entry(batch).or_default().push(Waiter { clone: Arc::clone(clone), address, since });
        }
        // Whoever claims it from here on finds the waiter, also who fetches ahead and has not come to it yet.
        let waits = state.load(Ordering::Acquire) == ABSENT && comes(batch);
        if !waits && self.claim(batch) {
            count(&self.counters.asked, 1);
            let mut with = with(batch);
            with.retain(|batch| self.claim(*batch));
            if !self.bring_all(batch, with) {
                self.bring(batch);
            }
            Some(batch)
        } else {
            count(&self.counters.late_faults, 1);
            None
        }
    }

    /// Whether it is this thread that brings a batch from now on.
    fn claim(&self, batch: u32) -> bool {
        let claimed = |state: &AtomicU8| {
            state.compare_exchange(ABSENT, COMING, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        self.states.get(batch as usize).is_some_and(claimed)
    }

    /// Fetches a batch that nobody has asked for yet.
    pub fn ahead(&self, batch: u32) -> Brought {
        if !self.claim(batch) {
            return Brought::Done;
        }
        count(&self.counters.ahead, 1);
        self.bring(batch)
    }

    /// Fetches batches that this thread has claimed, `batch` and others `with` it, and wakes who waits for them. If one of them cannot be had, says so, and `batch`
    /// is to be brought by itself: the others are there or not, as if nobody had asked for them.
    fn bring_all(&self, batch: u32, mut with: Vec<u32>) -> bool {
        if with.is_empty() {
            return false;
        }
        count(&self.counters.ahead, with.len() as u64);
        with.push(batch);
        if self.fetch_all(&with).is_ok() {
            // The one that is asked for last: who has waited for it finds the others.
            with.into_iter().for_each(|batch| self.arrived(batch));
            return true;
        }
        with.pop();
        for other in with {
            self.bring(other);
        }
        false
    }

    /// All frames of a batch that this thread has claimed are there.
    fn arrived(&self, batch: u32) {
        let waiters = {
            let mut waiting = self.waiting();
            self.states[batch as usize].store(PRESENT, Ordering::Release);
            waiting.remove(&batch)
        };
        waiters.into_iter().flatten().for_each(|waiter| self.woken(&waiter));
        self.missing.fetch_sub(1, Ordering::AcqRel);
    }

    /// Fetches a batch that this thread has claimed, wakes who waits for it, and kills who waits in vain.
    fn bring(&self, batch: u32) -> Brought {
        for tries in 1.. {
            let error = match self.fetch_all(&[batch]) {
                Ok(()) => {
                    self.arrived(batch);
                    return Brought::Done;
                }
                Err(e) => e,
            };
            let waiters = {
                let mut waiting = self.waiting();
                let again = tries < TRIES && !matches!(error, SourceError::Damaged(_));
                if again && waiting.contains_key(&batch) {
                    drop(waiting);
                    std::thread::sleep(self.pause);
                    continue;
                }
                self.states[batch as usize].store(ABSENT, Ordering::Release);
                waiting.remove(&batch)
            };
            eprintln!("dayfly-pager: batch {batch}: {error}");
            for waiter in waiters.into_iter().flatten() {
                waiter.kill(&format!("memory that it touched cannot be had: {error}"));
            }
            if let SourceError::Install(e) = &error
                && e.kind() == io::ErrorKind::InvalidData
            {
                // What else is in the template is not known. The daemon ends everybody who has it.
                std::process::exit(1);
            }
            return if matches!(error, SourceError::Damaged(_)) { Brought::Lost } else { Brought::Failed };
        }
        Brought::Failed
    }

    fn woken(&self, waiter: &Waiter) {
        waiter.clone.wake(waiter.address);
        let took = u64::try_from(waiter.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        count(&self.counters.fault_ns, took);
        self.counters.longest_fault_ns.fetch_max(took, Ordering::Relaxed);
    }

    fn fetch_all(&self, batches: &[u32]) -> Result<(), SourceError> {
        self.source.fetch_all(batches, &mut |frame, bytes| {
            let at = u64::from(frame) * PAGE_SIZE;
            let fits = bytes.len().is_multiple_of(PAGE) && at + bytes.len() as u64 <= self.bytes;
            if !fits {
                return Err(io::Error::other(format!("{} bytes at frame {frame}", bytes.len())));
            }
            count(&self.counters.bytes, bytes.len() as u64);
            // SAFETY: the range lies in our mapping, of which this process takes nothing for anything.
            unsafe { self.uffd.copy(self.mapping + at, bytes, PAGE) }
        })
    }

    /// Kills who has waited longer than `limit` for a page.
    pub fn end_who_waits(&self, limit: Duration) {
        self.waiting().retain(|batch, waiters| {
            waiters.retain(|waiter| {
                let waited = waiter.since.elapsed();
                if waited > limit {
                    let frame = self.layout().batches.get(*batch as usize).map_or(0, |b| b.first);
                    waiter.kill(&format!(
                        "memory that it touched has not come within {} s (batch {batch}, from frame {frame} on)",
                        waited.as_secs()
                    ));
                }
                waited <= limit
            });
            // A batch that nobody waits for any more is not tried again.
            !waiters.is_empty()
        });
    }

    /// Nobody can write to it any more, which also says to others that all of it is there (F_SEAL_FUTURE_WRITE).
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn seal(self) -> io::Result<()> {
        let length = usize::try_from(self.bytes).map_err(io::Error::other)?;
        let mapping = usize::try_from(self.mapping).map_err(io::Error::other)?;
        // SAFETY: the mapping that `new` made, which nobody refers to: `self` is gone with this call.
        unsafe { munmap(std::ptr::with_exposed_provenance_mut(mapping), length)? };
        Ok(rustix::fs::fcntl_add_seals(&self.memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
    }
}
