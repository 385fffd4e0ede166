//! A clone whose memory is not complete.

use crate::wire::EXIT_PAGE_BYTES;
use dayfly_sys::uffd::Uffd;
use dayfly_units::PAGE_SIZE;
use dayfly_units::regions::Region;
use rustix::fd::OwnedFd;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// The most faults of a clone, for each frame of its RAM. Several vCPUs may fault on one frame, but
/// a clone that needs more makes its own pages missing again and again.
const FAULTS_PER_FRAME: u64 = 16;
/// The least number of frames for that limit.
const LEAST_FRAMES: u64 = 4_096;
/// The most faults of a clone that wait at a time: KVM allows 64 for each vCPU.
const MOST_WAITS: u32 = 32_768;

/// The daemon's description of a clone.
#[derive(Debug)]
pub struct Handle {
    /// The VM's id, for messages.
    pub vm: String,
    /// A pidfd of the VMM.
    pub process: OwnedFd,
    /// The exit record: the pager writes the cause into it if it kills the clone.
    pub exit: File,
}

/// A clone that the pager serves.
#[derive(Debug)]
pub struct Clone {
    handle: Handle,
    uffd: Uffd,
    /// Regions of RAM, in ascending order of their addresses.
    regions: Vec<Region>,
    /// Set once SIGKILL has been sent.
    killed: OnceLock<()>,
    /// Whether the VMM has ended.
    ended: AtomicBool,
    /// Number of faults read.
    faults: AtomicU64,
    most_faults: u64,
    /// Number of fault threads that serve the clone now.
    servers: AtomicU32,
    /// Number of faults that wait for a batch.
    waits: AtomicU32,
}

impl Clone {
    /// A clone with these regions, in ascending order of their addresses.
    #[must_use]
    pub fn new(handle: Handle, uffd: Uffd, regions: Vec<Region>) -> Self {
        let frames = regions.iter().map(|region| region.bytes / PAGE_SIZE).sum::<u64>();
        let most_faults = frames.max(LEAST_FRAMES).saturating_mul(FAULTS_PER_FRAME);
        let (killed, ended) = (OnceLock::new(), AtomicBool::new(false));
        let (faults, servers, waits) = (AtomicU64::new(0), AtomicU32::new(0), AtomicU32::new(0));
        Self { handle, uffd, regions, killed, ended, faults, most_faults, servers, waits }
    }

    /// Number of faults read so far.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Counts a fault. Returns `false` if the clone has more faults than any use of its RAM needs.
    #[must_use]
    pub fn count_fault(&self) -> bool {
        self.faults.fetch_add(1, Ordering::Relaxed) < self.most_faults
    }

    /// Notes that a fault begins to wait for a batch. Returns `false` if more faults wait than the
    /// clone can have threads; [`Self::wait_ends`] must be called in both cases.
    #[must_use]
    pub fn wait_begins(&self) -> bool {
        self.waits.fetch_add(1, Ordering::Relaxed) < MOST_WAITS
    }

    /// Notes that a fault does not wait any more.
    pub fn wait_ends(&self) {
        self.waits.fetch_sub(1, Ordering::Relaxed);
    }

