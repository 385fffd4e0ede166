//! Stores the pages of a snapshot's RAM, and makes the table.

use super::classify::{self, Frame, FreeFrames, Hints, Sources};
use super::table::{FramesDigest, Kind, MAX_FRAMES, Run, Table};
use super::types::{BlockHint, MemorySpec, PutMemory};
use super::work::{self, RamWork};
use crate::errors::IoError;
use crate::meter::Meter;
use crate::objects::manifest::{MAX_DISKS, MAX_LAYERS};
use crate::objects::types::FileRef;
use crate::pages::put::pieces;
use crate::pages::{PackWork, PagesError, Tenant};
use dayfly_units::Digest;
use std::collections::HashMap;

impl Tenant {
    /// Stores the pages of a snapshot's RAM that are not on its disks, and makes the table. New
    /// pages are stored in this order: first `order`, then by colour, then by frame.
    ///
    /// # Errors
    /// [`PagesError`]; pages stored before are unaffected.
    pub fn put_memory(&self, spec: &MemorySpec) -> Result<PutMemory, PagesError> {
        self.put_memory_by(spec, None)
    }

    /// As [`Self::put_memory`]. With `work`, that process reads RAM and writes the packs, and is
    /// ended.
    ///
    /// # Errors
    /// As [`Self::put_memory`], or `Work`.
    pub fn put_memory_by(
        &self,
        spec: &MemorySpec,
        work: Option<&mut dyn RamWork>,
    ) -> Result<PutMemory, PagesError> {
        let frames = check(spec, self.space.dir.path())?;
        let no_meter = Meter::default();
        let meter = spec.known.meter.unwrap_or(&no_meter);
        meter.begin("reading the disks' blocks", 0);
        let store = |kinds: &[Frame], work: Option<&mut dyn PackWork>| {
            self.space.store(&self.inner, spec.memory, ordered(kinds, spec), work, meter)
        };
        let (kinds, ram, hints, (stats, lease)) = match work {
            None => {
                let (kinds, ram, hints) = self.classify(spec, frames, meter)?;
                let stored = store(&kinds, None)?;
                (kinds, ram, hints, stored)
            }
            Some(work) => {
                let tenant = &self.space.tenant;
                let found = work::classify(&self.inner, spec, tenant, frames, work, meter)?;
                let (kinds, ram, hints) = found;
                let stored = store(&kinds, Some(work))?;
                (kinds, ram, hints, stored)
            }
        };
        let table = self.table(ram, &kinds, spec);
        Ok(PutMemory { table, stats, hints: (hints.right, hints.wrong), lease })
    }

    /// Classifies RAM on all cores, in this process.
    fn classify(
        &self,
        spec: &MemorySpec,
        frames: u32,
        meter: &Meter,
    ) -> Result<(Vec<Frame>, FileRef, Hints), PagesError> {
        let path = self.space.dir.path();
        let free = FreeFrames::new(frames, spec.known.free);
        let indexes = spec.disks.iter().map(|disk| {
            disk.iter()
                .map(|layer| self.inner.block_index(&layer.digest, layer.file, meter))
                .collect()
        });
        let indexes = indexes.collect::<Result<Vec<Vec<_>>, _>>()?;
        let indexes: Vec<Vec<_>> = indexes.iter().map(|of| of.iter().collect()).collect();
        let data = pieces(spec.memory, path)?.iter().map(|piece| piece.end - piece.start).sum();
        meter.begin("hashing memory", data);
        let sources = Sources { spec, free: &free, indexes: &indexes, path, meter };
        // The sparse digest is sequential, so one thread computes it beside the others.
        let (ram, found) = std::thread::scope(|scope| {
            let ram = scope.spawn(|| classify::ram_digest(spec, &free, path, meter));
            let found = classify::classify(&sources, frames);
            (ram.join(), found)
        });
        let ram = ram.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let (kinds, hints) = found?;
        let ram = FileRef { digest: ram.digest, bytes: ram.bytes, data_bytes: ram.data_bytes };
        Ok((kinds, ram, hints))
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
        let disks =
            spec.disks.iter().map(|disk| disk.iter().map(|layer| layer.digest).collect()).collect();
        let frames_digest = digest.finish(u32::try_from(kinds.len()).unwrap_or(u32::MAX));
        Table { tenant: self.space.tenant.clone(), ram, frames_digest, disks, runs, hashes }
    }
}

/// Number of frames of RAM, if all sizes are within bounds.
pub(super) fn check(spec: &MemorySpec, path: &std::path::Path) -> Result<u32, PagesError> {
    let invalid = |place: &str, expected: String, got: String| PagesError::Invalid {
        place: place.to_owned(),
        expected,
        got,
    };
    let bytes = spec.memory.metadata().map_err(IoError::new("looking at", path))?.len();
    let frames = u32::try_from(bytes / dayfly_units::PAGE_SIZE)
        .ok()
        .filter(|n| (1..=MAX_FRAMES).contains(n));
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

/// Whether a frame of kind `kind` right after `run` extends that run.
fn follows(run: &Run, kind: Kind) -> bool {
    match (run.kind, kind) {
        (Kind::Zero, Kind::Zero) | (Kind::Free, Kind::Free) => true,
        (Kind::Disk { disk: d, layer: l, block }, Kind::Disk { disk, layer, block: next }) => {
            (d, l) == (disk, layer) && block.checked_add(run.frames) == Some(next)
        }
        (Kind::Page { hash }, Kind::Page { hash: next }) => {
            hash.checked_add(run.frames) == Some(next)
        }
        _ => false,
    }
}

/// Frames that are pages, in the order in which clones touch them. The caller stores the first
/// frame of each content.
fn ordered<'a>(
    kinds: &'a [Frame],
    spec: &'a MemorySpec,
) -> impl Iterator<Item = (u32, Digest)> + 'a {
    let colour = |frame: u32| spec.known.colours.get(frame as usize).copied().unwrap_or(0);
    let mut rest: Vec<u32> = (0..).take(kinds.len()).collect();
    rest.sort_by_key(|&frame| colour(frame));
    spec.known.order.iter().copied().chain(rest).filter_map(|frame| {
        match kinds.get(frame as usize)? {
            Frame::Page(hash) => Some((frame, *hash)),
            _ => None,
        }
    })
}
