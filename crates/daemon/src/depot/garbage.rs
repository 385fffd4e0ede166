//! What nobody needs any more goes without being asked for: pages when a snapshot is removed, its layers then or with whoever stands on them last.

use super::Depot;
use crate::error::{blocking, chain};
use dayfly_store::GcError;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// When layers that the host could not remove are looked for again.
const AGAIN: Duration = Duration::from_secs(30);

impl Depot {
    /// Removes pages that no snapshot needs. VMs need none: theirs were read when their snapshot was opened.
    pub fn collect_pages(&self) {
        match self.store.gc_pages() {
            Ok(report) => {
                for damage in &report.damage {
                    tracing::warn!("collecting pages: left alone: {damage}");
                }
                if report.packs > 0 {
                    tracing::info!(packs = report.packs, bytes = report.freed_bytes, "collected pages");
                }
            }
            Err(e) => tracing::warn!("collecting pages: {}", chain(&e)),
        }
    }

    /// Removes layers that nobody needs; what the host does not remove is tried again.
    pub fn collect(&self) {
        if self.failed_to_collect() {
            self.look_for_garbage();
        }
    }

    fn failed_to_collect(&self) -> bool {
        match self.store.gc() {
            Ok(report) => {
                if !report.layers.is_empty() {
                    tracing::info!(layers = report.layers.len(), bytes = report.freed_bytes, "collected");
                }
                false
            }
            Err(e) => {
                tracing::warn!("collecting layers: {}", chain(&e));
                // Where a snapshot cannot be read, nothing is known before that is removed; and then it is tried anyway.
                matches!(e, GcError::Io(_))
            }
        }
    }

    /// Has layers removed that nobody needs, soon.
    pub fn look_for_garbage(&self) {
        self.garbage.notify_one();
    }

    /// Removes layers of snapshots that are gone when what stood on them has gone too, until `stop`.
    pub async fn keep_collected(self, stop: CancellationToken) {
        while stop.run_until_cancelled(self.garbage.notified()).await.is_some() {
            let depot = self.clone();
            // Reads manifests, perhaps all of them.
            if blocking(move || Ok(depot.failed_to_collect())).await != Ok(false) {
                stop.run_until_cancelled(tokio::time::sleep(AGAIN)).await;
                self.look_for_garbage();
            }
        }
    }
}
