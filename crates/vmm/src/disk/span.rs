//! Blocks as places of the index.

use std::ops::Range;

/// Converts a length within one disk, which is at most 2^40.
pub(super) fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

pub(super) fn span(blocks: &Range<u64>) -> Range<usize> {
    length(blocks.start)..length(blocks.end)
}
