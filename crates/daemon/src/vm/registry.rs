//! All VMs, by id and by name, and the slots from which their user ids follow.
//!
//! Every method is one short critical section without I/O. Reserving a VM costs the same with one
//! VM and with thousands.

use crate::base::config::Config;
use crate::base::error::ApiError;
use crate::model::facts::Facts;
use crate::model::vm_slot::{MAX_VMS, VmSlot};
use crate::vm::Vm;
use crate::vm::budget::Reservation;
use dayfly_api::types::ErrorCode;
use dayfly_units::{Name, VmId, VmName, sync::lock};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};

/// Why no VM was reserved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// Another VM has the name.
    #[error("VM name {name}: taken by VM {holder}; remove that one or choose another name")]
    Taken {
        /// The requested name.
        name: VmName,
        /// The VM that has it.
        holder: VmId,
    },
    /// The name has the form of an id, so that a word could mean two VMs.
    #[error("VM name {0}: has the form of a VM id (12 hexadecimal digits); choose another")]
    LooksLikeAnId(VmName),
    /// All slots are in use.
    #[error("VMs: expected fewer than {MAX_VMS}, got {MAX_VMS}; remove some")]
    Full,
}

/// Why a VM cannot take the place of one that has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestartError {
    /// No slot.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// It was removed, or started.
    #[error("VM {0}: was removed or started meanwhile; `dayfly ps -a` lists the VMs")]
    Gone(Name),
}

/// Why a word does not name a VM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// No VM matches.
    #[error("VM {0:?}: no such id, name or unique start of an id")]
    None(String),
    /// Several ids start with the word.
    #[error(
        "VM {word:?}: the start of {count} ids, such as {first} and {second}; give more digits"
    )]
    Several {
        /// The word.
        word: String,
        /// The number of matching ids.
        count: usize,
        /// The lowest matching id.
        first: VmId,
        /// The second lowest matching id.
        second: VmId,
    },
}

/// Allocates slots, the lowest free one first.
#[derive(Debug, Default)]
struct Slots {
    free: BTreeSet<u32>,
    next: u32,
}

impl Slots {
    fn take(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop_first() {
            return Some(slot);
        }
        let slot = self.next;
        (slot < MAX_VMS).then(|| {
            self.next += 1;
            slot
        })
    }

    /// Takes this slot, which a VM of an earlier daemon has; `false` if it is taken or too high.
    fn take_exactly(&mut self, slot: u32) -> bool {
        if slot >= MAX_VMS {
            return false;
        }
        if slot >= self.next {
            self.free.extend(self.next..slot);
            self.next = slot + 1;
            return true;
        }
        self.free.remove(&slot)
    }

    fn give_back(&mut self, slot: u32) {
        self.free.insert(slot);
    }
}

#[derive(Debug, Default)]
struct Inner {
    vms: HashMap<VmId, Arc<Vm>>,
    /// Ids reserved without an entry in `vms`: of warm VMMs, and of removed VMs whose process has
    /// not ended yet.
    vm_slots: HashSet<VmId>,
    names: HashMap<Name, VmId>,
    slots: Slots,
    /// The user id of slot 0.
    first_uid: u32,
}

/// Number of clones that were forked from one VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Children {
    /// Clones that start, run or are paused.
    pub alive: u32,
    /// Clones that have ended and are not removed: their folders, layers and names still exist.
    pub ended: u32,
}

/// All VMs of a daemon.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<Inner>,
}

impl Inner {
    fn vm_slot(&mut self, node: usize) -> Result<VmSlot, ReserveError> {
        let slot = self.slots.take().ok_or(ReserveError::Full)?;
        let id = std::iter::repeat_with(VmId::random)
            .find(|id| !self.vms.contains_key(id) && !self.vm_slots.contains(id))
            .unwrap_or_else(VmId::random);
        Ok(VmSlot { id, slot, uid: self.first_uid.saturating_add(slot), node })
    }
}

impl Inner {
    fn add(&mut self, vm: Vm) -> Arc<Vm> {
        let vm = Arc::new(vm);
        self.names.insert(vm.name.clone(), vm.id);
        self.vms.insert(vm.id, vm.clone());
        vm
    }

    fn holds(&self, vm: &Vm) -> bool {
        self.vms.get(&vm.id).is_some_and(|own| std::ptr::eq(&**own, vm))
    }

    fn release_slot(&mut self, vm: &Vm) {
        if vm.drop_slot() {
            self.slots.give_back(vm.slot);
        }
    }
}

impl Registry {
    /// No VMs; the VMM of the VM in slot n will run as user `first_uid + n`.
    #[must_use]
    pub fn new(first_uid: u32) -> Self {
        Self { inner: Mutex::new(Inner { first_uid, ..Inner::default() }) }
    }

