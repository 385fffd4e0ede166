//! Space of the host's file systems: what VMs are guaranteed, and what requests may take.
//!
//! Each VM that lives has a guaranteed share of the state folder's file system. Space is kept free
//! for the unused part of all shares:
//!
//! ```text
//! 0 ──── free space ──────────────────────────────────────────────────────────▶
//! │ half the reserve │ unused parts of shares │ rest of the reserve │ for all │
//!                                             ▲ floor               ▲ requests are refused
//!                                               below: VMs over their share wait
//! ```
//!
//! VMMs read the floor from a file in the run folder ([`dayfly_vmm::disk::room`]), so shares are
//! kept without a daemon too. [`crate::ops::space`] keeps the floor exact, and has VMs that wait go
//! on.

use crate::base::config::{Config, DiskSpace};
use crate::base::error::ApiError;
use dayfly_api::types::ErrorCode;
use dayfly_units::{Bytes, sync::lock};
use dayfly_vmm::control::NoSpace;
use dayfly_vmm::disk::room::Limits;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Default of [`DiskSpace::share_bytes`]: this part of the file system, within [`SHARES`].
const SHARE_FRACTION: u64 = 4096;
const SHARES: (u64, u64) = (4 << 20, 64 << 20);
/// Default of [`DiskSpace::reserve_bytes`]: this part of the file system, at most
/// [`MOST_RESERVE_BYTES`].
const RESERVE_FRACTION: u64 = 32;
const MOST_RESERVE_BYTES: u64 = 1 << 30;

/// The size of a file system, and what is free on it for users without privileges, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystem {
    /// All of it.
    pub size_bytes: u64,
    /// The free part.
    pub free_bytes: u64,
}

impl FileSystem {
    /// The file system of `path`. One without a size, such as a tmpfs without a limit, has the
    /// largest size and all of it free.
    ///
    /// # Errors
    /// The error of statvfs(3).
    pub fn of(path: &Path) -> io::Result<Self> {
        let of = rustix::fs::statvfs(path)?;
        if of.f_blocks == 0 {
            return Ok(Self { size_bytes: u64::MAX, free_bytes: u64::MAX });
        }
        let bytes = |blocks: u64| blocks.saturating_mul(of.f_frsize);
        Ok(Self { size_bytes: bytes(of.f_blocks), free_bytes: bytes(of.f_bavail) })
    }
}

/// A file system has too little space for a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: expected at least {} free on the file system of {}, got {}: it needs {}, {} are kept \
     for the shares of {vms} VMs, and {} as a reserve; make room with `dayfly store gc`, `dayfly \
     rm` or `dayfly snapshots rm`, or start dayflyd with a smaller --disk-share or --disk-reserve",
    Bytes(.kept.saturating_add(*.reserve).saturating_add(*.needs)), path.display(), Bytes(*.free),
    Bytes(*.needs), Bytes(*.kept), Bytes(*.reserve)
)]
pub struct NoRoom {
    what: &'static str,
    path: PathBuf,
    free: u64,
    needs: u64,
    kept: u64,
    vms: u64,
    reserve: u64,
}

impl From<NoRoom> for ApiError {
    fn from(e: NoRoom) -> Self {
        Self::new(ErrorCode::Exhausted, e)
    }
}

/// What is kept for the shares of VMs.
#[derive(Debug, Default)]
struct Kept {
    /// VMs that have a share.
    vms: u64,
    /// Shares taken since the survey that is in progress began.
    taken: u64,
    /// At least the sum of the unused parts of all shares, in bytes.
    unused_bytes: u64,
    /// The limits in the file.
    written: Option<Limits>,
    file: Option<File>,
}

/// The space of a daemon's VMs.
#[derive(Debug)]
pub struct Space {
    state: PathBuf,
    run: PathBuf,
    /// The guaranteed share of each VM.
    share_bytes: u64,
    quota_bytes: u64,
    reserve_bytes: u64,
    run_reserve_bytes: u64,
    kept: Mutex<Kept>,
}

/// The share of one VM; dropping it returns the share.
#[derive(Debug)]
pub struct Share(pub(super) Arc<Space>);

impl Drop for Share {
    fn drop(&mut self) {
        let mut kept = lock(&self.0.kept);
        kept.vms = kept.vms.saturating_sub(1);
        // How much of the share was unused is not known here; the next survey counts it.
    }
}