    /// Notes that a fault thread begins to serve the clone, unless `most` threads do already.
    #[must_use]
    pub fn enter(&self, most: u32) -> bool {
        let one_more = |now: u32| (now < most).then_some(now + 1);
        self.servers.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// Notes that a fault thread has served the clone.
    pub fn leave(&self) {
        self.servers.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether another thread may serve the clone, if `most` threads may.
    #[must_use]
    pub fn has_room(&self, most: u32) -> bool {
        self.servers.load(Ordering::Acquire) < most
    }

    /// The VM's id.
    #[must_use]
    pub fn vm(&self) -> &str {
        &self.handle.vm
    }

    /// The pidfd of the VMM: readable once the VMM has ended.
    #[must_use]
    pub const fn process(&self) -> &OwnedFd {
        &self.handle.process
    }

    /// Notes that the VMM has ended. Its faults are still served while its memory exists, because
    /// KVM's kernel threads may touch the memory. If the last descriptor of the userfaultfd were
    /// closed then, such a touch would put a page of zeroes into the template.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether the VMM has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The userfaultfd of the VMM.
    #[must_use]
    pub const fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// The frame of RAM at an address in the VMM.
    #[must_use]
    pub fn frame(&self, address: u64) -> Option<u32> {
        let at = self.regions.partition_point(|r| r.host <= address).checked_sub(1)?;
        let region = self.regions[at];
        let inside = address.checked_sub(region.host).filter(|n| *n < region.bytes)?;
        u32::try_from((region.offset + inside) / PAGE_SIZE).ok()
    }

    /// The addresses in the VMM at which a frame of RAM is.
    pub fn addresses(&self, frame: u32) -> impl Iterator<Item = u64> {
        let at = u64::from(frame) * PAGE_SIZE;
        self.regions.iter().filter_map(move |region| {
            let inside = at.checked_sub(region.offset).filter(|n| *n < region.bytes)?;
            Some(region.host + inside)
        })
    }

    /// Wakes threads that wait at `address`; they look again. If the VMM has ended, no thread
    /// waits, and the error is ignored.
    pub fn wake(&self, address: u64) {
        let _ = self.uffd.wake(address & !(PAGE_SIZE - 1), PAGE_SIZE);
    }

    /// Gives a page of zeroes to threads that wait at `address`.
    pub fn zero(&self, address: u64) {
        if let Err(e) = self.uffd.zero(address & !(PAGE_SIZE - 1), PAGE_SIZE) {
            self.kill(&format!("a page of zeroes for {address:#x}: {e}"));
        }
    }

    /// Unregisters the memory: all of it is present, so the kernel resolves faults without the
    /// pager.
    pub fn release(&self) {
        for region in &self.regions {
            match self.uffd.unregister(region.host, region.bytes) {
                Err(e) if e.raw_os_error() != Some(libc::ESRCH) => {
                    self.kill(&format!("releasing its memory: {e}"));
                }
                _ => {}
            }
        }
    }

    /// Whether the pager has killed the clone.
    #[must_use]
    pub fn is_killed(&self) -> bool {
        self.killed.get().is_some()
    }

    /// Kills the clone, and writes the cause to its exit record: a clone without its memory must
    /// not run. On return SIGKILL has been sent, by this thread or another. Only then may the clone
    /// get zeroes. The caller has no lock, because the record is a file.
    pub fn kill(&self, cause: &str) {
        self.killed.get_or_init(|| {
            if !self.has_ended()
                && let Err(e) = self.record(cause)
            {
                say!("the exit record of VM {}: {e}", self.vm());
            }
            // Fails only if the VMM has just ended by itself.
            let _ = pidfd_send_signal(&self.handle.process, Signal::KILL);
        });
    }

    fn record(&self, cause: &str) -> io::Result<()> {
        // The format of `dayfly-vmm` (`dayfly_vmm::control::ExitRecord`).
        let record = serde_json::json!({ "reason": "failed", "message": cause });
        if ![0, EXIT_PAGE_BYTES].contains(&self.handle.exit.metadata()?.len()) {
            return Ok(()); // the VMM has written its own exit record
        }
        // The file is open for appending, so the offset does not count (pwrite(2), bugs).
        self.handle.exit.write_all_at(record.to_string().as_bytes(), 0)
    }
}

/// The clones that a pager serves, by id.
#[derive(Debug, Default)]
pub struct Clones(RwLock<HashMap<u64, Arc<Clone>>>);

impl Clones {
    /// The clone with this id.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<Arc<Clone>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// All clones, with their ids.
    #[must_use]
    pub fn all(&self) -> Vec<(u64, Arc<Clone>)> {
        let clones = self.0.read().unwrap_or_else(PoisonError::into_inner);
        clones.iter().map(|(id, clone)| (*id, Arc::clone(clone))).collect()
    }

    /// Adds a clone.
    pub fn insert(&self, id: u64, clone: Arc<Clone>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(id, clone);
    }

    /// Removes a clone.
    pub fn remove(&self, id: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}
