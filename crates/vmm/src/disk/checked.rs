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
use dayfly_units::tree::{LEAF_BYTES, LeafError, TreeReader};
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
        let state = State { reader: TreeReader::new(bytes, spec.root), good: Vec::new() };
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
        let mut state = lock(&self.state);
        let end = offset.saturating_add(data.len() as u64);
        let mut at = offset;
        while at < end {
            let leaf = at / LEAF_BYTES;
            let mut next = leaf + 1;
            if state.is_good(leaf) {
                while next * LEAF_BYTES < end && state.is_good(next) {
                    next += 1;
                }
            }
            let stop = end.min(next * LEAF_BYTES);
            let part = data.window(length(at - offset), length(stop - at));
            if state.is_good(leaf) {
                if part.read_at(file, at)? < part.len() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            } else {
                // The guest could change its memory while it is hashed, so the leaf is hashed here
                // and then copied.
                let bytes = self.leaf(&mut state, file, leaf)?;
                let from = length(at % LEAF_BYTES);
                let bytes = bytes.get(from..from + part.len());
                part.copy_from(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
                state.note(leaf);
            }
            at = stop;
        }
        Ok(())
    }

    fn leaf(&self, state: &mut State, file: BorrowedFd<'_>, leaf: u64) -> io::Result<Vec<u8>> {
        let tree = |out: &mut [u8], at: u64| read(self.tree.as_fd(), out, at);
        let wrong = |error: LeafError| io::Error::new(io::ErrorKind::InvalidData, error);
        let leaf = state.reader.leaf(&tree, leaf).map_err(wrong)?;
        let mut bytes = vec![0; leaf.length()];
        read(file, &mut bytes, leaf.at())?;
        leaf.check(&bytes).map_err(wrong)?;
        Ok(bytes)
    }
}
