//! The page map: the disk block that each frame of guest RAM was last read from or written to.
//!
//! A guest's page cache is a copy of disk blocks, and often most of its memory. virtio-blk sees
//! which frame holds which block, so a snapshot can refer to the block instead of storing the page.
//! Park et al. write-protect these pages, so their map is always true (summed up in Egger et al.,
//! "Efficiently Restoring Virtual Machines", section 2.1). This map is a **hint** and costs the
//! guest nothing. The frame or the block may have changed since: by a CPU, another device, or a
//! write from another frame. A reader of an entry therefore compares the bytes first.
//!
//! A **frame** is a page of the memory file: byte in the file ÷ 4096 ([`crate::memory`]). An entry
//! is made only if a whole frame meets a whole block: both aligned, every byte transferred, with
//! any division into buffers. A frame that a read changes in another way loses its entry. The map
//! does not notice that a block is written from another frame, zeroed or discarded, because this
//! would need a table from blocks to frames.
//!
//! The map has one word for each frame, in chunks that are made when one of their frames first
//! meets a block. It takes at most 1/1024 of RAM, plus 8 bytes for each 2 MiB of RAM. [`record`] is
//! its file format.

pub mod record;
#[cfg(test)]
mod tests;

pub use record::{PageMapError, Run};

use super::IoList;
use super::layer::MAX_BLOCKS;
use crate::config::{DISK_BLOCK_BYTES, MAX_DISKS};
use dayfly_units::PAGE_SIZE;
use std::ops::Range;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

/// Frames of a chunk: 2 MiB of RAM.
const CHUNK: usize = 512;
/// Chunks that are read without a pause: 128 MiB of RAM.
pub const PART: usize = 64;
/// The first bit of the disk's number in an entry; the block is in the bits below.
const DISK_SHIFT: u32 = 28;
/// Set in every entry, so that 0 means no entry.
const THERE: u32 = 1 << 31;

const _: () = assert!(PAGE_SIZE == DISK_BLOCK_BYTES);
const _: () = assert!(MAX_BLOCKS <= 1 << DISK_SHIFT && MAX_DISKS <= 1 << (31 - DISK_SHIFT));

/// The block that each frame holds, for all disks of a VM.
#[derive(Debug)]
pub struct PageMap {
    regions: Vec<Region>,
    chunks: Vec<Option<Box<[u32; CHUNK]>>>,
}

/// A part of RAM without a hole.
#[derive(Debug, Clone, Copy)]
struct Region {
    /// Its address in this process.
    host: usize,
    len: usize,
    /// Its offset in the memory file, in bytes.
    at: u64,
}

/// Consecutive frames that hold consecutive blocks of one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// The first frame.
    pub first: u32,
    /// The number of frames.
    pub count: u32,
    /// The disk's number, from 0.
    pub disk: u8,
    /// The block in the first frame.
    pub block: u32,
}

/// Bytes that are consecutive both in the memory file and on a disk.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// The first byte's offset in the memory file.
    at: u64,
    /// The first byte's offset on the disk.
    offset: u64,
    /// The number of bytes.
    len: u64,
}

impl Span {
    /// Frames that the span covers at least in part.
    const fn touched(&self) -> Range<u64> {
        self.at / PAGE_SIZE..(self.at + self.len).div_ceil(PAGE_SIZE)
    }

    /// Frames that the span covers from their first byte to their last.
    const fn covered(&self) -> Range<u64> {
        self.at.div_ceil(PAGE_SIZE)..(self.at + self.len) / PAGE_SIZE
    }

    /// Whether the borders of frames are borders of blocks.
    const fn aligned(&self) -> bool {
        self.at % PAGE_SIZE == self.offset % PAGE_SIZE
    }
}

impl PageMap {
    /// An empty map for the RAM `memory`, whose mappings keep their addresses in this process.
    #[must_use]
    pub fn new(memory: &GuestMemoryMmap) -> Self {
        let (mut regions, mut at) = (Vec::new(), 0);
        for region in memory.iter() {
            let host = region.get_host_address(MemoryRegionAddress(0));
            if let (Ok(host), Ok(len)) = (host, usize::try_from(region.len())) {
                regions.push(Region { host: host.addr(), len, at });
            }
            at += region.len();
        }
        let chunks = at.div_ceil(CHUNK as u64 * PAGE_SIZE);
        Self { regions, chunks: vec![None; usize::try_from(chunks).unwrap_or(0)] }
    }

    /// Notes that `data` was read from `disk`, from byte `offset` on.
    pub fn filled(&mut self, disk: u8, offset: u64, data: &IoList<'_>) {
        self.note(disk, offset, data, true);
    }

    /// Notes that `data` was written to `disk`, from byte `offset` on.
    pub fn written(&mut self, disk: u8, offset: u64, data: &IoList<'_>) {
        self.note(disk, offset, data, false);
    }

    /// Notes that the content of `data` is unknown now.
    pub fn lost(&mut self, data: &IoList<'_>) {
        let Self { regions, chunks } = self;
        each_span(regions, 0, data, |span| span.touched().for_each(|frame| clear(chunks, frame)));
    }

