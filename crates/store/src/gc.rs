//! Removing layers that nothing refers to any more.

use crate::errors::IoError;
use crate::layers::{DATA, LayerId, MAP};
use crate::manifest::{self, ManifestError};
use crate::{Store, refs};
use std::os::unix::fs::MetadataExt;

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

impl Store {
    /// Removes every layer that no snapshot refers to and no [`crate::Pin`] holds. Excludes every commit while it runs.
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
        let pinned = inner.pins.all().into_iter().flat_map(|p| p.layers).collect();
        let mut report = GcReport::default();
        for id in refs::unreferenced(&present, &snapshots.items, &pinned) {
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
