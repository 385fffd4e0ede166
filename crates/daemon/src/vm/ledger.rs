//! What is kept of a VM for its bill ([`crate::vm::bill`]).

use crate::model::live::Live;
use crate::net::relay::Spent;
use dayfly_units::sync::lock;
use dayfly_vmm::meter::Metered;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Microseconds; `u64::MAX` if there are more.
pub(super) fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// What was done for a VM outside of its control group, and what its VMM counted last.
#[derive(Debug)]
pub struct Ledger {
    /// CPU time of its relays.
    pub relays: Arc<Spent>,
    /// The most microseconds of vCPUs that were counted: those of threads that have ended are not.
    vcpus_us: AtomicU64,
    /// What its destruction has taken so far.
    destruction: Mutex<Destruction>,
    /// Notified when a part of the destruction is done.
    destroyed: Condvar,
    /// Bits of [`REMOVED`] and [`CLOSED`].
    state: AtomicU8,
    /// The highest figures that were read of its VMM.
    metered: Mutex<Option<Metered>>,
}

/// The VM was removed while it lived: its last bill is known after that.
const REMOVED: u8 = 1;
/// Its bill is closed.
const CLOSED: u8 = 2;
/// How long the last bill waits for the threads that destroy the VM.
const DESTROYED_WITHIN: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Destruction {
    took: Duration,
    /// Parts of it that are queued, or being done.
    under_way: usize,
}

impl Ledger {
    /// That of a VM in this state.
    pub(super) fn new(live: &Live) -> Self {
        Self {
            relays: Arc::new(Spent::before(live.relays_us)),
            vcpus_us: AtomicU64::new(0),
            destruction: Mutex::default(),
            destroyed: Condvar::new(),
            state: AtomicU8::new(0),
            metered: Mutex::default(),
        }
    }

    /// What its VMM has counted by this reading: no figure is lower than in one before.
    pub(super) fn highest(&self, read: Option<Metered>) -> Option<Metered> {
        let mut metered = lock(&self.metered);
        *metered = match (*metered, read) {
            (Some(before), Some(now)) => Some(before.max(now)),
            (before, now) => now.or(before),
        };
        *metered
    }

    /// The VM is removed while it lives. Returns whether its bill is closed already.
    #[must_use]
    pub fn removed(&self) -> bool {
        self.state.fetch_or(REMOVED, Ordering::AcqRel) & CLOSED != 0
    }

    /// Its bill is closed. Returns whether it was removed while it lived.
    #[must_use]
    pub fn closed(&self) -> bool {
        self.state.fetch_or(CLOSED, Ordering::AcqRel) & REMOVED != 0
    }

    /// What its destruction has taken, when no part of it is under way. Blocks.
    pub(super) fn destruction_us(&self) -> u64 {
        let destruction = lock(&self.destruction);
        let waited =
            self.destroyed.wait_timeout_while(destruction, DESTROYED_WITHIN, |of| of.under_way > 0);
        us(waited.unwrap_or_else(PoisonError::into_inner).0.took)
    }

    /// A part of its destruction is queued.
    pub(super) fn destruction_begins(&self) {
        lock(&self.destruction).under_way += 1;
    }

    /// A part of it has taken this much CPU time.
    pub(super) fn destruction_took(&self, took: Duration) {
        let mut destruction = lock(&self.destruction);
        destruction.took = destruction.took.saturating_add(took);
    }

    /// A part of it is done.
    pub(super) fn destruction_ends(&self) {
        lock(&self.destruction).under_way -= 1;
        self.destroyed.notify_all();
    }

    /// The most microseconds that vCPUs have taken, by this count or one before.
    pub(super) fn vcpus_us(&self, counted: u64) -> u64 {
        self.vcpus_us.fetch_max(counted, Ordering::Relaxed).max(counted)
    }
}
