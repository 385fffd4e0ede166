//! The map of a frozen layer: the blocks that the layer has.
//!
//! Sealed ([`dayfly_units::sealed`]) with the magic [`MAGIC`]. The payload, little-endian:
//!
//! | offset | size | field | checked |
//! |---|---|---|---|
//! | 0 | 4 | block size in bytes | equals [`DISK_BLOCK_BYTES`] |
//! | 4 | 8 | blocks of the disk | at most [`MAX_BLOCKS`] |
//! | 12 | | version 1: a bitmap; version 2: runs | see below |
//!
//! - Version 1, a bitmap: ⌈blocks / 8⌉ bytes, block b is bit b % 8 of byte b / 8. Checked: the
//!   length fits exactly; bits past the last block are zero.
//! - Version 2, runs of 8 bytes: first block (4), number of blocks (4). Checked: whole runs, each
//!   not empty, behind the previous run and not touching it, within the disk.
//!
//! The writer picks the shorter version, and the bitmap if both have the same length. A reader
//! needs a tenth of the time for runs, if a large disk has few blocks in the layer. Each layer of a
//! chain has a map.
//!
//! The layer's data is another file, sparse and as long as the disk: block b at byte b × block
//! size. A block in the map whose place is a hole is a block of zeroes. A change of the layout
//! needs a new version; all versions stay readable.

use super::iolist::IoList;
use super::spec::MAX_DISK_BYTES;
use crate::config::DISK_BLOCK_BYTES;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic, SealError};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// The first 8 bytes of a map file.
pub const MAGIC: Magic = *b"DFlayer\n";
/// The version whose payload is a bitmap.
pub const BITMAP: u32 = 1;
/// The version whose payload is runs.
pub const RUNS: u32 = 2;
/// Bytes of a run.
const RUN_BYTES: usize = 8;
/// The most blocks a disk may have: 1 TiB in blocks of 4 KiB.
pub const MAX_BLOCKS: u64 = MAX_DISK_BYTES / DISK_BLOCK_BYTES;
/// Bytes before the bitmap.
const FIXED_BYTES: usize = 12;
/// The longest payload, in bytes.
const MAX_PAYLOAD_BYTES: u64 = FIXED_BYTES as u64 + MAX_BLOCKS / 8;

/// The set of blocks that a layer has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerMap {
    blocks: u64,
    bits: Vec<u8>,
}

/// Why bytes are not a layer map.
#[derive(Debug, thiserror::Error)]
pub enum LayerMapError {
    /// The file could not be read.
    #[error("layer map: reading")]
    Read(#[source] io::Error),
    /// The file is longer than any map.
    #[error("layer map: expected at most {max} bytes, got {got}")]
    TooLarge {
        /// Limit in bytes.
        max: u64,
        /// Size of the file in bytes.
        got: u64,
    },
    /// The file is damaged, of another kind or of another version.
    #[error("layer map: {0}")]
    Seal(#[from] SealError),
    /// The payload is shorter than its fixed fields.
    #[error("layer map: expected a payload of at least {FIXED_BYTES} bytes, got {0}")]
    Short(usize),
    /// The block size is not [`DISK_BLOCK_BYTES`].
    #[error("layer map: block size at payload byte 0: expected {DISK_BLOCK_BYTES}, got {0}")]
    BlockBytes(u32),
    /// More than [`MAX_BLOCKS`] blocks.
    #[error("layer map: blocks at payload byte 4: expected at most {MAX_BLOCKS}, got {0}")]
    Blocks(u64),
    /// The bitmap's length does not fit the number of blocks.
    #[error(
        "layer map: bitmap at payload byte 12: expected {expected} bytes \
         for {blocks} blocks, got {got}"
    )]
    Bitmap {
        /// Blocks of the disk.
        blocks: u64,
        /// Bytes that the blocks need.
        expected: u64,
        /// Bytes in the payload.
        got: usize,
    },
    /// Bytes after the last whole run.
    #[error(
        "layer map: runs at payload byte 12: expected whole runs of {RUN_BYTES} \
         bytes, got {0} bytes"
    )]
    Runs(usize),
    /// A run that is empty, out of order, or past the disk's end.
    #[error(
        "layer map: run {number}: expected at least 1 block, from {from} on, \
         below {blocks}, got {count} from {first}"
    )]
    Run {
        /// The run's number, from 0.
        number: usize,
        /// The first block that the run may begin with.
        from: u64,
        /// Blocks of the disk.
        blocks: u64,
        /// The run's first block.
        first: u64,
        /// The number of the run's blocks.
        count: u64,
    },
    /// A bit past the last block is set.
    #[error("layer map: bitmap names a block past the disk's last, block {0}")]
    Stray(u64),
}

