//! The store of images, kernels, layers, snapshots and their pages: what is in it, what takes room, whether it is sound.

use super::*;

wire! {
    /// How many of something there are, and how much they take.
    #[derive(Copy, Default)]
    pub struct Counted {
        /// How many.
        pub count: u64,
        /// The lengths of their files, holes included.
        pub apparent_bytes: u64,
        /// Bytes of the host's disk that they take.
        pub disk_bytes: u64,
    }

    /// RAM by what it is made of, in bytes.
    #[derive(Copy, Default)]
    pub struct MemoryKinds {
        /// Zeroes.
        pub zero_bytes: u64,
        /// Not used by the guest; zeroes after a restore.
        pub free_bytes: u64,
        /// Blocks of the snapshot's own disks.
        pub disk_bytes: u64,
        /// Pages that another snapshot has too.
        pub shared_bytes: u64,
        /// Pages that only this snapshot has.
        pub own_bytes: u64,
    }

    /// What a snapshot takes.
    pub struct SnapshotUse {
        /// Which.
        pub name: Name,
        /// RAM of its clones.
        pub memory_bytes: u64,
        /// What its RAM is made of; together `memory_bytes`.
        pub memory: MemoryKinds,
        /// Bytes that only this snapshot keeps in the store: its pages compressed, its layers, its files. Removing it gives them back; of
        /// pages in packs that others use the most of, when those others go.
        pub own_stored_bytes: u64,
        /// Of these, compressed pages of RAM.
        pub own_page_bytes: u64,
        /// Of these, disk layers.
        pub own_layer_bytes: u64,
        /// Disk layers that it stands on.
        pub layers: Counted,
    }

    /// What could not be read, and why.
    pub struct Unreadable {
        /// Name of the snapshot.
        pub name: String,
        /// File, place, expected and got.
        pub message: String,
    }

    /// What the snapshots take.
    pub struct StoreUsage {
        /// By own bytes, the most first.
        pub snapshots: Vec<SnapshotUse>,
        /// Snapshots that cannot be read. What they share with others counts as those others' own.
        pub unreadable: Vec<Unreadable>,
    }

    /// Which snapshots to verify.
    #[derive(Default)]
    pub struct VerifyRequest {
        /// These and what they stand on; none is everything that is stored.
        #[serde(default)]
        pub snapshots: Vec<Name>,
    }

    /// Something damaged.
    pub struct Damaged {
        /// `image`, `kernel`, `layer`, `snapshot`, `pack` or `block_index`.
        pub kind: String,
        /// Its name or id.
        pub name: String,
        /// File, place, expected and got.
        pub message: String,
        /// Snapshots that need it.
        pub snapshots: Vec<String>,
        /// What to do next, for people.
        pub next: String,
    }

    /// What a verification read and found.
    #[derive(Default)]
    pub struct Verified {
        /// Images that were read.
        pub images: u64,
        /// Kernels that were read.
        pub kernels: u64,
        /// Frozen layers that were read.
        pub layers: u64,
        /// Snapshots that were read.
        pub snapshots: u64,
        /// Packs that were opened.
        pub packs: u64,
        /// Pages of 4096 bytes that were decompressed and hashed.
        pub pages: u64,
        /// Indexes of disks' blocks that were read.
        pub block_indexes: u64,
        /// Everything that is damaged or missing; at most 1000 entries.
        pub damaged: Vec<Damaged>,
        /// Entries left out of `damaged`.
        pub more_damaged: u64,
    }

    /// Something that a collection left alone because something is damaged.
    pub struct LeftAlone {
        /// What, for people.
        pub what: String,
        /// Why: file, place, expected and got.
        pub message: String,
        /// What to do next, for people.
        pub next: String,
    }

    /// What a collection removed.
    #[derive(Default)]
    pub struct Collected {
        /// Disk layers.
        pub layers: u64,
        /// Bytes of disk they took.
        pub layer_bytes: u64,
        /// Pages of 4096 bytes.
        pub pages: u64,
        /// Packs, those written anew with what is still needed of them among them.
        pub packs: u64,
        /// Bytes of packs removed, less those of packs written; negative where more was written.
        pub pack_bytes: i64,
        /// Indexes of disks' blocks.
        pub block_indexes: u64,
        /// Bytes of disk they took.
        pub block_index_bytes: u64,
        /// Entries of the staging folder that nobody works on.
        pub staged: u64,
        /// Bytes of disk they took.
        pub staged_bytes: u64,
        /// What was left alone because something is damaged.
        pub left_alone: Vec<LeftAlone>,
    }

    /// The pages of RAM, each stored once.
    #[derive(Copy, Default)]
    pub struct Pages {
        /// Different pages.
        pub unique: u64,
        /// Their bytes, 4096 each.
        pub raw_bytes: u64,
        /// Their bytes as stored, compressed; pages that nobody needs any more included.
        pub stored_bytes: u64,
        /// Frames of all snapshots that are pages.
        pub referring_frames: u64,
        /// Packs.
        pub packs: u64,
        /// Packs that could not be opened when the daemon started.
        pub damaged_packs: u64,
        /// Bytes of the index on disk: the packs' footers.
        pub index_disk_bytes: u64,
        /// Bytes of the daemon's memory that the index takes.
        pub index_memory_bytes: u64,
    }
}

/// The store in numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct StoreStats {
    /// Root disks.
    pub images: Counted,
    /// Kernels with their initramfs.
    pub kernels: Counted,
    /// Frozen disk layers.
    pub layers: Counted,
    /// Snapshots, without their layers and pages.
    pub snapshots: Counted,
    /// Indexes of disks' blocks: a cache.
    pub block_indexes: Counted,
    /// Pages of RAM.
    pub pages: Pages,
    /// RAM of all snapshots.
    pub memory: MemoryKinds,
    /// `referring_frames` for each unique page; 0 without pages.
    pub dedup_ratio: f64,
    /// Raw bytes for each stored byte of a page; 0 without pages.
    pub compression_ratio: f64,
    /// Snapshots that cannot be read; they are in no other figure.
    pub unreadable: u64,
}

impl MemoryKinds {
    /// All of it.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        let Self { zero_bytes, free_bytes, disk_bytes, shared_bytes, own_bytes } = *self;
        zero_bytes
            .saturating_add(free_bytes)
            .saturating_add(disk_bytes)
            .saturating_add(shared_bytes)
            .saturating_add(own_bytes)
    }
}
