//! # store
//!
//! The room for everything on disk under the state folder: images, kernels, frozen disk layers, snapshots, the writable
//! layers of running VMs, and what is being made.
//!
//! | folder | entry | files |
//! |---|---|---|
//! | `images/` | name | `disk` (raw, sparse), `manifest` |
//! | `kernels/` | name | `vmlinux`, `initrd`, `manifest` |
//! | `layers/` | content id | `data` (sparse), `map` (sealed; opaque here) |
//! | `snapshots/` | name | `state`, `memory` (sparse), `manifest` |
//! | | | or, in place of `memory`, `table` ([`Table`]) |
//! | `pages/` | tenant | packs of unique pages ([`Tenant`]) |
//! | `blocks/` | digest of a disk file | its blocks by content: a cache |
//! | `vms/` | VM id | `disk<d>.<n>.data`, `disk<d>.<n>.map`: layers that belong to one VM |
//! | `staging/` | anything | what is not finished; emptied when a store opens |
//! | `lock` | – | `flock`ed by the one process that has the store open |
//!
//! ## Publishing, and why a crash leaves the old or the new
//! Everything is made in `staging/` and enters its folder by one `rename` of a whole folder. The order:
//!
//! 1. every file is written, made read-only and `fsync`ed;
//! 2. its staging folder is `fsync`ed, and the folder above it;
//! 3. layers, those that a long chain was merged into among them, are renamed into `layers/`, which is `fsync`ed;
//! 4. packs of pages likewise into `pages/<tenant>/`, before the table that names them is written;
//! 5. only then the snapshot is renamed into `snapshots/`, which is `fsync`ed.
//!
//! A layer or a pack nobody refers to is harmless ([`Store::gc`], [`Store::gc_pages`]); a snapshot that is there has all it needs. Removal goes the other
//! way: rename into `staging/`, `fsync`, delete.
//!
//! ## Trust
//! Manifests are sealed ([`dayfly_units::sealed`]). A file is hashed in full before its first use by this process, and then
//! trusted while its device, inode, size, mtime and ctime stay (`verify.rs`); [`Store::open_snapshot`] is then a few `fstat`s. No
//! symbolic link is followed below the state folder. [`Store::verify`] reads everything again, whatever is trusted.
//!
//! ## References
//! Counted from the snapshots' manifests whenever they are needed ([`refs`]), never stored. What a running VM stands on is held by a [`Pin`].
//!
//! What may not enter: HTTP, async, processes, what a disk layer's map means.

mod blob;
mod digest;
mod errors;
mod freezing;
mod gc;
mod held;
mod images;
mod kernels;
mod layers;
mod manifest;
mod memory;
mod meter;
mod pages;
mod pins;
mod publish;
pub mod refs;
mod scrub;
mod snapshots;
pub mod sparse;
mod upload;
mod usage;
mod verify;
mod vms;
mod workers;

pub use digest::{Digest, DigestError};
pub use errors::{Damage, IoError};
pub use freezing::{Freeze, Freezing};
pub use gc::{GcError, GcReport, GcStagingReport};
pub use images::{Image, ImageSpec};
pub use kernels::{Kernel, KernelSpec};
pub use layers::{ChainLayer, LayerId, LayerRef, VmLayer};
pub use manifest::{
    DiskRef, FileRef, ImageConfig, ImageManifest, ImageRef, KernelManifest, KernelRef, Listing,
    ManifestError, SnapshotManifest,
};
pub use memory::{
    Alike, BlockHint, Comparable, DiskLayer, FramesDigest, Kind, Known, MAX_FRAMES, Materialised, MemorySpec,
    PutMemory, Run, Table, alike,
};
pub use meter::{Meter, Reading};
pub use pages::gc::{GcPagesError, GcPagesReport, REWRITE_BELOW_PERCENT};
pub use pages::report::PagesStats;
pub use pages::{Group, Lease, PagesError, Put, PutStats, Tenant};
pub use pins::{Pin, PinError};
pub use publish::{OpenError, PutError, RemoveError};
pub use scrub::{Finding, MAX_FINDINGS, Object, Scope, SearchError, VerifyReport};
pub use snapshots::{
    CommitError, Committed, DiskSpec, FlattenError, GroupBuffer, GroupId, MOST_LAYERS, Merge, Merged,
    OpenDisk, OpenLayer, OpenSnapshot, PageReader, PagedSpec, Plan, Prepared, Resident, SavedSnapshot, Sizes,
    SnapshotPages, SnapshotSpec, SnapshotWriter, seal_content,
};
pub use usage::{Counted, Frames, SnapshotUse, StoreStats, Unreadable, Usage};

