//! Removal of data without a user: pages when a snapshot is removed, its layers when the last user
//! is gone.

use crate::base::error::blocking;
use crate::templates::cache::TemplateCache;
use dayfly_store::GcError;
use dayfly_units::error::chain;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Delay before the next gc after the host failed to remove a layer.
const AGAIN: Duration = Duration::from_secs(30);

impl TemplateCache {
    /// Removes pages that no snapshot needs. Running VMs need none, because their pages were read
    /// when the snapshot was opened.
    pub fn collect_pages(&self) {
        match self.store.gc_pages() {
            Ok(report) => {
                for damage in &report.damage {
                    tracing::warn!("collecting pages: left alone: {damage}");
                }
                if let Some(error) = report.no_space {
                    tracing::warn!("collecting pages: not all unused ones are removed: {error}");
                }
                if report.packs > 0 {
                    tracing::info!(
                        packs = report.packs,
                        bytes = report.freed_bytes,
                        "collected pages"
                    );
                }
            }
            Err(e) => tracing::warn!("collecting pages: {}", chain(&e)),
        }
    }

    /// Removes layers without a user. If the host fails to remove one, another gc follows.
    pub fn collect(&self) {
        if self.failed_to_collect() {
            self.look_for_garbage();
        }
    }

    fn failed_to_collect(&self) -> bool {
        match self.store.gc() {
            Ok(report) => {
                if !report.layers.is_empty() {
                    tracing::info!(
                        layers = report.layers.len(),
                        bytes = report.freed_bytes,
                        "collected"
                    );
                }
                false
            }
            Err(e) => {
                tracing::warn!("collecting layers: {}", chain(&e));
                // After damage in a manifest, gc cannot work until that snapshot is removed, and
                // the removal starts a gc. A store that is open for reading stays so.
                matches!(e, GcError::Io(e) if !e.is_read_only())
            }
        }
    }

    /// Schedules a gc of layers in [`Self::keep_collected`].
    pub fn look_for_garbage(&self) {
        self.garbage.notify_one();
    }

    /// Collects layers whenever [`Self::look_for_garbage`] or the store asks for it, until `stop`.
    pub async fn keep_collected(self, stop: CancellationToken) {
        while stop.run_until_cancelled(self.garbage.notified()).await.is_some() {
            let templates = self.clone();
            // Blocking, because gc may read all manifests.
            if blocking(move || Ok(templates.failed_to_collect())).await != Ok(false) {
                stop.run_until_cancelled(tokio::time::sleep(AGAIN)).await;
                self.look_for_garbage();
            }
        }
    }
}
