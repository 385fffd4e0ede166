//! The size of a block.

/// Size of a block in bytes.
pub const BLOCK: usize = 512;
/// Size of a block in bytes, as a length in an archive.
pub const BLOCK_BYTES: u64 = 512;