use blob::Dir;
use errors::IoResult;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The state folder, held by this process alone. Cheap to clone; every method may be called from any thread, and blocks.
#[derive(Debug, Clone)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    root: Dir,
    images: Dir,
    kernels: Dir,
    layers: Dir,
    snapshots: Dir,
    vms: Dir,
    staging: Dir,
    /// Held while something becomes visible or goes away, so that references are decided on one state of the folders.
    publish: Mutex<()>,
    verifier: verify::Verifier,
    tenants: pages::Tenants,
    pins: Arc<pins::Pins>,
    held: Arc<held::Held>,
    counter: AtomicU64,
    /// The entries of `staging` that somebody works on.
    stages: blob::Stages,
    /// The first layers of the next VMs.
    spares: Mutex<vms::Spares>,
    /// Closed, and so unlocked, last.
    _lock: File,
}

/// Why a store was not opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("{path} is in use by process {holder}: only one daemon may have it open")]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// What that process wrote into it: its pid.
        holder: String,
    },
    /// A folder cannot be made, opened or emptied.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl Store {
    /// Opens the store at `root`, making what is missing, and empties `staging/`: whoever filled it is dead, as the lock was free.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed when it is `Locked`.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        let root = Dir::root(root)?;
        let lock = Self::lock(&root)?;
        let folder = |name: &str| root.make_or_open(name);
        let inner = Inner {
            images: folder("images")?,
            kernels: folder("kernels")?,
            layers: folder("layers")?,
            snapshots: folder("snapshots")?,
            held: Arc::new(held::Held::new(folder("vms")?)),
            vms: folder("vms")?,
            staging: folder("staging")?,
            root,
            publish: Mutex::new(()),
            verifier: verify::Verifier::default(),
            tenants: pages::Tenants::default(),
            pins: Arc::default(),
            counter: AtomicU64::new(0),
            stages: blob::Stages::default(),
            spares: Mutex::default(),
            _lock: lock,
        };
        inner.root.sync()?;
        for name in inner.staging.entries()? {
            tracing::info!(entry = name, "sweeping what a dead process left in staging");
            inner.staging.remove(&name)?;
        }
        Ok(Self(Arc::new(inner)))
    }

    fn lock(root: &Dir) -> Result<File, StoreError> {
        /// A child of who had the lock has its descriptors too, from fork(2) to execve(2).
        const WAIT: Duration = Duration::from_millis(500);
        let mut lock = root.open_or_create("lock")?;
        let path = root.path().join("lock");
        let begun = Instant::now();
        let mut locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
        while locked == Err(rustix::io::Errno::WOULDBLOCK) && begun.elapsed() < WAIT {
            std::thread::sleep(Duration::from_millis(5));
            locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
        }
        match locked {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                let _shown_as_empty = lock.take(32).read_to_string(&mut holder);
                return Err(StoreError::Locked { path, holder: holder.trim().to_owned() });
            }
            Err(e) => return Err(IoError::new("locking", &path)(e.into()).into()),
        }
        let written = lock
            .set_len(0)
            .and_then(|()| lock.rewind())
            .and_then(|()| writeln!(lock, "{}", std::process::id()));
        written.map_err(IoError::new("writing", &path))?;
        Ok(lock)
    }

    /// The state folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.0.root.path()
    }

    /// The entries of `staging/` that are in use now, for a search for leaks.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn staged(&self) -> Result<Vec<PathBuf>, IoError> {
        Ok(self.0.staging.entries()?.iter().map(|n| self.0.staging.path().join(n)).collect())
    }
}

impl Inner {
    fn publishing(&self) -> MutexGuard<'_, ()> {
        self.publish.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A fresh folder in `staging/`, removed when dropped.
    fn stage(&self) -> IoResult<blob::Stage> {
        let n = self.counter.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{n}", std::process::id());
        blob::Stage::listed(&self.staging, &name, &self.stages)
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod fixture_pages;
#[cfg(test)]
mod tests;