    /// Reserves an id and a slot for a warm VMM on this node.
    ///
    /// # Errors
    /// No slot is free.
    pub fn vm_slot(&self, node: usize) -> Result<VmSlot, ReserveError> {
        let mut inner = lock(&self.inner);
        let vm_slot = inner.vm_slot(node)?;
        inner.vm_slots.insert(vm_slot.id);
        Ok(vm_slot)
    }

    /// Releases the slot of a warm VMM whose process and files are gone.
    pub fn release_unused(&self, vm_slot: VmSlot) {
        let mut inner = lock(&self.inner);
        if inner.vm_slots.remove(&vm_slot.id) {
            inner.slots.give_back(vm_slot.slot);
        }
    }

    /// Ids that are reserved without a VM: of warm VMMs, and of removed VMs that are still ending.
    #[must_use]
    pub fn vm_slots(&self) -> Vec<VmId> {
        lock(&self.inner).vm_slots.iter().copied().collect()
    }

    /// Reserves a name, and an id and a slot unless `warm` has them. Reserves all or nothing. The
    /// new VM is `Starting` and has `memory`.
    ///
    /// # Errors
    /// [`ReserveError`]; the warm VMM keeps its slot.
    pub fn reserve(
        &self,
        config: &Config,
        name: Option<VmName>,
        facts: Facts,
        memory: Reservation,
        warm: Option<VmSlot>,
    ) -> Result<Arc<Vm>, ReserveError> {
        if let Some(name) = &name
            && name.as_str().parse::<VmId>().is_ok()
        {
            return Err(ReserveError::LooksLikeAnId(name.clone()));
        }
        let mut inner = lock(&self.inner);
        if let Some(name) = &name
            && let Some(holder) = inner.names.get(&Name::from(name.clone()))
        {
            return Err(ReserveError::Taken { name: name.clone(), holder: *holder });
        }
        let vm_slot = match warm {
            Some(vm_slot) => vm_slot,
            None => inner.vm_slot(memory.node)?,
        };
        inner.vm_slots.remove(&vm_slot.id);
        let id = vm_slot.id;
        let name = name.map_or_else(|| id_as_name(id), Name::from);
        let vm = Arc::new(Vm::new(vm_slot, name.clone(), config.vm(id), facts, memory));
        inner.names.insert(name, id);
        inner.vms.insert(id, vm.clone());
        Ok(vm)
    }

    /// Adds a VM that an earlier daemon started.
    ///
    /// # Errors
    /// A text that says whether the id, the name or the slot is taken.
    pub fn adopt(&self, vm: Vm) -> Result<Arc<Vm>, String> {
        let mut inner = lock(&self.inner);
        if inner.vms.contains_key(&vm.id) {
            return Err(format!("VM id {}: taken", vm.id));
        }
        if let Some(holder) = inner.names.get(&vm.name) {
            return Err(format!("VM name {}: taken by {holder}", vm.name));
        }
        if vm.holds_slot() && !inner.slots.take_exactly(vm.slot) {
            return Err(format!("slot {}: taken, or not below {MAX_VMS}", vm.slot));
        }
        Ok(inner.add(vm))
    }

    /// Adds a VM that an earlier daemon started and that cannot be adopted. If its name is taken,
    /// it gets its id as its name. If its slot is taken, it has none.
    ///
    /// # Errors
    /// Its id is taken.
    pub fn keep(&self, mut vm: Vm) -> Result<Arc<Vm>, String> {
        let mut inner = lock(&self.inner);
        if inner.vms.contains_key(&vm.id) {
            return Err(format!("VM id {}: taken", vm.id));
        }
        if inner.names.contains_key(&vm.name) {
            vm.name = id_as_name(vm.id);
        }
        if vm.holds_slot() && !inner.slots.take_exactly(vm.slot) {
            vm.drop_slot();
        }
        Ok(inner.add(vm))
    }

    /// The slot whose VMM runs as user `uid`; `None` if this daemon gives the user to no VM.
    #[must_use]
    pub fn slot_of(&self, uid: u32) -> Option<u32> {
        uid.checked_sub(lock(&self.inner).first_uid).filter(|slot| *slot < MAX_VMS)
    }

    /// Puts a VM that starts again in the place of `ended`, under its id and name, with a new slot.
    /// It is `Starting` and has `memory`.
    ///
    /// # Errors
    /// No slot is free, or `ended` is not in the registry any more.
    pub fn restart(
        &self,
        ended: &Vm,
        facts: Facts,
        memory: Reservation,
    ) -> Result<Arc<Vm>, RestartError> {
        let mut inner = lock(&self.inner);
        if !inner.holds(ended) {
            return Err(RestartError::Gone(ended.name.clone()));
        }
        let slot = inner.slots.take().ok_or(ReserveError::Full)?;
        let (id, uid) = (ended.id, inner.first_uid.saturating_add(slot));
        let vm_slot = VmSlot { id, slot, uid, node: memory.node };
        let mut vm = Vm::new(vm_slot, ended.name.clone(), ended.dir.clone(), facts, memory);
        vm.carried = ended.carried.clone();
        let vm = Arc::new(vm);
        inner.vms.insert(id, vm.clone());
        Ok(vm)
    }

