//! The superblock and the group descriptors of an ext4 file system (kernel documentation,
//! filesystems/ext4: "Super Block", "Block Group Descriptors").

use super::error::{SaveError, format};
use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const SUPERBLOCK: u64 = 1024;
const MAGIC: u16 = 0xef53;
/// Incompatible features that the reader knows: filetype, extents, 64bit, flex_bg, csum_seed.
const KNOWN_FEATURES: u32 = 0x2 | 0x40 | 0x80 | 0x200 | 0x2000;
const FEATURE_64BIT: u32 = 0x80;
/// Compatible feature `has_journal` needs no work on a clean file system; this flag says that it is
/// not clean.
const FEATURE_RECOVER: u32 = 0x4;
/// Length of the part of an inode that every version has.
pub(super) const LEAST_INODE_BYTES: u64 = 128;

/// A file system, read from a disk.
#[derive(Debug)]
pub(super) struct Ext4<'a> {
    disk: &'a File,
    pub block_bytes: u64,
    pub blocks: u64,
    pub inodes: u32,
    pub inode_bytes: u64,
    inodes_per_group: u32,
    descriptor_bytes: u64,
    /// The first byte of the table of descriptors.
    descriptors: u64,
    has_wide_descriptors: bool,
    /// Blocks that may still be read. A sound file system has each block in one place only, so a
    /// reader of the whole needs each of them once.
    budget: Cell<u64>,
}

/// The number at `at`; 0 if it is beyond the end of `bytes`.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let field = bytes.get(at..).and_then(<[u8]>::first_chunk);
    field.map_or(0, |field| u16::from_le_bytes(*field))
}

/// As [`u16_at`].
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..).and_then(<[u8]>::first_chunk);
    field.map_or(0, |field| u32::from_le_bytes(*field))
}

fn read(disk: &File, at: u64, bytes: &mut [u8]) -> Result<(), SaveError> {
    disk.read_exact_at(bytes, at).map_err(|source| SaveError::Disk { at, source })
}

impl<'a> Ext4<'a> {
    /// Reads and checks the superblock.
    pub fn open(disk: &'a File) -> Result<Self, SaveError> {
        let length = disk.metadata().map_err(|source| SaveError::Disk { at: 0, source })?.len();
        let mut block = vec![0; 1024];
        if length < SUPERBLOCK + 1024 {
            return format("its length", "an ext4 file system", format!("{length} bytes"));
        }
        read(disk, SUPERBLOCK, &mut block)?;
        let place = "superblock";
        let magic = u16_at(&block, 0x38);
        if magic != MAGIC {
            let got = format!("{magic:#06x}");
            return format(place, format!("the magic {MAGIC:#06x} of ext4"), got);
        }
        let features = u32_at(&block, 0x60);
        if features & FEATURE_RECOVER != 0 {
            return format(place, "a clean file system", "one whose journal was not replayed");
        }
        if features & !KNOWN_FEATURES != 0 {
            let got = format!("{features:#x}");
            return format(place, format!("features of {KNOWN_FEATURES:#x}"), got);
        }
        let log = u32_at(&block, 0x18);
        if log > 5 {
            return format(place, "blocks of 1 to 32 KiB", format!("2^{log} KiB"));
        }
        let block_bytes = 1024 << log;
        let wide = features & FEATURE_64BIT != 0;
        let high = if wide { u64::from(u32_at(&block, 0x150)) << 32 } else { 0 };
        let blocks = high | u64::from(u32_at(&block, 4));
        if blocks == 0 || blocks > length / block_bytes {
            let expected = format!("at most {} blocks", length / block_bytes);
            return format(place, expected, blocks);
        }
        let (inode_bytes, descriptor) = (u64::from(u16_at(&block, 0x58)), u16_at(&block, 0xfe));
        let descriptor_bytes = if wide { u64::from(descriptor) } else { 32 };
        let first = u64::from(u32_at(&block, 0x14));
        let ext4 = Self {
            disk,
            block_bytes,
            blocks,
            inodes: u32_at(&block, 0),
            inode_bytes,
            inodes_per_group: u32_at(&block, 0x28),
            descriptor_bytes,
            descriptors: (first.min(1) + 1) * block_bytes,
            has_wide_descriptors: wide && descriptor_bytes >= 64,
            budget: Cell::new(blocks),
        };
        let sound = first <= 1
            && (LEAST_INODE_BYTES..=block_bytes).contains(&inode_bytes)
            && inode_bytes.is_power_of_two()
            && (32..=1024).contains(&descriptor_bytes)
            && descriptor_bytes.is_power_of_two()
            && ext4.inodes_per_group > 0;
        if !sound {
            let got = format!("{ext4:?}");
            return format(place, "sizes of ext4", got.chars().take(200).collect::<String>());
        }
        Ok(ext4)
    }

