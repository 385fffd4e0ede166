//! Checks leaves of a disk file against its tree.

use super::layout::{FANOUT, HASH, LEAF, LEAF_BYTES, Layout, NODE, ZERO, hash, root};
use crate::Digest;
use std::io;

/// Nodes kept in memory. A node of the lowest level covers 8 MiB of the disk file.
const KEPT: usize = 32;

/// Why a leaf was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum LeafError {
    /// The tree or the disk file cannot be read.
    #[error("reading {what} at byte {at}")]
    Read {
        /// Which file.
        what: &'static str,
        /// Offset in that file.
        at: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A node of the tree has another hash.
    #[error("hash tree: node at byte {at}: expected {expected}, got {got}")]
    Node {
        /// Offset in the tree file.
        at: u64,
        /// The hash in the parent, or the root.
        expected: Digest,
        /// The hash of the node as it is now.
        got: Digest,
    },
    /// A leaf has another hash.
    #[error("bytes {at} to {end}: expected hash {expected}, got {got}")]
    Leaf {
        /// The leaf's first byte in the disk file.
        at: u64,
        /// The byte behind it.
        end: u64,
        /// The hash in the tree.
        expected: Digest,
        /// The hash of the bytes as they are now.
        got: Digest,
    },
    /// The range is not of this file.
    #[error("bytes {at} to {end}: expected a range within {bytes} bytes")]
    Range {
        /// First byte.
        at: u64,
        /// The byte behind the last.
        end: u64,
        /// Length of the disk file.
        bytes: u64,
    },
}

#[derive(Debug)]
struct Kept {
    level: usize,
    node: u64,
    bytes: Box<[u8; NODE]>,
}

/// The place of a leaf in the disk file, and its hash in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    at: u64,
    length: usize,
    digest: Digest,
}

impl Leaf {
    /// Whether all its bytes are zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.digest == ZERO
    }

    /// Its first byte in the disk file.
    #[must_use]
    pub const fn at(&self) -> u64 {
        self.at
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Checks that the leaf has these bytes.
    ///
    /// # Errors
    /// `Range` for another length, `Leaf` for another hash.
    pub fn check(&self, bytes: &[u8]) -> Result<(), LeafError> {
        let (at, end) = (self.at, self.at + bytes.len() as u64);
        if bytes.len() != self.length {
            return Err(LeafError::Range { at, end, bytes: self.at + self.length as u64 });
        }
        let (expected, got) = (self.digest, hash(bytes));
        if expected == got { Ok(()) } else { Err(LeafError::Leaf { at, end, expected, got }) }
    }
}

/// Fills `out` with the bytes of a disk file from `at` on, and checks each leaf that has a part of
/// them. `disk` reads the disk file, `leaf` asks its tree. After an error the content of `out` is
/// not to be used.
///
/// # Errors
/// [`LeafError`].
pub fn read(
    disk: ReadAt<'_>,
    leaf: &dyn Fn(u64) -> Result<Leaf, LeafError>,
    at: u64,
    out: &mut [u8],
) -> Result<(), LeafError> {
    let mut buffer = Vec::new();
    let (mut from, mut rest) = (at, out);
    while !rest.is_empty() {
        let leaf = leaf(from / LEAF_BYTES)?;
        let start = usize::try_from(from % LEAF_BYTES).unwrap_or(LEAF);
        let Some(left) = leaf.length.checked_sub(start).filter(|left| *left > 0) else {
            let (end, bytes) = (from.saturating_add(rest.len() as u64), from);
            return Err(LeafError::Range { at: from, end, bytes });
        };
        let (part, behind) = rest.split_at_mut(rest.len().min(left));
        let failed = |source| LeafError::Read { what: "the file", at: leaf.at, source };
        if part.len() == leaf.length {
            disk(part, leaf.at).map_err(failed)?;
            leaf.check(part)?;
        } else {
            buffer.resize(leaf.length, 0);
            disk(&mut buffer, leaf.at).map_err(failed)?;
            leaf.check(&buffer)?;
            part.copy_from_slice(&buffer[start..start + part.len()]);
        }
        from = from.saturating_add(part.len() as u64);
        rest = behind;
    }
    Ok(())
}

/// Checks leaves against a root. Nodes are read when they are needed and checked before they are
/// used. Nothing in the tree is trusted but the root, which the caller has.
#[derive(Debug)]
pub struct TreeReader {
    layout: Layout,
    root: Digest,
    kept: Vec<Option<Kept>>,
}

/// Reads a range of a file into a buffer.
pub type ReadAt<'a> = &'a dyn Fn(&mut [u8], u64) -> io::Result<()>;

