//! Classifies each frame of RAM: zero, free, a block of a disk, or a page.
//!
//! A page that equals a block of the snapshot's own disks is not stored, because it is on disk
//! already. Most of a guest's memory may be such pages (Efficiently Restoring VMs, section 2.1: the
//! page cache often is 80 % of RAM).
//!
//! The paper trusts the hypervisor's record of transfers. Here the record and the block index only
//! give hints: the bytes are compared before a reference is made.

use super::blocks::BlockIndex;
use super::types::{BlockHint, MemorySpec};
use crate::errors::{IoError, IoResult};
use crate::meter::Meter;
use crate::pages::PagesError;
use crate::pages::pack::PAGE;
use crate::pages::put::{pieces, read_piece};
use crate::sparse::{SparseHasher, is_zero};
use crate::workers;
use dayfly_units::sync::lock;
use dayfly_units::{Digest, PAGE_SIZE};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

/// A frame, classified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    Zero,
    Free,
    Disk(BlockHint, Digest),
    Page(Digest),
}

/// How many hints of the block device's record were right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Hints {
    /// Hints whose block equals the page.
    pub(crate) right: u64,
    /// Hints whose block differs.
    pub(crate) wrong: u64,
}

/// A flag for each frame: whether it is free. Ranges beyond RAM are cut.
pub(super) struct FreeFrames(Vec<bool>);

impl FreeFrames {
    pub(super) fn new(frames: u32, ranges: &[std::ops::Range<u32>]) -> Self {
        let mut free = vec![false; frames as usize];
        for range in ranges {
            let (start, end) = (range.start.min(frames) as usize, range.end.min(frames) as usize);
            free.get_mut(start..end).unwrap_or_default().fill(true);
        }
        Self(free)
    }

    pub(super) fn has(&self, frame: u32) -> bool {
        self.0.get(frame as usize).copied().unwrap_or(false)
    }
}

/// The inputs of the classification.
pub(super) struct Sources<'a> {
    pub(super) spec: &'a MemorySpec<'a>,
    pub(super) free: &'a FreeFrames,
    /// For each disk, and each of its files, the block index.
    pub(super) indexes: &'a [Vec<&'a BlockIndex>],
    pub(super) path: &'a Path,
    pub(super) meter: &'a Meter,
}

/// Gets the first frame of a piece, the classes of its frames, and how many hints were right.
pub(super) type Found<'a> = dyn Fn(u32, Vec<Frame>, Hints) -> IoResult<()> + Sync + 'a;

/// Classifies every frame of RAM.
pub(super) fn classify(sources: &Sources, frames: u32) -> Result<(Vec<Frame>, Hints), PagesError> {
    let mut all: Vec<Frame> =
        (0..frames).map(|n| if sources.free.has(n) { Frame::Free } else { Frame::Zero }).collect();
    let mut tally = Hints::default();
    let both = Mutex::new((&mut all, &mut tally));
    each(sources, &|first, kinds, of_piece| {
        let mut both = lock(&both);
        let first = first as usize;
        if let Some(slots) = both.0.get_mut(first..first + kinds.len()) {
            slots.copy_from_slice(&kinds);
        }
        both.1.right += of_piece.right;
        both.1.wrong += of_piece.wrong;
        Ok(())
    })?;
    Ok((all, tally))
}

/// Classifies the frames of each piece of RAM that is no hole. Calls `found` from several threads,
/// in any order.
pub(super) fn each(sources: &Sources, found: &Found<'_>) -> Result<(), PagesError> {
    let mut hints: HashMap<u32, Vec<BlockHint>> = HashMap::new();
    for (frame, hint) in sources.spec.known.hints {
        hints.entry(*frame).or_default().push(*hint);
    }
    let pieces = pieces(sources.spec.memory, sources.path)?;
    Ok(workers::each(
        pieces.len(),
        || (Vec::new(), vec![0; PAGE]),
        |(buffer, block), n| -> IoResult<()> {
            let (first, bytes) = read_piece(sources.spec.memory, &pieces[n], buffer, sources.path)?;
            let mut tally = Hints::default();
            let mut kinds = Vec::with_capacity(bytes.len() / PAGE);
            for (frame, page) in (first..).zip(bytes.chunks_exact(PAGE)) {
                let hints = hints.get(&frame).map_or(&[][..], Vec::as_slice);
                kinds.push(sources.frame(frame, page, hints, block, &mut tally)?);
            }
            // Half, because `ram_digest` reads the same bytes and counts the other half.
            sources.meter.add(bytes.len() as u64 / 2);
            found(first, kinds, tally)
        },
    )?)
}

impl Sources<'_> {
    fn frame(
        &self,
        frame: u32,
        page: &[u8],
        hints: &[BlockHint],
        buffer: &mut [u8],
        tally: &mut Hints,
    ) -> IoResult<Frame> {
        if self.free.has(frame) {
            return Ok(Frame::Free);
        }
        if is_zero(page) {
            return Ok(Frame::Zero);
        }
        let hash = Digest::of(page);
        for hint in hints {
            if self.equals(*hint, page, buffer)? {
                tally.right += 1;
                return Ok(Frame::Disk(*hint, hash));
            }
            tally.wrong += 1;
        }
        for (disk, layers) in (0..).zip(self.indexes) {
            for (layer, index) in (0..).zip(layers) {
                let Some(block) = index.find(&hash) else { continue };
                let found = BlockHint { disk, layer, block };
                if self.equals(found, page, buffer)? {
                    return Ok(Frame::Disk(found, hash));
                }
            }
        }
        Ok(Frame::Page(hash))
    }

    /// Whether the block equals the page; `false` if the block does not exist.
    fn equals(&self, at: BlockHint, page: &[u8], buffer: &mut [u8]) -> IoResult<bool> {
        let layers = self.spec.disks.get(usize::from(at.disk));
        let Some(layer) = layers.and_then(|layers| layers.get(usize::from(at.layer))) else {
            return Ok(false);
        };
        match layer.file.read_exact_at(buffer, u64::from(at.block) * PAGE_SIZE) {
            Ok(()) => Ok(buffer == page),
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
            Err(e) => Err(IoError::new("comparing a page with a block, for", self.path)(e)),
        }
    }
}

/// The sparse digest of RAM as restored: free frames count as zeroes.
pub(super) fn ram_digest(
    spec: &MemorySpec,
    free: &FreeFrames,
    path: &Path,
    meter: &Meter,
) -> Result<crate::sparse::Sparse, PagesError> {
    let mut hasher = SparseHasher::default();
    let mut buffer = Vec::new();
    for piece in pieces(spec.memory, path)? {
        let (first, bytes) = read_piece(spec.memory, &piece, &mut buffer, path)?;
        for (frame, page) in (first..).zip(bytes.chunks_exact(PAGE)).filter(|(n, _)| !free.has(*n))
        {
            hasher.update(u64::from(frame) * PAGE_SIZE, page);
        }
        meter.add(bytes.len() as u64 / 2);
    }
    let length = spec.memory.metadata().map_err(IoError::new("looking at", path))?.len();
    Ok(hasher.finish(length))
}
