//! Several adjacent layers as one: which blocks it has, and from which of them each is.

use super::layer::{LayerMap, LayerMapError};
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// What becomes one layer.
#[derive(Debug)]
pub struct Merge {
    map: LayerMap,
    /// For each block 0, or the number of the layer that it is from, the lowest being 1.
    index: Vec<u8>,
}

/// Why layers cannot become one.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// Too few or too many.
    #[error("merging layers: expected 1 to {MAX_LAYERS}, got {0}")]
    Count(usize),
    /// A map was refused.
    #[error("merging layers: layer {number}")]
    Map {
        /// Which, the lowest is 1.
        number: usize,
        /// Why.
        #[source]
        source: LayerMapError,
    },
    /// One is of another disk.
    #[error("merging layers: layer {number}: expected a map of {expected} blocks, got {got}")]
    Blocks {
        /// Which, the lowest is 1.
        number: usize,
        /// Blocks of the first one's disk.
        expected: u64,
        /// Blocks of this one's.
        got: u64,
    },
}

impl Merge {
    /// Merges the layers with these maps, the lowest first.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn of(maps: &[BorrowedFd<'_>]) -> Result<Self, MergeError> {
        let mut merge: Option<Self> = None;
        if maps.len() > MAX_LAYERS {
            return Err(MergeError::Count(maps.len()));
        }
        for (file, number) in maps.iter().zip(1_u8..) {
            let place = usize::from(number);
            let map = LayerMap::read(*file).map_err(|source| MergeError::Map { number: place, source })?;
            let merge = match &mut merge {
                Some(merge) => merge,
                none => {
                    let index = vec![0; usize::try_from(map.blocks()).unwrap_or(0)];
                    none.insert(Self { map: map.clone(), index })
                }
            };
            let (expected, got) = (merge.map.blocks(), map.blocks());
            if expected != got {
                return Err(MergeError::Blocks { number: place, expected, got });
            }
            for run in map.runs() {
                merge.map.insert_run(&run);
                if let Some(part) = merge.index.get_mut(super::cow::span(&run)) {
                    part.fill(number);
                }
            }
        }
        merge.ok_or(MergeError::Count(0))
    }

    /// The map of the one.
    #[must_use]
    pub const fn map(&self) -> &LayerMap {
        &self.map
    }

    /// Every block that the one has, as runs of bytes of the disk, ascending, each with the layer that it is from: 0 is the
    /// first of the maps given.
    pub fn into_runs(self) -> impl Iterator<Item = (usize, Range<u64>)> {
        let runs: Vec<Range<u64>> = self.map.runs().collect();
        let index = self.index;
        let mut left = runs.into_iter();
        let mut run = 0..0;
        std::iter::from_fn(move || {
            if run.is_empty() {
                run = left.next()?;
            }
            let part = index.get(super::cow::span(&run)).unwrap_or_default();
            let from = part.first().copied().unwrap_or(1);
            let same = part.iter().take_while(|layer| **layer == from).count();
            let end = run.start + (same as u64).max(1);
            let bytes = run.start * DISK_BLOCK_BYTES..end * DISK_BLOCK_BYTES;
            run.start = end;
            Some((usize::from(from).saturating_sub(1), bytes))
        })
    }
}
