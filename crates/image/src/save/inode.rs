//! Inodes (ext4: "Index Nodes").

use super::error::{SaveError, format};
use super::ext4::{Ext4, LEAST_INODE_BYTES, u16_at, u32_at};
use dayfly_archive::Kind;

const EXTENTS_FLAG: u32 = 0x8_0000;
/// Where the content is: extents, a short target of a link, or a device's number.
const CONTENT: std::ops::Range<usize> = 0x28..0x64;

/// The longest file that readers of archives take, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 40;

/// An inode.
#[derive(Debug)]
pub(super) struct Inode {
    pub number: u32,
    bytes: Vec<u8>,
    pub size_bytes: u64,
}

impl Inode {
    /// Reads an inode.
    pub fn read(ext4: &Ext4<'_>, number: u32) -> Result<Self, SaveError> {
        let bytes = ext4.inode(number)?;
        let size_bytes = u64::from(u32_at(&bytes, 0x6c)) << 32 | u64::from(u32_at(&bytes, 4));
        let inode = Self { number, bytes, size_bytes };
        if inode.links() == 0 {
            return format(format!("inode {number}"), "one that is in use", "one without links");
        }
        if size_bytes > MAX_FILE_BYTES.min(ext4.block_bytes << 32) {
            let got = format!("{size_bytes} bytes");
            return format(format!("inode {number}"), "at most 2^32 blocks and 16 TiB", got);
        }
        Ok(inode)
    }

    fn kind_bits(&self) -> u16 {
        u16_at(&self.bytes, 0) & 0xf000
    }

    /// The kind as an archive has it; `None` for a socket, which no archive has.
    pub fn kind(&self) -> Result<Option<Kind>, SaveError> {
        Ok(Some(match self.kind_bits() {
            0x1000 => Kind::Fifo,
            0x2000 => Kind::Char,
            0x4000 => Kind::Folder,
            0x6000 => Kind::Block,
            0x8000 => Kind::File,
            0xa000 => Kind::Symlink,
            0xc000 => return Ok(None),
            other => {
                let got = format!("{other:#x}");
                return format(format!("inode {}", self.number), "a known kind", got);
            }
        }))
    }

    pub fn mode(&self) -> u32 {
        u32::from(u16_at(&self.bytes, 0) & 0o7777)
    }

    pub fn uid(&self) -> u32 {
        u32::from(u16_at(&self.bytes, 0x78)) << 16 | u32::from(u16_at(&self.bytes, 2))
    }

    pub fn gid(&self) -> u32 {
        u32::from(u16_at(&self.bytes, 0x7a)) << 16 | u32::from(u16_at(&self.bytes, 0x18))
    }

    pub fn links(&self) -> u16 {
        u16_at(&self.bytes, 0x1a)
    }

    pub fn has_extents(&self) -> bool {
        u32_at(&self.bytes, 0x20) & EXTENTS_FLAG != 0
    }

    /// The block with extended attributes, or 0.
    pub fn attributes_block(&self) -> u64 {
        u64::from(u16_at(&self.bytes, 0x76)) << 32 | u64::from(u32_at(&self.bytes, 0x68))
    }

    /// The part behind the inode's fields, which has extended attributes.
    pub fn attributes(&self) -> &[u8] {
        let least = usize::try_from(LEAST_INODE_BYTES).unwrap_or(128);
        let extra = usize::from(u16_at(&self.bytes, 0x80));
        self.bytes.get(least + extra..).filter(|_| self.bytes.len() > least).unwrap_or_default()
    }

    /// Seconds since 1970, and nanoseconds.
    pub fn mtime(&self) -> (i64, u32) {
        let seconds = i64::from(u32_at(&self.bytes, 0x10).cast_signed());
        // The extra fields are there if the inode's own length says so.
        let has_extra = u16_at(&self.bytes, 0x80) >= 12;
        let extra = if has_extra { u32_at(&self.bytes, 0x88) } else { 0 };
        (seconds + (i64::from(extra & 3) << 32), (extra >> 2).min(999_999_999))
    }

    pub fn content(&self) -> Vec<u8> {
        self.bytes.get(CONTENT).unwrap_or_default().to_vec()
    }

    /// The major and minor number of a device, in the old or the new form (`new_decode_dev`).
    pub fn device(&self) -> (u32, u32) {
        let content = self.content();
        match u32_at(&content, 0) {
            0 => {
                let new = u32_at(&content, 4);
                ((new & 0xf_ff00) >> 8, (new & 0xff) | ((new >> 12) & 0xf_ff00))
            }
            old => ((old >> 8) & 0xff, old & 0xff),
        }
    }
}
