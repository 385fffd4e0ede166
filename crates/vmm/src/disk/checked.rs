//! Checks what is read of a published disk file against the file's hash tree.
//!
//! A leaf is checked when it is first read, before a byte of it reaches the guest, and then noted
//! in a bitmap. Later reads of it go straight to guest memory. The host's page cache may lose the
//! leaf and read it again from a disk that has rotted since: that is not noticed here, and
//! `dayfly store verify` finds it. Each VM has its own bitmap, because a VMM that its guest took
//! over must not vouch for others.

use super::iolist::IoList;
use super::span::length;
use super::spec::TreeSpec;
use dayfly_units::sync::lock;
use dayfly_units::tree::{LEAF_BYTES, Leaf, LeafError, TreeReader};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// The hash tree of a disk file, and the leaves that were checked.
#[derive(Debug)]
pub(super) struct Checked {
    tree: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    reader: TreeReader,
    /// A bit for each leaf; empty until the first read.
    good: Vec<u64>,
    /// How many leaves were hashed.
    #[cfg(test)]
    hashed: usize,
}

impl State {
    fn is_good(&self, leaf: u64) -> bool {
        let word = self.good.get(length(leaf / 64));
        word.is_some_and(|word| word >> (leaf % 64) & 1 == 1)
    }

    fn note(&mut self, leaf: u64) {
        if self.good.is_empty() {
            self.good = vec![0; length(self.reader.layout().leaves().div_ceil(64))];
        }
        if let Some(word) = self.good.get_mut(length(leaf / 64)) {
            *word |= 1 << (leaf % 64);
        }
    }
}

/// Reads all of `out`.
fn read(file: BorrowedFd<'_>, out: &mut [u8], at: u64) -> io::Result<()> {
    let whole = out.len();
    match IoList::of(out).read_at(file, at)? {
        got if got == whole => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Checked {
    /// For a disk file of `bytes` bytes. Reads nothing.
    pub(super) fn new(spec: TreeSpec, bytes: u64) -> Self {
        let state = State {
            reader: TreeReader::new(bytes, spec.root),
            good: Vec::new(),
            #[cfg(test)]
            hashed: 0,
        };
        Self { tree: spec.file, state: Mutex::new(state) }
    }

    /// Fills `data` from byte `offset` of `file` on.
    ///
    /// # Errors
    /// The host's error; `InvalidData` with a [`LeafError`] if a leaf is not what the tree says.
    pub(super) fn read(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        data: &IoList<'_>,
    ) -> io::Result<()> {
        let end = offset.saturating_add(data.len() as u64);
        let mut at = offset;
        while at < end {
            let (good, stop) = self.run(at, end);
            let part = data.window(length(at - offset), length(stop - at));
            if good {
                if part.read_at(file, at)? < part.len() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            } else {
                let leaf = self.expect(at)?;
                let mut bytes = vec![0; leaf.length()];
                read(file, &mut bytes, leaf.at())?;
                self.accept(&leaf, &bytes)?;
                copy_leaf(&bytes, at, &part)?;
            }
            at = stop;
        }
        Ok(())
    }

    /// Whether the leaves from byte `at` on were checked, and the byte, at most `end`, up to which
    /// the answer is the same. Leaves that were not checked come one at a time.
    pub(super) fn run(&self, at: u64, end: u64) -> (bool, u64) {
        let state = lock(&self.state);
        let leaf = at / LEAF_BYTES;
        let mut next = leaf + 1;
        let good = state.is_good(leaf);
        while good && next * LEAF_BYTES < end && state.is_good(next) {
            next += 1;
        }
        (good, end.min(next * LEAF_BYTES))
    }

    /// What the tree says about the leaf that has byte `at`.
    ///
    /// # Errors
    /// The host's error; `InvalidData` with a [`LeafError`] if the tree is damaged.
    pub(super) fn expect(&self, at: u64) -> io::Result<Leaf> {
        let tree = |out: &mut [u8], at: u64| read(self.tree.as_fd(), out, at);
        lock(&self.state).reader.leaf(&tree, at / LEAF_BYTES).map_err(wrong)
    }

    /// Checks `bytes`, which are those of `leaf`, and notes that the leaf is good. The caller then
    /// copies them to the guest ([`copy_leaf`]).
    ///
    /// The guest could change its memory while it is hashed, so a leaf is hashed in this process's
    /// memory and then copied.
    ///
    /// # Errors
    /// `InvalidData` with a [`LeafError`] if the leaf is not what the tree says.
    pub(super) fn accept(&self, leaf: &Leaf, bytes: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        {
            lock(&self.state).hashed += 1;
        }
        leaf.check(bytes).map_err(wrong)?;
        lock(&self.state).note(leaf.at() / LEAF_BYTES);
        Ok(())
    }

    /// How many leaves were hashed.
    #[cfg(test)]
    pub(super) fn hashed(&self) -> usize {
        lock(&self.state).hashed
    }
}

/// Copies what `part` has of a leaf from byte `at` of the file on. `leaf` is the leaf's content.
///
/// # Errors
/// `UnexpectedEof` if the leaf ends before the part does.
pub(super) fn copy_leaf(leaf: &[u8], at: u64, part: &IoList<'_>) -> io::Result<()> {
    let from = length(at % LEAF_BYTES);
    let bytes = leaf.get(from..from + part.len());
    part.copy_from(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
    Ok(())
}

fn wrong(error: LeafError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
