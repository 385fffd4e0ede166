//! What a snapshot's RAM is used for, by colour (Kaleidoscope's term for the use of a page).

use super::limits::{DiskTraffic, NetTraffic, VmUsage};
use super::wire::wire;
use dayfly_units::{Name, VmId};

/// Upper limit for the frames in a row of a picture.
pub const MAX_PICTURE_WIDTH: u32 = 16384;

wire! {
    /// RAM of one colour, by how it is stored, in bytes.
    pub struct ColourUse {
        /// Name of the colour, such as `page cache`.
        pub colour: String,
        /// Colour in pictures: `#` and six hexadecimal digits.
        pub rgb: String,
        /// Pages that are all zero.
        pub zero_bytes: u64,
        /// Pages that the guest does not use; they are zero after a restore.
        pub free_bytes: u64,
        /// Pages that are blocks of the snapshot's own disks.
        pub disk_bytes: u64,
        /// Pages in the store's packs.
        pub page_bytes: u64,
    }

    /// What a snapshot's RAM is used for. If its use could not be determined at the save, all of it
    /// is `unknown`.
    pub struct Colours {
        /// RAM in bytes.
        pub memory_bytes: u64,
        /// All colours, used or not.
        pub colours: Vec<ColourUse>,
    }

    /// RAM of one colour that a VM holds, in bytes.
    pub struct ColourHeld {
        /// Name of the colour, such as `page cache`: the use of the frame when the VM's snapshot
        /// was saved.
        pub colour: String,
        /// Pages that the VM has written, which only this VM holds.
        pub own_bytes: u64,
        /// Pages that the VM touched, or that were mapped for it in advance, unchanged since its
        /// snapshot. All clones of the snapshot share them.
        pub shared_bytes: u64,
        /// Touched pages that are zero and take no memory.
        pub zero_bytes: u64,
    }

    /// What a VM holds of its RAM.
    ///
    /// All of it is `unknown` if its snapshot is gone or unreadable, or if the VM is no clone. If
    /// the VM is no clone, the memory of its VMM is included.
    pub struct Footprint {
        /// The VM's id.
        pub id: VmId,
        /// The VM's name.
        pub name: Name,
        /// RAM in bytes.
        pub memory_bytes: u64,
        /// All colours, held or not.
        pub colours: Vec<ColourHeld>,
        /// What it has taken from the host; `None` if it has no control group.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub usage: Option<VmUsage>,
        /// What the guest has moved to and from each disk, in the order vda, vdb, …; absent if the
        /// VMM is of an earlier version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub disk_traffic: Vec<DiskTraffic>,
        /// What the guest has sent and received; absent without a network device, and if the VMM
        /// is of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub net_traffic: Option<NetTraffic>,
        /// The CPUs of the host that it has booked and has alone, in ascending order.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub cpus: Vec<u32>,
    }
}

impl ColourUse {
    /// Sum of all kinds of storage.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let Self { zero_bytes, free_bytes, disk_bytes, page_bytes, .. } = self;
        [zero_bytes, free_bytes, disk_bytes, page_bytes]
            .into_iter()
            .fold(0, |sum, n| sum.saturating_add(*n))
    }
}

impl Colours {
    /// Sum of all colours.
    #[must_use]
    pub fn total(&self) -> ColourUse {
        let sum = |of: fn(&ColourUse) -> u64| {
            self.colours.iter().fold(0, |sum: u64, c| sum.saturating_add(of(c)))
        };
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
    /// Sum of all colours.
    #[must_use]
    pub fn total(&self) -> ColourHeld {
        let sum = |of: fn(&ColourHeld) -> u64| {
            self.colours.iter().fold(0, |sum: u64, c| sum.saturating_add(of(c)))
        };
        ColourHeld {
            colour: "all".into(),
            own_bytes: sum(|c| c.own_bytes),
            shared_bytes: sum(|c| c.shared_bytes),
            zero_bytes: sum(|c| c.zero_bytes),
        }
    }
}
