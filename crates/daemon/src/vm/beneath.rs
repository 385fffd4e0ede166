//! What a VM's RAM is mapped from: a snapshot's, or that of a VM that was forked, which lies over a snapshot's.

use crate::depot::Loaded;
use crate::depot::sharing::Shared;
use crate::pagers::{Pager, Wanted};
use std::fs::File;
use std::sync::Arc;

/// RAM beneath clones.
#[derive(Debug, Clone)]
pub enum Beneath {
    /// Of a snapshot.
    Snapshot(Arc<Loaded>),
    /// Of a VM at the instant when it was forked.
    Fork(Arc<Ram>),
}

/// RAM of a VM that was forked.
#[derive(Debug)]
pub struct Ram {
    /// All that `shared` does not have.
    pub memory: File,
    /// What was written since, over what was shared before.
    pub shared: Option<Shared>,
    /// Who fills `memory`, or has filled it.
    pub pager: Option<Arc<Wanted>>,
    /// What clones touch first, if that is known.
    pub working_set: Option<File>,
}

impl Beneath {
    /// The file that has what no other has.
    pub fn memory(&self) -> &File {
        match self {
            Self::Snapshot(open) => &open.memory,
            Self::Fork(ram) => &ram.memory,
        }
    }

    /// What is in other files.
    pub fn shared(&self) -> Option<&Shared> {
        match self {
            Self::Snapshot(open) => open.shared.as_deref(),
            Self::Fork(ram) => ram.shared.as_ref(),
        }
    }

    /// Who fills it, or has filled it.
    pub fn wanted(&self) -> Option<&Arc<Wanted>> {
        match self {
            Self::Snapshot(open) => open.pager.as_ref(),
            Self::Fork(ram) => ram.pager.as_ref(),
        }
    }

    /// Who has to be told of a clone.
    pub fn filling(&self) -> Option<&Arc<Pager>> {
        self.wanted().map(|wanted| wanted.pager()).filter(|pager| pager.is_filling())
    }

    /// The sealed record of what clones touch first.
    pub fn working_set(&self) -> Option<&File> {
        match self {
            Self::Snapshot(open) => open.working_set.as_ref(),
            Self::Fork(ram) => ram.working_set.as_ref(),
        }
    }
}
