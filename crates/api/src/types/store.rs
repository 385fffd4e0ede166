//! The store of images, kernels, layers, snapshots and their pages: its content, its use of disk
//! space, and its integrity.

use super::wire::wire;
use dayfly_units::{Counted, MemoryKinds, Name, Unreadable};

wire! {
    /// The storage that a snapshot takes.
    pub struct SnapshotUse {
        /// Name of the snapshot.
        pub name: Name,
        /// RAM of each clone in bytes.
        pub memory_bytes: u64,
        /// The kinds of its RAM; their sum is `memory_bytes`.
        pub memory: MemoryKinds,
        /// Bytes of the store that only this snapshot keeps: compressed pages, layers and files.
        /// Removing the snapshot frees them, except its pages in packs that other snapshots mostly
        /// use. Those are freed when the other snapshots are removed.
        pub own_stored_bytes: u64,
        /// Compressed pages of RAM, a part of `own_stored_bytes`.
        pub own_page_bytes: u64,
        /// Disk layers, a part of `own_stored_bytes`.
        pub own_layer_bytes: u64,
        /// Disk layers that the snapshot depends on.
        pub layers: Counted,
    }

    /// The storage that the snapshots take.
    pub struct StoreUsage {
        /// Readable snapshots, the one with the most own bytes first.
        pub snapshots: Vec<SnapshotUse>,
        /// Unreadable snapshots. What they share with one other snapshot counts as that snapshot's
        /// own.
        pub unreadable: Vec<Unreadable>,
    }

    /// The snapshots to verify.
    #[derive(Default)]
    pub struct VerifyRequest {
        /// Names of snapshots, which are verified with all that they depend on. If empty,
        /// everything in the store is verified.
        #[serde(default)]
        pub snapshots: Vec<Name>,
    }

    /// What a collection leaves out of account.
    #[derive(Default)]
    pub struct CollectRequest {
        /// Names of damaged snapshots. What cannot be read of them references nothing, so they do
        /// not stop the collection. Their own files stay.
        #[serde(default)]
        pub without: Vec<Name>,
    }

    /// A damaged object.
    pub struct Damaged {
        /// `image`, `kernel`, `layer`, `snapshot`, `pack` or `block_index`.
        pub kind: String,
        /// The object's name or id.
        pub name: String,
        /// File and place, with expected and got.
        pub message: String,
        /// Names of the snapshots that need the object.
        pub snapshots: Vec<String>,
        /// The next step, for people.
        pub next: String,
    }

    /// The result of a verification.
    #[derive(Default)]
    pub struct Verified {
        /// Number of images that were read.
        pub images: u64,
        /// Number of kernels that were read.
        pub kernels: u64,
        /// Number of frozen layers that were read.
        pub layers: u64,
        /// Number of snapshots that were read.
        pub snapshots: u64,
        /// Number of packs that were opened.
        pub packs: u64,
        /// Number of pages (4096 bytes) that were decompressed and hashed.
        pub pages: u64,
        /// Number of block indexes of disks that were read.
        pub block_indexes: u64,
        /// Objects that are damaged or missing; at most 1000 entries.
        pub damaged: Vec<Damaged>,
        /// Number of entries left out of `damaged`.
        pub more_damaged: u64,
    }

    /// A snapshot that cannot be cloned any more.
    pub struct LostSnapshot {
        /// Name of the snapshot.
        pub name: String,
        /// Number of its pages (4096 bytes) that the store does not have.
        pub lost_pages: u64,
        /// For each damaged or missing thing that it needs, file and place, with expected and got;
        /// at most 100 entries.
        pub causes: Vec<String>,
        /// The next step, for people.
        pub next: String,
    }

    /// The result of a repair.
    #[derive(Default)]
    pub struct Repaired {
        /// Number of damaged pages (4096 bytes) that were written anew.
        pub healed_pages: u64,
        /// Number of packs that were removed: damaged ones that nothing needs any more, and
        /// unused ones.
        pub packs: u64,
        /// Bytes of removed packs minus bytes of written packs. The figure is negative if more was
        /// written.
        pub pack_bytes: i64,
        /// Number of damaged block indexes that were removed; they are made again.
        pub block_indexes: u64,
        /// Number of damaged or missing hash trees of disk files that were made anew.
        pub hash_trees: u64,
        /// Snapshots that cannot be cloned any more.
        pub lost: Vec<LostSnapshot>,
        /// Other damaged objects; at most 1000 entries.
        pub damaged: Vec<Damaged>,
    }

    /// An object that a collection kept because something is damaged.
    pub struct LeftAlone {
        /// The object, for people.
        pub what: String,
        /// The cause: file and place, with expected and got.
        pub message: String,
        /// The next step, for people.
        pub next: String,
    }

    /// The result of a collection: what was removed.
    #[derive(Default)]
    pub struct Collected {
        /// Number of disk layers.
        pub layers: u64,
        /// Bytes of disk that the layers took.
        pub layer_bytes: u64,
        /// Number of pages (4096 bytes).
        pub pages: u64,
        /// Number of packs, including packs that were rewritten without their unneeded pages.
        pub packs: u64,
        /// Bytes of removed packs minus bytes of written packs. The figure is negative if more was
        /// written.
        pub pack_bytes: i64,
        /// Number of block indexes of disks.
        pub block_indexes: u64,
        /// Bytes of disk that the block indexes took.
        pub block_index_bytes: u64,
        /// Number of entries of the staging folder that no operation uses.
        pub staged: u64,
        /// Bytes of disk that those entries took.
        pub staged_bytes: u64,
        /// Objects that were kept because something is damaged.
        pub left_alone: Vec<LeftAlone>,
    }
}
