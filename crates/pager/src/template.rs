//! The memfd that clones map: which batches are present, and which clones wait for which batch.

use crate::clones::{Clone, Clones};
use crate::replace::replace;
use crate::source::{ELSEWHERE, Layout, Source, SourceError, ZERO};
use dayfly_sys::uffd::Uffd;
use dayfly_units::{PAGE_SIZE, sync::lock};
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const ABSENT: u8 = 0;
const COMING: u8 = 1;
const PRESENT: u8 = 2;

/// How often a batch that a clone waits for is tried.
const TRIES: u32 = 5;

/// A clone that waits for a batch.
struct Waiter {
    clone: Arc<Clone>,
    address: u64,
    since: Instant,
}

impl Waiter {
    /// Kills the clone, and gives zeroes to a waiting kernel thread: it takes no signal, and the
    /// process cannot end before it. No code of the clone runs any more that could see the zeroes.
    fn kill(&self, cause: &str) {
        self.clone.kill(cause);
        self.clone.zero(self.address);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.clone.wait_ends();
    }
}

/// Counts of a pager's work.
#[derive(Debug, Default)]
pub struct Counters {
    /// Faults read.
    pub faults: AtomicU64,
    /// Faults on frames that read as zeroes.
    pub zero_faults: AtomicU64,
    /// Faults on batches that were present, or that another thread was fetching.
    pub late_faults: AtomicU64,
    /// Batches fetched because of a fault.
    pub asked: AtomicU64,
    /// Batches fetched ahead of faults.
    pub ahead: AtomicU64,
    /// Bytes put into the template.
    pub bytes: AtomicU64,
    /// Sum over all faults of the nanoseconds from reading to waking.
    pub fault_ns: AtomicU64,
    /// Nanoseconds of the longest fault.
    pub longest_fault_ns: AtomicU64,
    /// Times that a fault thread has served a clone.
    pub turns: AtomicU64,
    /// Pages that were present with other content, and were replaced.
    pub replaced: AtomicU64,
}

/// The outcome of fetching a batch.
#[derive(Debug, PartialEq, Eq)]
pub enum Brought {
    /// The batch is present, or another thread fetches it.
    Done,
    /// The batch could not be read this time.
    Failed,
    /// The batch is damaged; another attempt would fail too.
    Lost,
}

