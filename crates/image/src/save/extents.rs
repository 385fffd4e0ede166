//! Where a file's bytes are (ext4: "Extent Tree").

use super::error::{SaveError, format};
use super::ext4::{Ext4, u16_at, u32_at};
use super::inode::Inode;

const MAGIC: u16 = 0xf30a;
/// Length of a header, an index and an extent.
const ENTRY: usize = 12;
/// Upper limit for the depth of a tree (EXT4_MAX_EXTENT_DEPTH).
const MAX_DEPTH: u16 = 5;
/// Blocks of an extent. A longer length means the blocks are reserved and read as zeroes.
const MAX_LENGTH: u16 = 32768;
/// Upper limit for the extents of a file. Readers of archives take 2^19 runs of a sparse file.
const MAX_EXTENTS: usize = (1 << 19) - 2;

/// A part of a file that is no hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// Its offset in the file in bytes.
    pub offset: u64,
    /// Its place on the disk in bytes.
    pub at: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The extents of a file, in order, within its length. Extents that follow each other in the file
/// and on the disk are one.
pub(super) fn of(ext4: &Ext4<'_>, inode: &Inode) -> Result<Vec<Extent>, SaveError> {
    let mut walk = Walk { ext4, inode, next: 0, extents: Vec::new() };
    if !inode.has_extents() {
        return format(walk.place(), "a file with extents", "one without");
    }
    let depth = u16_at(&inode.content(), 6);
    walk.node(&inode.content(), depth)?;
    let length = inode.size_bytes;
    walk.extents.retain_mut(|extent| {
        extent.bytes = extent.bytes.min(length.saturating_sub(extent.offset));
        extent.bytes > 0
    });
    Ok(walk.extents)
}

struct Walk<'a> {
    ext4: &'a Ext4<'a>,
    inode: &'a Inode,
    /// The first block of the file that the next extent may have.
    next: u64,
    extents: Vec<Extent>,
}

impl Walk<'_> {
    fn place(&self) -> String {
        format!("extents of inode {}", self.inode.number)
    }

    /// Reads a node at this depth. The recursion is at most [`MAX_DEPTH`] deep.
    fn node(&mut self, node: &[u8], depth: u16) -> Result<(), SaveError> {
        let (magic, count, own) = (u16_at(node, 0), u16_at(node, 2), u16_at(node, 6));
        let entries = node.get(ENTRY..).unwrap_or_default().chunks_exact(ENTRY);
        if magic != MAGIC || usize::from(count) > entries.len() || own != depth || own > MAX_DEPTH {
            let got = format!("magic {magic:#x}, {count} entries, depth {own}");
            return format(self.place(), format!("a node of depth {depth}"), got);
        }
        for entry in entries.take(usize::from(count)) {
            let first = u64::from(u32_at(entry, 0));
            if first < self.next {
                let expected = format!("a block of the file from {} on", self.next);
                return format(self.place(), expected, first);
            }
            if depth == 0 {
                self.leaf(first, entry)?;
                continue;
            }
            let block = u64::from(u16_at(entry, 8)) << 32 | u64::from(u32_at(entry, 4));
            let at = self.ext4.spend(&self.place(), block, 1)?;
            self.node(&self.ext4.block(at)?, depth - 1)?;
        }
        Ok(())
    }

    fn leaf(&mut self, first: u64, entry: &[u8]) -> Result<(), SaveError> {
        let length = u16_at(entry, 4);
        if length == 0 {
            return format(self.place(), "an extent with blocks", "none");
        }
        let is_reserved = length > MAX_LENGTH;
        let count = u64::from(if is_reserved { length - MAX_LENGTH } else { length });
        self.next = first + count;
        if is_reserved {
            return Ok(());
        }
        let block = u64::from(u16_at(entry, 6)) << 32 | u64::from(u32_at(entry, 8));
        let at = self.ext4.spend(&self.place(), block, count)?;
        let (offset, bytes) = (first * self.ext4.block_bytes, count * self.ext4.block_bytes);
        let is_full = self.extents.len() == MAX_EXTENTS;
        match self.extents.last_mut() {
            Some(last) if (last.offset + last.bytes, last.at + last.bytes) == (offset, at) => {
                last.bytes += bytes;
            }
            _ if is_full => {
                return format(self.place(), format!("at most {MAX_EXTENTS}"), "more");
            }
            _ => self.extents.push(Extent { offset, at, bytes }),
        }
        Ok(())
    }
}
