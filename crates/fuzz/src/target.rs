//! What a target is, and how one input is run.

use crate::heap::{Usage, measured};
use std::sync::atomic::{AtomicBool, Ordering};

/// What a decoder did with an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It decoded at least a part of the input.
    Accepted,
    /// It returned an error.
    Refused,
}

impl Outcome {
    /// `Accepted` if `yes`.
    #[must_use]
    pub const fn of(yes: bool) -> Self {
        if yes { Self::Accepted } else { Self::Refused }
    }
}

/// How much an input may make a target allocate on its thread.
#[derive(Debug, Clone, Copy)]
pub struct Heap {
    /// Bytes for an empty input.
    pub fixed: usize,
    /// Further bytes for each byte of input.
    pub per_byte: usize,
}

impl Heap {
    /// The total of an input's allocations may be this many times the limit of the peak.
    const TURNOVER: usize = 16;

    /// The limits for an input of `length` bytes.
    #[must_use]
    pub const fn most(self, length: usize) -> Usage {
        let peak_bytes = self.fixed + self.per_byte * length;
        Usage { peak_bytes, total_bytes: peak_bytes * Self::TURNOVER }
    }
}

/// A decoder or a state machine as a function of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, and that of its folder in `corpus/`.
    pub name: &'static str,
    /// What is decoded, in a few words.
    pub what: &'static str,
    /// Whether an input is a sequence of events rather than one message.
    pub stateful: bool,
    /// The longest input that is generated, in bytes.
    pub most_bytes: usize,
    /// The limit of memory.
    pub heap: Heap,
    /// Runs one input. Panics if a property does not hold.
    pub run: fn(&[u8]) -> Outcome,
    /// Generated inputs that a corpus starts with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

impl Target {
    /// Runs one input and checks the limits.
    ///
    /// # Panics
    /// If a property of the target does not hold.
    pub fn check(&self, input: &[u8]) -> Outcome {
        let (outcome, used) = measured(|| (self.run)(input));
        let most = self.heap.most(input.len());
        assert!(
            used.peak_bytes <= most.peak_bytes && used.total_bytes <= most.total_bytes,
            "target {}: an input of {} bytes: expected at most {most:?}, got {used:?}",
            self.name,
            input.len()
        );
        outcome
    }
}

static PLANTED: AtomicBool = AtomicBool::new(false);

/// Turns planted faults on.
pub fn plant_faults() {
    PLANTED.store(true, Ordering::Relaxed);
}

/// A planted fault: panics if faults are planted and `found` holds. Each target has at least one,
/// for a structure that its seeds do not have, so that a run shows whether fuzzing reaches it.
///
/// # Panics
/// On purpose.
pub fn planted(found: impl FnOnce() -> bool) {
    if PLANTED.load(Ordering::Relaxed) {
        assert!(!found(), "the planted fault");
    }
}
