//! Snapshots: memory, state and disk layers of one instant.
//!
//! ```text
//! Store::snapshot_writer ──▶ SnapshotWriter ──freeze(disk)…──▶ the VMM saves ──saved()──▶ SavedSnapshot ──prepare(spec)──▶ Prepared ──▶ Committed
//!                                │ dropped: nothing stays                      │ dropped, or commit failed: no snapshot; what
//!                                ▼ of it, nor of the new layers                ▼ the VM froze stays in vms/, as it stands on it
//! ```

mod commit;
mod flatten;
mod open;
mod paged;
mod plan;
mod ram;
mod writer;

pub use commit::{Committed, Prepared};
pub use flatten::{FlattenError, MOST as MOST_LAYERS, Merge, Merged};
pub use open::{OpenDisk, OpenLayer, OpenSnapshot, Sizes};
pub use paged::{PagedSpec, SnapshotPages};
pub use plan::{GroupBuffer, GroupId, PageReader, Plan};
pub use ram::{Resident, seal_content};
pub use writer::{CommitError, DiskSpec, SavedSnapshot, SnapshotSpec, SnapshotWriter};

pub(crate) const STATE: &str = "state";
pub(crate) const MEMORY: &str = "memory";
/// In place of `memory` where RAM is in pages.
pub(crate) const TABLE: &str = "table";
pub(crate) const WORKING_SET: &str = "working-set";
/// The longest payload of one that is looked at; its reader may allow less.
pub(crate) const MAX_WORKING_SET_BYTES: u64 = 16 << 20;

#[cfg(test)]
#[path = "damage_tests.rs"]
mod damage_tests;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
