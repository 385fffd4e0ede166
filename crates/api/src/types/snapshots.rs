//! Snapshots, and the progress of long operations.

use super::error::ApiError;
use super::recording::Recording;
use super::store::{Collected, Repaired, Verified};
use super::wire::wire;
use crate::agent::ExecSpec;
use dayfly_units::{CpuModel, Egress, Name};

wire! {
    /// A snapshot, from which clones start.
    pub struct Snapshot {
        /// The snapshot's name.
        pub name: Name,
        /// Time at which the snapshot was taken.
        pub created_unix_ms: u64,
        /// Name of the image of the root disk.
        pub image: Name,
        /// Name of the kernel.
        pub kernel: Name,
        /// The snapshot that the VM was cloned from, if any.
        pub parent: Option<Name>,
        /// Number of vCPUs, the least of a clone.
        pub vcpus: u8,
        /// The most vCPUs of a clone; 0 if a daemon of an earlier version answers.
        #[serde(default)]
        pub max_vcpus: u8,
        /// The model of the vCPUs.
        #[serde(default)]
        pub cpu_model: CpuModel,
        /// RAM of each clone in bytes.
        pub memory_bytes: u64,
        /// Bytes of RAM that are stored; the rest is zero.
        pub memory_stored_bytes: u64,
        /// Ids of the copy-on-write layers over the image, base first.
        pub layers: Vec<String>,
        /// Bytes that those layers take.
        pub layers_stored_bytes: u64,
        /// Whether the snapshot is pending: a fork made it, and it is still being stored. A pending
        /// snapshot can be cloned, and is lost if the daemon ends before it is stored.
        #[serde(default)]
        pub pending: bool,
        /// The part of its RAM that is in the host's memory. `None` if no clone of it was made
        /// recently.
        #[serde(default)]
        pub resident: Option<Resident>,
    }

    /// The RAM of a snapshot in the host's memory, counted once for all clones.
    pub struct Resident {
        /// Bytes loaded for this snapshot alone.
        pub own_bytes: u64,
        /// Bytes that its clones map from other snapshots with the same pages.
        pub shared_bytes: u64,
    }

    /// Boots an image, warms it up, and makes a snapshot of it. The answer is a stream of
    /// [`Progress`], one JSON object per line.
    pub struct BakeRequest {
        /// Name of the image.
        pub image: Name,
        /// Name of the new snapshot, which must be free.
        pub name: Name,
        /// Name of the kernel. If `None`, the newest kernel is used.
        pub kernel: Option<Name>,
        /// RAM in bytes.
        pub memory_bytes: u64,
        /// Number of vCPUs, 1 to 16.
        pub vcpus: u8,
        /// A warm-up program, which runs to its end before the snapshot and must exit with code 0.
        /// Processes that it leaves running are in the snapshot.
        pub warmup: Option<ExecSpec>,
        /// A program whose touched pages are the snapshot's working set, which every clone finds in
        /// memory. After the bake it runs twice in a temporary clone; the first run must exit with
        /// code 0. If `None`, the working set is what a clone touches while it takes its identity.
        #[serde(default)]
        pub recording: Option<ExecSpec>,
        /// An init of the image that replaces the agent's own init.
        pub init: Option<String>,
        /// The model of the vCPUs, which this host's CPU must have. Clones can be made on each host
        /// whose CPU has the features of that model; of `host`, where it has all of this one's.
        #[serde(default, skip_serializing_if = "CpuModel::is_host")]
        pub cpu_model: CpuModel,
        /// Egress policy of the VM while it is baked, and of clones that ask for none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        pub egress: Option<Egress>,
    }

    /// Makes a snapshot of a VM: `POST /v1/vms/{vm}/snapshot`. The answer is a stream of
    /// [`Progress`].
    pub struct SnapshotRequest {
        /// Name of the new snapshot, which must be free.
        pub name: Name,
    }

    /// One line of the stream that reports a long operation.
    #[serde(tag = "event", rename_all = "snake_case")]
    pub enum Progress {
        /// A phase has begun.
        Phase {
            /// Name of the phase, for people.
            label: String,
        },
        /// Progress within the phase.
        Step {
            /// Bytes that are done.
            done: u64,
            /// Bytes in total.
            total: u64,
        },
        /// Output of the warm-up program.
        Output {
            /// The text; bytes that are not UTF-8 are replaced.
            text: String,
        },
        /// First touches of pages, in order. Each is a frame number and the microseconds since the
        /// restore.
        Touched {
            /// At most 2,000 touches.
            touches: Vec<[u32; 2]>,
        },
        /// The run was recorded; the stream ends.
        Recorded(Box<Recording>),
        /// The snapshot is complete; the stream ends.
        Snapshot(Box<Snapshot>),
        /// The verification is complete; the stream ends. Found damage does not make the operation
        /// fail.
        Verified(Box<Verified>),
        /// The collection is complete; the stream ends.
        Collected(Box<Collected>),
        /// The repair is complete; the stream ends. Lost snapshots do not make the operation fail.
        Repaired(Box<Repaired>),
        /// The operation failed and leaves nothing behind; the stream ends.
        Failed(ApiError),
    }
}
