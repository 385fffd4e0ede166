//! The hash tree of a disk file: whatever a damaged tree says, no wrong leaf is accepted.

use crate::sealing::resealed;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_units::Digest;
use dayfly_units::tree::{
    Header, LEAF_BYTES, LeafError, NODE_BYTES, TOP_BYTES, TreeBuilder, TreeReader,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "hash-tree",
    what: "a damaged hash tree of a disk file",
    stateful: false,
    most_bytes: 512,
    heap: Heap { fixed: 1 << 20, per_byte: 64 },
    run: damaged,
    seeds: || {
        vec![
            vec![0, 0, 0, 0],
            vec![13, 1, 0, 2, 0, 0, 7, 128, 0, 9],
            vec![20, 0, 0, 3, 0, 0, 1, 90, 0, 2, 255, 255, 3, 1, 0, 3, 1],
            vec![30, 9, 9, 2, 0, 1, 5, 200, 9, 6, 2, 8, 7, 128, 3, 1, 0, 255, 0, 16, 16, 4],
        ]
    },
}];

/// A disk file with a few leaves that are not zero.
struct Disk {
    bytes: u64,
    /// What the beginning of a leaf is filled with.
    leaves: BTreeMap<u64, u8>,
}

impl Disk {
    /// Bytes of a leaf that are filled.
    const FILLED: usize = 100;

    /// The file that the beginning of an input describes, and the rest of the input: four bytes
    /// for length and number of leaves, then three bytes for each leaf.
    fn of(input: &[u8]) -> Option<(Self, &[u8])> {
        let (&[bits, low, high, count], mut rest) = input.split_first_chunk()?;
        let bytes = (1 << (10 + bits % 31)) + u64::from(u16::from_le_bytes([low, high]));
        let all = bytes.div_ceil(LEAF_BYTES);
        let mut leaves = BTreeMap::new();
        for _ in 0..count % 9 {
            let (&[high, low, fill], behind) = rest.split_first_chunk()?;
            let place = u128::from(u16::from_be_bytes([high, low]));
            leaves.insert(u64::try_from((u128::from(all) * place) >> 16).unwrap(), fill);
            rest = behind;
        }
        Some((Self { bytes, leaves }, rest))
    }

    fn leaf(&self, leaf: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let filled = length.min(Self::FILLED);
        bytes[..filled].fill(self.leaves.get(&leaf).copied().unwrap_or(0));
        bytes
    }

    /// Builds its tree in one pass.
    fn tree(&self) -> (File, Header) {
        let mut tree = TreeBuilder::new(tempfile::tempfile().unwrap(), self.bytes).unwrap();
        for leaf in self.leaves.keys() {
            let at = leaf * LEAF_BYTES;
            let length = usize::try_from((self.bytes - at).min(LEAF_BYTES)).unwrap();
            tree.update(at, &self.leaf(*leaf, length)).unwrap();
        }
        let digest = Digest::of(&[self.leaves.len().to_le_bytes()[0]]);
        let (file, root) = tree.finish(digest).unwrap();
        (file, Header { bytes: self.bytes, digest, root })
    }
}

/// An input is a disk file, then changes of four bytes: which of the tree's parts that were read,
/// where in it, and the bits.
fn damaged(input: &[u8]) -> Outcome {
    let Some((disk, rest)) = Disk::of(input) else { return Outcome::Refused };
    let (file, header) = disk.tree();
    // The header and each node that is read while the tree is sound.
    let parts = RefCell::new(vec![0]);
    let sound = |out: &mut [u8], at: u64| {
        parts.borrow_mut().push(at);
        file.read_exact_at(out, at)
    };
    let mut reader = TreeReader::new(disk.bytes, header.root);
    let last = disk.bytes.div_ceil(LEAF_BYTES) - 1;
    let leaves = disk.leaves.keys().copied().chain([0, last / 2, last]);
    for leaf in leaves.clone() {
        let said = reader.leaf(&sound, leaf).expect("a sound tree");
        said.check(&disk.leaf(leaf, said.length())).expect("a sound leaf");
        assert_eq!(said.is_zero(), disk.leaves.get(&leaf).is_none_or(|fill| *fill == 0));
    }
    let parts = parts.take();
    let changes: Vec<_> = rest
        .chunks_exact(4)
        .map(|change| {
            let part = parts[usize::from(change[0]) % parts.len()];
            let within = u64::from(u16::from_le_bytes([change[1], change[2]]) % 4096);
            (part + within, change[3])
        })
        .collect();
    let changed = |out: &mut [u8], at: u64| -> io::Result<()> {
        file.read_exact_at(out, at)?;
        for (place, bits) in &changes {
            let within = place.checked_sub(at).and_then(|within| usize::try_from(within).ok());
            if let Some(byte) = within.and_then(|within| out.get_mut(within)) {
                *byte ^= bits;
            }
        }
        Ok(())
    };
    let mut reader = TreeReader::new(disk.bytes, header.root);
    let mut refused = false;
    for leaf in leaves {
        let Ok(said) = reader.leaf(&changed, leaf) else {
            refused = true;
            continue;
        };
        let mut bytes = disk.leaf(leaf, said.length());
        assert!(said.check(&bytes).is_ok(), "leaf {leaf}: the tree gave another hash");
        bytes[said.length() / 2] ^= 1;
        assert!(said.check(&bytes).is_err(), "leaf {leaf}: a wrong byte was accepted");
    }
    planted(|| changes.len() > 2 && disk.bytes > 1 << 32 && disk.leaves.len() == 4);
    check_header(&header, &changed);
    Outcome::of(!refused)
}

/// A header with right seals is either the one that was written or refused; with new seals it may
/// say anything, but of the highest node that is there.
fn check_header(written: &Header, read: &dyn Fn(&mut [u8], u64) -> io::Result<()>) {
    let mut top = vec![0; TOP_BYTES];
    read(&mut top, 0).unwrap();
    if let Ok(header) = Header::decode(&top) {
        assert_eq!(header, *written, "a damaged header was accepted");
    }
    let sealed = dayfly_units::sealed::HEADER_BYTES + 80;
    let Some(right) = resealed(&top[..sealed]) else { return };
    top[..sealed].copy_from_slice(&right);
    let Ok(header) = Header::decode(&top) else { return };
    // Its root is that of the highest node, so the reader cannot refuse that one.
    let first = TreeReader::new(header.bytes, header.root).leaf(&read, 0);
    let refused = matches!(first, Err(LeafError::Node { at: NODE_BYTES, .. }));
    assert!(!refused, "{header:?}: {first:?}");
}
