//! # memory
//!
//! The room for a snapshot's RAM: what each frame is ([`table`]), how that is found ([`classify`]), and the way back ([`materialise`]).
//!
//! Prebaked uVMs, section IV-A, keeps memory apart from the state of devices, raw, so that equal pages are equal; Efficiently Restoring VMs, section 2.1, leaves out
//! what disk holds already. Both together: a table in the snapshot's folder, page bodies in the tenant's namespace ([`crate::pages`]), and
//! references into the files of the snapshot's own disks.

mod alike;
mod blocks;
mod classify;
mod materialise;
pub(crate) mod table;

pub use alike::{Alike, Comparable, alike};
pub use materialise::Materialised;
pub use table::{FramesDigest, Kind, MAX_FRAMES, Run, Table};

pub(crate) use blocks::{BLOCKS, BlockIndex};

use crate::digest::Digest;
use crate::errors::IoError;
use crate::manifest::{FileRef, MAX_DISKS, MAX_LAYERS};
use crate::meter::Meter;
use crate::pages::put::pieces;
use crate::pages::{Lease, PagesError, PutStats, Tenant};
use classify::{Frame, FreeFrames, Sources};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

/// A file that frames of RAM may refer to: an image's disk or a frozen layer's data. Its content was verified against `digest`.
#[derive(Debug, Clone, Copy)]
pub struct DiskLayer<'a> {
    /// The file.
    pub file: &'a File,
    /// Its sparse digest.
    pub digest: Digest,
}

/// A block of one of the snapshot's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHint {
    /// Which disk, from 0.
    pub disk: u8,
    /// 0 for the image, n for the n-th frozen layer, the lowest first.
    pub layer: u8,
    /// The bytes from `block` × 4096 of that file.
    pub block: u32,
}

/// What is known of RAM. All of it may be missing, and everything but `free` may be wrong: it then costs space or time, never a byte of
/// content.
#[derive(Debug, Clone, Copy, Default)]
pub struct Known<'a> {
    /// Frames that the guest does not use: they read as zeroes after a restore.
    pub free: &'a [Range<u32>],
    /// For each frame what the guest uses it for; 0, or past the end, is unknown.
    pub colours: &'a [u8],
    /// Frames in the order in which clones will want them: the recorded working set.
    pub order: &'a [u32],
    /// The block device's record of which frame was last read from or written to which block.
    pub hints: &'a [(u32, BlockHint)],
    /// Where to tell how far the work with it is, if anybody asks. It is not stopped by it.
    pub meter: Option<&'a Meter>,
}

/// RAM that is to be put.
#[derive(Debug, Clone, Copy)]
pub struct MemorySpec<'a> {
    /// RAM, raw: byte `frame` × 4096. Nobody may write to it meanwhile.
    pub memory: &'a File,
    /// What is known of it.
    pub known: Known<'a>,
    /// For each disk its image and its frozen layers, the lowest first.
    pub disks: &'a [Vec<DiskLayer<'a>>],
}

/// RAM that is in the store but for its table.
#[derive(Debug)]
pub struct PutMemory {
    /// What to keep: the snapshot's own file.
    pub table: Table,
    /// What was done with pages.
    pub stats: PutStats,
    /// Hints of the record that held, and that did not.
    pub hints: (u64, u64),
    /// Keeps the pages until the table is where [`crate::Store::gc_pages`] finds it.
    pub lease: Lease,
}

impl Tenant {
    /// Puts the pages of a snapshot's RAM that its disks do not hold, and makes its table. New pages are stored in this order: `order`,
    /// then by colour, then by frame.
    ///
    /// # Errors
    /// [`PagesError`]; what was there before is there still.
    pub fn put_memory(&self, spec: &MemorySpec) -> Result<PutMemory, PagesError> {
        let path = self.space.dir.path();
        let frames = check(spec, path)?;
        let nobody = Meter::default();
        let meter = spec.known.meter.unwrap_or(&nobody);
        meter.begin("reading the disks' blocks", 0);
        let free = FreeFrames::new(frames, spec.known.free);
        let indexes = spec.disks.iter().map(|disk| {
            disk.iter().map(|layer| self.inner.block_index(&layer.digest, layer.file, meter)).collect()
        });
        let indexes = indexes.collect::<Result<Vec<Vec<_>>, _>>()?;
        let data = pieces(spec.memory, path)?.iter().map(|piece| piece.end - piece.start).sum();
        meter.begin("hashing memory", data);
        let sources = Sources { spec, free: &free, indexes: &indexes, path, meter };
        // One core computes the digest that cannot be computed on many.
        let (ram, found) = std::thread::scope(|scope| {
            let ram = scope.spawn(|| classify::ram_digest(spec, &free, path, meter));
            let found = classify::classify(&sources, frames);
            (ram.join(), found)
        });
        let ram = ram.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let (kinds, hints) = found?;
        let (stats, lease) = self.space.store(&self.inner, spec.memory, ordered(&kinds, spec), meter)?;
        let ram = FileRef { digest: ram.digest, bytes: ram.bytes, data_bytes: ram.data_bytes };
        let table = self.table(ram, &kinds, spec);
        Ok(PutMemory { table, stats, hints: (hints.held, hints.wrong), lease })
    }

