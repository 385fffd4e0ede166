//! A set of blocks of a disk, in memory and with work that depend on its blocks, not on the disk.
//!
//! A freeze writes the map of the writable layer while the VM stands still. The layer's blocks are
//! therefore kept apart from the disk's index, which has a byte for each block of the disk.

use super::span::length;
use crate::config::DISK_BLOCK_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;

/// Blocks of a chunk: 16 MiB of the disk.
const CHUNK: u64 = 4096;
/// Words of a chunk that has some of its blocks.
const WORDS: usize = 64;
/// The most bytes of heap for each chunk of the disk: its words, and its place in the tree.
pub const MAX_BYTES_PER_CHUNK: u64 = 2 * 8 * WORDS as u64;
/// Bytes of the disk in a chunk.
pub const CHUNK_BYTES: u64 = CHUNK * DISK_BLOCK_BYTES;

/// The blocks of one chunk.
#[derive(Debug)]
enum Chunk {
    All,
    /// A bit for each block.
    Some(Box<[u64; WORDS]>),
}

/// A set of blocks.
#[derive(Debug, Default)]
pub struct BlockSet {
    /// The chunks that have a block, by their numbers.
    chunks: BTreeMap<u64, Chunk>,
}

impl BlockSet {
    /// Adds a run of blocks.
    pub fn insert_run(&mut self, run: &Range<u64>) {
        let mut at = run.start;
        while at < run.end {
            let (number, end) = (at / CHUNK, run.end.min(at - at % CHUNK + CHUNK));
            if end - at == CHUNK {
                self.chunks.insert(number, Chunk::All);
            } else {
                let empty = || Chunk::Some(Box::new([0; WORDS]));
                let chunk = self.chunks.entry(number).or_insert_with(empty);
                chunk.insert(&(at % CHUNK..at % CHUNK + (end - at)));
            }
            at = end;
        }
    }

    /// The runs of blocks, ascending, that neither touch nor overlap. Looks at each chunk that has
    /// a block, and at no other.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut parts = self.parts().peekable();
        std::iter::from_fn(move || {
            let mut run = parts.next()?;
            while let Some(next) = parts.next_if(|next| next.start == run.end) {
                run.end = next.end;
            }
            Some(run)
        })
    }

    /// As [`Self::runs`], but cut at the borders of words.
    fn parts(&self) -> impl Iterator<Item = Range<u64>> {
        self.chunks.iter().flat_map(|(number, chunk)| {
            #[cfg(test)]
            tests::looked_at_a_chunk();
            let first = number * CHUNK;
            let (all, words) = match chunk {
                Chunk::All => (Some(first..first + CHUNK), [].as_slice()),
                Chunk::Some(words) => (None, words.as_slice()),
            };
            let starts = (first..).step_by(64);
            all.into_iter().chain(starts.zip(words).flat_map(|(at, word)| runs_of(at, *word)))
        })
    }
}

impl Chunk {
    /// Adds a run of the chunk's blocks, which is not empty.
    fn insert(&mut self, run: &Range<u64>) {
        let Self::Some(words) = self else { return };
        let (first, last) = (run.start / 64, (run.end - 1) / 64);
        let touched = &mut words[length(first)..=length(last)];
        for (word, first) in touched.iter_mut().zip((first * 64..).step_by(64)) {
            let (start, end) = (run.start.max(first), run.end.min(first + 64));
            *word |= (u64::MAX >> (64 - (end - start))) << (start - first);
        }
        if words.iter().all(|word| *word == u64::MAX) {
            *self = Self::All;
        }
    }
}

/// The runs of set bits of `word`, whose first bit is block `first`.
fn runs_of(first: u64, word: u64) -> impl Iterator<Item = Range<u64>> {
    let mut left = word;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let start = left.trailing_zeros();
        let end = start + (left >> start).trailing_ones();
        left &= u64::MAX.checked_shl(end).unwrap_or(0);
        Some(first + u64::from(start)..first + u64::from(end))
    })
}

#[cfg(test)]
#[path = "block_set_tests.rs"]
pub(super) mod tests;
