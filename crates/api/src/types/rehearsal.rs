//! What one run of a clone touches, held against what was expected of it.

use super::*;

/// The most touches of a line.
pub const MAX_TOUCHES: usize = 2000;

wire! {
    /// A run to be recorded.
    #[derive(Default)]
    pub struct RehearseRequest {
        /// Run once in a throw-away clone; nothing: only its first moments, until it has its identity.
        pub program: Option<ExecSpec>,
        /// Whether every touch is told, the first 262,144 of them.
        pub touches: bool,
    }

    /// Memory of one colour that a run touched, in bytes.
    pub struct ColourTouched {
        /// Such as `page cache`.
        pub colour: String,
        /// Touched, and not zero in the snapshot.
        pub touched_bytes: u64,
        /// Of these, in the recorded working set: they come before they are touched.
        pub expected_bytes: u64,
        /// In the working set, and not touched.
        pub unneeded_bytes: u64,
        /// Touched, and zero in the snapshot: nothing has to come.
        pub zero_bytes: u64,
    }

    /// What a run touched.
    pub struct Rehearsal {
        /// RAM.
        pub memory_bytes: u64,
        /// From the restore to the last first touch that was noted (at most 262,144 are), in microseconds; every one waits for the recorder.
        pub took_us: u64,
        /// Every colour, touched or not.
        pub colours: Vec<ColourTouched>,
    }
}

impl Rehearsal {
    /// All colours together.
    #[must_use]
    pub fn total(&self) -> ColourTouched {
        let sum = |of: fn(&ColourTouched) -> u64| {
            self.colours.iter().fold(0, |sum: u64, c| sum.saturating_add(of(c)))
        };
        ColourTouched {
            colour: "all".into(),
            touched_bytes: sum(|c| c.touched_bytes),
            expected_bytes: sum(|c| c.expected_bytes),
            unneeded_bytes: sum(|c| c.unneeded_bytes),
            zero_bytes: sum(|c| c.zero_bytes),
        }
    }
}
