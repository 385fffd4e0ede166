//! A clone whose memory has not all arrived.

use crate::uffd::Uffd;
use dayfly_units::PAGE_SIZE;
use dayfly_units::regions::Region;
use rustix::fd::OwnedFd;
use rustix::process::{Signal, pidfd_send_signal};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the daemon gives of a clone.
#[derive(Debug)]
pub struct Handle {
    /// Its VM's id, for messages.
    pub vm: String,
    /// Its VMM's process.
    pub process: OwnedFd,
    /// Where the cause of its end is written, if the pager ends it.
    pub exit: File,
}

/// A clone that is served.
#[derive(Debug)]
pub struct Clone {
    handle: Handle,
    uffd: Uffd,
    /// In the order of their addresses.
    regions: Vec<Region>,
    /// Somebody ends it.
    ending: AtomicBool,
    /// It has been told.
    killed: AtomicBool,
    /// Its process has ended.
    ended: AtomicBool,
}

impl Clone {
    /// A clone with these regions, in the order of their addresses.
    #[must_use]
    pub const fn new(handle: Handle, uffd: Uffd, regions: Vec<Region>) -> Self {
        let (ending, killed, ended) =
            (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        Self { handle, uffd, regions, ending, killed, ended }
    }

    /// Its VM's id.
    #[must_use]
    pub fn vm(&self) -> &str {
        &self.handle.vm
    }

    /// Its VMM's process: readable when that has ended.
    #[must_use]
    pub const fn process(&self) -> &OwnedFd {
        &self.handle.process
    }

    /// Its process has ended. Its faults are served on while its memory is there: KVM's workers may touch that in its name, and where the last
    /// userfaultfd were closed they would find zeroes, which then were the template's.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether its process has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Where its faults are read.
    #[must_use]
    pub const fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// The frame of RAM at an address in its VMM.
    #[must_use]
    pub fn frame(&self, address: u64) -> Option<u32> {
        let at = self.regions.partition_point(|r| r.host <= address).checked_sub(1)?;
        let region = self.regions[at];
        let inside = address.checked_sub(region.host).filter(|n| *n < region.bytes)?;
        u32::try_from((region.offset + inside) / PAGE_SIZE).ok()
    }

    /// Whoever waits at `address` looks again. A VMM that has ended is no error: it waits for nothing.
    pub fn wake(&self, address: u64) {
        let _ = self.uffd.wake(address & !(PAGE_SIZE - 1), PAGE_SIZE);
    }

    /// Gives zeroes to who waits at `address`.
    pub fn zero(&self, address: u64) {
        if let Err(e) = self.uffd.zero(address & !(PAGE_SIZE - 1), PAGE_SIZE) {
            self.kill(&format!("a page of zeroes for {address:#x}: {e}"));
        }
    }

    /// All of its memory is there: from now on the kernel finds it by itself.
    pub fn release(&self) {
        for region in &self.regions {
            match self.uffd.unregister(region.host, region.bytes) {
                Err(e) if e.raw_os_error() != Some(libc::ESRCH) => {
                    self.kill(&format!("letting go of its memory: {e}"));
                }
                _ => {}
            }
        }
    }

    /// Whether it was ended by this process.
    #[must_use]
    pub fn is_killed(&self) -> bool {
        self.killed.load(Ordering::SeqCst)
    }

    /// Ends it, with a cause in its exit record: a clone that cannot have its memory must not run. When this returns it has been ended, whoever
    /// was first: only then may it be given zeroes.
    pub fn kill(&self, cause: &str) {
        if self.ending.swap(true, Ordering::SeqCst) {
            while !self.is_killed() {
                std::thread::yield_now();
            }
            return;
        }
        if !self.has_ended()
            && let Err(e) = self.record(cause)
        {
            eprintln!("dayfly-pager: the exit record of VM {}: {e}", self.vm());
        }
        // One that has just ended by itself is no error.
        let _ = pidfd_send_signal(&self.handle.process, Signal::KILL);
        self.killed.store(true, Ordering::SeqCst);
    }

    fn record(&self, cause: &str) -> io::Result<()> {
        // As `dayfly-vmm` writes it (`dayfly_vmm::control::ExitRecord`).
        let record = serde_json::json!({ "reason": "failed", "message": cause });
        if self.handle.exit.metadata()?.len() > 0 {
            return Ok(()); // it has ended for a reason of its own
        }
        self.handle.exit.write_all_at(record.to_string().as_bytes(), 0)
    }
}
