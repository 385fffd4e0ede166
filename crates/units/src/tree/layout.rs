//! Where the nodes of a tree lie, what its hashes are of, and its header.

use crate::sealed::{self, HEADER_BYTES, Magic, SealError};
use crate::{Digest, sparse};

/// The first 8 bytes of a tree.
pub const MAGIC: Magic = *b"DFtree\r\n";
/// The version of the header.
pub const VERSION: u32 = 1;
/// Bytes of a leaf.
pub const LEAF_BYTES: u64 = 64 << 10;
/// Bytes of a node, and of the header with its padding.
pub const NODE_BYTES: u64 = 4096;
/// Bytes of header and highest node, which [`Header::decode`] needs.
pub const TOP_BYTES: usize = 2 * NODE;

#[expect(clippy::cast_possible_truncation, reason = "64 KiB")]
pub(super) const LEAF: usize = LEAF_BYTES as usize;
#[expect(clippy::cast_possible_truncation, reason = "4096")]
pub(super) const NODE: usize = NODE_BYTES as usize;
pub(super) const HASH: usize = 32;
/// Hashes of a node.
pub(super) const FANOUT: u64 = NODE_BYTES / HASH as u64;
const PAYLOAD_BYTES: usize = 80;
/// The hash of a leaf or a node of zeroes.
pub(super) const ZERO: Digest = Digest([0; HASH]);

/// Whether all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(sparse::PAGE).all(sparse::is_zero)
}

/// The hash of a leaf or a node.
pub(super) fn hash(bytes: &[u8]) -> Digest {
    if is_zero(bytes) { ZERO } else { Digest::of(bytes) }
}

/// The root of a tree whose highest node has the hash `top`.
pub(super) fn root(bytes: u64, top: &Digest) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"dayfly tree 1\n").update(&bytes.to_le_bytes()).update(&top.0);
    hasher.finalize().into()
}

/// A level of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    pub(super) nodes: u64,
    /// Offset of its first node in the tree file.
    pub(super) at: u64,
}

/// The places of a tree's nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    bytes: u64,
    /// The lowest level first; never empty.
    pub(super) levels: Vec<Level>,
}

impl Layout {
    /// The layout for a disk file of `bytes` bytes.
    #[must_use]
    pub fn of(bytes: u64) -> Self {
        let mut levels = Vec::new();
        let mut nodes = bytes.div_ceil(LEAF_BYTES).max(1);
        while levels.is_empty() || nodes > 1 {
            nodes = nodes.div_ceil(FANOUT);
            levels.push(Level { nodes, at: 0 });
        }
        let mut at = NODE_BYTES;
        for level in levels.iter_mut().rev() {
            level.at = at;
            at += level.nodes * NODE_BYTES;
        }
        Self { bytes, levels }
    }

    /// The length of the disk file.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The length of the tree file.
    #[must_use]
    pub fn tree_bytes(&self) -> u64 {
        self.levels.first().map_or(NODE_BYTES, |level| level.at + level.nodes * NODE_BYTES)
    }

    /// The number of leaves.
    #[must_use]
    pub const fn leaves(&self) -> u64 {
        self.bytes.div_ceil(LEAF_BYTES)
    }

    /// The length of a leaf in bytes; 0 behind the last one.
    #[must_use]
    pub fn leaf_bytes(&self, leaf: u64) -> usize {
        let rest = self.bytes.saturating_sub(leaf.saturating_mul(LEAF_BYTES));
        usize::try_from(rest.min(LEAF_BYTES)).unwrap_or(LEAF)
    }

    pub(super) const fn top(&self) -> usize {
        self.levels.len() - 1
    }

    /// The offset of a node in the tree file.
    pub(super) fn node_at(&self, level: usize, node: u64) -> Option<u64> {
        let level = self.levels.get(level).filter(|level| node < level.nodes)?;
        Some(level.at + node * NODE_BYTES)
    }
}

/// The content of a tree's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The length of the disk file in bytes.
    pub bytes: u64,
    /// The sparse digest of the disk file.
    pub digest: Digest,
    /// The root of the tree.
    pub root: Digest,
}

/// Why bytes are not the beginning of a tree.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file ends within the header or the highest node.
    #[error("hash tree: expected at least {TOP_BYTES} bytes, got {0}")]
    Short(usize),
    /// The header is damaged, or of another kind or version.
    #[error("hash tree: {0}")]
    Seal(#[from] SealError),
    /// The header has another value in a field.
    #[error("hash tree: {place} at payload byte {at}: expected {expected}, got {got}")]
    Field {
        /// The field.
        place: &'static str,
        /// Its offset in the payload.
        at: usize,
        /// The expected value.
        expected: String,
        /// The value found.
        got: String,
    },
    /// The padding behind the header is not zero.
    #[error("hash tree: bytes {} to {NODE_BYTES}: expected zeroes", HEADER_BYTES + PAYLOAD_BYTES)]
    Padding,
}

impl Header {
    /// The first 4096 bytes of the tree.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(PAYLOAD_BYTES);
        payload.extend_from_slice(&self.bytes.to_le_bytes());
        payload.extend_from_slice(&LEAF_BYTES.to_le_bytes()[..4]);
        payload.extend_from_slice(&NODE_BYTES.to_le_bytes()[..4]);
        payload.extend_from_slice(&self.digest.0);
        payload.extend_from_slice(&self.root.0);
        let mut out = sealed::seal(&MAGIC, VERSION, &payload);
        out.resize(NODE, 0);
        out
    }

    /// Decodes the header, and compares its root with the highest node. `top` is the first
    /// [`TOP_BYTES`] bytes of a tree.
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn decode(top: &[u8]) -> Result<Self, HeaderError> {
        let Some((first, node)) = top.split_at_checked(NODE).filter(|(_, rest)| rest.len() >= NODE)
        else {
            return Err(HeaderError::Short(top.len()));
        };
        let (sealed, padding) = first.split_at(HEADER_BYTES + PAYLOAD_BYTES);
        let (_, payload) = sealed::open(&MAGIC, VERSION..=VERSION, PAYLOAD_BYTES as u64, sealed)?;
        let number = |at: usize| u64::from(u32::from_le_bytes(array(payload, at)));
        for (place, at, expected) in
            [("bytes of a leaf", 8, LEAF_BYTES), ("bytes of a node", 12, NODE_BYTES)]
        {
            if number(at) != expected {
                let (expected, got) = (expected.to_string(), number(at).to_string());
                return Err(HeaderError::Field { place, at, expected, got });
            }
        }
        if !padding.iter().all(|byte| *byte == 0) {
            return Err(HeaderError::Padding);
        }
        let header = Self {
            bytes: u64::from_le_bytes(array(payload, 0)),
            digest: Digest(array(payload, 16)),
            root: Digest(array(payload, 48)),
        };
        let got = root(header.bytes, &hash(&node[..NODE]));
        if got != header.root {
            let (expected, got) = (header.root.to_string(), got.to_string());
            return Err(HeaderError::Field { place: "root", at: 48, expected, got });
        }
        Ok(header)
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes.get(at + n).copied().unwrap_or(0))
}
