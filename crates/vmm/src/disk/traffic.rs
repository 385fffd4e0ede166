//! How much each disk of a VM has moved. [`crate::meter`] counts it.

use serde::{Deserialize, Serialize};

/// Successful requests of one disk, and their bytes, since the VMM made the disk. No figure goes
/// down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTraffic {
    /// Requests that read.
    pub reads: u64,
    /// Bytes read by the guest.
    pub read_bytes: u64,
    /// Requests that wrote. Zeroed and discarded ranges do not count.
    pub writes: u64,
    /// Bytes written by the guest.
    pub written_bytes: u64,
}
