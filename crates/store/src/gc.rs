//! Removes layers that nothing references.

use crate::blob::Dir;
use crate::errors::IoError;
use crate::inner::Store;
use crate::objects::manifest::{self, ManifestError};
use crate::objects::refs;
use crate::objects::tree::TREE;
use crate::objects::types::{DATA, LayerId, MAP};
use dayfly_units::failpoint;
use rustix::fs::{AtFlags, FileType, statat};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a gc of layers removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// The removed layers.
    pub layers: Vec<LayerId>,
    /// Bytes of disk that the removed layers took.
    pub freed_bytes: u64,
}

/// Why a gc removed nothing, or not everything.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// A manifest is unreadable, so the references are not known; nothing was removed.
    #[error(
        "snapshot {snapshot}: its manifest cannot be read, so its layers are not known; \
         remove it first"
    )]
    Unreadable {
        /// Name of the snapshot.
        snapshot: String,
        /// The cause.
        #[source]
        source: ManifestError,
    },
    /// Another version of dayfly made a snapshot, so the references are not known; nothing was
    /// removed.
    #[error(
        "snapshot {snapshot}: another version of dayfly made it, so its layers are not known; \
         start that version, or remove the snapshot"
    )]
    Version {
        /// Name of the snapshot.
        snapshot: String,
        /// The version expected and the version found.
        #[source]
        source: ManifestError,
    },
    /// The host could not read or remove a file.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// What a gc removed from `staging/`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcStagingReport {
    /// Number of entries.
    pub entries: u64,
    /// Bytes of disk that the entries took.
    pub freed_bytes: u64,
}

impl Store {
    /// Removes the entries of `staging/` that belong to no operation of this process, such as
    /// leftovers of a failed removal. Leftovers of dead processes are removed when a store opens.
    ///
    /// # Errors
    /// The folder cannot be listed, or an entry cannot be removed.
    pub fn gc_staging(&self) -> Result<GcStagingReport, IoError> {
        self.0.writable()?;
        let staging = &self.0.staging;
        let mut report = GcStagingReport::default();
        // A stage is listed before its folder exists, and stays listed until the folder is gone.
        for name in staging.entries()?.iter().filter(|name| !self.0.stages.has(name)) {
            let bytes = allocated_below(staging, name);
            staging.remove(name)?;
            report.entries += 1;
            report.freed_bytes += bytes;
        }
        Ok(report)
    }

    /// Removes every layer that no snapshot references and no [`crate::Pin`] retains. Blocks
    /// commits while it runs. If a layer is kept only by pins, the callback of
    /// [`Self::when_garbage`] runs when the last pin is dropped.
    ///
    /// # Errors
    /// [`GcError`]; a referenced layer is never removed.
    pub fn gc(&self) -> Result<GcReport, GcError> {
        let inner = &self.0;
        inner.writable()?;
        let _publishing = inner.publishing();
        let mut snapshots = manifest::list(&inner.snapshots)?;
        if let Some((snapshot, source)) = snapshots.other_version() {
            return Err(GcError::Version { snapshot, source });
        }
        if let Some((snapshot, source)) = snapshots.damaged.pop() {
            return Err(GcError::Unreadable { snapshot, source });
        }
        // Entries whose name is not a layer id are not ours, and stay.
        let present = inner.layers.entries()?.iter().filter_map(|n| n.parse().ok()).collect();
        let mut report = GcReport::default();
        for id in inner.pins.unpinned(refs::unreferenced(&present, &snapshots.items)) {
            let bytes = self.layer_allocated(id);
            if inner.retire(&inner.layers, &id.to_string())? {
                failpoint::reached("store.gc.layer_removed");
                report.layers.push(id);
                report.freed_bytes += bytes;
            }
        }
        Ok(report)
    }

    /// Bytes of disk that a layer takes; missing files count as 0.
    fn layer_allocated(&self, id: LayerId) -> u64 {
        let Ok(dir) = self.0.layers.sub(&id.to_string()) else { return 0 };
        let blocks =
            |name| dir.open(name).ok().and_then(|f| f.metadata().ok()).map_or(0, |m| m.blocks());
        (blocks(DATA) + blocks(TREE) + blocks(MAP)) * 512
    }
}

/// Bytes of disk that an entry of `dir` takes, with everything in it; unreadable entries count as
/// 0.
pub(crate) fn allocated_below(dir: &Dir, name: &str) -> u64 {
    let Ok(stat) = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return 0 };
    let own = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return own;
    }
    let Ok(folder) = dir.sub(name) else { return own };
    folder
        .entries()
        .unwrap_or_default()
        .iter()
        .fold(own, |sum, n| sum.saturating_add(allocated_below(&folder, n)))
}

/// Bytes of disk that the file at `path` takes; 0 if it does not exist.
pub(crate) fn allocated(path: &Path) -> u64 {
    std::fs::symlink_metadata(path).map_or(0, |meta| meta.blocks() * 512)
}
