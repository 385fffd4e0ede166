//! Which file of a disk's chain holds the bytes of a block.

use super::cow::Disk;
use super::page_map::{Run, Stretch};
use dayfly_units::PAGE_SIZE;
use rustix::fs::{SeekFrom, seek};
use std::ops::Range;

/// Consecutive blocks of one file that are all data or all a hole.
#[derive(Debug, Clone)]
struct Extent {
    blocks: Range<u64>,
    /// Whether the blocks are data.
    data: bool,
}

impl Disk {
    /// Adds to `runs` the blocks of `stretches` (those of this disk) that are in the base image or
    /// in a frozen layer. Blocks in a hole are left out. So are blocks at or past the end of a
    /// short base, even if a part of the block is in it. A run's layer is 0 for the base, else
    /// the layer's number.
    ///
    /// Moves the file offsets of the layers' descriptors. Each file is searched once if the blocks
    /// ascend.
    pub fn held(&self, stretches: &[Stretch], runs: &mut Vec<Run>) {
        let nothing = Extent { blocks: 0..0, data: false };
        let mut extents = vec![nothing; self.frozen_layers() + 2];
        for &Stretch { first, count, disk, block } in stretches {
            let (start, end) = (u64::from(block), u64::from(block) + u64::from(count));
            let mut at = start;
            while at < end {
                let (layer, same) = self.run(at, end);
                let Some(extent) = extents.get_mut(usize::from(layer)) else { break };
                if !extent.blocks.contains(&at) {
                    *extent = self.extent(layer, at);
                }
                let stop = same.min(extent.blocks.end);
                let (done, len) = (u32::try_from(at - start), u32::try_from(stop - at));
                if let (true, Ok(done), Ok(count)) = (extent.data, done, len) {
                    runs.push(Run { first: first + done, count, disk, layer, block: block + done });
                }
                at = stop;
            }
        }
    }

    /// The extent of a layer's file that begins with `block` or contains it.
    fn extent(&self, layer: u8, block: u64) -> Extent {
        let hole_to = |end: u64| Extent { blocks: block..end, data: false };
        let frozen = usize::from(layer) <= self.frozen_layers();
        let (true, Ok((file, bytes))) = (frozen, self.file(layer)) else {
            return hole_to(u64::MAX);
        };
        let blocks = bytes / PAGE_SIZE;
        if block >= blocks {
            return hole_to(u64::MAX);
        }
        let data = match seek(file, SeekFrom::Data(block * PAGE_SIZE)) {
            Ok(start) => start / PAGE_SIZE,
            Err(rustix::io::Errno::NXIO) => blocks,
            // A file system without SEEK_DATA.
            Err(_) => block,
        };
        if data > block {
            return hole_to(data);
        }
        let end = seek(file, SeekFrom::Hole(block * PAGE_SIZE))
            .map_or(blocks, |at| at.div_ceil(PAGE_SIZE));
        Extent { blocks: block..end.clamp(block + 1, blocks), data: true }
    }
}