impl LayerMap {
    /// A map of no blocks for a disk of `blocks` blocks.
    ///
    /// # Errors
    /// [`LayerMapError::Blocks`] for more than [`MAX_BLOCKS`].
    pub fn empty(blocks: u64) -> Result<Self, LayerMapError> {
        if blocks > MAX_BLOCKS {
            return Err(LayerMapError::Blocks(blocks));
        }
        let bytes =
            usize::try_from(blocks.div_ceil(8)).map_err(|_| LayerMapError::Blocks(blocks))?;
        Ok(Self { blocks, bits: vec![0; bytes] })
    }

    /// Decodes the bytes of a map file.
    ///
    /// # Errors
    /// [`LayerMapError`]; nothing is decoded before the seal has been verified.
    pub fn decode(bytes: &[u8]) -> Result<Self, LayerMapError> {
        let (version, payload) = sealed::open(&MAGIC, BITMAP..=RUNS, MAX_PAYLOAD_BYTES, bytes)?;
        let Some((fixed, rest)) = payload.split_at_checked(FIXED_BYTES) else {
            return Err(LayerMapError::Short(payload.len()));
        };
        let (mut size, mut count) = ([0; 4], [0; 8]);
        size.copy_from_slice(&fixed[..4]);
        count.copy_from_slice(&fixed[4..]);
        let (block_bytes, blocks) = (u32::from_le_bytes(size), u64::from_le_bytes(count));
        if u64::from(block_bytes) != DISK_BLOCK_BYTES {
            return Err(LayerMapError::BlockBytes(block_bytes));
        }
        if blocks > MAX_BLOCKS {
            return Err(LayerMapError::Blocks(blocks));
        }
        if version == RUNS {
            return Self::of_runs(blocks, rest);
        }
        let expected = blocks.div_ceil(8);
        if rest.len() as u64 != expected {
            return Err(LayerMapError::Bitmap { blocks, expected, got: rest.len() });
        }
        let map = Self { blocks, bits: rest.to_vec() };
        match map.runs().last_end() {
            end if end > blocks => Err(LayerMapError::Stray(end - 1)),
            _ => Ok(map),
        }
    }

    fn of_runs(blocks: u64, bytes: &[u8]) -> Result<Self, LayerMapError> {
        let (runs, rest) = bytes.as_chunks::<RUN_BYTES>();
        if !rest.is_empty() {
            return Err(LayerMapError::Runs(bytes.len()));
        }
        let (mut map, mut from) = (Self::empty(blocks)?, 0);
        for (number, [a, b, c, d, e, f, g, h]) in runs.iter().copied().enumerate() {
            let first = u64::from(u32::from_le_bytes([a, b, c, d]));
            let count = u64::from(u32::from_le_bytes([e, f, g, h]));
            if count == 0 || first < from || first + count > blocks {
                return Err(LayerMapError::Run { number, from, blocks, first, count });
            }
            map.insert_run(&(first..first + count));
            // A run that touches the previous run would be part of it.
            from = first + count + 1;
        }
        Ok(map)
    }

    /// Reads and decodes a file from its start, at any file offset of its descriptor.
    ///
    /// # Errors
    /// [`LayerMapError`]; the file's size is checked before anything is allocated.
    pub fn read(file: BorrowedFd<'_>) -> Result<Self, LayerMapError> {
        let read = |e: rustix::io::Errno| LayerMapError::Read(e.into());
        let size =
            u64::try_from(rustix::fs::fstat(file).map_err(read)?.st_size).unwrap_or(u64::MAX);
        let max = MAX_PAYLOAD_BYTES + HEADER_BYTES as u64;
        let too_large = || LayerMapError::TooLarge { max, got: size };
        if size > max {
            return Err(too_large());
        }
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| too_large())?];
        let got = IoList::of(&mut bytes).read_at(file, 0).map_err(LayerMapError::Read)?;
        Self::decode(&bytes[..got])
    }

    /// Encodes and seals the map.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self.blocks, || self.runs())
    }

    /// The number of blocks of the disk.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The number of blocks that the layer has.
    #[must_use]
    pub fn present(&self) -> u64 {
        self.bits.iter().map(|byte| u64::from(byte.count_ones())).sum()
    }

    /// Whether the layer has `block`.
    #[must_use]
    pub fn has(&self, block: u64) -> bool {
        let byte = usize::try_from(block / 8).ok().and_then(|at| self.bits.get(at));
        byte.is_some_and(|byte| byte >> (block % 8) & 1 == 1)
    }

    /// Adds a block; a block past the disk's last is ignored.
    pub fn insert(&mut self, block: u64) {
        if block < self.blocks {
            set(&mut self.bits, block);
        }
    }

    /// Adds a run of blocks; blocks past the disk's last are ignored.
    pub fn insert_run(&mut self, run: &Range<u64>) {
        set_run(&mut self.bits, &(run.start..run.end.min(self.blocks)));
    }

    /// The blocks that the layer has, ascending, as runs that neither touch nor overlap.
    #[must_use]
    pub const fn runs(&self) -> Runs<'_> {
        Runs { bits: self.bits.as_slice(), next: 0 }
    }
}

