//! What is prepared before the first snapshot is opened.

use crate::base::error::Outcome;
use crate::templates::cache::TemplateCache;
use dayfly_store::SnapshotManifest;

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

    /// Ends the pager that waits for a snapshot.
    pub fn end_pager(&self) {
        self.pagers.end();
    }
}
