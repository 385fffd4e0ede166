//! What all of the daemon shares.

use crate::config::Config;
use crate::depot::Depot;
use crate::metrics::Metrics;
use crate::net::Networks;
use crate::upkeep::Turns;
use crate::vm::berth::Berths;
use crate::vm::budget::Budget;
use crate::vm::pool::Pool;
use crate::vm::registry::Registry;
use crate::vm::zygotes::Zygotes;
use dayfly_host::numa::Node;
use dayfly_host::reaper::Reapers;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The daemon.
#[derive(Debug)]
pub struct Daemon {
    /// Where things are, and how long they may take.
    pub config: Config,
    /// Which VMs there are.
    pub registry: Registry,
    /// The host's memory nodes; a VM's [`Seat`](crate::vm::registry::Seat) says by place which is its own.
    pub nodes: Vec<Node>,
    /// How much memory VMs may have.
    pub budget: Arc<Budget>,
    /// What frees their memory.
    pub reapers: Reapers,
    /// What VMMs are forked from.
    pub zygotes: Zygotes,
    /// What VMMs have of the host's files, ahead of them.
    pub berths: Berths,
    /// Turns to make VMMs that somebody waits for: two for each CPU.
    pub makers: Arc<Semaphore>,
    /// Their network.
    pub networks: Networks,
    /// What is made ahead of demand.
    pub pool: Arc<Pool>,
    /// What is counted and timed.
    pub metrics: Metrics,
    /// Images, kernels, snapshots, layers.
    pub depot: Depot,
    /// Whose turn it is to search all of it, and to collect.
    pub turns: Turns,
    /// Undoing: the daemon waits for it before it ends.
    pub undo: TaskTracker,
    /// The daemon was asked to stop: long operations undo themselves.
    pub stop: CancellationToken,
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

impl Daemon {
    /// A daemon that knows no VM.
    ///
    /// # Errors
    /// The host gives no threads.
    pub fn new(config: Config, depot: Depot, nodes: Vec<Node>) -> std::io::Result<Self> {
        Ok(Self {
            reapers: Reapers::new(&nodes)?,
            registry: Registry::default(),
            budget: Arc::new(Budget::new(&nodes, config.overcommit)),
            makers: Arc::new(Semaphore::new(2 * cpus())),
            berths: Berths::new(&config),
            zygotes: Zygotes::new(&config, &nodes),
            networks: Networks::new(&config),
            nodes,
            pool: Arc::new(Pool::new(config.pool)),
            config,
            metrics: Metrics::default(),
            depot,
            turns: Turns::default(),
            undo: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }
}
