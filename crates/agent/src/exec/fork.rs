//! Whether a fork of this machine is under way, and which of its machines this is.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Whether this machine is the original or a clone of a fork. In a clone, the programs keep
/// running, but the peers of their connections exist only in the original.
#[derive(Debug, Default)]
pub struct Fork {
    under_way: AtomicBool,
    /// How often this machine became a clone.
    times: AtomicU64,
    /// The clone's number in the last fork.
    number: AtomicU32,
}

impl Fork {
    /// A snapshot may be taken at any moment from now on.
    pub fn begin(&self) {
        self.under_way.store(true, Ordering::SeqCst);
    }

    /// The fork is over. `clone` is this machine's number if it is a clone, `None` if it is the
    /// original.
    pub fn end(&self, clone: Option<u32>) {
        if let Some(number) = clone.filter(|_| self.is_under_way()) {
            self.number.store(number, Ordering::SeqCst);
            self.times.fetch_add(1, Ordering::SeqCst);
        }
        self.under_way.store(false, Ordering::SeqCst);
    }

    /// Whether a fork is under way, so that this machine may be either.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.under_way.load(Ordering::SeqCst)
    }

    /// How often this machine became a clone. Read it after [`Self::is_under_way`], because a fork
    /// ends with that flag.
    #[must_use]
    pub fn times(&self) -> u64 {
        self.times.load(Ordering::SeqCst)
    }

    /// The clone's number in the last fork, valid if [`Self::times`] is not 0.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number.load(Ordering::SeqCst)
    }
}
