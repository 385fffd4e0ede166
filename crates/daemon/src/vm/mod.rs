//! A VM as the daemon knows it.
//!
//! [`state`] says what may happen when, [`registry`] which VMs there are, [`record`] what the next daemon is told, [`birth`] and
//! [`death`] do the work, [`agent_link`] and [`control_link`] talk to the guest's agent and to the VMM, [`inspect`] measures.

pub mod agent_link;
pub mod beneath;
pub mod berth;
pub mod birth;
pub mod budget;
pub mod control_link;
pub mod death;
mod demand;
pub mod footprint;
pub mod identity;
pub mod inspect;
pub mod launch;
pub mod link;
pub mod pool;
pub mod power;
pub mod record;
pub mod registry;
pub mod source;
pub mod state;
pub mod step;
pub mod zygotes;

use crate::config::VmDir;
use crate::error::Fault;
use crate::net::Wires;
use crate::time::{monotonic_us, unix_ms};
use beneath::Beneath;
use budget::Reservation;
use dayfly_api::types::{self, ErrorCode, VmExit};
use dayfly_host::process::{Process, ProcessId};
use dayfly_store::{ChainLayer, ImageConfig, ImageRef, KernelRef, Pin, VmLayer};
use dayfly_units::{Name, VmId};
use registry::{Seat, lock};
use serde::{Deserialize, Serialize};
use state::{Event, Phase, Refused};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// What does not change in a VM's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Snapshot it was cloned from, or what it was forked from.
    pub snapshot: Option<Name>,
    /// What it has to do with forks.
    #[serde(default)]
    pub fork: ForkFacts,
    /// Image of its root disk.
    pub image: Name,
    /// Its kernel.
    pub kernel: KernelRef,
    /// vCPUs.
    pub vcpus: u8,
    /// RAM.
    pub memory_bytes: u64,
    /// Network devices.
    #[serde(default)]
    pub nets: u8,
    /// When it was asked for.
    pub created_unix_ms: u64,
    /// What was asked for of the network.
    #[serde(default)]
    pub network: types::NetworkRequest,
    /// How its image wants to be started.
    pub config: ImageConfig,
    /// Whether it goes with the connection or the bake that made it.
    pub ephemeral: bool,
    /// As given.
    pub labels: BTreeMap<String, String>,
}

/// What a VM has to do with forks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkFacts {
    /// The VM it was forked from.
    pub from: Option<VmId>,
    /// Which clone of that fork it is, from 1.
    pub number: u32,
    /// How many clones of itself, at one time, its guest may ask for.
    pub may: u32,
}

/// Who a guest is; given again after a snapshot, which ends the seal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Its hostname.
    pub hostname: String,
    /// Its machine-id.
    pub machine_id: String,
}

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The lowest layer.
    pub image: ImageRef,
    /// The size that the guest sees.
    pub size_bytes: u64,
    /// Frozen layers over the image, the lowest first.
    pub layers: Vec<ChainLayer>,
    /// The layer that takes its writes.
    pub writable: Option<VmLayer>,
}

/// What changes in a VM's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Live {
    /// Where it is.
    pub phase: Phase,
    /// Why it ended.
    pub exit: Option<VmExit>,
    /// Somebody asked for its end.
    pub kill_asked: bool,
    /// Microseconds from the request to the agent's first answer.
    pub ready_us: Option<u64>,
    /// Phases of its start, in microseconds since the request.
    pub timeline: Vec<(String, u64)>,
    /// When it was asked for, in microseconds of the host's `CLOCK_MONOTONIC`.
    pub asked_us: Option<u64>,
    /// Its VMM.
    pub process: Option<ProcessId>,
    /// Who it is.
    pub who: Option<Who>,
    /// Where it is on the network.
    #[serde(default)]
    pub network: Option<types::VmNetwork>,
    /// Version of the agent in it.
    pub agent_version: String,
    /// In order vda, vdb, ….
    pub disks: Vec<Disk>,
    /// Why no snapshot can be taken of it: a layer under its writable one is not in the store.
    pub no_snapshot: Option<String>,
}

