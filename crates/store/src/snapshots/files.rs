//! The names of the files in a snapshot's folder.

pub(crate) const STATE: &str = "state";
pub(crate) const MEMORY: &str = "memory";
/// Present instead of `memory` if RAM is stored in pages.
pub(crate) const TABLE: &str = "table";
pub(crate) const WORKING_SET: &str = "working-set";
/// The longest payload of a working set that is verified, in bytes; its reader may allow less.
pub(crate) const MAX_WORKING_SET_BYTES: u64 = 16 << 20;