impl TreeReader {
    /// A reader for the tree with this root, of a disk file of `bytes` bytes. Reads nothing.
    #[must_use]
    pub fn new(bytes: u64, root: Digest) -> Self {
        Self { layout: Layout::of(bytes), root, kept: Vec::new() }
    }

    /// The places of the tree's nodes.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The root.
    #[must_use]
    pub const fn root(&self) -> Digest {
        self.root
    }

    fn place(level: usize, node: u64) -> usize {
        // The levels above the lowest have few nodes; they use other places than its neighbours.
        usize::try_from((node + 29 * level as u64) % KEPT as u64).unwrap_or(0)
    }

    fn find(&self, level: usize, node: u64) -> Option<&[u8; NODE]> {
        let kept = self.kept.get(Self::place(level, node))?.as_ref()?;
        (kept.level == level && kept.node == node).then_some(&*kept.bytes)
    }

    /// The hash number `index` in the nodes of `level`.
    fn digest(&mut self, tree: ReadAt<'_>, level: usize, index: u64) -> Result<Digest, LeafError> {
        let node = index / FANOUT;
        if self.find(level, node).is_none() {
            let is_top = level == self.layout.top();
            let expected = if is_top { None } else { Some(self.digest(tree, level + 1, node)?) };
            if expected == Some(ZERO) {
                return Ok(ZERO);
            }
            let bytes = self.read_node(tree, level, node, expected)?;
            if self.kept.is_empty() {
                self.kept.resize_with(KEPT, || None);
            }
            self.kept[Self::place(level, node)] = Some(Kept { level, node, bytes });
        }
        let at = usize::try_from(index % FANOUT).unwrap_or(0) * HASH;
        let node = self.find(level, node).map(|bytes| &bytes[at..at + HASH]);
        Ok(node.map_or(ZERO, |hash| Digest(std::array::from_fn(|n| hash[n]))))
    }

    /// Reads a node, and compares its hash with `expected`, or with the root if that is `None`.
    fn read_node(
        &self,
        tree: ReadAt<'_>,
        level: usize,
        node: u64,
        expected: Option<Digest>,
    ) -> Result<Box<[u8; NODE]>, LeafError> {
        let bytes = self.layout.bytes();
        let at = self.layout.node_at(level, node);
        let at = at.ok_or(LeafError::Range { at: bytes, end: bytes, bytes })?;
        let mut out = Box::new([0; NODE]);
        tree(out.as_mut_slice(), at).map_err(|source| LeafError::Read {
            what: "the hash tree",
            at,
            source,
        })?;
        let got = hash(out.as_slice());
        let (expected, got) = match expected {
            Some(expected) => (expected, got),
            None => (self.root, root(bytes, &got)),
        };
        if expected == got { Ok(out) } else { Err(LeafError::Node { at, expected, got }) }
    }

    /// What the tree says about the leaf number `leaf`. `tree` reads the tree.
    ///
    /// # Errors
    /// [`LeafError`].
    pub fn leaf(&mut self, tree: ReadAt<'_>, leaf: u64) -> Result<Leaf, LeafError> {
        let (at, length) = (leaf.saturating_mul(LEAF_BYTES), self.layout.leaf_bytes(leaf));
        if length == 0 {
            let (end, bytes) = (at.saturating_add(LEAF_BYTES), self.layout.bytes());
            return Err(LeafError::Range { at, end, bytes });
        }
        Ok(Leaf { at, length, digest: self.digest(tree, 0, leaf)? })
    }

    /// Checks that the leaf number `leaf` of the disk file has these bytes. `tree` reads the tree.
    ///
    /// # Errors
    /// [`LeafError`].
    pub fn check(&mut self, tree: ReadAt<'_>, leaf: u64, bytes: &[u8]) -> Result<(), LeafError> {
        self.leaf(tree, leaf)?.check(bytes)
    }

    /// Reads and checks every node that covers data, the highest first.
    ///
    /// # Errors
    /// [`LeafError`] of the first node that is wrong.
    pub fn check_nodes(&mut self, tree: ReadAt<'_>) -> Result<(), LeafError> {
        let top = self.layout.top();
        self.check_below(tree, top, 0, None)
    }

    fn check_below(
        &self,
        tree: ReadAt<'_>,
        level: usize,
        node: u64,
        expected: Option<Digest>,
    ) -> Result<(), LeafError> {
        let bytes = self.read_node(tree, level, node, expected)?;
        let Some(below) = level.checked_sub(1) else { return Ok(()) };
        for (child, hash) in (node * FANOUT..).zip(bytes.chunks_exact(HASH)) {
            let expected = Digest(std::array::from_fn(|n| hash[n]));
            if expected != ZERO {
                self.check_below(tree, below, child, Some(expected))?;
            }
        }
        Ok(())
    }
}
