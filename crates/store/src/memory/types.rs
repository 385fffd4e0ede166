//! What the caller knows about RAM, and what is known once its pages are stored.

use super::table::Table;
use crate::meter::Meter;
use crate::pages::{Lease, PutStats};
use dayfly_units::Digest;
use std::fs::File;
use std::ops::Range;

/// A file that frames of RAM may refer to: an image's disk or a layer's data. The caller has
/// verified its content against `digest`.
#[derive(Debug, Clone, Copy)]
pub struct DiskLayer<'a> {
    /// The file, open for reading.
    pub file: &'a File,
    /// Its sparse digest.
    pub digest: Digest,
}

/// A block of one of the snapshot's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHint {
    /// Number of the disk, from 0.
    pub disk: u8,
    /// 0 for the image, n for the n-th frozen layer, the lowest first.
    pub layer: u8,
    /// The block at byte `block` × 4096 of that file.
    pub block: u32,
}

/// Optional knowledge about RAM. Every field may be empty. Wrong values, except in `free`, cost
/// space or time, but never change content.
#[derive(Debug, Clone, Copy, Default)]
pub struct Known<'a> {
    /// Frames that the guest does not use; they read as zeroes after a restore.
    pub free: &'a [Range<u32>],
    /// For each frame its colour (the guest's use of it); 0, or past the end, means unknown.
    pub colours: &'a [u8],
    /// Frames in the order in which clones touch them: the recorded working set.
    pub order: &'a [u32],
    /// The block device's record: for each frame the block that it was last read from or written
    /// to.
    pub hints: &'a [(u32, BlockHint)],
    /// Progress of the work. [`Meter::stop`] does not stop it.
    pub meter: Option<&'a Meter>,
}

/// RAM to store.
#[derive(Debug, Clone, Copy)]
pub struct MemorySpec<'a> {
    /// RAM, raw: frame `n` at byte `n` × 4096. Nothing may write to the file meanwhile.
    pub memory: &'a File,
    /// Optional knowledge about this RAM.
    pub known: Known<'a>,
    /// For each disk its image and its layers' data, the lowest first.
    pub disks: &'a [Vec<DiskLayer<'a>>],
}

/// RAM whose pages are stored, but whose table is not.
#[derive(Debug)]
pub struct PutMemory {
    /// The table, which the caller writes into the snapshot's folder.
    pub table: Table,
    /// Counts of pages.
    pub stats: PutStats,
    /// Number of hints that were right, and that were wrong.
    pub hints: (u64, u64),
    /// Keeps the pages until the table is published, where [`crate::Store::gc_pages`] finds it.
    pub lease: Lease,
}
