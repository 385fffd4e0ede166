//! What all of the daemon shares.

use crate::config::Config;
use crate::depot::Depot;
use crate::metrics::Metrics;
use crate::vm::pool::Pool;
use crate::vm::registry::Registry;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The daemon.
#[derive(Debug)]
pub struct Daemon {
    /// Where things are, and how long they may take.
    pub config: Config,
    /// Which VMs there are.
    pub registry: Registry,
    /// What is made ahead of demand.
    pub pool: Pool,
    /// What is counted and timed.
    pub metrics: Metrics,
    /// Images, kernels, snapshots, layers.
    pub depot: Depot,
    /// Undoing: the daemon waits for it before it ends.
    pub undo: TaskTracker,
    /// The daemon was asked to stop: long operations undo themselves.
    pub stop: CancellationToken,
}

impl Daemon {
    /// A daemon that knows no VM.
    #[must_use]
    pub fn new(config: Config, depot: Depot) -> Self {
        Self {
            config,
            registry: Registry::default(),
            pool: Pool::default(),
            metrics: Metrics::default(),
            depot,
            undo: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }
}
