use super::layout::{LEAF, NODE, is_zero};
use super::*;
use crate::Digest;
use proptest::prelude::*;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

/// The tree of a file of `bytes` bytes with this data, and its root.
fn tree(bytes: u64, data: &[(u64, Vec<u8>)]) -> (File, Digest) {
    let mut builder = TreeBuilder::new(tempfile::tempfile().unwrap(), bytes).unwrap();
    data.iter().for_each(|(at, piece)| builder.update(*at, piece).unwrap());
    builder.finish(Digest([5; 32])).unwrap()
}

fn all(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Reads from memory, as from a file.
fn at(bytes: &[u8]) -> impl Fn(&mut [u8], u64) -> io::Result<()> {
    move |out, at| {
        let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..at + out.len()));
        out.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

fn check(tree: &[u8], root: Digest, disk: &[u8]) -> Result<(), LeafError> {
    let mut reader = TreeReader::new(disk.len() as u64, root);
    let leaves = (0..).zip(disk.chunks(LEAF));
    for (leaf, bytes) in leaves {
        reader.check(&at(tree), leaf, bytes)?;
    }
    Ok(())
}

/// Reads a range, each leaf checked.
fn range(
    tree: &[u8],
    root: Digest,
    disk: &[u8],
    place: u64,
    out: &mut [u8],
) -> Result<(), LeafError> {
    let reader = std::cell::RefCell::new(TreeReader::new(disk.len() as u64, root));
    let leaf = |leaf| reader.borrow_mut().leaf(&at(tree), leaf);
    read(&at(disk), &leaf, place, out)
}

/// A file of five leaves, the last one short and the third a hole.
fn sample() -> (Vec<u8>, Vec<u8>, Digest) {
    let mut disk = vec![0; 4 * LEAF + 4096];
    for (n, page) in (0_u8..).zip(disk.chunks_mut(4096)) {
        page.fill(n + 1);
    }
    disk[2 * LEAF..3 * LEAF].fill(0);
    let (file, root) = tree(disk.len() as u64, &[(0, disk.clone())]);
    (disk, all(&file), root)
}

#[test]
fn the_layout_depends_on_the_length_alone() {
    let of = |bytes: u64| {
        let layout = Layout::of(bytes);
        let levels: Vec<_> = layout.levels.iter().map(|level| (level.nodes, level.at)).collect();
        (levels, layout.tree_bytes())
    };
    assert_eq!(of(0), (vec![(1, 4096)], 8192));
    assert_eq!(of(128 * LEAF_BYTES), (vec![(1, 4096)], 8192));
    assert_eq!(of(128 * LEAF_BYTES + 1), (vec![(2, 8192), (1, 4096)], 16384));
    // 20 GiB: 327,680 leaves.
    let (levels, bytes) = of(20 << 30);
    assert_eq!(levels.iter().map(|(nodes, _)| *nodes).collect::<Vec<_>>(), [2560, 20, 1]);
    assert_eq!(bytes, 4096 * (1 + 1 + 20 + 2560));
    assert_eq!(Layout::of(1 << 40).levels.len(), 4);
    // No length overflows.
    assert!(Layout::of(u64::MAX).tree_bytes() > 1 << 53);
    assert_eq!(Layout::of(LEAF_BYTES + 3).leaf_bytes(1), 3);
    assert_eq!(Layout::of(LEAF_BYTES + 3).leaf_bytes(2), 0);
}

/// Trees outlive a version of dayfly. If this test fails, an old tree is unreadable: raise
/// `VERSION` and read both versions.
#[test]
fn the_bytes_of_version_1_are_frozen() {
    let (disk, tree, root) = sample();
    let digest = |bytes: &[u8]| Digest::of(bytes).to_string();
    assert_eq!(
        root.to_string(),
        "9f2a0b86e252b1693fb2f8fe8c7ebd94340788cccd4162cecd8372a324f6797e"
    );
    assert_eq!(digest(&tree), "3cf1176208f861eebf74c950a3d8f6e571734f847b0de49c6dd4e0309e3f15cd");
    check(&tree, root, &disk).unwrap();
    let header = Header::decode(&tree[..TOP_BYTES]).unwrap();
    assert_eq!(header, Header { bytes: disk.len() as u64, digest: Digest([5; 32]), root });
}

#[test]
fn a_terabyte_of_holes_costs_nothing_and_one_block_a_path() {
    let (file, empty) = tree(1 << 40, &[]);
    assert!(file.metadata().unwrap().blocks() * 512 <= 8192);
    let block = vec![7; 4096];
    let (file, root) = tree(1 << 40, &[((1 << 40) - 4096, block.clone())]);
    assert_ne!(root, empty);
    assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10);
    let read = |out: &mut [u8], at: u64| file.read_exact_at(out, at);
    let mut reader = TreeReader::new(1 << 40, root);
    let mut leaf = vec![0; LEAF];
    reader.check(&read, 5, &leaf).unwrap();
    leaf[LEAF - 4096..].copy_from_slice(&block);
    reader.check(&read, (1 << 24) - 1, &leaf).unwrap();
    // Data in a hole, and a hole in place of data.
    assert!(matches!(reader.check(&read, 5, &leaf), Err(LeafError::Leaf { .. })));
    leaf.fill(0);
    let error = reader.check(&read, (1 << 24) - 1, &leaf).unwrap_err();
    assert!(
        error.to_string().contains("bytes 1099511562240 to 1099511627776: expected"),
        "{error}"
    );
    reader.check_nodes(&read).unwrap();
}

