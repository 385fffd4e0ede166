//! A disk for tests and for the crate `fuzz`, made without tools.

/// Length of its blocks.
pub const BLOCK: usize = 1024;
/// Where its table of inodes begins.
pub const INODES: usize = 3 * BLOCK;
const INODE: usize = 256;
const BLOCKS: usize = 12;

fn put(disk: &mut [u8], at: usize, bytes: &[u8]) {
    disk[at..at + bytes.len()].copy_from_slice(bytes);
}

fn inode(disk: &mut [u8], number: usize, mode: u16, links: u16, size: u32, content: &[u8]) {
    let at = INODES + (number - 1) * INODE;
    put(disk, at, &mode.to_le_bytes());
    put(disk, at + 4, &size.to_le_bytes());
    put(disk, at + 0x1a, &links.to_le_bytes());
    put(disk, at + 0x28, content);
    // Behind the fields: i_extra_isize.
    put(disk, at + 0x80, &32_u16.to_le_bytes());
}

/// Content of an inode with one extent.
fn extent(disk: &mut [u8], number: usize, block: u8) -> Vec<u8> {
    put(disk, INODES + (number - 1) * INODE + 0x20, &0x8_0000_u32.to_le_bytes());
    let header = [0x0a, 0xf3, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0];
    [&header[..], &[0, 0, 0, 0, 1, 0, 0, 0, block, 0, 0, 0]].concat()
}

/// The entries of a folder, of which the last one takes the rest of the block.
fn folder(entries: &[(u8, &str, u8)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (number, (inode, name, kind)) in entries.iter().enumerate() {
        let is_last = number + 1 == entries.len();
        let length = if is_last { BLOCK - block.len() } else { (8 + name.len()).div_ceil(4) * 4 };
        let length = u16::try_from(length).unwrap_or(0).to_le_bytes();
        let name_length = u8::try_from(name.len()).unwrap_or(0);
        block.extend_from_slice(&[*inode, 0, 0, 0, length[0], length[1], name_length, *kind]);
        block.extend_from_slice(name.as_bytes());
        block.resize(block.len().next_multiple_of(4), 0);
    }
    block.resize(BLOCK, 0);
    block
}

/// An entry of an attribute `user.x`, with its value at this offset.
fn attribute(offset: u8) -> [u8; 20] {
    [1, 1, offset, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, b'x', 0, 0, 0]
}

/// A file system of 12 KiB: a folder, a file with two names, a link, a device, attributes in an
/// inode and in a block.
#[must_use]
pub fn small_disk() -> Vec<u8> {
    let mut disk = vec![0; BLOCKS * BLOCK];
    let at = 1024;
    for (field, value) in [
        (0, 16_u32),
        (4, 12),
        (0x14, 1),
        (0x20, 8192),
        (0x28, 16),
        // The magic, and a clean state.
        (0x38, 0x1_ef53),
        (0x4c, 1),
        (0x54, 11),
        (0x58, 256),
        // filetype, extents.
        (0x60, 0x42),
    ] {
        put(&mut disk, at + field, &value.to_le_bytes());
    }
    put(&mut disk, 2 * BLOCK + 8, &3_u32.to_le_bytes());
    let content = extent(&mut disk, 2, 7);
    inode(&mut disk, 2, 0o40755, 3, 1024, &content);
    let content = extent(&mut disk, 12, 8);
    inode(&mut disk, 12, 0o100_644, 2, 5, &content);
    inode(&mut disk, 13, 0o120_777, 1, 3, b"d/x");
    inode(&mut disk, 14, 0o20_600, 1, 0, &[3, 1, 0, 0]);
    let content = extent(&mut disk, 15, 10);
    inode(&mut disk, 15, 0o40755, 2, 1024, &content);
    let names = [(2, ".", 2), (2, "..", 2), (12, "a", 1), (12, "b", 1), (15, "d", 2)];
    let names = [&names[..], &[(13, "l", 7), (14, "z", 3)]].concat();
    put(&mut disk, 7 * BLOCK, &folder(&names));
    put(&mut disk, 8 * BLOCK, b"hello");
    put(&mut disk, 10 * BLOCK, &folder(&[(15, ".", 2), (2, "..", 2)]));
    // In the file's inode, and in a block of the folder.
    let own = INODES + 11 * INODE + 160;
    put(&mut disk, own, &0xea02_0000_u32.to_le_bytes());
    put(&mut disk, own + 4, &attribute(40));
    put(&mut disk, own + 4 + 40, b"one");
    put(&mut disk, INODES + 14 * INODE + 0x68, &9_u32.to_le_bytes());
    put(&mut disk, 9 * BLOCK, &0xea02_0000_u32.to_le_bytes());
    put(&mut disk, 9 * BLOCK + 32, &attribute(200));
    put(&mut disk, 9 * BLOCK + 200, b"two");
    disk
}
