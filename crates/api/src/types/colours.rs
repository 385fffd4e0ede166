//! What a snapshot's RAM is used for.

use super::*;

/// Most frames to a row of a picture.
pub const MAX_PICTURE_WIDTH: u32 = 16384;

wire! {
    /// RAM of one colour, by how it is stored, in bytes.
    pub struct ColourUse {
        /// Such as `page cache`.
        pub colour: String,
        /// How pictures show it: `#` and six hexadecimal digits.
        pub rgb: String,
        /// Zeroes.
        pub zero_bytes: u64,
        /// Not used by the guest; zeroes after a restore.
        pub free_bytes: u64,
        /// Blocks of the snapshot's own disks.
        pub disk_bytes: u64,
        /// Pages of the store.
        pub page_bytes: u64,
    }

    /// What a snapshot's RAM is used for. All of it is `unknown` where nothing could be found out when it was saved.
    pub struct Colours {
        /// RAM.
        pub memory_bytes: u64,
        /// Every colour, used or not.
        pub colours: Vec<ColourUse>,
    }

    /// RAM of one colour that a VM holds, in bytes.
    pub struct ColourHeld {
        /// Such as `page cache`; what the frame was when the VM's snapshot was saved.
        pub colour: String,
        /// Its own: pages that it has written.
        pub own_bytes: u64,
        /// Touched, or laid ready for it, and as its snapshot has them: every clone of that holds the same.
        pub shared_bytes: u64,
        /// Touched, and zeroes that take no memory.
        pub zero_bytes: u64,
    }

    /// What a VM holds of its RAM. All of it is `unknown` where its snapshot is gone, or cannot be read, and where it is no clone; then its VMM's own
    /// memory is in it.
    pub struct Footprint {
        /// The VM.
        pub id: VmId,
        /// Its name.
        pub name: Name,
        /// RAM.
        pub memory_bytes: u64,
        /// Every colour, held or not.
        pub colours: Vec<ColourHeld>,
    }
}

impl ColourUse {
    /// Of all kinds.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let Self { zero_bytes, free_bytes, disk_bytes, page_bytes, .. } = self;
        [zero_bytes, free_bytes, disk_bytes, page_bytes].into_iter().fold(0, |sum, n| sum.saturating_add(*n))
    }
}

impl Colours {
    /// All colours together.
    #[must_use]
    pub fn total(&self) -> ColourUse {
        let sum =
            |of: fn(&ColourUse) -> u64| self.colours.iter().fold(0, |sum: u64, c| sum.saturating_add(of(c)));
        ColourUse {
            colour: "all".into(),
            rgb: String::new(),
            zero_bytes: sum(|c| c.zero_bytes),
            free_bytes: sum(|c| c.free_bytes),
            disk_bytes: sum(|c| c.disk_bytes),
            page_bytes: sum(|c| c.page_bytes),
        }
    }
}

impl Footprint {
    /// All colours together.
    #[must_use]
    pub fn total(&self) -> ColourHeld {
        let sum =
            |of: fn(&ColourHeld) -> u64| self.colours.iter().fold(0, |sum: u64, c| sum.saturating_add(of(c)));
        ColourHeld {
            colour: "all".into(),
            own_bytes: sum(|c| c.own_bytes),
            shared_bytes: sum(|c| c.shared_bytes),
            zero_bytes: sum(|c| c.zero_bytes),
        }
    }
}
