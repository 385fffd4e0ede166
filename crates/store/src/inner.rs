//! The open store: its folders, locks, and what this process knows about them.

use crate::blob::{Dir, Stage, Stages};
use crate::errors::{IoError, IoResult};
use crate::integrity::verify::Verifier;
use crate::pages::space::Tenants;
use crate::vms::pins::Pins;
use crate::vms::prepared::PreparedFiles;
use crate::vms::shared::SharedLayers;
use dayfly_units::sync::lock;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The state folder, locked by this process alone. Cheap to clone. Every method may be called from
/// any thread, and blocks.
#[derive(Debug, Clone)]
pub struct Store(pub(crate) Arc<Inner>);

/// What all clones of a [`Store`] share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) root: Dir,
    pub(crate) images: Dir,
    pub(crate) kernels: Dir,
    pub(crate) layers: Dir,
    pub(crate) snapshots: Dir,
    pub(crate) vms: Dir,
    pub(crate) staging: Dir,
    /// The publish lock: taken while an entry becomes visible or is removed, so that reference
    /// decisions see one state of the folders.
    pub(crate) publish: Mutex<()>,
    /// Held while a frozen layer is copied because a process may write to it.
    pub(crate) copying: Mutex<()>,
    pub(crate) verifier: Arc<Verifier>,
    pub(crate) tenants: Tenants,
    pub(crate) pins: Arc<Pins>,
    pub(crate) shared: Arc<SharedLayers>,
    pub(crate) counter: AtomicU64,
    /// The entries of `staging/` in use by an operation of this process.
    pub(crate) stages: Stages,
    /// Folders and files prepared for the next VM layers.
    pub(crate) prepared: Mutex<PreparedFiles>,
    /// The last field: dropping it closes the file, which releases the lock.
    _lock: File,
}

/// Why a store was not opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has the store open.
    #[error("{path} is in use by process {holder}: only one daemon may have it open")]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The pid that the other process wrote into the file.
        holder: String,
    },
    /// A folder cannot be created, opened or emptied.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl Store {
    /// Opens the store at `root` and creates missing folders. Empties `staging/`: the lock was
    /// free, so the process that filled it is dead.
    ///
    /// # Errors
    /// [`StoreError`]; if it is `Locked`, nothing was changed.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        let root = Dir::root(root)?;
        let lock = Self::lock(&root)?;
        let folder = |name: &str| root.make_or_open(name);
        let verifier: Arc<Verifier> = Arc::default();
        let inner = Inner {
            images: folder("images")?,
            kernels: folder("kernels")?,
            layers: folder("layers")?,
            snapshots: folder("snapshots")?,
            shared: Arc::new(SharedLayers::new(folder("vms")?, verifier.clone())),
            vms: folder("vms")?,
            staging: folder("staging")?,
            root,
            publish: Mutex::new(()),
            copying: Mutex::new(()),
            verifier,
            tenants: Tenants::default(),
            pins: Arc::default(),
            counter: AtomicU64::new(0),
            stages: Stages::default(),
            prepared: Mutex::default(),
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
        /// How long to retry: from fork(2) to execve(2), a child of the previous owner still has
        /// the locked descriptor.
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

    /// The paths of the entries in `staging/` now, for a leak check.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn staged(&self) -> Result<Vec<PathBuf>, IoError> {
        Ok(self.0.staging.entries()?.iter().map(|n| self.0.staging.path().join(n)).collect())
    }
}

impl Inner {
    pub(crate) fn publishing(&self) -> MutexGuard<'_, ()> {
        lock(&self.publish)
    }

    /// Creates a new folder in `staging/`, which is removed when the `Stage` is dropped.
    pub(crate) fn stage(&self) -> IoResult<Stage> {
        let n = self.counter.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{n}", std::process::id());
        Stage::listed(&self.staging, &name, &self.stages)
    }
}