    /// Reads bytes of a block. The place was checked by [`Self::check`] or [`Self::spend`].
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), SaveError> {
        read(self.disk, at, bytes)
    }

    /// The first byte of `count` blocks from `block` on, which are taken from the budget.
    pub fn spend(
        &self,
        what: &dyn std::fmt::Display,
        block: u64,
        count: u64,
    ) -> Result<u64, SaveError> {
        self.check(what, block, count)?;
        let Some(left) = self.budget.get().checked_sub(count) else {
            let expected = format!("each of {} blocks in one place", self.blocks);
            return format(what, expected, "blocks in several places");
        };
        self.budget.set(left);
        Ok(block * self.block_bytes)
    }

    /// The first byte of `count` blocks from `block` on.
    pub fn check(
        &self,
        what: &dyn std::fmt::Display,
        block: u64,
        count: u64,
    ) -> Result<u64, SaveError> {
        if block == 0 || block.checked_add(count).is_none_or(|end| end > self.blocks) {
            let expected = format!("blocks below {}", self.blocks);
            return format(what, expected, format!("{count} from {block} on"));
        }
        Ok(block * self.block_bytes)
    }

    /// The bytes of an inode.
    pub fn inode(&self, number: u32) -> Result<Vec<u8>, SaveError> {
        let place = format!("inode {number}");
        if number == 0 || number > self.inodes {
            return format(place, format!("a number from 1 to {}", self.inodes), number);
        }
        let index = number - 1;
        let group = u64::from(index / self.inodes_per_group);
        let mut descriptor = vec![0; 64];
        let bytes = usize::try_from(self.descriptor_bytes.min(64)).unwrap_or(32);
        let at = self.descriptors + group * self.descriptor_bytes;
        let block = at / self.block_bytes;
        self.check(&place, block, 1)?;
        self.read(at, &mut descriptor[..bytes])?;
        let high = if self.has_wide_descriptors { u32_at(&descriptor, 0x28) } else { 0 };
        let table = u64::from(high) << 32 | u64::from(u32_at(&descriptor, 8));
        let offset = u64::from(index % self.inodes_per_group) * self.inode_bytes;
        let within = table.saturating_add(offset / self.block_bytes);
        let at = self.check(&place, within, 1)? + offset % self.block_bytes;
        let mut inode = vec![0; usize::try_from(self.inode_bytes).unwrap_or(0)];
        self.read(at, &mut inode)?;
        Ok(inode)
    }

    /// The disk.
    pub const fn disk(&self) -> &'a File {
        self.disk
    }

    /// The bytes of a block.
    pub fn block(&self, at: u64) -> Result<Vec<u8>, SaveError> {
        let mut block = vec![0; usize::try_from(self.block_bytes).unwrap_or(0)];
        self.read(at, &mut block)?;
        Ok(block)
    }

    /// A reader of `bytes` bytes of the disk from `at` on.
    pub fn bytes(&self, at: u64, bytes: u64) -> impl io::Read + use<'a> {
        Part { disk: self.disk, at, left: bytes }
    }
}

struct Part<'a> {
    disk: &'a File,
    at: u64,
    left: u64,
}

impl io::Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let got = self.disk.read_at(&mut buffer[..most], self.at)?;
        self.at += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}
