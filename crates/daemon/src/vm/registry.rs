//! Which VMs there are: by id, by name, and which numbers (slots) their users take.
//!
//! One short critical section per question and no I/O inside; a birth costs the same with one VM and with thousands.

use super::budget::Reservation;
use super::{Facts, Vm};
use crate::config::Config;
use dayfly_units::{Name, VmId};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The user id of slot 0; VM n runs as user and group `FIRST_UID + n`.
pub const FIRST_UID: u32 = 200_000;
/// The most VMs at once.
pub const MAX_VMS: u32 = 32_768;

/// Why no VM could be reserved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// Somebody has it.
    #[error("VM name {name}: taken by VM {holder}; remove that one or choose another name")]
    Taken {
        /// The name asked for.
        name: Name,
        /// Who has it.
        holder: VmId,
    },
    /// A name that is read as an id could name two VMs.
    #[error("VM name {0}: has the form of a VM id (12 hexadecimal digits); choose another")]
    LooksLikeAnId(Name),
    /// No slot is free.
    #[error("VMs: expected fewer than {MAX_VMS}, got {MAX_VMS}; remove some")]
    Full,
}

/// Why a word names no VM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// None.
    #[error("VM {0:?}: no such id, name or unique start of an id")]
    None(String),
    /// More than one.
    #[error("VM {word:?}: the start of {count} ids, such as {first} and {second}; give more digits")]
    Several {
        /// What was asked for.
        word: String,
        /// How many.
        count: usize,
        /// One of them.
        first: VmId,
        /// Another.
        second: VmId,
    },
}

/// Numbers for users, each with one VM at a time; the lowest free one first.
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

    /// Takes this one: of a VM that an earlier daemon started.
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

/// An id and a slot that nobody else has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seat {
    /// The id.
    pub id: VmId,
    /// The user is `FIRST_UID + slot`.
    pub slot: u32,
    /// The place of its memory node in the host's list of nodes.
    pub node: usize,
}

#[derive(Debug, Default)]
struct Inner {
    vms: HashMap<VmId, Arc<Vm>>,
    /// Of shells that wait for their guests, and of VMs that are forgotten but whose processes are still ending.
    seats: HashSet<VmId>,
    names: HashMap<Name, VmId>,
    slots: Slots,
}

/// All VMs.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<Inner>,
}

/// Locks although a thread panicked while it held the lock: every critical section here leaves its data whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn seat(&mut self, node: usize) -> Result<Seat, ReserveError> {
        let slot = self.slots.take().ok_or(ReserveError::Full)?;
        let id = std::iter::repeat_with(VmId::random)
            .find(|id| !self.vms.contains_key(id) && !self.seats.contains(id))
            .unwrap_or_else(VmId::random);
        Ok(Seat { id, slot, node })
    }
}

impl Inner {
    fn release_slot(&mut self, vm: &Vm) {
        if vm.drop_slot() {
            self.slots.give_back(vm.slot);
        }
    }
}

impl Registry {
    /// A seat for a shell on this node.
    ///
    /// # Errors
    /// No slot is free.
    pub fn seat(&self, node: usize) -> Result<Seat, ReserveError> {
        let mut inner = lock(&self.inner);
        let seat = inner.seat(node)?;
        inner.seats.insert(seat.id);
        Ok(seat)
    }

    /// Gives back the seat of a shell whose process and files are gone.
    pub fn unseat(&self, seat: Seat) {
        let mut inner = lock(&self.inner);
        if inner.seats.remove(&seat.id) {
            inner.slots.give_back(seat.slot);
        }
    }

    /// The ids of all shells, and of what is still ending.
    #[must_use]
    pub fn seats(&self) -> Vec<VmId> {
        lock(&self.inner).seats.iter().copied().collect()
    }

    /// Reserves a name, and an id and a slot where there is no shell that has them, all or nothing; the VM is `Starting` and has
    /// its `memory`.
    ///
    /// # Errors
    /// [`ReserveError`]; the shell keeps its seat.
    pub fn reserve(
        &self,
        config: &Config,
        name: Option<Name>,
        facts: Facts,
        memory: Reservation,
        shell: Option<Seat>,
    ) -> Result<Arc<Vm>, ReserveError> {
        if let Some(name) = &name
            && name.as_str().parse::<VmId>().is_ok()
        {
            return Err(ReserveError::LooksLikeAnId(name.clone()));
        }
        let mut inner = lock(&self.inner);
        if let Some(name) = &name
            && let Some(holder) = inner.names.get(name)
        {
            return Err(ReserveError::Taken { name: name.clone(), holder: *holder });
        }
        let seat = match shell {
            Some(seat) => seat,
            None => inner.seat(memory.node)?,
        };
        inner.seats.remove(&seat.id);
        let id = seat.id;
        let name = name.unwrap_or_else(|| id_as_name(id));
        let vm = Arc::new(Vm::new(seat, name.clone(), config.vm(id), facts, memory));
        inner.names.insert(name, id);
        inner.vms.insert(id, vm.clone());
        Ok(vm)
    }

    /// Takes in a VM that an earlier daemon knew.
    ///
    /// # Errors
    /// Its text says which of id, name and slot is taken.
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
        let vm = Arc::new(vm);
        inner.names.insert(vm.name.clone(), vm.id);
        inner.vms.insert(vm.id, vm.clone());
        Ok(vm)
    }

    /// The process of `vm` is gone: another VM may have its user. Once per VM that holds its slot.
    pub fn release_slot(&self, vm: &Vm) {
        let mut inner = lock(&self.inner);
        inner.seats.remove(&vm.id);
        inner.release_slot(vm);
    }

    /// Forgets a VM whose files are gone. Its process may still be ending: until [`Self::release_slot`] its seat is taken.
    pub fn forget(&self, vm: &Vm) {
        let mut inner = lock(&self.inner);
        if inner.vms.remove(&vm.id).is_some() {
            inner.names.remove(&vm.name);
            if vm.is_gone() {
                inner.release_slot(vm);
            } else if vm.holds_slot() {
                inner.seats.insert(vm.id);
            }
        }
    }

    /// The VM with this id, name, or unique start of an id.
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

    /// Whether there is a VM with this id.
    #[must_use]
    pub fn has(&self, id: VmId) -> bool {
        lock(&self.inner).vms.contains_key(&id)
    }

    /// All of them, the oldest first.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Vm>> {
        let mut all: Vec<_> = lock(&self.inner).vms.values().cloned().collect();
        all.sort_by_key(|vm| (vm.facts.created_unix_ms, vm.id));
        all
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.inner).vms.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The name of a VM that was given none.
///
/// # Panics
/// Never: twelve hexadecimal digits are a name.
#[must_use]
pub fn id_as_name(id: VmId) -> Name {
    #[expect(clippy::expect_used, reason = "locally proven: [0-9a-f]{12} matches the grammar of names")]
    id.to_string().parse().expect("twelve hexadecimal digits are a name")
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