/// A VM.
#[derive(Debug)]
pub struct Vm {
    /// Its id.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// Its user is `registry::FIRST_UID + slot`.
    pub slot: u32,
    /// The place of its memory node in the host's list of nodes.
    pub node: usize,
    /// Its folder.
    pub dir: VmDir,
    /// What does not change.
    pub facts: Facts,
    /// Held while its vCPUs are stopped, let go, or its state is saved: one after the other.
    pub turn: tokio::sync::Mutex<()>,
    /// Held while a snapshot of it is made, until that is stored.
    pub snapshots: Arc<tokio::sync::Mutex<()>>,
    /// Held while its files are being removed.
    pub removal: tokio::sync::Mutex<()>,
    /// Held while its VMM is being started: who ends it waits for that.
    pub launching: Arc<tokio::sync::Mutex<()>>,
    live: Mutex<Live>,
    process: Mutex<Option<Arc<Process>>>,
    pin: Mutex<Option<Pin>>,
    memory: Mutex<Option<Reservation>>,
    beneath: Mutex<Option<Beneath>>,
    wires: Mutex<Wires>,
    slot_held: Mutex<bool>,
    gone: watch::Sender<bool>,
}

impl Vm {
    /// A VM that is starting.
    #[must_use]
    pub fn new(seat: Seat, name: Name, dir: VmDir, facts: Facts, memory: Reservation) -> Self {
        let live = Live {
            phase: Phase::Starting,
            exit: None,
            kill_asked: false,
            ready_us: None,
            timeline: Vec::new(),
            asked_us: None,
            process: None,
            who: None,
            network: None,
            agent_version: String::new(),
            disks: Vec::new(),
            no_snapshot: None,
        };
        let vm = Self::with(seat, name, dir, facts, live);
        vm.keep_memory(memory);
        vm
    }

    /// A VM as it was left.
    #[must_use]
    pub fn with(seat: Seat, name: Name, dir: VmDir, facts: Facts, live: Live) -> Self {
        let Seat { id, slot, node } = seat;
        let alive = live.phase.alive();
        Self {
            id,
            name,
            slot,
            node,
            dir,
            facts,
            turn: tokio::sync::Mutex::default(),
            snapshots: Arc::default(),
            removal: tokio::sync::Mutex::default(),
            launching: Arc::default(),
            live: Mutex::new(live),
            process: Mutex::default(),
            pin: Mutex::default(),
            memory: Mutex::default(),
            beneath: Mutex::default(),
            wires: Mutex::default(),
            slot_held: Mutex::new(alive),
            gone: watch::Sender::new(!alive),
        }
    }

    /// Its id and slot.
    #[must_use]
    pub fn seat(&self) -> Seat {
        Seat { id: self.id, slot: self.slot, node: self.node }
    }

    /// What it is now.
    #[must_use]
    pub fn live(&self) -> Live {
        lock(&self.live).clone()
    }

    /// Where it is now.
    #[must_use]
    pub fn phase(&self) -> Phase {
        lock(&self.live).phase
    }

