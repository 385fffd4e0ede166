//! The work on RAM's bytes, done by another process: it hashes each frame, compares frames with
//! blocks of the disks, and writes packs. The reasons, and what its answers are trusted with:
//! [`crate::pages::work`].

use super::blocks::BlockIndex;
use super::classify::{Frame, FreeFrames, Hints};
use super::types::{BlockHint, MemorySpec};
use crate::errors::{IoError, IoResult};
use crate::inner::Inner;
use crate::meter::Meter;
use crate::objects::types::FileRef;
use crate::pages::{PackWork, PagesError, WorkError};
use dayfly_sys::reopen;
use dayfly_units::{Digest, Name, PAGE_SIZE};
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// A frame that is neither zero nor free, as the other process has classified it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundFrame {
    /// A page with this hash.
    Page(Digest),
    /// Equal to a block of a disk.
    Disk(BlockHint, Digest),
}

/// What the other process reports at the end of the classification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classified {
    /// The sparse digest of RAM, with free frames as zeroes.
    pub digest: Digest,
    /// Its bytes in pages that are not all zero.
    pub data_bytes: u64,
    /// Hints that were right, and that were wrong.
    pub hints: (u64, u64),
}

/// A file of a disk, and its block index if there is one.
#[derive(Debug)]
pub struct RamDisk {
    /// The image or the data of a layer.
    pub file: File,
    /// Its sparse digest.
    pub digest: Digest,
    /// The sealed index of its blocks.
    pub index: Option<File>,
}

/// What the other process gets. All files are new, read-only descriptions.
#[derive(Debug)]
pub struct RamJob<'a> {
    /// The tenant that packs name.
    pub tenant: &'a Name,
    /// RAM.
    pub memory: File,
    /// Frames that the guest does not use.
    pub free: &'a [Range<u32>],
    /// As [`super::Known::hints`].
    pub hints: &'a [(u32, BlockHint)],
    /// For each disk its image and its layers' data.
    pub disks: Vec<Vec<RamDisk>>,
}

/// Gets a frame, and its class.
pub type TakeFrame<'a> = dyn FnMut(u32, FoundFrame) -> Result<(), WorkError> + 'a;

/// A process that does the work on RAM's bytes. [`Self::classify`] is called once, before any pack
/// is begun.
pub trait RamWork: PackWork {
    /// Classifies RAM. Calls `found` for each frame that is neither zero nor free, in any order.
    ///
    /// # Errors
    /// The process has ended, takes too long, or sends what is not expected; or the error of
    /// `found`.
    fn classify(
        &mut self,
        job: RamJob<'_>,
        found: &mut TakeFrame<'_>,
    ) -> Result<Classified, WorkError>;
}

/// The class of each frame of RAM, its digest, and how many hints were right, by `work`.
pub(super) fn classify(
    inner: &Inner,
    spec: &MemorySpec,
    tenant: &Name,
    frames: u32,
    work: &mut dyn RamWork,
    meter: &Meter,
) -> Result<(Vec<Frame>, FileRef, Hints), PagesError> {
    let free = FreeFrames::new(frames, spec.known.free);
    let blocks = blocks_of(spec)?;
    let mut all: Vec<Frame> =
        (0..frames).map(|n| if free.has(n) { Frame::Free } else { Frame::Zero }).collect();
    let job = job(inner, spec, tenant, meter)?;
    // After the block indexes, of which some may have been made.
    meter.begin("hashing memory", u64::from(frames) * PAGE_SIZE);
    let mut count = 0_u64;
    let done = work.classify(job, &mut |frame, found| {
        let slot = all.get_mut(frame as usize).filter(|slot| **slot == Frame::Zero);
        let slot = slot.ok_or_else(|| {
            WorkError::new(format!(
                "frames: expected one below {frames} that is not free, each once, got {frame}"
            ))
        })?;
        *slot = match found {
            FoundFrame::Page(hash) => Frame::Page(hash),
            FoundFrame::Disk(at, hash) => {
                let of = blocks.get(usize::from(at.disk));
                let count = of.and_then(|files| files.get(usize::from(at.layer)));
                if count.is_none_or(|count| u64::from(at.block) >= *count) {
                    return Err(WorkError::new(format!(
                        "frame {frame}: expected a block of the VM's disks, got {at:?}"
                    )));
                }
                Frame::Disk(at, hash)
            }
        };
        count += 1;
        meter.add(PAGE_SIZE);
        Ok(())
    })?;
    let (bytes, expected, got) =
        (u64::from(frames) * PAGE_SIZE, count * PAGE_SIZE, done.data_bytes);
    if got != expected {
        return Err(WorkError::new(format!("bytes of data: expected {expected}, got {got}")).into());
    }
    let ram = FileRef { digest: done.digest, bytes, data_bytes: done.data_bytes };
    Ok((all, ram, Hints { right: done.hints.0, wrong: done.hints.1 }))
}

/// For each disk file the number of its whole blocks.
fn blocks_of(spec: &MemorySpec) -> IoResult<Vec<Vec<u64>>> {
    let blocks = |file: &File| {
        let meta = file.metadata().map_err(IoError::new("looking at", Path::new("a disk")))?;
        Ok(meta.len() / PAGE_SIZE)
    };
    let of_disk = |disk: &Vec<super::DiskLayer<'_>>| disk.iter().map(|l| blocks(l.file)).collect();
    spec.disks.iter().map(of_disk).collect()
}

fn job<'a>(
    inner: &Inner,
    spec: &MemorySpec<'a>,
    tenant: &'a Name,
    meter: &Meter,
) -> Result<RamJob<'a>, PagesError> {
    let opening = |e| IoError::new("opening for another process", Path::new("a disk"))(e);
    let disk = |layer: &super::DiskLayer<'_>| -> Result<RamDisk, PagesError> {
        let index = inner.block_index_file(&layer.digest, layer.file, meter)?;
        let file = reopen::read_only(layer.file).map_err(opening)?.into();
        Ok(RamDisk { file, digest: layer.digest, index })
    };
    let disks = spec.disks.iter().map(|disk_files| disk_files.iter().map(disk).collect());
    Ok(RamJob {
        tenant,
        memory: reopen::read_only(spec.memory).map_err(opening)?.into(),
        free: spec.known.free,
        hints: spec.known.hints,
        disks: disks.collect::<Result<_, PagesError>>()?,
    })
}

impl BlockIndex {
    /// An index of a file of which nothing is known.
    pub(super) const fn empty() -> Self {
        Self { prefixes: Vec::new(), blocks: Vec::new() }
    }
}