#[test]
fn a_changed_byte_is_found_and_named_and_no_other_leaf_suffers() {
    let (disk, tree, root) = sample();
    for place in [0, LEAF - 1, 2 * LEAF + 9, disk.len() - 1] {
        let mut changed = disk.clone();
        changed[place] ^= 1;
        let LeafError::Leaf { at: first, end, .. } = check(&tree, root, &changed).unwrap_err()
        else {
            panic!("another error");
        };
        assert!((first..end).contains(&(place as u64)), "{place}: {first} to {end}");
        let mut out = vec![0; 4096];
        for page in (0..disk.len()).step_by(4096) {
            let got = range(&tree, root, &changed, page as u64, &mut out);
            assert_eq!(got.is_ok(), page / LEAF != place / LEAF, "{place} at {page}");
            assert!(got.is_err() || out == disk[page..page + 4096]);
        }
    }
}

#[test]
fn no_bit_of_a_tree_can_change_what_is_accepted() {
    let (disk, whole, root) = sample();
    let mut changed = disk.clone();
    changed[9] ^= 1;
    for bit in 0..whole.len() * 8 {
        let mut tree = whole.clone();
        tree[bit / 8] ^= 1 << (bit % 8);
        let (header, node) = (Header::decode(&tree[..TOP_BYTES]), bit / 8 >= NODE);
        assert!(header.is_err(), "bit {bit}");
        // A reader needs no header.
        assert_eq!(check(&tree, root, &disk).is_err(), node, "bit {bit}");
        assert!(bit % 64 != 0 || check(&tree, root, &changed).is_err());
    }
    for length in (0..whole.len()).step_by(97) {
        let cut = &whole[..length];
        assert!(Header::decode(cut).is_err());
        assert!(matches!(check(cut, root, &disk), Err(LeafError::Read { .. })), "{length}");
    }
    assert!(check(&whole, Digest([0; 32]), &disk).is_err(), "of another root");
    assert!(check(&whole, root, &disk[..disk.len() - 4096]).is_err(), "of another length");
}

#[test]
fn ranges_past_the_end_are_refused() {
    let (disk, tree, root) = sample();
    let mut reader = TreeReader::new(disk.len() as u64, root);
    let mut out = vec![0; 4096];
    for place in [disk.len() as u64 - 4095, disk.len() as u64, u64::MAX - 5, u64::MAX] {
        let got = range(&tree, root, &disk, place, &mut out);
        assert!(matches!(got, Err(LeafError::Range { .. })), "{place}");
    }
    for (leaf, length) in [(0, 4096), (4, LEAF), (5, 0), (5, 4096), (u64::MAX, 4096)] {
        let got = reader.check(&at(&tree), leaf, &vec![0; length]);
        assert!(matches!(got, Err(LeafError::Range { .. })), "{leaf}");
    }
    let mut builder = TreeBuilder::new(tempfile::tempfile().unwrap(), 4096).unwrap();
    builder.update(4096, &[1]).unwrap_err();
    builder.update(u64::MAX, &[1]).unwrap_err();
}

proptest! {
    /// Pieces of any length give one tree, whatever the holes between them.
    #[test]
    fn the_tree_depends_on_the_content_alone(
        pages in prop::collection::vec((0_u64..3000, 1_u8..4, 1_usize..40), 0..12),
        cut in 1_usize..50,
    ) {
        let mut disk = vec![0; 3050 * 4096 + 100];
        for (page, byte, count) in &pages {
            let start = usize::try_from(*page).unwrap() * 4096;
            disk[start..start + count * 4096].fill(*byte);
        }
        let (first, root) = tree(disk.len() as u64, &[(0, disk.clone())]);
        let pieces = (0_u64..).step_by(cut * 4096).zip(disk.chunks(cut * 4096));
        let pieces = pieces.filter(|(_, piece)| !is_zero(piece));
        let pieces: Vec<_> = pieces.map(|(at, piece)| (at, piece.to_vec())).collect();
        let (second, again) = tree(disk.len() as u64, &pieces);
        prop_assert_eq!(root, again);
        let (first, second) = (all(&first), all(&second));
        prop_assert!(first == second);
        check(&first, root, &disk).unwrap();
        TreeReader::new(disk.len() as u64, root).check_nodes(&at(&first)).unwrap();
    }
}
