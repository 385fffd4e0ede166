//! The files from which a clone's RAM is mapped: those of a snapshot, or those of a forked VM,
//! which are laid over a snapshot's.

use crate::templates::open::OpenTemplate;
use crate::templates::pagers::{Pager, Wanted};
use crate::templates::shared::Shared;
use std::fs::File;
use std::sync::Arc;

/// The backing of a clone's RAM.
#[derive(Debug, Clone)]
pub enum MemoryBacking {
    /// RAM of a snapshot.
    Snapshot(Arc<OpenTemplate>),
    /// RAM of a VM at the instant of its fork.
    Fork(Arc<Ram>),
}

/// RAM of a forked VM.
#[derive(Debug)]
pub struct Ram {
    /// The memory file, with all pages that are not in `shared`.
    pub memory: File,
    /// Pages in other files: those written since the VM's start, over those that were shared
    /// before.
    pub shared: Option<Shared>,
    /// The pager that fills `memory`, or has filled it.
    pub pager: Option<Arc<Wanted>>,
    /// The recorded working set of clones, if there is one.
    pub working_set: Option<File>,
}

impl MemoryBacking {
    /// The memory file, with all pages that are not in [`Self::shared`].
    pub fn memory(&self) -> &File {
        match self {
            Self::Snapshot(open) => &open.memory,
            Self::Fork(ram) => &ram.memory,
        }
    }

    /// The pages that are in other files.
    pub fn shared(&self) -> Option<&Shared> {
        match self {
            Self::Snapshot(open) => open.shared.as_deref(),
            Self::Fork(ram) => ram.shared.as_ref(),
        }
    }

    /// The pager that fills the memory file, or has filled it.
    pub fn wanted(&self) -> Option<&Arc<Wanted>> {
        match self {
            Self::Snapshot(open) => open.pager.as_ref(),
            Self::Fork(ram) => ram.pager.as_ref(),
        }
    }

    /// The pager, while it is filling: every new clone must be announced to it.
    pub fn filling(&self) -> Option<&Arc<Pager>> {
        self.wanted().map(|wanted| wanted.pager()).filter(|pager| pager.is_filling())
    }

    /// The sealed record of the working set: the pages that clones touch first.
    pub fn working_set(&self) -> Option<&File> {
        match self {
            Self::Snapshot(open) => open.working_set.as_ref(),
            Self::Fork(ram) => ram.working_set.as_ref(),
        }
    }
}