    /// Releases the slot of `vm`, whose processes are gone. The slot is released once, however
    /// often this is called.
    pub fn release_slot(&self, vm: &Vm) {
        let mut inner = lock(&self.inner);
        inner.vm_slots.remove(&vm.id);
        inner.release_slot(vm);
    }

    /// Forgets a VM whose files are gone. If its process is still ending, or that of its streams,
    /// its slot stays taken until [`Self::release_slot`].
    pub fn forget(&self, vm: &Vm) {
        let mut inner = lock(&self.inner);
        if inner.holds(vm) {
            inner.vms.remove(&vm.id);
            inner.names.remove(&vm.name);
            if vm.is_gone() && vm.streams.close() {
                inner.release_slot(vm);
            } else if vm.holds_slot() {
                inner.vm_slots.insert(vm.id);
            }
        }
    }

    /// The VM with this id, this name, or the only one whose id starts with `word`.
    ///
    /// # Errors
    /// [`FindError`].
    pub fn find(&self, word: &str) -> Result<Arc<Vm>, FindError> {
        let none = || FindError::None(word.chars().take(80).collect());
        let inner = lock(&self.inner);
        if let Some(vm) = word.parse().ok().and_then(|id: VmId| inner.vms.get(&id)) {
            return Ok(vm.clone());
        }
        if let Some(vm) =
            word.parse().ok().and_then(|n: Name| inner.names.get(&n)).and_then(|i| inner.vms.get(i))
        {
            return Ok(vm.clone());
        }
        if word.is_empty() || word.len() > 12 || !word.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(none());
        }
        let mut fits: Vec<_> =
            inner.vms.keys().filter(|id| id.to_string().starts_with(word)).copied().collect();
        fits.sort_unstable();
        match fits.as_slice() {
            [] => Err(none()),
            [id] => inner.vms.get(id).cloned().ok_or_else(none),
            [first, second, ..] => Err(FindError::Several {
                word: word.to_owned(),
                count: fits.len(),
                first: *first,
                second: *second,
            }),
        }
    }

    /// Whether it has this VM. A VM that ended and was started again is another one with the same
    /// id.
    #[must_use]
    pub fn holds(&self, vm: &Vm) -> bool {
        lock(&self.inner).holds(vm)
    }

    /// Whether a VM has this id.
    #[must_use]
    pub fn has(&self, id: VmId) -> bool {
        lock(&self.inner).vms.contains_key(&id)
    }

    /// All VMs, the oldest first.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Vm>> {
        let mut all: Vec<_> = lock(&self.inner).vms.values().cloned().collect();
        all.sort_by_key(|vm| (vm.facts.created_unix_ms, vm.id));
        all
    }

    /// The number of clones that the guest of the VM `of` has asked for.
    #[must_use]
    pub fn children(&self, of: VmId) -> Children {
        let mut children = Children::default();
        for vm in lock(&self.inner)
            .vms
            .values()
            .filter(|vm| vm.facts.fork.from == Some(of) && vm.facts.fork.by_guest)
        {
            let count = if vm.phase().alive() { &mut children.alive } else { &mut children.ended };
            *count = count.saturating_add(1);
        }
        children
    }

    /// The number of VMs, exited ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.inner).vms.len()
    }

    /// Whether there is no VM.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The name of a VM for which the client gave none: its id.
///
/// # Panics
/// Never: the grammar of names accepts twelve hexadecimal digits.
#[must_use]
pub fn id_as_name(id: VmId) -> Name {
    #[expect(
        clippy::expect_used,
        reason = "locally proven: [0-9a-f]{12} matches the grammar of names"
    )]
    id.to_string().parse().expect("twelve hexadecimal digits are a name")
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;

impl From<ReserveError> for ApiError {
    fn from(e: ReserveError) -> Self {
        let code = match &e {
            ReserveError::Taken { .. } => ErrorCode::Conflict,
            ReserveError::LooksLikeAnId(_) => ErrorCode::Invalid,
            ReserveError::Full => ErrorCode::Exhausted,
        };
        Self::new(code, e)
    }
}

impl From<RestartError> for ApiError {
    fn from(e: RestartError) -> Self {
        match e {
            RestartError::Reserve(e) => e.into(),
            RestartError::Gone(_) => Self::new(ErrorCode::State, e),
        }
    }
}

impl From<FindError> for ApiError {
    fn from(e: FindError) -> Self {
        let code = match &e {
            FindError::None(_) => ErrorCode::NotFound,
            FindError::Several { .. } => ErrorCode::Invalid,
        };
        Self::new(code, e)
    }
}