impl Space {
    /// The space of the folders in `config`. No VM has a share yet.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let size = FileSystem::of(&config.state).map_or(0, |of| of.size_bytes);
        let DiskSpace { share_bytes, quota_bytes, reserve_bytes, run_reserve_bytes } = config.disk;
        let (least, most) = SHARES;
        Self {
            state: config.state.clone(),
            run: config.run.clone(),
            share_bytes: share_bytes.unwrap_or((size / SHARE_FRACTION).clamp(least, most)),
            quota_bytes: quota_bytes.unwrap_or(u64::MAX),
            reserve_bytes: reserve_bytes
                .unwrap_or((size / RESERVE_FRACTION).min(MOST_RESERVE_BYTES)),
            run_reserve_bytes,
            kept: Mutex::default(),
        }
    }

    /// Opens or makes the file at `path` in which VMMs read the limits. Limits of an earlier daemon
    /// stay in it until they differ.
    ///
    /// # Errors
    /// The file cannot be made or written.
    pub fn publish(&self, path: &Path) -> io::Result<()> {
        let mut options = File::options();
        options.write(true).create(true).truncate(false).mode(0o600);
        let mut kept = lock(&self.kept);
        kept.file = Some(options.open(path)?);
        self.write(&mut kept)
    }

    fn limits_of(&self, kept: &Kept) -> Limits {
        Limits {
            share_bytes: self.share_bytes,
            quota_bytes: self.quota_bytes,
            floor_bytes: (self.reserve_bytes / 2).saturating_add(kept.unused_bytes),
        }
    }

    fn write(&self, kept: &mut Kept) -> io::Result<()> {
        let limits = self.limits_of(kept);
        if let Some(file) = &kept.file
            && kept.written != Some(limits)
        {
            // In place: VMMs have this file open.
            file.write_all_at(&limits.encode(), 0)?;
            kept.written = Some(limits);
        }
        Ok(())
    }

    /// The limits of VMs as they are now.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits_of(&lock(&self.kept))
    }

    /// The file system of the state folder.
    ///
    /// # Errors
    /// The error of statvfs(3).
    pub fn state(&self) -> io::Result<FileSystem> {
        FileSystem::of(&self.state)
    }

    /// Whether VMs have a limit that is reached while the file system has room.
    #[must_use]
    pub const fn has_quota(&self) -> bool {
        self.quota_bytes < u64::MAX
    }

    /// Whether nothing can come near its limit: the VMs need not be looked at one by one. `most` is
    /// the largest request of a guest, in bytes.
    #[must_use]
    pub fn is_ample(&self, of: FileSystem, most: u64) -> bool {
        let shares = lock(&self.kept).vms.saturating_mul(self.share_bytes);
        // No VM is over its share by more than the whole file system.
        let floor = self.reserve_bytes.saturating_add(shares);
        let limits = Limits { floor_bytes: floor, ..self.limits() };
        !self.has_quota() && of.free_bytes >= limits.needs_free(of.size_bytes).saturating_add(most)
    }

    /// Checks that `needs` bytes for `what` are left beside the shares of VMs and the reserve.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn check(&self, what: &'static str, needs: u64) -> Result<(), NoRoom> {
        self.check_with(&lock(&self.kept), what, needs, self.reserve_bytes)
    }

    /// As [`Self::check`] of an operation that runs: half of the reserve is there for it.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn check_running(&self, what: &'static str) -> Result<(), NoRoom> {
        self.check_with(&lock(&self.kept), what, 0, self.reserve_bytes / 2)
    }

    fn check_with(
        &self,
        kept: &Kept,
        what: &'static str,
        needs: u64,
        reserve: u64,
    ) -> Result<(), NoRoom> {
        // If the host does not say how much is free, the operation shows it.
        let free = self.state().map_or(u64::MAX, |of| of.free_bytes);
        let (unused, vms) = (kept.unused_bytes, kept.vms);
        if free < unused.saturating_add(reserve).saturating_add(needs) {
            let path = self.state.clone();
            return Err(NoRoom { what, path, free, needs, kept: unused, vms, reserve });
        }
        Ok(())
    }

    /// Checks that the run folder has room for consoles and records of `vms` more VMs.
    fn check_run(&self, vms: u64) -> Result<(), NoRoom> {
        let needs = vms.saturating_mul(RUN_BYTES).min(self.run_reserve_bytes);
        let free = FileSystem::of(&self.run).map_or(u64::MAX, |of| of.free_bytes);
        let reserve = self.run_reserve_bytes;
        if free < reserve.saturating_add(needs) {
            let path = self.run.clone();
            return Err(NoRoom { what: "a VM", path, free, needs, kept: 0, vms: 0, reserve });
        }
        Ok(())
    }

    /// Checks that `vms` more VMs can have their shares.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn check_shares(&self, vms: u64) -> Result<(), NoRoom> {
        self.check_run(vms)?;
        self.check("the guaranteed shares of disks", vms.saturating_mul(self.share_bytes))
    }

    /// Takes the share of a VM that is being created.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn share(self: &Arc<Self>) -> Result<Share, NoRoom> {
        self.check_run(1)?;
        let mut kept = lock(&self.kept);
        self.check_with(&kept, "a VM's guaranteed share", self.share_bytes, self.reserve_bytes)?;
        Ok(self.take(&mut kept))
    }

    /// Takes the share of a VM that an earlier daemon started, even if there is no space for it.
    #[must_use]
    pub fn adopt(self: &Arc<Self>) -> Share {
        self.take(&mut lock(&self.kept))
    }

    fn take(self: &Arc<Self>, kept: &mut Kept) -> Share {
        kept.vms += 1;
        kept.taken += 1;
        kept.unused_bytes = kept.unused_bytes.saturating_add(self.share_bytes);
        // Before the VM writes, so that no other VM takes its share.
        if let Err(e) = self.write(kept) {
            tracing::error!("limits of disks, {}: {e}", self.run.display());
        }
        Share(self.clone())
    }

    /// Begins a survey of what VMs use.
    pub fn begin_survey(&self) {
        lock(&self.kept).taken = 0;
    }

    /// Ends a survey: `used` has the bytes of the layers of each VM that was seen. A VM that was
    /// not seen has used nothing of its share.
    pub fn end_survey(&self, used: &[u64]) {
        let unused = used.iter().map(|used| self.share_bytes.saturating_sub(*used));
        let unused = unused.fold(0, u64::saturating_add);
        let mut kept = lock(&self.kept);
        // Shares that were taken meanwhile may belong to VMs that were seen: counted twice, they
        // only keep more space free until the next survey.
        let unseen = kept.vms.saturating_sub(used.len() as u64).max(kept.taken);
        kept.unused_bytes = unused.saturating_add(unseen.saturating_mul(self.share_bytes));
        if let Err(e) = self.write(&mut kept) {
            tracing::error!("limits of disks, {}: {e}", self.run.display());
        }
    }

    /// Whether a VM that waits because of `why`, and has `used` bytes, may try again.
    #[must_use]
    pub fn may_retry(&self, why: NoSpace, used: u64, of: FileSystem) -> bool {
        let limits = self.limits();
        // Enough that it does not wait again at once.
        let margin = (of.size_bytes / 256).clamp(MARGIN.0, MARGIN.1);
        match why {
            NoSpace::Quota => used.saturating_add(margin) <= limits.quota_bytes,
            NoSpace::Full | NoSpace::Shares | NoSpace::Other => {
                of.free_bytes >= limits.needs_free(used).saturating_add(margin)
            }
        }
    }

    /// Why a VM waits, for people.
    #[must_use]
    pub fn explain(&self, why: NoSpace) -> String {
        let (state, share) = (self.state.display(), Bytes(self.share_bytes));
        let room = "it goes on by itself when there is space: dayfly store gc, dayfly rm";
        match why {
            NoSpace::Quota => format!(
                "no space: its disk has as much as a VM may have, {}; it goes on after dayflyd was \
                 started with a higher --disk-quota",
                Bytes(self.quota_bytes)
            ),
            NoSpace::Shares => format!(
                "no space: its disk has more than its share of {share}, and what is free in \
                 {state} is kept for other VMs; {room}"
            ),
            NoSpace::Full | NoSpace::Other => {
                format!("no space: the file system of {state} is full; {room}")
            }
        }
    }
}

/// The least and the most free space beyond its need with which a VM tries again, in bytes.
const MARGIN: (u64, u64) = (1 << 20, 64 << 20);
/// Bytes in the run folder that a VM may fill: console and records.
const RUN_BYTES: u64 = 4 << 20;

/// What a VM knows of its space.
#[derive(Debug, Default)]
pub struct VmSpace {
    pub(super) share: Option<Share>,
    pub(super) no_space: Option<NoSpace>,
}

impl VmSpace {
    /// Returns the share; the VM does not write any more.
    pub(super) fn end(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
