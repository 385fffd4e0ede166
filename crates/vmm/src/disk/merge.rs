//! Merging adjacent layers into one: the blocks of the result, and the layer that each comes from.

use super::layer::{LayerMap, LayerMapError};
use super::span::span;
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// The plan of a merged layer.
#[derive(Debug)]
pub struct Merge {
    map: LayerMap,
    /// For each block the number of the layer that it comes from, the lowest being 1; 0: no layer
    /// has it.
    index: Vec<u8>,
}

/// Why layers cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// Not 1 to [`MAX_LAYERS`] layers.
    #[error("merging layers: expected 1 to {MAX_LAYERS}, got {0}")]
    Count(usize),
    /// A map was refused.
    #[error("merging layers: layer {number}")]
    Map {
        /// The layer's number, the lowest being 1.
        number: usize,
        /// Why the map was refused.
        #[source]
        source: LayerMapError,
    },
    /// A layer of a disk of another size.
    #[error("merging layers: layer {number}: expected a map of {expected} blocks, got {got}")]
    Blocks {
        /// The layer's number, the lowest being 1.
        number: usize,
        /// Blocks of the first layer's disk.
        expected: u64,
        /// Blocks of this layer's disk.
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
            let map = LayerMap::read(*file)
                .map_err(|source| MergeError::Map { number: place, source })?;
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
                if let Some(part) = merge.index.get_mut(span(&run)) {
                    part.fill(number);
                }
            }
        }
        merge.ok_or(MergeError::Count(0))
    }

    /// The map of the merged layer.
    #[must_use]
    pub const fn map(&self) -> &LayerMap {
        &self.map
    }

    /// The blocks of the merged layer, as ascending runs of bytes of the disk. Each run has the
    /// index in `maps` of the layer that it comes from.
    pub fn into_runs(self) -> impl Iterator<Item = (usize, Range<u64>)> {
        let runs: Vec<Range<u64>> = self.map.runs().collect();
        let index = self.index;
        let mut left = runs.into_iter();
        let mut run = 0..0;
        std::iter::from_fn(move || {
            if run.is_empty() {
                run = left.next()?;
            }
            let part = index.get(span(&run)).unwrap_or_default();
            let from = part.first().copied().unwrap_or(1);
            let same = part.iter().take_while(|layer| **layer == from).count();
            let end = run.start + (same as u64).max(1);
            let bytes = run.start * DISK_BLOCK_BYTES..end * DISK_BLOCK_BYTES;
            run.start = end;
            Some((usize::from(from).saturating_sub(1), bytes))
        })
    }
}
