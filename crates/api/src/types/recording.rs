//! The pages that one run of a clone touches, compared with the recorded working set.

use super::wire::wire;
use crate::agent::ExecSpec;

/// Upper limit for the touches in one line of progress.
pub const MAX_TOUCHES: usize = 2000;

wire! {
    /// A request to record a run.
    #[derive(Default)]
    pub struct RecordRequest {
        /// A program to run once in a temporary clone. If `None`, only the clone's start until it
        /// has its identity is recorded.
        pub program: Option<ExecSpec>,
        /// Whether to report every touch, up to 262,144 touches.
        pub touches: bool,
    }

    /// Memory of one colour that a run touched, in bytes.
    pub struct ColourTouched {
        /// Name of the colour, such as `page cache`.
        pub colour: String,
        /// Touched pages that are not zero in the snapshot.
        pub touched_bytes: u64,
        /// Touched pages of the recorded working set, a part of `touched_bytes`: they are loaded
        /// before their first touch.
        pub expected_bytes: u64,
        /// Pages of the working set that were not touched.
        pub unneeded_bytes: u64,
        /// Touched pages that are zero in the snapshot, so nothing has to be loaded.
        pub zero_bytes: u64,
    }

    /// The result of a recorded run.
    pub struct Recording {
        /// RAM in bytes.
        pub memory_bytes: u64,
        /// Microseconds from the restore to the last recorded first touch (at most 262,144 are
        /// recorded). Each first touch waits for the recorder.
        pub took_us: u64,
        /// All colours, touched or not.
        pub colours: Vec<ColourTouched>,
    }
}

impl Recording {
    /// Sum of all colours.
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
