//! Removing layers that nothing refers to any more.

use crate::blob::Dir;
use crate::errors::IoError;
use crate::layers::{DATA, LayerId, MAP};
use crate::manifest::{self, ManifestError};
use crate::{Store, refs};
use rustix::fs::{AtFlags, FileType, statat};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Which layers.
    pub layers: Vec<LayerId>,
    /// Bytes of disk they took.
    pub freed_bytes: u64,
}

/// Why nothing, or not everything, was removed.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// What a snapshot refers to cannot be known, so nothing was removed.
    #[error("snapshot {snapshot}: its manifest cannot be read, so its layers are not known; remove it first")]
    Unreadable {
        /// Which snapshot.
        snapshot: String,
        /// Why.
        #[source]
        source: ManifestError,
    },
    /// The host could not.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// What was removed from `staging/`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcStagingReport {
    /// Entries.
    pub entries: u64,
    /// Bytes of disk they took.
    pub freed_bytes: u64,
}

impl Store {
    /// Removes what is in `staging/` and belongs to no operation of this process: a removal that failed left it there. What dead
    /// processes left goes when a store opens.
    ///
    /// # Errors
    /// The folder cannot be listed, or an entry cannot be removed.
    pub fn gc_staging(&self) -> Result<GcStagingReport, IoError> {
        let staging = &self.0.staging;
        let mut report = GcStagingReport::default();
        // A stage is in the list before it is in the folder, and leaves it after.
        for name in staging.entries()?.iter().filter(|name| !self.0.stages.has(name)) {
            let bytes = allocated_below(staging, name);
            staging.remove(name)?;
            report.entries += 1;
            report.freed_bytes += bytes;
        }
        Ok(report)
    }

    /// Removes every layer that no snapshot refers to and no [`crate::Pin`] holds. Excludes every commit while it runs. What it leaves for pins alone is
    /// told when they go ([`Self::when_garbage`]).
    ///
    /// # Errors
    /// [`GcError`]; what is still referred to stays in any case.
    pub fn gc(&self) -> Result<GcReport, GcError> {
        let inner = &self.0;
        let _publishing = inner.publishing();
        let mut snapshots = manifest::list(&inner.snapshots)?;
        if let Some((snapshot, source)) = snapshots.damaged.pop() {
            return Err(GcError::Unreadable { snapshot, source });
        }
        // What is not named like a layer was not put here by us.
        let present = inner.layers.entries()?.iter().filter_map(|n| n.parse().ok()).collect();
        let mut report = GcReport::default();
        for id in inner.pins.unheld(refs::unreferenced(&present, &snapshots.items)) {
            let bytes = self.layer_allocated(id);
            if inner.retire(&inner.layers, &id.to_string())? {
                report.layers.push(id);
                report.freed_bytes += bytes;
            }
        }
        Ok(report)
    }

    /// Bytes of disk a layer takes; 0 for files that are missing.
    fn layer_allocated(&self, id: LayerId) -> u64 {
        let Ok(dir) = self.0.layers.sub(&id.to_string()) else { return 0 };
        let blocks = |name| dir.open(name).ok().and_then(|f| f.metadata().ok()).map_or(0, |m| m.blocks());
        (blocks(DATA) + blocks(MAP)) * 512
    }
}

/// Bytes of disk that an entry of `dir` takes, with everything in it; 0 for what cannot be looked at.
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

/// Bytes of disk that the file at `path` takes; 0 where it is not there.
pub(crate) fn allocated(path: &Path) -> u64 {
    std::fs::symlink_metadata(path).map_or(0, |meta| meta.blocks() * 512)
}
