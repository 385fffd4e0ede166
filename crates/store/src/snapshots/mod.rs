//! Snapshots: memory, state and disk layers of one VM at one instant.
//!
//! ```text
//! Store::snapshot_writer ─▶ SnapshotWriter ─freeze(disk)…─▶ the VMM saves ─saved()─▶ SavedSnapshot
//!     SavedSnapshot ─prepare(spec)─▶ Prepared ─▶ Committed
//!
//! SnapshotWriter dropped: its files and the new layers are removed.
//! SavedSnapshot or Prepared dropped, or commit failed: there is no snapshot. The layers that the
//! VM froze stay in vms/, because the VM depends on them.
//! ```

mod commit;
pub(crate) mod error;
pub(crate) mod files;
mod flatten;
mod open;
mod paged;
mod plan;
mod ram;
mod roots;
mod staged;
mod writer;

pub use commit::{Committed, Prepared};
pub use error::CommitError;
pub use flatten::{FlattenError, MOST as MOST_LAYERS, Merge, Merged};
pub use open::{OpenDisk, OpenSnapshot, Sizes};
pub use paged::{PagedSpec, SnapshotPages};
pub use plan::{GroupBuffer, GroupId, PageReader, Plan};
pub use ram::{Resident, seal_content};
pub use writer::{DiskSpec, SavedSnapshot, SnapshotSpec, SnapshotWriter};

#[cfg(test)]
#[path = "damage_tests.rs"]
mod damage_tests;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
