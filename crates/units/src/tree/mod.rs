//! The hash tree of a disk file: proves a part of the file without reading the rest.
//!
//! The file is divided into **leaves** of 64 KiB; the last one may be shorter. A leaf's hash is
//! BLAKE3 of its bytes, or 32 zeroes if all its bytes are zero. **Nodes** of 4096 bytes have 128
//! hashes each. A node of level 0 has hashes of leaves, a node of level n hashes of nodes of level
//! n - 1. The highest level has one node. Unused hashes are zero, and a node of zeroes counts as 32
//! zeroes in its parent. The **root** is BLAKE3 over `dayfly tree 1\n`, the file's length as u64
//! little-endian, and the hash of the highest node.
//!
//! The tree is a file beside the disk file:
//!
//! | offset | size | content |
//! |---|---|---|
//! | 0 | 4096 | header: sealed ([`crate::sealed`]), magic [`MAGIC`], version 1; then zeroes |
//! | 4096 | 4096 | the node of the highest level |
//! | 8192 | | the nodes of the other levels, the lowest level last |
//!
//! Offset and number of all nodes follow from the file's length alone ([`Layout`]). Nodes of zeroes
//! are holes. So a hole of the disk file costs nothing, and a reader neither allocates nor seeks by
//! a number in the tree.
//!
//! Payload of the header, little-endian:
//!
//! | offset | size | field | checked |
//! |---|---|---|---|
//! | 0 | 8 | length of the disk file in bytes | the caller's |
//! | 8 | 4 | bytes of a leaf | 65,536 |
//! | 12 | 4 | bytes of a node | 4096 |
//! | 16 | 32 | sparse digest of the disk file ([`crate::sparse`]) | the caller's |
//! | 48 | 32 | root | that of the highest node |

mod build;
mod layout;
mod read;

pub use build::TreeBuilder;
pub use layout::{Header, HeaderError, LEAF_BYTES, Layout, MAGIC, NODE_BYTES, TOP_BYTES, VERSION};
pub use read::{Leaf, LeafError, ReadAt, TreeReader, read};

#[cfg(test)]
mod tests;