/// Encodes and seals the map of a layer that has the blocks of `runs`, on a disk of `blocks`
/// blocks. The runs ascend and do not touch. Each call of `runs` returns the same ones.
#[must_use]
pub fn encode<R>(blocks: u64, runs: impl Fn() -> R) -> Vec<u8>
where
    R: Iterator<Item = Range<u64>>,
{
    #[expect(clippy::cast_possible_truncation, reason = "a constant of 4096")]
    let mut payload = (DISK_BLOCK_BYTES as u32).to_le_bytes().to_vec();
    payload.extend_from_slice(&blocks.to_le_bytes());
    let bitmap_bytes = usize::try_from(blocks.div_ceil(8)).unwrap_or(0);
    let most = bitmap_bytes / RUN_BYTES;
    let mut count = 0;
    for run in runs().take(most) {
        count += 1;
        // Block numbers have 28 bits.
        for number in [run.start, run.end - run.start] {
            payload.extend_from_slice(&u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
        }
    }
    if count < most {
        return sealed::seal(&MAGIC, RUNS, &payload);
    }
    payload.truncate(FIXED_BYTES);
    payload.resize(FIXED_BYTES + bitmap_bytes, 0);
    runs().for_each(|run| set_run(&mut payload[FIXED_BYTES..], &run));
    sealed::seal(&MAGIC, BITMAP, &payload)
}

/// Sets the bit of a block; a bit past the last is ignored.
fn set(bits: &mut [u8], block: u64) {
    if let Some(byte) = usize::try_from(block / 8).ok().and_then(|at| bits.get_mut(at)) {
        *byte |= 1 << (block % 8);
    }
}

/// Sets the bits of a run of blocks.
fn set_run(bits: &mut [u8], run: &Range<u64>) {
    let whole = run.start.next_multiple_of(8).min(run.end)..run.end - run.end % 8;
    if whole.start >= whole.end {
        return run.clone().for_each(|block| set(bits, block));
    }
    let at = |block: u64| usize::try_from(block / 8).unwrap_or(usize::MAX);
    if let Some(bytes) = bits.get_mut(at(whole.start)..at(whole.end)) {
        bytes.fill(0xff);
    }
    (run.start..whole.start).chain(whole.end..run.end).for_each(|block| set(bits, block));
}

/// Runs of blocks; see [`LayerMap::runs`].
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    bits: &'a [u8],
    /// The next bit to examine.
    next: usize,
}

impl Runs<'_> {
    /// The end of the last run.
    fn last_end(&self) -> u64 {
        let last = self.bits.iter().rposition(|byte| *byte != 0);
        last.map_or(0, |at| at as u64 * 8 + u64::from(8 - self.bits[at].leading_zeros()))
    }

    /// The first bit at or after `from` that equals `set`, else the number of bits.
    fn seek(&self, from: usize, set: bool) -> usize {
        let (whole, bits) = (if set { 0 } else { 0xff }, self.bits.len() * 8);
        let mut at = from;
        while at < bits {
            let byte = self.bits[at / 8];
            if at.is_multiple_of(8) && byte == whole {
                // Whole words first: most words of a map have equal bits.
                let words = self.bits[at / 8..].as_chunks::<8>().0;
                let alike = words.iter().take_while(|word| **word == [whole; 8]).count();
                at += if alike == 0 { 8 } else { alike * 64 };
            } else if (byte >> (at % 8) & 1 == 1) == set {
                return at;
            } else {
                at += 1;
            }
        }
        bits
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.seek(self.next, true);
        if start == self.bits.len() * 8 {
            self.next = start;
            return None;
        }
        let end = self.seek(start, false);
        self.next = end;
        Some(start as u64..end as u64)
    }
}
