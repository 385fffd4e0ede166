//! What all programs share, and a started program.

use super::cage::{Cage, Cages};
use super::detached::{Log, Logs};
use super::fork::Fork;
use super::leftovers::Leftovers;
use super::spawn::Child;
use super::streams::Streams;
use super::strings::Places;
use crate::watch::Watchers;
use std::path::PathBuf;
use std::sync::Arc;

/// State that all execs share.
#[derive(Debug)]
pub struct Programs {
    /// The folder that contains etc/passwd and etc/group; `/` except in tests.
    pub root: PathBuf,
    /// The cgroups of programs.
    pub cages: Cages,
    /// Whether programs must reset oom_score_adj, because they would inherit the agent's protection
    /// from the out-of-memory killer.
    pub mortal: bool,
    /// Whether this machine may have become a clone.
    pub fork: Fork,
    /// Connections that are informed of forks.
    pub watchers: Watchers,
    /// Detached programs, and their output.
    pub logs: Logs,
    /// Bounds the memory of long arguments.
    pub places: Places,
    /// Streams of programs that have ended, which others still hold.
    pub leftovers: Leftovers,
}

impl Programs {
    /// The state for the machine at `root`, without any program.
    #[must_use]
    pub fn new(root: PathBuf, cages: Cages, mortal: bool) -> Self {
        Self {
            root,
            cages,
            mortal,
            fork: Fork::default(),
            watchers: Watchers::default(),
            logs: Logs::default(),
            places: Places::default(),
            leftovers: Leftovers::default(),
        }
    }
}

/// A started program.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) cage: Cage,
    pub(crate) streams: Streams,
    /// Where its end is noted, if it is detached.
    pub(crate) log: Option<Arc<Log>>,
}
