//! The open store: its folders, locks, and what this process knows about them.

use crate::blob::probe::{self, UnfitError};
use crate::blob::{Dir, Stage, Stages};
use crate::errors::{IoError, IoResult};
use crate::format::{Format, FormatError, read_only};
use crate::integrity::verify::{Stamp, Verifier};
use crate::lock::{Lock, LockError};
use crate::objects::types::{Unsynced, VmLayer};
use crate::pages::space::Tenants;
use crate::published::Published;
use crate::vms::pins::Pins;
use crate::vms::prepared::PreparedFiles;
use crate::vms::shared::SharedLayers;
use dayfly_units::Digest;
use dayfly_units::error::chain;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

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
    pub(crate) publish: Mutex<Published>,
    /// Held while a frozen layer is copied because a process may write to it.
    pub(crate) copying: Mutex<()>,
    pub(crate) verifier: Verifier,
    pub(crate) tenants: Tenants,
    /// The files of block indexes that were decoded, by the digest of the disk file.
    pub(crate) sound_indexes: Mutex<BTreeMap<Digest, Stamp>>,
    /// The wanted size of the reserve for gc in bytes; 0 for none.
    pub(crate) reserve: Mutex<u64>,
    /// The layers of VMs whose fsync failed in this process.
    pub(crate) unsynced: Mutex<BTreeMap<VmLayer, Unsynced>>,
    pub(crate) pins: Arc<Pins>,
    pub(crate) shared: Arc<SharedLayers>,
    pub(crate) counter: AtomicU64,
    /// The entries of `staging/` in use by an operation of this process.
    pub(crate) stages: Stages,
    /// Folders and files prepared for the next VM layers.
    pub(crate) prepared: Mutex<PreparedFiles>,
    /// As [`Store::unknown_features`].
    unknown_features: Vec<String>,
    /// The last field: dropping it releases the lock.
    _lock: Lock,
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
    /// The file system lacks something, or other hosts may use it too. Nothing was changed.
    #[error(transparent)]
    Unfit(#[from] UnfitError),
    /// The store's format is damaged, or that of a newer version. Nothing was changed.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A folder cannot be created or opened.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl Store {
    /// Opens the store at `root` and creates missing folders. Empties `staging/`: the lock was
    /// free, so the process that filled it is dead. If the store has features that this version
    /// does not know, [`Self::unknown_features`] names them, and nothing is changed.
    ///
    /// # Errors
    /// [`StoreError`]; except for `Io`, nothing was changed.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        let root = Dir::root(root)?;
        probe::local(&root)?;
        let lock = Lock::take(&root).map_err(|e| match e {
            LockError::Taken(path, holder) => StoreError::Locked { path, holder },
            LockError::Io(e) => e.into(),
        })?;
        let format = Format::read(&root)?;
        let unknown_features = format.as_ref().map(Format::unknown_ro_compat).unwrap_or_default();
        let folder = |name: &str| root.make_or_open(name);
        let inner = Inner {
            images: folder("images")?,
            kernels: folder("kernels")?,
            layers: folder("layers")?,
            snapshots: folder("snapshots")?,
            shared: Arc::new(SharedLayers::new(folder("vms")?)),
            vms: folder("vms")?,
            staging: folder("staging")?,
            root,
            publish: Mutex::default(),
            copying: Mutex::new(()),
            verifier: Verifier::default(),
            tenants: Tenants::default(),
            sound_indexes: Mutex::default(),
            reserve: Mutex::default(),
            unsynced: Mutex::default(),
            pins: Arc::default(),
            counter: AtomicU64::new(0),
            stages: Stages::default(),
            prepared: Mutex::default(),
            unknown_features,
            _lock: lock,
        };
        inner.root.sync()?;
        if let Err(error) = inner.writable() {
            tracing::warn!("opening the store for reading only: {}", chain(&error));
            return Ok(Self(Arc::new(inner)));
        }
        Self::empty_staging(&inner.staging)?;
        probe::features(&inner.root, &inner.staging)?;
        if format.is_none() {
            // On a full disk, gc needs an open store. The next open tries again.
            let written = inner.stage().and_then(|s| Format::current().write(&s, &inner.root));
            if let Err(error) = written {
                tracing::warn!("the store has no format yet: {}", chain(&error));
            }
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Removes what a dead process left in `staging/`. An entry that cannot be removed stays.
    fn empty_staging(staging: &Dir) -> Result<(), IoError> {
        for name in staging.names()? {
            let shown = name.to_string_lossy();
            match staging.remove_raw(&name) {
                Ok(()) => {
                    tracing::info!(entry = %shown, "removed what a dead process left in staging")
                }
                Err(e) => tracing::warn!("leaving something in staging: {}", chain(&e)),
            }
        }
        Ok(())
    }

    /// The `ro_compat` features of the store that this version does not know. If there are any,
    /// objects can only be read; VMs run nevertheless.
    #[must_use]
    pub fn unknown_features(&self) -> &[String] {
        &self.0.unknown_features
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
    /// Whether objects may be published and removed.
    ///
    /// # Errors
    /// The store has `ro_compat` features that this version does not know.
    pub(crate) fn writable(&self) -> IoResult<()> {
        let unknown = &self.unknown_features;
        if unknown.is_empty() { Ok(()) } else { Err(read_only(self.root.path(), unknown)) }
    }

    /// Creates a new folder in `staging/`, which is removed when the `Stage` is dropped.
    pub(crate) fn stage(&self) -> IoResult<Stage> {
        let n = self.counter.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{n}", std::process::id());
        Stage::listed(&self.staging, &name, &self.stages)
    }
}