    fn note(&mut self, disk: u8, offset: u64, data: &IoList<'_>, into_memory: bool) {
        let Self { regions, chunks } = self;
        each_span(regions, offset, data, |span| {
            let (covered, aligned) = (span.covered(), span.aligned());
            for (frame, block) in span.touched().zip(span.offset / PAGE_SIZE..) {
                match entry(disk, block).filter(|_| aligned) {
                    Some(entry) if covered.contains(&frame) => put(chunks, frame, entry),
                    // A read of a part of the very block that the frame holds changes nothing.
                    same if into_memory && get(chunks, frame) != same => clear(chunks, frame),
                    _ => {}
                }
            }
        });
    }

    /// All entries, frames ascending. Of a map with more stretches than [`record::MAX_RUNS`], only
    /// the first ones.
    #[must_use]
    pub fn stretches(&self) -> Vec<Stretch> {
        let mut stretches = Vec::new();
        let mut parts = (0..).step_by(PART);
        while parts.next().is_some_and(|first| self.add_stretches(first, &mut stretches)) {}
        stretches
    }

    /// Adds the entries of [`PART`] chunks to `stretches`, from the chunk `first` on, which come
    /// after those that `stretches` has. Returns whether there are more. The caller gives others a
    /// turn between two parts: the thread of the disks waits for the map.
    pub fn add_stretches(&self, first: usize, stretches: &mut Vec<Stretch>) -> bool {
        let chunks = self.chunks.iter().zip((0_u32..).step_by(CHUNK)).skip(first);
        for (chunk, start) in chunks.take(PART) {
            let Some(chunk) = chunk else { continue };
            for (entry, first) in chunk.iter().zip(start..).filter(|(entry, _)| **entry != 0) {
                let ((disk, block), full) = (parts(*entry), stretches.len() == record::MAX_RUNS);
                match stretches.last_mut() {
                    Some(last) if last.goes_on(first, disk, block) => last.count += 1,
                    _ if full => return false,
                    _ => stretches.push(Stretch { first, count: 1, disk, block }),
                }
            }
        }
        first + PART < self.chunks.len()
    }

    /// The heap memory of the map, in bytes.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        let made = self.chunks.iter().flatten().count();
        self.chunks.capacity() * size_of::<Option<Box<[u32; CHUNK]>>>()
            + made * size_of::<[u32; CHUNK]>()
    }
}

impl Stretch {
    /// Whether the frame and its block continue this stretch.
    fn goes_on(&self, frame: u32, disk: u8, block: u32) -> bool {
        (self.first + self.count, self.disk, self.block + self.count) == (frame, disk, block)
    }
}

/// Divides `data`, which is on a disk from `offset` on, into spans as long as possible.
fn each_span(regions: &[Region], offset: u64, data: &IoList<'_>, mut act: impl FnMut(Span)) {
    let (mut offset, mut last) = (offset, None::<Span>);
    for piece in data.pieces() {
        let (host, len) = (piece.ptr_guard().as_ptr().addr(), piece.len() as u64);
        let region =
            regions.iter().find(|region| (region.host..region.host + region.len).contains(&host));
        let span =
            region.map(|region| Span { at: region.at + (host - region.host) as u64, offset, len });
        offset += len;
        match (&mut last, span) {
            (Some(last), Some(span)) if last.at + last.len == span.at => last.len += len,
            (last, span) => std::mem::replace(last, span).into_iter().for_each(&mut act),
        }
    }
    last.into_iter().for_each(act);
}

/// The entry for `block` of `disk`, if a VM may have that block.
fn entry(disk: u8, block: u64) -> Option<u32> {
    let there = usize::from(disk) < MAX_DISKS && block < MAX_BLOCKS;
    let block = u32::try_from(block).ok().filter(|_| there)?;
    Some(THERE | u32::from(disk) << DISK_SHIFT | block)
}

/// The disk and the block of an entry.
const fn parts(entry: u32) -> (u8, u32) {
    let [.., high] = entry.to_le_bytes();
    ((high & 0x7f) >> 4, entry & ((1 << DISK_SHIFT) - 1))
}

/// The index of a frame's chunk, and the frame's index in it.
fn place(frame: u64) -> (usize, usize) {
    let frame = usize::try_from(frame).unwrap_or(usize::MAX);
    (frame / CHUNK, frame % CHUNK)
}

fn get(chunks: &[Option<Box<[u32; CHUNK]>>], frame: u64) -> Option<u32> {
    let (chunk, at) = place(frame);
    chunks.get(chunk)?.as_ref().map(|chunk| chunk[at]).filter(|entry| *entry != 0)
}

fn put(chunks: &mut [Option<Box<[u32; CHUNK]>>], frame: u64, entry: u32) {
    let (chunk, at) = place(frame);
    if let Some(chunk) = chunks.get_mut(chunk) {
        chunk.get_or_insert_with(|| Box::new([0; CHUNK]))[at] = entry;
    }
}

fn clear(chunks: &mut [Option<Box<[u32; CHUNK]>>], frame: u64) {
    let (chunk, at) = place(frame);
    if let Some(Some(chunk)) = chunks.get_mut(chunk) {
        chunk[at] = 0;
    }
}
