//! The services of one daemon, in one struct that all operations share.

use crate::base::config::Config;
use crate::base::groups::GroupStock;
use crate::base::long_requests::LongRequests;
use crate::base::metrics::Metrics;
use crate::base::random::random;
use crate::base::time::unix_ms;
use crate::model::events::EventLog;
use crate::model::exit::exit_now;
use crate::net::Networks;
use crate::templates::cache::TemplateCache;
use crate::vm::Vm;
use crate::vm::available::Available;
use crate::vm::budget::Budget;
use crate::vm::registry::Registry;
use crate::vm::requests::Requests;
use crate::vm::space::Space;
use crate::vm::survey::addresses;
use crate::vmm::launch::Launcher;
use crate::vmm::pool::Pool;
use crate::volumes::named::Named;
use crate::volumes::offers::Offers;
use crate::volumes::server::Watched;
use dayfly_api::types::{Event, EventKind, ExitKind};
use dayfly_host::cpus;
use dayfly_host::numa::Node;
use dayfly_host::reaper::Reapers;
use dayfly_units::Name;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// One daemon: a field for each service.
#[derive(Debug)]
pub struct Daemon {
    /// Paths, limits and deadlines.
    pub config: Config,
    /// All VMs, by id and by name.
    pub registry: Registry,
    /// The host's memory nodes; [`VmSlot::node`](crate::model::vm_slot::VmSlot::node) is an index
    /// into this list.
    pub nodes: Vec<Node>,
    /// Memory that VMs may have, by node.
    pub budget: Arc<Budget>,
    /// Memory that the host has.
    pub available: Available,
    /// Space of the host's file systems.
    pub space: Arc<Space>,
    /// Threads that free the memory of ended VMs.
    pub reapers: Arc<Reapers>,
    /// Control groups of VMs and pagers.
    pub groups: GroupStock,
    /// Starts VMMs.
    pub launcher: Arc<Launcher>,
    /// Takes a VM and its guest request socket, on which the guest asks for forks of itself.
    /// Unbounded, but at most one entry for each VM.
    self_forks: UnboundedSender<(Arc<Vm>, UnixListener)>,
    /// Limits the VMMs that are made at once for waiting requests: two for each CPU.
    pub makers: Arc<Semaphore>,
    /// Bounds the memory of programs with long arguments.
    pub long_requests: LongRequests,
    /// Addresses, taps and names of VMs.
    pub networks: Networks,
    /// Warm VMMs and warm clones, made ahead of demand.
    pub pool: Arc<Pool>,
    /// Counters and histograms for `/metrics`.
    pub metrics: Metrics,
    /// The newest events of VMs.
    pub events: EventLog,
    /// Images, kernels, snapshots and layers of the store; open templates.
    pub templates: TemplateCache,
    /// Named volumes.
    pub volumes: Named,
    /// Folders of other hosts.
    pub offers: Arc<Offers>,
    /// Processes that serve volumes.
    pub volume_servers: Watched,
    /// Locks that serialise `verify` and `gc` of the store.
    pub maintenance: MaintenanceLocks,
    /// Requests with a key, and their answers.
    pub requests: Arc<Requests>,
    /// Roll-backs in progress; the daemon waits for them before it ends.
    pub undo: TaskTracker,
    /// Cancelled when the daemon is asked to stop; long operations then undo themselves.
    pub stop: CancellationToken,
}

impl Daemon {
    /// A daemon without VMs.
    ///
    /// # Errors
    /// The host cannot start the threads of [`Reapers`], or the run folder cannot be listed.
    pub fn new(
        config: Config,
        templates: TemplateCache,
        groups: GroupStock,
        nodes: Vec<Node>,
        self_forks: UnboundedSender<(Arc<Vm>, UnixListener)>,
    ) -> std::io::Result<Self> {
        let reapers = Arc::new(Reapers::new(&nodes, &groups.kept_off())?);
        let templates = templates.freeing_on(reapers.clone());
        Ok(Self {
            reapers,
            registry: Registry::new(config.first_uid),
            budget: Arc::new(Budget::new(&nodes, config.overcommit)),
            available: Available::new(config.memory_reserve_bytes, config.overcommit),
            space: Arc::new(Space::new(&config)),
            makers: Arc::new(Semaphore::new(2 * cpus::number())),
            launcher: Arc::new(Launcher::new(
                &config,
                templates.store().clone(),
                &nodes,
                groups.clone(),
            )),
            groups,
            self_forks,
            long_requests: LongRequests::default(),
            networks: Networks::new(&config, &addresses(&config)?),
            nodes,
            pool: Arc::new(Pool::new(config.pool)),
            volumes: Named::new(&config.state),
            offers: Arc::default(),
            volume_servers: Watched::default(),
            config,
            metrics: Metrics::default(),
            events: EventLog::new(u64::from_ne_bytes(random())),
            templates,
            maintenance: MaintenanceLocks::default(),
            requests: Arc::default(),
            undo: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }

    /// Adds an event of `vm`.
    pub fn happened(&self, vm: &Vm, kind: EventKind) {
        let removed = || exit_now(ExitKind::Killed, "removed");
        let has_exit = matches!(kind, EventKind::Exited | EventKind::Billed);
        let exit = has_exit.then(|| vm.live().exit.unwrap_or_else(removed));
        self.events.add(Event { exit, ..event_of(vm, kind) });
    }

    /// Adds an event of `vm` that has a cause.
    pub fn happened_because(&self, vm: &Vm, kind: EventKind, message: String) {
        self.events.add(Event { message: Some(message), ..event_of(vm, kind) });
    }

    /// Adds the event that `snapshot` of `vm` is stored.
    pub fn snapshotted(&self, vm: &Vm, snapshot: Name) {
        let snapshot = Some(snapshot);
        self.events.add(Event { snapshot, ..event_of(vm, EventKind::Snapshotted) });
    }

    /// Has the requests of a guest to fork itself served on `listener`.
    pub fn serve_self_forks(&self, vm: Arc<Vm>, listener: UnixListener) {
        let id = vm.id;
        if self.self_forks.send((vm, listener)).is_err() && !self.stop.is_cancelled() {
            tracing::error!(vm = %id, "cannot fork itself: the task that serves it has ended");
        }
    }
}

/// An event without more than the VM. The log gives it its id.
fn event_of(vm: &Vm, kind: EventKind) -> Event {
    Event {
        id: String::new(),
        at_unix_ms: unix_ms(),
        kind,
        vm: Some(vm.id),
        name: Some(vm.name.clone()),
        exit: None,
        snapshot: None,
        message: None,
    }
}

/// Locks of store maintenance: at most one `verify` and one `gc` run at a time.
#[derive(Debug, Default)]
pub struct MaintenanceLocks {
    pub(crate) verify: Mutex<()>,
    pub(crate) gc: Mutex<()>,
}

#[cfg(test)]
impl MaintenanceLocks {
    /// Takes the lock of `verify`, as a running `verify` does.
    pub(crate) async fn hold(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.verify.lock().await
    }
}
