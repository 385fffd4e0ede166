//! Which frames come together, and which come before anybody asks.
//!
//! Kaleidoscope, section 4.3, fetches beside a fault what has its colour, as much as a window of that colour says; Efficiently Restoring VMs, section
//! 3.3, what one read gives, and in the end everything. Policies of others are here to be compared with.

use serde::{Deserialize, Serialize};

/// Room for so many colours (`dayfly-introspect` has nine).
pub const COLOURS: usize = 16;
/// What one read gives at most: pages of a pack's group, blocks in a row.
pub const UNIT: u8 = 16;

/// What is fetched when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// For each colour how many frames come at once, 1 to [`UNIT`].
    pub windows: [u8; COLOURS],
    /// Neighbours are those in RAM, whatever they are used for; not those of one colour that one read gives.
    pub blind: bool,
    /// The recorded working set comes first, in its order.
    pub working_set: bool,
    /// What is asked for one after the other has more and more come with it ([`crate::streams`]).
    pub streams: bool,
    /// So many batches after one that was asked for are next.
    pub beside: u32,
    /// Everything comes in the end.
    pub background: bool,
}

impl Policy {
    /// Nothing that nobody asks for.
    pub const MINIMAL: Self = Self::blind(1);

    /// So many frames in a row, and nothing else.
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

    /// Frames of one colour, of streams more of them, and nothing else.
    #[must_use]
    pub const fn colour(windows: [u8; COLOURS]) -> Self {
        Self { windows, blind: false, streams: true, ..Self::MINIMAL }
    }

    /// With the working set.
    #[must_use]
    pub const fn with_working_set(self) -> Self {
        Self { working_set: true, ..self }
    }

    /// How many frames of a colour come at once.
    #[must_use]
    pub fn window(&self, colour: u8) -> u8 {
        self.windows.get(usize::from(colour)).copied().unwrap_or(1).clamp(1, UNIT)
    }
}

/// Everything comes, the working set first; who waits gets all that one read gives.
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
