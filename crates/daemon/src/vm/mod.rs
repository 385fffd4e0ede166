//! A VM as the daemon knows it. [`registry`] has all VMs, and [`record`] is the file in which the
//! next daemon finds a VM. [`batch`] has the VMs of unanswered requests, and [`requests`] has
//! answers for their repetition. [`budget`] is the memory of VMs, and `pins` keeps their images and
//! layers. [`crate::model::state`] decides which event a phase accepts.
//!
//! # Lock order
//!
//! A task that holds a lock of this list takes only locks further down. The locks of a VM:
//!
//! ```text
//!  snapshots      a snapshot, until it is stored; a fork, until its clones       asynchronous
//!                 run and its layers are merged
//!    └─ turn      vCPUs are stopped, started, or the state is saved              asynchronous
//!         └─ removal    the record is written, or files are removed              asynchronous
//!  launching      the VMM is being started; the end of the VM waits for it       asynchronous
//!  egress         the egress policy is being changed                             asynchronous
//! ```
//!
//! Below them come locks that are held for a few instructions and never across an `await`. First
//! `end_announced`, then the registry's lock, then `live`, then one of `process`, `pin`, `memory`,
//! `backing`, `attachment`, `group`, `booking`, `space`, `volumes`, `has_slot` and the processes of
//! `streams`. The drop of a pin or a template may remove files, so it happens after `live` is
//! released: readers of `live` must not wait for the disk.

pub mod available;
pub mod batch;
pub mod bill;
pub mod budget;
mod group;
mod ledger;
mod pins;
pub mod record;
pub mod registry;
pub mod requests;
mod shown;
pub mod space;
pub mod survey;
pub mod uids;
pub mod unknown;
mod volumes;
mod waiting;

pub use volumes::{OpenVolume, OpenVolumes};

use crate::base::config::{Config, VmDir};
use crate::base::cpus::{Booking, KeptBooking};
use crate::base::error::{ApiError, Outcome};
use crate::base::groups::GroupLease;
use crate::base::time::monotonic_us;
use crate::model::facts::Facts;
use crate::model::live::Live;
use crate::model::state::{Event, Phase, Refused};
use crate::model::vm_slot::VmSlot;
use crate::net::Attachment;
use crate::net::streams::Streams;
use crate::templates::memory_backing::MemoryBacking;
use crate::vm::ledger::Ledger;
use crate::vm::unknown::Carried;
use budget::Reservation;
use dayfly_api::types::{self, ErrorCode, VmExit};
use dayfly_host::cpus::CpuList;
use dayfly_host::process::Process;
use dayfly_store::Pin;
use dayfly_units::{Name, VmId, sync::lock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, OwnedMutexGuard, watch};
use tokio::time::timeout;

/// One VM.
#[derive(Debug)]
pub struct Vm {
    /// Its id.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// Its slot.
    pub slot: u32,
    /// The user and group id of its VMM.
    pub uid: u32,
    /// Index of its memory node in the host's list of nodes.
    pub node: usize,
    /// Its run directory.
    pub dir: VmDir,
    /// The immutable facts.
    pub facts: Facts,
    /// Why an earlier daemon's VM cannot be adopted, such as an unreadable record. Such a VM is
    /// kept and listed, and can only be removed.
    pub unadopted: Option<String>,
    /// What its record has that this daemon does not understand.
    pub carried: Carried,
    /// Held while vCPUs are stopped or started, or the state is saved, so that these happen in
    /// turn.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Held by a snapshot until it is stored, and by a fork until its clones run and its layers are
    /// merged. A pending snapshot is stored without it.
    pub snapshots: Arc<tokio::sync::Mutex<()>>,
    /// Held while its record is written or its files are removed.
    pub removal: tokio::sync::Mutex<()>,
    /// Held for reading while a client follows a program; a VM that is removed with its program
    /// waits for them.
    pub followers: Arc<tokio::sync::RwLock<()>>,
    /// Its streams that the daemon hands over, and the processes that have them.
    pub streams: Streams,
    /// Held while its VMM is being started; the end of the VM waits for it.
    pub launching: Arc<tokio::sync::Mutex<()>>,
    live: Mutex<Live>,
    process: Mutex<Option<Arc<Process>>>,
    group: Mutex<Option<Arc<GroupLease>>>,
    booking: Mutex<KeptBooking>,
    pin: Mutex<Option<Pin>>,
    memory: Mutex<Option<Reservation>>,
    backing: Mutex<Option<MemoryBacking>>,
    attachment: Mutex<Attachment>,
    space: Mutex<space::VmSpace>,
    /// The folders of its volumes, until they are mounted.
    pub volumes: OpenVolumes,
    has_slot: Mutex<bool>,
    gone: watch::Sender<bool>,
    /// For the first caller of [`Self::ended`].
    mark_gone: Mutex<Option<MarkGone>>,
    /// Held while its egress policy is being changed.
    pub egress: tokio::sync::Mutex<()>,
    /// Notified when its deadline has changed.
    pub deadline_changed: Notify,
    /// Whether a task ends it at its deadline.
    deadline_watched: AtomicBool,
    /// Whether the event of its end was added.
    end_announced: Mutex<bool>,
    /// Whether the VM runs only for a snapshot or a fork, and is then paused again. Changed with
    /// the turn, see [`Self::take_turn`].
    pub pause_due: AtomicBool,
    /// Why its VMM, which an earlier daemon started, has not said yet in which state it is.
    waiting: watch::Sender<Option<String>>,
    /// What was done for it outside of its control group.
    pub ledger: Ledger,
}

