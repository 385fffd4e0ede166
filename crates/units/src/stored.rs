//! What a store holds, as the store counts it and as the API shows it.

use serde::{Deserialize, Serialize};
#[cfg(feature = "openapi")]
use utoipa::ToSchema;

macro_rules! wire {
    ($($item:item)*) => { $(
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(ToSchema))]
        $item
    )* };
}

wire! {
    /// Number and size of one kind of object.
    #[derive(Copy, Default)]
    pub struct Counted {
        /// Number of objects.
        pub count: u64,
        /// Sum of the lengths of their files in bytes, holes included.
        pub apparent_bytes: u64,
        /// Bytes that they take on the host's disk.
        pub disk_bytes: u64,
    }

    /// RAM by how it is stored, in bytes.
    #[derive(Copy, Default)]
    pub struct MemoryKinds {
        /// Pages that are all zero.
        pub zero_bytes: u64,
        /// Pages that the guest does not use; they are zero after a restore.
        pub free_bytes: u64,
        /// Pages that are blocks of the snapshot's own disks.
        pub disk_bytes: u64,
        /// Pages that another snapshot has too.
        pub shared_bytes: u64,
        /// Pages that only this snapshot has.
        pub own_bytes: u64,
    }

    /// An unreadable snapshot, and the cause.
    pub struct Unreadable {
        /// Name of the snapshot.
        pub name: String,
        /// File and place, with expected and got.
        pub message: String,
    }

    /// The pages of RAM in the store, each stored once.
    #[derive(Copy, Default)]
    pub struct Pages {
        /// Number of different pages.
        pub unique: u64,
        /// Bytes of these pages uncompressed, 4096 each.
        pub raw_bytes: u64,
        /// Bytes of the compressed pages, including pages that no snapshot needs any more.
        pub stored_bytes: u64,
        /// Number of frames, over all snapshots, that refer to a page.
        pub referring_frames: u64,
        /// Number of packs.
        pub packs: u64,
        /// Number of packs that could not be opened when the daemon started.
        pub damaged_packs: u64,
        /// Bytes of the index on disk, which consists of the packs' footers.
        pub index_disk_bytes: u64,
        /// Bytes of the daemon's memory that the index takes.
        pub index_memory_bytes: u64,
    }
}

/// The store's statistics.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
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
    /// Block indexes of disks, which are a cache.
    pub block_indexes: Counted,
    /// Pages of RAM.
    pub pages: Pages,
    /// RAM of all snapshots, by kind.
    pub memory: MemoryKinds,
    /// `referring_frames` divided by the number of unique pages; 0 without pages.
    pub dedup_ratio: f64,
    /// Raw bytes divided by stored bytes of the pages; 0 without pages.
    pub compression_ratio: f64,
    /// Number of unreadable snapshots, which no other figure includes.
    pub unreadable: u64,
}

impl MemoryKinds {
    /// Sum of all kinds, in bytes.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        let Self { zero_bytes, free_bytes, disk_bytes, shared_bytes, own_bytes } = *self;
        zero_bytes
            .saturating_add(free_bytes)
            .saturating_add(disk_bytes)
            .saturating_add(shared_bytes)
            .saturating_add(own_bytes)
    }

    /// Adds the bytes of each kind.
    pub const fn add(&mut self, other: Self) {
        let Self { zero_bytes, free_bytes, disk_bytes, shared_bytes, own_bytes } = other;
        self.zero_bytes += zero_bytes;
        self.free_bytes += free_bytes;
        self.disk_bytes += disk_bytes;
        self.shared_bytes += shared_bytes;
        self.own_bytes += own_bytes;
    }
}

impl Counted {
    /// Adds the objects and their sizes.
    pub const fn add(&mut self, other: Self) {
        self.count += other.count;
        self.apparent_bytes += other.apparent_bytes;
        self.disk_bytes += other.disk_bytes;
    }
}

impl Pages {
    /// See [`StoreStats::dedup_ratio`].
    #[must_use]
    pub fn dedup_ratio(&self) -> f64 {
        ratio(self.referring_frames, self.unique)
    }

    /// See [`StoreStats::compression_ratio`].
    #[must_use]
    pub fn compression_ratio(&self) -> f64 {
        ratio(self.raw_bytes, self.stored_bytes)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn ratio(of: u64, to: u64) -> f64 {
    if to == 0 { 0.0 } else { of as f64 / to as f64 }
}