/// A template that is being filled.
pub struct Template<S> {
    memory: File,
    /// Address of the mapping through which this process fills the memfd; nothing reads it.
    mapping: u64,
    bytes: u64,
    uffd: Uffd,
    source: S,
    states: Vec<AtomicU8>,
    missing: AtomicU32,
    waiting: Mutex<HashMap<u32, Vec<Waiter>>>,
    /// Pause before an unreadable batch is tried again.
    pause: Duration,
    /// Counts so far.
    pub counters: Counters,
    /// The clones that are served.
    pub clones: Clones,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl<S: Source> Template<S> {
    /// An empty template.
    ///
    /// # Errors
    /// `memory` is not as long as the source's RAM, or the kernel refuses to map it or to register
    /// the mapping.
    pub fn new(memory: File, source: S) -> io::Result<Self> {
        let layout = source.layout();
        let (bytes, expected) =
            (memory.metadata()?.len(), layout.batch_of.len() as u64 * PAGE_SIZE);
        if bytes != expected {
            let text = format!("the template's memory: expected {expected} bytes, got {bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let uffd = Uffd::own()?;
        uffd.check_nowait()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let mapping = unsafe {
            mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &memory, 0)?
        };
        let mapping = mapping.expose_provenance() as u64;
        uffd.register(mapping, bytes)?;
        let states = layout.batches.iter().map(|_| AtomicU8::new(ABSENT)).collect();
        let missing =
            AtomicU32::new(u32::try_from(layout.batches.len()).map_err(io::Error::other)?);
        Ok(Self {
            memory,
            mapping,
            bytes,
            uffd,
            source,
            states,
            missing,
            waiting: Mutex::default(),
            pause: Duration::ZERO,
            counters: Counters::default(),
            clones: Clones::default(),
        })
    }

    /// Sets the pause before an unreadable batch is tried again.
    pub fn retrying(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// The division of RAM into batches.
    pub fn layout(&self) -> &Layout {
        self.source.layout()
    }

    /// The source of the pages.
    pub const fn source(&self) -> &S {
        &self.source
    }

    /// Stored bytes read so far.
    pub fn read_bytes(&self) -> u64 {
        self.source.read_bytes()
    }

    /// Length of RAM in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of batches that are not present.
    pub fn missing(&self) -> u32 {
        self.missing.load(Ordering::Acquire)
    }

    /// Whether a batch is present.
    pub fn has(&self, batch: u32) -> bool {
        self.states
            .get(batch as usize)
            .is_some_and(|state| state.load(Ordering::Acquire) == PRESENT)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u32, Vec<Waiter>>> {
        lock(&self.waiting)
    }

    /// Resolves a fault of `clone` at `address`: the page is present, or a thread fetches it, or
    /// the clone is killed. Returns the batch if this thread fetched it.
    ///
    /// If no thread is fetching the batch yet, `comes` reports whether the prefetcher will fetch it
    /// soon enough to wait for. Otherwise this thread fetches it, together with the batches that
    /// `with` returns.
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
            // The clone does not run any more, but a kernel thread may still wait for the page.
            clone.zero(address);
            return None;
        }
        if !clone.count_fault() {
            clone.kill(&format!("{} page faults, more than its memory needs", clone.faults()));
            clone.zero(address);
            return None;
        }
        let Some(&batch) =
            clone.frame(address).and_then(|frame| self.layout().batch_of.get(frame as usize))
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
            clone
                .kill(&format!("a page fault at {address:#x}, which it has from another template"));
            clone.zero(address);
            return None;
        }
        let state = &self.states[batch as usize];
        let few = clone.wait_begins();
        let waiter = Waiter { clone: Arc::clone(clone), address, since };
        if !few {
            waiter.kill("more of its page faults wait than it has threads");
            return None;
        }
        {
            // Lock order: the fetching thread marks a batch present under this lock and takes the
            // batch's waiters with it, so no waiter is missed.
            let mut waiting = self.waiting();
            if state.load(Ordering::Acquire) == PRESENT {
                drop(waiting);
                count(&self.counters.late_faults, 1);
                clone.wake(address);
                return None;
            }
            waiting.entry(batch).or_default().push(waiter);
        }
        // A thread that claims the batch from here on finds the waiter; this includes the
        // prefetcher.
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

    /// Marks a batch as being fetched by this thread. Returns `false` if it is present or claimed
    /// already.
    fn claim(&self, batch: u32) -> bool {
        let claimed = |state: &AtomicU8| {
            state.compare_exchange(ABSENT, COMING, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        self.states.get(batch as usize).is_some_and(claimed)
    }

    /// Fetches a batch ahead of faults.
    pub fn ahead(&self, batch: u32) -> Brought {
        if !self.claim(batch) {
            return Brought::Done;
        }
        count(&self.counters.ahead, 1);
        self.bring(batch)
    }

    /// Fetches batches that this thread has claimed, `batch` and the batches `with` it, and wakes
    /// their waiters. If one fails, the others are fetched one by one, `false` is returned, and the
    /// caller must fetch `batch` alone.
    fn bring_all(&self, batch: u32, mut with: Vec<u32>) -> bool {
        if with.is_empty() {
            return false;
        }
        count(&self.counters.ahead, with.len() as u64);
        with.push(batch);
        if self.fetch_all(&with).is_ok() {
            // `batch` is last, so that its waiters find the other batches present when they
            // continue.
            with.into_iter().for_each(|batch| self.arrived(batch));
            return true;
        }
        with.pop();
        for other in with {
            self.bring(other);
        }
        false
    }

    /// Marks a claimed batch as present, and wakes its waiters.
    fn arrived(&self, batch: u32) {
        let waiters = {
            let mut waiting = self.waiting();
            self.states[batch as usize].store(PRESENT, Ordering::Release);
            waiting.remove(&batch)
        };
        waiters.into_iter().flatten().for_each(|waiter| self.woken(&waiter));
        self.missing.fetch_sub(1, Ordering::AcqRel);
    }

    /// Fetches a batch that this thread has claimed, and wakes its waiters. If it cannot be
    /// fetched, kills them.
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
            say!("batch {batch}: {error}");
            for waiter in waiters.into_iter().flatten() {
                waiter.kill(&format!("memory that it touched cannot be had: {error}"));
            }
            return if matches!(error, SourceError::Damaged(_)) {
                Brought::Lost
            } else {
                Brought::Failed
            };
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
            // SAFETY: the range lies in our mapping, and this process holds no reference into it.
            let others = unsafe { self.uffd.copy(self.mapping + at, bytes, PAGE)? };
            others.into_iter().try_for_each(|other| {
                let number = u32::try_from(other / PAGE).map_err(io::Error::other)?;
                self.replace(frame + number, &bytes[other..other + PAGE])
            })
        })
    }

    /// Puts `page` in place of the present page of `frame`, which has other content.
    fn replace(&self, frame: u32, page: &[u8]) -> io::Result<()> {
        if self.counters.replaced.fetch_add(1, Ordering::Relaxed) == 0 {
            say!("frame {frame}: another process made this page of the template; it is replaced");
        }
        let at = usize::try_from(self.mapping + u64::from(frame) * PAGE_SIZE);
        let at = std::ptr::with_exposed_provenance_mut::<u8>(at.map_err(io::Error::other)?);
        replace(&self.clones, frame, page, || {
            // SAFETY: the page lies in our mapping and is present, so the write does not wait for
            // this process's own userfaultfd. This process holds no reference into the mapping.
            unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), at, page.len()) };
        });
        Ok(())
    }

    /// Kills clones that have waited longer than `limit` for a page.
    pub fn kill_overdue(&self, limit: Duration) {
        let mut overdue = Vec::new();
        self.waiting().retain(|batch, waiters| {
            let late = waiters.extract_if(.., |waiter| waiter.since.elapsed() > limit);
            overdue.extend(late.map(|waiter| (*batch, waiter)));
            // A batch without waiters is not tried again.
            !waiters.is_empty()
        });
        // Without the lock, because fault threads need it.
        for (batch, waiter) in overdue {
            let frame = self.layout().batches.get(batch as usize).map_or(0, |b| b.first);
            waiter.kill(&format!(
                "memory that it touched has not come within {} s (batch {batch}, from frame \
                 {frame} on)",
                waiter.since.elapsed().as_secs()
            ));
        }
    }

    /// Seals the memfd with F_SEAL_FUTURE_WRITE: it can be mapped or written no more, and the seal
    /// shows other processes that it is complete. This process's mapping ends with `self`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn seal(&self) -> io::Result<()> {
        Ok(rustix::fs::fcntl_add_seals(&self.memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
    }
}

impl<S> Drop for Template<S> {
    fn drop(&mut self) {
        let (Ok(mapping), Ok(length)) =
            (usize::try_from(self.mapping), usize::try_from(self.bytes))
        else {
            return;
        };
        // SAFETY: `new` made the mapping, and nothing refers to it. If munmap fails, the mapping
        // stays.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(mapping), length) };
    }
}
