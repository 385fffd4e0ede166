//! An open snapshot.

use crate::templates::pagers::{Pager, Wanted};
use crate::templates::shared::Shared;
use dayfly_api::types;
use dayfly_store::OpenSnapshot;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// An open snapshot, and the pager that fills its RAM if the RAM is not complete yet.
#[derive(Debug)]
pub struct OpenTemplate {
    /// The open files and the manifest.
    pub(crate) snapshot: OpenSnapshot,
    /// The pager that fills its memory, or has filled it.
    pub pager: Option<Arc<Wanted>>,
    /// Pages that its clones map from the memory of other templates.
    pub shared: Option<Arc<Shared>>,
}

impl std::ops::Deref for OpenTemplate {
    type Target = OpenSnapshot;

    fn deref(&self) -> &OpenSnapshot {
        &self.snapshot
    }
}

impl OpenTemplate {
    /// A template whose own memory file is complete.
    pub(crate) const fn whole(snapshot: OpenSnapshot) -> Self {
        Self { snapshot, pager: None, shared: None }
    }

    /// Whether the open files are still those of the snapshot, and its RAM can be completed.
    pub(crate) fn is_current(&self) -> bool {
        !self.is_lost() && self.snapshot.is_current()
    }

    /// Whether a part of its RAM is missing for ever, because its pager died.
    pub(crate) fn is_lost(&self) -> bool {
        self.pager.as_ref().is_some_and(|wanted| wanted.pager().is_gone())
    }

    /// The RAM that is in the host's memory; `None` if it is a file on disk, which has no seals.
    pub(crate) fn resident(&self) -> Option<types::Resident> {
        rustix::fs::fcntl_get_seals(&self.memory).ok()?;
        let own_bytes = self.memory.metadata().ok()?.blocks() * 512;
        Some(types::Resident {
            own_bytes,
            shared_bytes: self.shared.as_ref().map_or(0, |s| s.bytes()),
        })
    }

    /// The pager, while it is filling: every new clone must be announced to it.
    #[must_use]
    pub fn filling(&self) -> Option<&Arc<Pager>> {
        self.pager.as_ref().map(|wanted| wanted.pager()).filter(|pager| pager.is_filling())
    }
}
