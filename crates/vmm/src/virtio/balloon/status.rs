//! What the balloon's device did, and what its guest says of its memory.

use crate::disk::IoList;
use serde::{Deserialize, Serialize};

/// A statistic (5.5.6.3): 16 bits of tag, 64 bits of value.
const STATISTIC_BYTES: usize = 10;
/// Most statistics that are read; virtio 1.2 has ten.
const MOST_STATISTICS: usize = 32;

/// What the guest says of its memory. A driver may leave out any figure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestMemory {
    /// VIRTIO_BALLOON_S_MEMTOT: all memory, in bytes.
    #[serde(default)]
    pub total_bytes: Option<u64>,
    /// VIRTIO_BALLOON_S_MEMFREE: memory that is unused, in bytes.
    #[serde(default)]
    pub free_bytes: Option<u64>,
    /// VIRTIO_BALLOON_S_AVAIL: memory for a new program without swapping, in bytes.
    #[serde(default)]
    pub available_bytes: Option<u64>,
    /// VIRTIO_BALLOON_S_CACHES: memory that caches of files have, in bytes.
    #[serde(default)]
    pub cached_bytes: Option<u64>,
}

impl GuestMemory {
    /// Reads statistics as a driver gives them; unknown ones are left out.
    pub(super) fn read(bytes: &IoList<'_>) -> Self {
        let mut buffer = [0; STATISTIC_BYTES * MOST_STATISTICS];
        let got = bytes.copy_to(&mut buffer);
        let mut memory = Self::default();
        let (statistics, _) = buffer[..got].as_chunks::<STATISTIC_BYTES>();
        for [low, high, value @ ..] in statistics {
            let place = match u16::from_le_bytes([*low, *high]) {
                4 => &mut memory.free_bytes,
                5 => &mut memory.total_bytes,
                6 => &mut memory.available_bytes,
                7 => &mut memory.cached_bytes,
                _ => continue,
            };
            *place = Some(u64::from_le_bytes(*value));
        }
        memory
    }
}

/// The saved state beyond the registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// Pages that the host wants (`num_pages`).
    pub target_pages: u32,
    /// Pages that the driver says it has given (`actual`).
    pub actual_pages: u32,
}

/// What the device did, and what the guest says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonStatus {
    /// Whether a driver uses the device now.
    pub driver: bool,
    /// Whether the driver reports free pages.
    pub reports: bool,
    /// Why the device needs a reset, if the driver broke a rule.
    #[serde(default)]
    pub broken: Option<String>,
    /// The memory that the host wants in the balloon, in bytes.
    pub target_bytes: u64,
    /// The memory that the guest says is in the balloon, in bytes; at most RAM.
    pub actual_bytes: u64,
    /// The length of all discarded ranges since this process has the VM, in bytes.
    pub discarded_bytes: u64,
    /// Ranges that the guest named and that lie outside of RAM, or could not be discarded.
    pub refused: u64,
    /// What the guest said last; empty before it said anything.
    pub guest: GuestMemory,
}
