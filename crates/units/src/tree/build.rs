//! Builds a tree while the disk file is read or written, in one pass.

use super::layout::{
    FANOUT, HASH, Header, LEAF, LEAF_BYTES, Layout, NODE, ZERO, hash, is_zero, root,
};
use crate::Digest;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The node of a level that is being filled.
#[derive(Debug)]
struct Filling {
    node: u64,
    bytes: Box<[u8; NODE]>,
}

/// Computes a tree from pieces of a disk file given in ascending order, and writes each node when
/// it is complete. It holds one leaf, and one node of each level.
#[derive(Debug)]
pub struct TreeBuilder {
    layout: Layout,
    file: File,
    /// The leaf in `buffer`, of which only a part was given so far.
    leaf: Option<u64>,
    buffer: Vec<u8>,
    filling: Vec<Filling>,
    top: Digest,
}

impl TreeBuilder {
    /// Begins the tree of a disk file of `bytes` bytes in the empty file `file`.
    ///
    /// # Errors
    /// The host cannot extend the file.
    pub fn new(file: File, bytes: u64) -> io::Result<Self> {
        let layout = Layout::of(bytes);
        file.set_len(layout.tree_bytes())?;
        let filling = layout.levels.iter().map(|_| Filling { node: 0, bytes: Box::new([0; NODE]) });
        let filling = filling.collect();
        Ok(Self { layout, file, leaf: None, buffer: vec![0; LEAF], filling, top: ZERO })
    }

    /// Adds the bytes at `offset`, behind all bytes given before. Ranges left out count as zeroes.
    ///
    /// # Errors
    /// `InvalidInput` if the bytes lie past the file's end; or the host cannot write.
    pub fn update(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.layout.bytes()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let leaf = at / LEAF_BYTES;
            let start = usize::try_from(at % LEAF_BYTES).unwrap_or(0);
            let length = self.layout.leaf_bytes(leaf);
            let (part, behind) = rest.split_at(rest.len().min(length - start));
            if part.len() == length {
                self.end_leaf()?;
                self.leaf_is(leaf, &hash(part))?;
            } else {
                if self.leaf != Some(leaf) {
                    self.end_leaf()?;
                    self.leaf = Some(leaf);
                    self.buffer.fill(0);
                }
                self.buffer[start..start + part.len()].copy_from_slice(part);
            }
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    fn end_leaf(&mut self) -> io::Result<()> {
        let Some(leaf) = self.leaf.take() else { return Ok(()) };
        let digest = hash(&self.buffer[..self.layout.leaf_bytes(leaf)]);
        self.leaf_is(leaf, &digest)
    }

    fn leaf_is(&mut self, leaf: u64, digest: &Digest) -> io::Result<()> {
        if *digest == ZERO { Ok(()) } else { self.put(0, leaf, digest) }
    }

    /// Writes a hash into its node of `level`.
    fn put(&mut self, level: usize, index: u64, digest: &Digest) -> io::Result<()> {
        let node = index / FANOUT;
        if self.filling[level].node != node {
            self.end_node(level)?;
            self.filling[level].node = node;
        }
        let at = usize::try_from(index % FANOUT).unwrap_or(0) * HASH;
        self.filling[level].bytes[at..at + HASH].copy_from_slice(&digest.0);
        Ok(())
    }

    /// Writes the node of `level` that is being filled, and its hash into its parent.
    fn end_node(&mut self, level: usize) -> io::Result<()> {
        let Filling { node, bytes } = &mut self.filling[level];
        if is_zero(bytes.as_slice()) {
            return Ok(());
        }
        let (node, digest) = (*node, hash(bytes.as_slice()));
        let at = self.layout.node_at(level, node).ok_or(io::ErrorKind::InvalidInput)?;
        self.file.write_all_at(bytes.as_slice(), at)?;
        bytes.fill(0);
        if level == self.layout.top() {
            self.top = digest;
            return Ok(());
        }
        self.put(level + 1, node, &digest)
    }

    /// Ends the tree of the disk file with this sparse digest. Returns the tree's file and root.
    ///
    /// # Errors
    /// The host cannot write.
    pub fn finish(mut self, digest: Digest) -> io::Result<(File, Digest)> {
        self.end_leaf()?;
        (0..self.layout.levels.len()).try_for_each(|level| self.end_node(level))?;
        let root = root(self.layout.bytes(), &self.top);
        let header = Header { bytes: self.layout.bytes(), digest, root };
        self.file.write_all_at(&header.encode(), 0)?;
        Ok((self.file, root))
    }
}
