//! Removes layers that nothing references.

use crate::blob::Dir;
use crate::errors::IoError;
use crate::inner::{Inner, Store};
use crate::objects::manifest::{self, ManifestError, SnapshotManifest};
use crate::objects::tree::TREE;
use crate::objects::types::{DATA, LayerId, MAP};
use crate::publish::Retired;
use crate::watch::Watch;
use dayfly_units::{Name, failpoint};
use rustix::fs::{AtFlags, FileType, statat};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

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

    /// Removes every layer that no snapshot references and no [`crate::Pin`] retains. If a layer is
    /// kept only by pins, the callback of [`Self::when_garbage`] runs when the last pin is dropped.
    /// Commits wait for the removal of one layer at most.
    ///
    /// # Errors
    /// [`GcError`]; a referenced layer is never removed.
    pub fn gc(&self) -> Result<GcReport, GcError> {
        self.gc_without(&BTreeSet::new())
    }

    /// As [`Self::gc`], but a snapshot in `without` whose manifest is damaged references nothing.
    /// One that another version of dayfly made stops the gc nevertheless.
    ///
    /// # Errors
    /// As [`Self::gc`].
    pub fn gc_without(&self, without: &BTreeSet<Name>) -> Result<GcReport, GcError> {
        let inner = &self.0;
        inner.writable()?;
        let mut watch = inner.watch();
        let mut users = LayerUsers { inner, without, used: BTreeSet::new() };
        let mut unreadable = None;
        for name in inner.snapshots.entries()? {
            match users.add(&name) {
                // One of another version has another way on, so it is reported first.
                Err(e @ GcError::Unreadable { .. }) => unreadable = Some(e),
                other => other?,
            }
        }
        unreadable.map_or(Ok(()), Err)?;
        // Entries whose name is not a layer id are not ours, and stay.
        let present = inner.layers.entries()?.into_iter().filter_map(|n| n.parse().ok());
        let unused = present.filter(|id| !users.used.contains(id)).collect();
        let mut report = GcReport::default();
        for id in inner.pins.unpinned(unused) {
            let bytes = self.layer_allocated(id);
            if let Some(_deleted) = users.retire(&mut watch, id)? {
                failpoint::reached("store.gc.layer_removed");
                report.layers.push(id);
                report.freed_bytes += bytes;
            }
        }
        drop(watch);
        self.remove_unused_modules();
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

/// The layers that snapshots reference.
struct LayerUsers<'a> {
    inner: &'a Arc<Inner>,
    without: &'a BTreeSet<Name>,
    used: BTreeSet<LayerId>,
}

impl LayerUsers<'_> {
    /// Adds the references of a snapshot. One that is gone has none.
    fn add(&mut self, snapshot: &str) -> Result<(), GcError> {
        let snapshots = &self.inner.snapshots;
        let read = snapshots.sub(snapshot).map_err(ManifestError::from);
        match read.and_then(|dir| manifest::read::<SnapshotManifest>(&dir)) {
            Ok(manifest) => self.used.extend(manifest.layer_ids()),
            Err(ManifestError::Io(e)) if e.is_not_found() && !snapshots.has(snapshot)? => {}
            Err(source) if source.is_version() => {
                return Err(GcError::Version { snapshot: snapshot.to_owned(), source });
            }
            Err(_) if self.without.iter().any(|name| name.as_str() == snapshot) => {}
            Err(source) => {
                return Err(GcError::Unreadable { snapshot: snapshot.to_owned(), source });
            }
        }
        Ok(())
    }

    /// Removes a layer, unless a snapshot or a pin references it now. Manifests are read without
    /// the publish lock.
    fn retire(&mut self, watch: &mut Watch, id: LayerId) -> Result<Option<Retired>, GcError> {
        loop {
            let (changed, publishing) = watch.changed();
            if changed.is_empty() {
                let needed = self.used.contains(&id) || self.inner.pins.keeps(id);
                if needed {
                    return Ok(None);
                }
                return Ok(self.inner.retire(&self.inner.layers, &id.to_string())?);
            }
            drop(publishing);
            for snapshot in changed {
                self.add(&snapshot)?;
            }
        }
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
