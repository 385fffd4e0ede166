//! What is prepared before the first snapshot is opened.

use crate::base::error::Outcome;
use crate::templates::cache::TemplateCache;
use crate::templates::open::OpenTemplate;
use dayfly_store::SnapshotManifest;
use dayfly_units::{Name, sync::lock};
use std::sync::Arc;

impl TemplateCache {
    /// Prepares what opening any snapshot needs: a pager, and the index of pages. Returns the
    /// newest snapshot, which will probably be cloned next. Blocks.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn prepare(&self) -> Outcome<Option<SnapshotManifest>> {
        self.pagers.warm();
        self.store.tenant(&self.tenant())?;
        let snapshots = self.store.snapshots()?.items.into_iter();
        Ok(snapshots.max_by_key(|manifest| manifest.created_unix_ms))
    }

    /// Opens a snapshot for requests that may come; `None` if it is so large that all of its memory
    /// would be read into a file.
    ///
    /// # Errors
    /// As [`Self::open_snapshot`].
    pub fn open_ahead(&self, name: &Name) -> Outcome<Option<Arc<OpenTemplate>>> {
        let bytes = self.store.snapshot(name)?.memory.data_bytes;
        let fits = bytes <= lock(&self.open).resident_most;
        fits.then(|| self.open_snapshot(name)).transpose()
    }

    /// Ends the pager that waits for a snapshot.
    pub fn end_pager(&self) {
        self.pagers.end();
    }
}