/// What a VM had until it ended. The drop may free gigabytes of RAM (of a template that no list has
/// any more) and delete layers. So it happens on a thread that may block, best on
/// [`crate::daemon::Daemon::reapers`].
#[derive(Debug)]
#[must_use = "the drop blocks: give it to the reapers"]
pub struct Remains {
    _pin: Option<Pin>,
    _backing: Option<MemoryBacking>,
    _attachment: Attachment,
    _group: Option<Arc<GroupLease>>,
    _booking: Option<Arc<Booking>>,
    /// The last field, because fields are dropped in this order: a VM that is gone keeps nothing.
    _gone: Option<MarkGone>,
}

/// Marks the VM as gone when dropped.
#[derive(Debug)]
struct MarkGone(watch::Sender<bool>);

impl Drop for MarkGone {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

impl Vm {
    /// A VM in phase `Starting`, with its reserved memory.
    #[must_use]
    pub fn new(vm_slot: VmSlot, name: Name, dir: VmDir, facts: Facts, memory: Reservation) -> Self {
        let live = Live {
            phase: Phase::Starting,
            exit: None,
            kill_asked: false,
            ready_us: None,
            creation_us: 0,
            relays_us: 0,
            memory_time: None,
            timeline: Vec::new(),
            asked_us: None,
            process: None,
            group: None,
            cpus: CpuList::default(),
            starts_vcpus: false,
            cpus_online: None,
            pager: None,
            identity: None,
            network: None,
            volumes: Vec::new(),
            agent_version: String::new(),
            disks: Vec::new(),
            read_only_layers: true,
            zeroes_written: true,
            deadline: None,
            expired: false,
            program: None,
            no_snapshot: None,
        };
        let vm = Self::with(vm_slot, name, dir, facts, live);
        vm.keep_memory(memory);
        vm
    }

    /// A VM with the state `live`, such as an adopted one.
    #[must_use]
    pub fn with(vm_slot: VmSlot, name: Name, dir: VmDir, facts: Facts, live: Live) -> Self {
        let VmSlot { id, slot, uid, node } = vm_slot;
        let alive = live.phase.alive();
        let gone = watch::Sender::new(!alive);
        let ledger = Ledger::new(&live);
        Self {
            id,
            name,
            slot,
            uid,
            node,
            dir,
            facts,
            unadopted: None,
            carried: Carried::default(),
            turn: Arc::default(),
            snapshots: Arc::default(),
            removal: tokio::sync::Mutex::default(),
            followers: Arc::default(),
            streams: Streams::default(),
            launching: Arc::default(),
            live: Mutex::new(live),
            process: Mutex::default(),
            group: Mutex::default(),
            booking: Mutex::default(),
            pin: Mutex::default(),
            memory: Mutex::default(),
            backing: Mutex::default(),
            attachment: Mutex::default(),
            space: Mutex::default(),
            volumes: OpenVolumes::default(),
            has_slot: Mutex::new(alive),
            mark_gone: Mutex::new(Some(MarkGone(gone.clone()))),
            gone,
            egress: tokio::sync::Mutex::default(),
            deadline_changed: Notify::new(),
            deadline_watched: AtomicBool::new(false),
            end_announced: Mutex::new(!alive),
            pause_due: AtomicBool::new(false),
            waiting: watch::Sender::new(None),
            ledger,
        }
    }

