//! Which frames come together, and which frames come ahead of faults.
//!
//! Kaleidoscope, section 4.3, fetches frames of the faulting frame's colour beside it, up to a
//! window per colour. Efficiently Restoring VMs, section 3.3, fetches the result of one read, and
//! everything in the end. The policies of those papers are here for comparison.

use serde::{Deserialize, Serialize};

/// Number of colours that fit (`dayfly-introspect` has nine).
pub const COLOURS: usize = 16;
/// The most frames of one read: pages of a pack's group, or consecutive blocks.
pub const UNIT: u8 = 16;

/// When to fetch which frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// For each colour the number of frames that come together, 1 to [`UNIT`].
    pub windows: [u8; COLOURS],
    /// Whether batches are consecutive frames of RAM, whatever their colour. If not, a batch has
    /// frames of one colour from one read.
    pub blind: bool,
    /// Whether the recorded working set comes first, in its order.
    pub working_set: bool,
    /// Whether the window of sequential faults grows ([`crate::streams`]).
    pub streams: bool,
    /// Number of batches behind a faulting batch that are fetched next, if they have its colour.
    pub beside: u32,
    /// Whether everything is fetched in the end.
    pub background: bool,
}

impl Policy {
    /// Only frames with a fault, one by one.
    pub const MINIMAL: Self = Self::blind(1);

    /// Windows of `frames` consecutive frames, and nothing else.
    #[must_use]
    pub const fn blind(frames: u8) -> Self {
        Self {
            windows: [frames; COLOURS],
            blind: true,
            working_set: false,
            streams: false,
            beside: 0,
            background: false,
        }
    }

    /// Windows of one colour, larger ones for streams, and nothing else.
    #[must_use]
    pub const fn colour(windows: [u8; COLOURS]) -> Self {
        Self { windows, blind: false, streams: true, ..Self::MINIMAL }
    }

    /// This policy, with the working set.
    #[must_use]
    pub const fn with_working_set(self) -> Self {
        Self { working_set: true, ..self }
    }

    /// Number of frames of a colour that come together.
    #[must_use]
    pub fn window(&self, colour: u8) -> u8 {
        self.windows.get(usize::from(colour)).copied().unwrap_or(1).clamp(1, UNIT)
    }
}

/// Everything is fetched, the working set first; a fault gets all frames of one read.
impl Default for Policy {
    fn default() -> Self {
        Self {
            windows: [UNIT; COLOURS],
            blind: false,
            working_set: true,
            streams: false,
            beside: 2,
            background: true,
        }
    }
}