    fn table(&self, ram: FileRef, kinds: &[Frame], spec: &MemorySpec) -> Table {
        let mut numbers: HashMap<Digest, u32> = HashMap::new();
        let (mut runs, mut hashes): (Vec<Run>, Vec<Digest>) = (Vec::new(), Vec::new());
        let mut digest = FramesDigest::default();
        for (first, frame) in (0..).zip(kinds) {
            let kind = match *frame {
                Frame::Zero => Kind::Zero,
                Frame::Free => Kind::Free,
                Frame::Disk(BlockHint { disk, layer, block }, hash) => {
                    digest.frame(first, &hash);
                    Kind::Disk { disk, layer, block }
                }
                Frame::Page(hash) => {
                    digest.frame(first, &hash);
                    let next = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
                    let number = *numbers.entry(hash).or_insert(next);
                    if number == next {
                        hashes.push(hash);
                    }
                    Kind::Page { hash: number }
                }
            };
            let colour = spec.known.colours.get(first as usize).copied().unwrap_or(0);
            match runs.last_mut() {
                Some(last) if last.colour == colour && follows(last, kind) => last.frames += 1,
                _ => runs.push(Run { first, frames: 1, kind, colour }),
            }
        }
        let disks = spec.disks.iter().map(|disk| disk.iter().map(|layer| layer.digest).collect()).collect();
        let frames_digest = digest.finish(u32::try_from(kinds.len()).unwrap_or(u32::MAX));
        Table { tenant: self.space.tenant.clone(), ram, frames_digest, disks, runs, hashes }
    }
}

/// Frames of RAM, when everything is within bounds.
fn check(spec: &MemorySpec, path: &std::path::Path) -> Result<u32, PagesError> {
    let invalid = |place: &str, expected: String, got: String| PagesError::Invalid {
        place: place.to_owned(),
        expected,
        got,
    };
    let bytes = spec.memory.metadata().map_err(IoError::new("looking at", path))?.len();
    let frames = u32::try_from(bytes / dayfly_units::PAGE_SIZE).ok().filter(|n| (1..=MAX_FRAMES).contains(n));
    let Some(frames) = frames.filter(|_| bytes.is_multiple_of(dayfly_units::PAGE_SIZE)) else {
        let expected = format!("a multiple of 4096, of 1 to {MAX_FRAMES} frames");
        return Err(invalid("bytes of RAM", expected, bytes.to_string()));
    };
    if spec.disks.len() > MAX_DISKS {
        return Err(invalid("disks", format!("at most {MAX_DISKS}"), spec.disks.len().to_string()));
    }
    for disk in spec.disks {
        if !(1..=MAX_LAYERS + 1).contains(&disk.len()) {
            return Err(invalid(
                "files of a disk",
                format!("1 to {}", MAX_LAYERS + 1),
                disk.len().to_string(),
            ));
        }
    }
    Ok(frames)
}

/// Whether `kind` is what the frame after `run` is when it goes on.
fn follows(run: &Run, kind: Kind) -> bool {
    match (run.kind, kind) {
        (Kind::Zero, Kind::Zero) | (Kind::Free, Kind::Free) => true,
        (Kind::Disk { disk: d, layer: l, block }, Kind::Disk { disk, layer, block: next }) => {
            (d, l) == (disk, layer) && block.checked_add(run.frames) == Some(next)
        }
        (Kind::Page { hash }, Kind::Page { hash: next }) => hash.checked_add(run.frames) == Some(next),
        _ => false,
    }
}

/// Frames that are pages, in the order they will be wanted in; the first of each content counts.
fn ordered<'a>(kinds: &'a [Frame], spec: &'a MemorySpec) -> impl Iterator<Item = (u32, Digest)> + 'a {
    let colour = |frame: u32| spec.known.colours.get(frame as usize).copied().unwrap_or(0);
    let mut rest: Vec<u32> = (0..).take(kinds.len()).collect();
    rest.sort_by_key(|&frame| colour(frame));
    spec.known.order.iter().copied().chain(rest).filter_map(|frame| match kinds.get(frame as usize)? {
        Frame::Page(hash) => Some((frame, *hash)),
        _ => None,
    })
}

#[cfg(test)]
mod tests;