    /// Its id, slot, user and node.
    #[must_use]
    pub fn vm_slot(&self) -> VmSlot {
        VmSlot { id: self.id, slot: self.slot, uid: self.uid, node: self.node }
    }

    /// A copy of its mutable state.
    #[must_use]
    pub fn live(&self) -> Live {
        let relays_us = self.ledger.relays.ended_us();
        Live { relays_us, ..lock(&self.live).clone() }
    }

    /// Its current phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        lock(&self.live).phase
    }

    /// Whether its guest has an agent. Guests of benchmarks have none, and get no requests.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        !lock(&self.live).agent_version.is_empty()
    }

    /// Changes the mutable state, except the phase: only [`Self::step`] and [`Self::ended`] change
    /// that.
    pub fn update<T>(&self, change: impl FnOnce(&mut Live) -> T) -> T {
        change(&mut lock(&self.live))
    }

    /// Changes the phase by `event`, and returns the phase before.
    ///
    /// # Errors
    /// [`Refused`]; the phase is unchanged.
    pub fn step(&self, event: Event) -> Result<Phase, Refused> {
        let mut live = lock(&self.live);
        let before = live.phase;
        live.phase = before.after(event)?;
        Ok(before)
    }

    /// As [`Self::take_turn`], without a time limit.
    pub async fn turn(&self) -> OwnedMutexGuard<()> {
        self.turn.clone().lock_owned().await
    }

    /// Takes the turn, which lets its holder stop, start and save the VM. The task that sends the
    /// commands to the VMM must own the guard, so that no other task sends commands meanwhile.
    ///
    /// # Errors
    /// The operation before has not ended within `within`.
    pub async fn take_turn(&self, within: Duration) -> Outcome<OwnedMutexGuard<()>> {
        let turn = timeout(within, self.turn()).await;
        turn.map_err(|_| {
            ApiError::new(
                ErrorCode::Timeout,
                format_args!(
                    "VM {}: expected the operation before to end within {} s, it still waits for \
                     the VMM; try again, or end the VM with `dayfly rm --force {}`",
                    self.name,
                    within.as_secs(),
                    self.name
                ),
            )
        })
    }

    /// Stores the process of its VMM, which has started.
    pub fn hold(&self, process: Arc<Process>) {
        lock(&self.live).process = Some(process.id());
        *lock(&self.process) = Some(process);
    }

    /// Its VMM; `None` before it was started and after it ended.
    #[must_use]
    pub fn process(&self) -> Option<Arc<Process>> {
        lock(&self.process).clone()
    }

    /// Adds a phase to the timeline, which ended `us` microseconds after the request.
    pub fn mark(&self, what: impl Into<String>, us: u64) {
        lock(&self.live).timeline.push((what.into(), us));
    }

    /// Adds a phase that ends now to the timeline. Does nothing if the time of the request is
    /// unknown.
    pub fn mark_now(&self, what: &str) {
        let mut live = lock(&self.live);
        if let Some(asked) = live.asked_us {
            live.timeline.push((what.to_owned(), monotonic_us().saturating_sub(asked)));
        }
    }

    /// Stores what its RAM is mapped from, and the pager that fills it, unless the VM has ended.
    pub fn set_backing(&self, backing: MemoryBacking) {
        let mut live = lock(&self.live);
        if live.phase.alive() {
            live.pager = backing.filling().map(|pager| pager.process().id());
            *lock(&self.backing) = Some(backing);
        }
    }

    /// What its RAM is mapped from. `None` for a VM that booted, and for one that an earlier daemon
    /// started.
    #[must_use]
    pub fn backing(&self) -> Option<MemoryBacking> {
        lock(&self.backing).clone()
    }

    /// Gives it a network attachment until it ends. A VM that has ended drops `attachment`.
    pub fn attach(&self, mut attachment: Attachment) {
        let mut live = lock(&self.live);
        if live.phase.alive() {
            attachment.name(self.id, &self.name);
            live.network = attachment.shown();
            *lock(&self.attachment) = attachment;
        }
    }

    /// The network that it has now, for its clones and the next daemon: what was asked for, with
    /// the egress policy as it was changed since.
    #[must_use]
    pub fn network_now(&self) -> types::NetworkRequest {
        let asked = self.facts.network.clone();
        match lock(&self.live).network.as_ref().map(types::VmNetwork::policy) {
            Some(policy) => asked.with_policy(policy),
            None => asked,
        }
    }

    /// Calls `with` on its network attachment, with the attachment's lock held.
    pub fn attachment<T>(&self, with: impl FnOnce(&mut Attachment) -> T) -> T {
        with(&mut lock(&self.attachment))
    }

    /// Has its published ports lead to its guest from now on. Its VMM runs. Call it within a tokio
    /// runtime.
    pub fn connect_ports(&self, config: &Config) {
        self.attachment(|attachment| attachment.connect(|| self.relay_place(config)));
    }

    /// Keeps the reservation of its memory until it ends.
    pub fn keep_memory(&self, memory: Reservation) {
        *lock(&self.memory) = Some(memory);
    }

    /// Returns its reserved memory to the budget.
    pub fn return_memory(&self) {
        lock(&self.memory).take();
    }

    /// Marks it as exited for the reason `exit`, and takes everything that a live VM has. The first
    /// reason stays. The VM counts as gone when the result of the first call is dropped: a second
    /// caller has nothing of the VM, and may drop its result earlier.
    pub fn ended(&self, exit: VmExit) -> Remains {
        self.attachment(Attachment::unpublish);
        let keeps_disks = {
            let mut live = lock(&self.live);
            live.phase = Phase::Exited;
            live.exit.get_or_insert(exit);
            live.process = None;
            live.group = None;
            live.cpus = CpuList::default();
            live.volumes.clear();
            self.keeps_disks(&live)
        };
        lock(&self.process).take();
        lock(&self.memory).take();
        lock(&self.space).end();
        drop(self.volumes.take());
        self.waiting.send_replace(None);
        Remains {
            _pin: if keeps_disks { None } else { lock(&self.pin).take() },
            _backing: lock(&self.backing).take(),
            _attachment: std::mem::take(&mut *lock(&self.attachment)),
            _group: self.take_group(),
            _booking: lock(&self.booking).take(),
            _gone: lock(&self.mark_gone).take(),
        }
    }

    /// Whether the caller is the first, and has to start the task that ends the VM at its deadline.
    #[must_use]
    pub fn claim_deadline(&self) -> bool {
        !self.deadline_watched.swap(true, Ordering::Relaxed)
    }

    /// Calls `add`, which adds the event of its end, unless another call has done so. Returns when
    /// the event is added, so that a later event follows it.
    pub fn announce_end(&self, add: impl FnOnce()) {
        let mut announced = lock(&self.end_announced);
        if !std::mem::replace(&mut *announced, true) {
            add();
        }
    }

    /// Resolves once its process is gone.
    pub async fn wait_gone(&self) {
        let mut gone = self.gone.subscribe();
        // The sender lives in `self`, so the wait ends with `true` and not with a closed channel.
        let _ = gone.wait_for(|gone| *gone).await;
    }

    /// Whether its process is gone, or has never existed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Stores why its VMM has not answered yet; `None` once it has.
    pub fn wait_for_vmm(&self, why: Option<String>) {
        self.waiting.send_replace(why);
    }

    /// Changes of what [`Self::wait_for_vmm`] stored.
    #[must_use]
    pub fn waiting(&self) -> watch::Receiver<Option<String>> {
        self.waiting.subscribe()
    }

    /// Why the daemon cannot control it, or why it does not go on; `None` for most VMs.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let waiting =
            || self.waiting.borrow().as_ref().map(|why| format!("waiting for its VMM: {why}"));
        self.unadopted.clone().or_else(waiting).or_else(|| self.stalled())
    }

    /// Whether the end of an ephemeral VM was requested: no client uses it any more.
    #[must_use]
    pub fn leaving(&self) -> bool {
        self.facts.ephemeral && lock(&self.live).kill_asked
    }

    /// Whether it has its slot, which no other VM may then get.
    #[must_use]
    pub fn holds_slot(&self) -> bool {
        *lock(&self.has_slot)
    }

    /// Gives up its slot; `false` if it has none any more.
    pub(crate) fn drop_slot(&self) -> bool {
        std::mem::replace(&mut *lock(&self.has_slot), false)
    }
}
