//! The page map in a file: which block of which file of a disk's chain each frame held when the VM
//! was saved.
//!
//! Sealed ([`dayfly_units::sealed`]) with the magic [`MAGIC`], version [`VERSION`]. The payload
//! consists of runs of 14 bytes, little-endian:
//!
//! | offset | size | field | checked |
//! |---|---|---|---|
//! | 0 | 4 | first frame: byte in the memory file ÷ 4096 | not before the end of the previous run |
//! | 4 | 4 | number of frames | at least 1, the last is one of RAM |
//! | 8 | 1 | disk, from 0 | below [`MAX_DISKS`] |
//! | 9 | 1 | layer: 0 the base image, n the nth frozen layer | at most [`MAX_LAYERS`] |
//! | 10 | 4 | first block: byte on the disk ÷ 4096 | the last is below [`MAX_BLOCKS`] |
//!
//! The last frozen layer is the one that this save froze.
//!
//! Frame `first + i` held block `block + i`, whose 4096 bytes are at the same offset of the layer's
//! file. Blocks that are in no file are left out ([`Disk::held`](super::super::Disk::held)). The
//! record is a hint: a reader compares the bytes before it uses an entry. A change of the layout
//! needs a new version; both stay readable.

use super::MAX_BLOCKS;
use crate::config::{MAX_DISKS, MAX_LAYERS};
use dayfly_units::PAGE_SIZE;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic, SealError};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The first 8 bytes of a record.
pub const MAGIC: Magic = *b"DFpgmap\n";
/// The only version, written and read.
pub const VERSION: u32 = 1;
/// The most runs of a record: 16 GiB of page cache if no two frames are in one run.
pub const MAX_RUNS: usize = 4 << 20;
const RUN_BYTES: usize = 14;

/// Consecutive frames that held consecutive blocks of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first frame.
    pub first: u32,
    /// The number of frames.
    pub count: u32,
    /// The disk's number, from 0.
    pub disk: u8,
    /// 0: the base image; n: the nth frozen layer.
    pub layer: u8,
    /// The block in the first frame.
    pub block: u32,
}

/// Why a record was refused.
#[derive(Debug, thiserror::Error)]
pub enum PageMapError {
    /// The file could not be read.
    #[error("page map: reading")]
    Read(#[source] io::Error),
    /// The file is too long.
    #[error("page map: expected at most {max} bytes, got {got}")]
    Length {
        /// The limit for this RAM, in bytes.
        max: u64,
        /// The file's length in bytes.
        got: u64,
    },
    /// The record is damaged or of another format.
    #[error("page map: {0}")]
    Seal(#[from] SealError),
    /// The payload is not a whole number of runs.
    #[error("page map: expected a payload of whole runs of {RUN_BYTES} bytes, got {0} bytes")]
    Ragged(usize),
    /// A run that no VM with this RAM can have.
    #[error(
        "page map: run {number} at byte {at}: expected frames ascending from {next} \
         and below {frames}, disk below {MAX_DISKS}, layer at most {MAX_LAYERS}, \
         blocks below {MAX_BLOCKS}, got {run:?}"
    )]
    Run {
        /// The run's number, from 0.
        number: usize,
        /// Its offset in the file, in bytes.
        at: usize,
        /// The end of the previous run: a frame.
        next: u64,
        /// The number of frames of RAM.
        frames: u64,
        /// The run.
        run: Run,
    },
}

/// The longest payload for RAM of `memory_bytes`, in bytes: no frame is in two runs.
fn max_payload(memory_bytes: u64) -> u64 {
    (memory_bytes / PAGE_SIZE).min(MAX_RUNS as u64) * RUN_BYTES as u64
}

/// Encodes and seals `runs`, whose frames ascend. Runs after the first [`MAX_RUNS`] are left out.
#[must_use]
pub fn encode(runs: &[Run]) -> Vec<u8> {
    let runs = &runs[..runs.len().min(MAX_RUNS)];
    let mut payload = Vec::with_capacity(runs.len() * RUN_BYTES);
    for run in runs {
        payload.extend_from_slice(&run.first.to_le_bytes());
        payload.extend_from_slice(&run.count.to_le_bytes());
        payload.extend_from_slice(&[run.disk, run.layer]);
        payload.extend_from_slice(&run.block.to_le_bytes());
    }
    sealed::seal(&MAGIC, VERSION, &payload)
}

/// Decodes a record of a VM with RAM of `memory_bytes`.
///
/// # Errors
/// [`PageMapError`]; nothing is decoded before the seal has been verified.
pub fn decode(bytes: &[u8], memory_bytes: u64) -> Result<Vec<Run>, PageMapError> {
    let (_, payload) = sealed::open(&MAGIC, VERSION..=VERSION, max_payload(memory_bytes), bytes)?;
    let (whole, rest) = payload.as_chunks::<RUN_BYTES>();
    if !rest.is_empty() {
        return Err(PageMapError::Ragged(payload.len()));
    }
    let frames = memory_bytes / PAGE_SIZE;
    let mut next = 0;
    let mut runs = Vec::with_capacity(whole.len());
    for (number, bytes) in whole.iter().enumerate() {
        let run = run_of(bytes);
        let end = u64::from(run.first) + u64::from(run.count);
        let ascends = run.count > 0 && u64::from(run.first) >= next && end <= frames;
        let names = usize::from(run.disk) < MAX_DISKS && usize::from(run.layer) <= MAX_LAYERS;
        if !ascends || !names || u64::from(run.block) + u64::from(run.count) > MAX_BLOCKS {
            let at = HEADER_BYTES + number * RUN_BYTES;
            return Err(PageMapError::Run { number, at, next, frames, run });
        }
        next = end;
        runs.push(run);
    }
    Ok(runs)
}

fn run_of(bytes: &[u8; RUN_BYTES]) -> Run {
    let [f0, f1, f2, f3, c0, c1, c2, c3, disk, layer, b0, b1, b2, b3] = *bytes;
    Run {
        first: u32::from_le_bytes([f0, f1, f2, f3]),
        count: u32::from_le_bytes([c0, c1, c2, c3]),
        disk,
        layer,
        block: u32::from_le_bytes([b0, b1, b2, b3]),
    }
}

/// Reads and decodes the record in `file`, of a VM with RAM of `memory_bytes`.
///
/// # Errors
/// [`PageMapError`].
pub fn read(file: &File, memory_bytes: u64) -> Result<Vec<Run>, PageMapError> {
    let got = file.metadata().map_err(PageMapError::Read)?.len();
    let max = max_payload(memory_bytes) + HEADER_BYTES as u64;
    if got > max {
        return Err(PageMapError::Length { max, got });
    }
    let mut bytes = vec![0; usize::try_from(got).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0).map_err(PageMapError::Read)?;
    decode(&bytes, memory_bytes)
}