    /// Whether its guest has an agent. Those of benchmarks have none, and are told nothing.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        !lock(&self.live).agent_version.is_empty()
    }

    /// Changes what is not decided by [`Phase::after`].
    pub fn update<T>(&self, change: impl FnOnce(&mut Live) -> T) -> T {
        change(&mut lock(&self.live))
    }

    /// Goes where `event` leads, and gives where it was.
    ///
    /// # Errors
    /// [`Refused`]; nothing has changed.
    pub fn step(&self, event: Event) -> Result<Phase, Refused> {
        let mut live = lock(&self.live);
        let before = live.phase;
        live.phase = before.after(event)?;
        Ok(before)
    }

    /// Its VMM runs.
    pub fn hold(&self, process: Arc<Process>) {
        lock(&self.live).process = Some(process.id());
        *lock(&self.process) = Some(process);
    }

    /// Its VMM, unless that was never started or is gone.
    #[must_use]
    pub fn process(&self) -> Option<Arc<Process>> {
        lock(&self.process).clone()
    }

    /// Adds a phase to the timeline.
    pub fn mark(&self, what: impl Into<String>, us: u64) {
        lock(&self.live).timeline.push((what.into(), us));
    }

    /// Adds a phase that is done now, counted from the request as those of its birth; not for one that an earlier daemon started.
    pub fn mark_now(&self, what: &str) {
        let mut live = lock(&self.live);
        if let Some(asked) = live.asked_us {
            live.timeline.push((what.to_owned(), monotonic_us().saturating_sub(asked)));
        }
    }

    /// Keeps what it stands on in the store, until it ends.
    pub fn keep_pinned(&self, pin: Pin) {
        let live = lock(&self.live);
        let before = if live.phase.alive() { lock(&self.pin).replace(pin) } else { Some(pin) };
        drop(live);
        // After the new one is there; it may remove layers, which nobody waits for who only looks.
        drop(before);
    }

    /// What it stands on, kept for somebody else too.
    #[must_use]
    pub fn pinned(&self) -> Option<Pin> {
        lock(&self.pin).clone()
    }

    /// It stands on nothing any more.
    pub fn let_go_pinned(&self) {
        let pin = lock(&self.pin).take();
        // May remove layers, which nobody waits for who only looks.
        drop(pin);
    }

    /// Its RAM is mapped from this.
    pub fn stand_on(&self, beneath: Beneath) {
        let live = lock(&self.live);
        if live.phase.alive() {
            *lock(&self.beneath) = Some(beneath);
        }
    }

    /// What its RAM is mapped from; not known of one that an earlier daemon started, nothing for one that booted.
    #[must_use]
    pub fn beneath(&self) -> Option<Beneath> {
        lock(&self.beneath).clone()
    }

    /// What it has of the network, until it ends.
    pub fn wire(&self, wires: Wires) {
        let mut live = lock(&self.live);
        if live.phase.alive() {
            live.network = wires.shown();
            *lock(&self.wires) = wires;
        }
    }

    /// What it has of the network.
    pub fn wires<T>(&self, with: impl FnOnce(&mut Wires) -> T) -> T {
        with(&mut lock(&self.wires))
    }

    /// Its memory, which others may not have until it ends.
    pub fn keep_memory(&self, memory: Reservation) {
        *lock(&self.memory) = Some(memory);
    }

    /// Others may have its memory.
    pub fn return_memory(&self) {
        lock(&self.memory).take();
    }

    /// Its process is gone, and this is why. The first cause stays.
    pub fn ended(&self, exit: VmExit) {
        {
            let mut live = lock(&self.live);
            live.phase = Phase::Exited;
            live.exit.get_or_insert(exit);
            live.process = None;
        }
        lock(&self.process).take();
        self.let_go_pinned();
        lock(&self.memory).take();
        lock(&self.beneath).take();
        *lock(&self.wires) = Wires::default();
        self.gone.send_replace(true);
    }

    /// Resolves once its process is gone; at once where it is already.
    pub async fn wait_gone(&self) {
        let mut gone = self.gone.subscribe();
        // The sender lives in `self`, so this ends with `true` and not with a closed channel.
        let _ = gone.wait_for(|gone| *gone).await;
    }

    /// Whether its process is gone, or never was.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Whether it is on its way out and nobody's any more.
    #[must_use]
    pub fn leaving(&self) -> bool {
        self.facts.ephemeral && lock(&self.live).kill_asked
    }

    /// Whether another VM may not have its slot.
    #[must_use]
    pub fn holds_slot(&self) -> bool {
        *lock(&self.slot_held)
    }

    /// Gives its slot up; `false` where it had done so before.
    pub(crate) fn drop_slot(&self) -> bool {
        std::mem::replace(&mut *lock(&self.slot_held), false)
    }

    /// What `ps` shows.
    #[must_use]
    pub fn shown(&self) -> types::Vm {
        let live = self.live();
        let facts = self.facts.clone();
        types::Vm {
            id: self.id,
            name: self.name.clone(),
            state: live.phase.shown(),
            exit: live.exit,
            snapshot: facts.snapshot,
            forked_from: facts.fork.from,
            image: facts.image,
            kernel: facts.kernel.name,
            vcpus: facts.vcpus,
            memory_bytes: facts.memory_bytes,
            created_unix_ms: facts.created_unix_ms,
            ready_us: live.ready_us,
            ephemeral: facts.ephemeral,
            network: live.network,
            labels: facts.labels,
        }
    }
}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Self {
        Self::new(ErrorCode::State, refused)
    }
}

impl From<registry::ReserveError> for Fault {
    fn from(e: registry::ReserveError) -> Self {
        let code = match &e {
            registry::ReserveError::Taken { .. } => ErrorCode::Conflict,
            registry::ReserveError::LooksLikeAnId(_) => ErrorCode::Invalid,
            registry::ReserveError::Full => ErrorCode::Exhausted,
        };
        Self::new(code, e)
    }
}

impl From<budget::NoMemory> for Fault {
    fn from(e: budget::NoMemory) -> Self {
        Self::new(ErrorCode::Exhausted, e)
    }
}

impl From<registry::FindError> for Fault {
    fn from(e: registry::FindError) -> Self {
        let code = match &e {
            registry::FindError::None(_) => ErrorCode::NotFound,
            registry::FindError::Several { .. } => ErrorCode::Invalid,
        };
        Self::new(code, e)
    }
}

/// An end at this moment.
#[must_use]
pub fn exit_now(reason: types::ExitKind, message: impl Into<String>) -> VmExit {
    VmExit { reason, message: message.into(), at_unix_ms: unix_ms() }
}
