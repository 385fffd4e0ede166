//! Disks over published files with hash trees: what is damaged is not served.

use super::{DamagedFile, Disk, DiskSpec, IoList, LayerSpec, TreeSpec, layer};
use crate::config::DISK_BLOCK_BYTES;
use dayfly_units::Digest;
use dayfly_units::tree::{LEAF_BYTES, TreeBuilder};
use proptest::prelude::*;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const BYTES: u64 = 5 * LEAF_BYTES;

/// The content of a block in the file number `of`.
fn block(of: u8, number: u64) -> Vec<u8> {
    vec![of.wrapping_mul(83).wrapping_add(number.to_le_bytes()[0]).max(1); 4096]
}

/// A file with its tree, both for reading.
struct Published {
    file: File,
    tree: File,
    root: Digest,
}

/// A file with these blocks; the others are holes.
fn published(of: u8, bytes: u64, blocks: &[u64]) -> Published {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    let mut tree = TreeBuilder::new(tempfile::tempfile().unwrap(), bytes).unwrap();
    for number in blocks {
        let at = number * DISK_BLOCK_BYTES;
        let block = block(of, *number);
        let block = &block[..usize::try_from(bytes - at).unwrap().min(4096)];
        file.write_all_at(block, at).unwrap();
        tree.update(at, block).unwrap();
    }
    let (tree, root) = tree.finish(Digest([0; 32])).unwrap();
    Published { file, tree, root }
}

impl Published {
    fn tree(&self) -> Option<TreeSpec> {
        Some(TreeSpec { file: self.tree.try_clone().unwrap().into(), root: self.root })
    }

    fn file(&self) -> std::os::fd::OwnedFd {
        self.file.try_clone().unwrap().into()
    }

    fn flip(&self, at: u64) {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, at).unwrap();
        self.file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
}

fn map(blocks: &[u64]) -> File {
    let mut map = layer::LayerMap::empty(BYTES / DISK_BLOCK_BYTES).unwrap();
    blocks.iter().for_each(|number| map.insert(*number));
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&map.encode(), 0).unwrap();
    file
}

/// The blocks of the layer over the base.
const OVER: [u64; 4] = [3, 4, 40, 79];

/// A base, which is shorter than the disk and ends within a block, and a layer over it.
struct Files {
    base: Published,
    over: Published,
}

impl Files {
    fn new() -> Self {
        let all: Vec<u64> = (0..70).filter(|number| !(16..32).contains(number)).collect();
        let base = published(0, 69 * DISK_BLOCK_BYTES + 100, &all);
        Self { base, over: published(1, BYTES, &OVER) }
    }

    fn disk(&self) -> Disk {
        let layer = LayerSpec { data: self.over.file(), map: map(&OVER).into() };
        Disk::open(DiskSpec {
            size_bytes: BYTES,
            base: self.base.file(),
            layers: vec![layer],
            writable: Some(tempfile::tempfile().unwrap().into()),
            trees: vec![self.base.tree(), self.over.tree()],
        })
        .unwrap()
    }

    /// What the disk has.
    fn content() -> Vec<u8> {
        let mut all = vec![0; usize::try_from(BYTES).unwrap()];
        for number in 0..BYTES / DISK_BLOCK_BYTES {
            let at = usize::try_from(number).unwrap() * 4096;
            if OVER.contains(&number) {
                all[at..at + 4096].copy_from_slice(&block(1, number));
            } else if number < 70 && !(16..32).contains(&number) {
                let length = if number == 69 { 100 } else { 4096 };
                all[at..at + length].copy_from_slice(&block(0, number)[..length]);
            }
        }
        all
    }
}

fn read(disk: &Disk, at: usize, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0xee; length];
    disk.read(at as u64, &IoList::of(&mut bytes))?;
    Ok(bytes)
}

fn damaged(error: &io::Error) -> String {
    let cause = error.get_ref().unwrap();
    assert!(cause.is::<DamagedFile>(), "{error:?}");
    dayfly_units::error::chain(cause)
}

proptest! {
    /// Any reads give what the files have, whichever leaves were read before.
    #[test]
    fn reads_with_trees_are_those_without(
        reads in prop::collection::vec((0_usize..640, 1_usize..400), 1..20),
    ) {
        let (files, content) = (Files::new(), Files::content());
        let disk = files.disk();
        for (sector, sectors) in reads {
            let (at, end) = (sector * 512, ((sector + sectors) * 512).min(content.len()));
            prop_assert!(read(&disk, at, end - at).unwrap() == content[at..end]);
        }
    }
}

#[test]
fn a_damaged_leaf_is_an_error_that_names_it_and_the_others_are_read() {
    for (of_layer, at, leaf) in [(false, 5000, 0), (false, 17 * 4096, 1), (true, 40 * 4096, 2)] {
        let (files, content) = (Files::new(), Files::content());
        let (file, name) = if of_layer {
            (&files.over, "layer 1 (inode ")
        } else {
            (&files.base, "base image (i")
        };
        file.flip(at);
        let disk = files.disk();
        let mut refused = 0;
        for page in (0..content.len()).step_by(4096) {
            let in_layer = OVER.contains(&(page as u64 / 4096));
            let got = read(&disk, page, 4096);
            if in_layer == of_layer && page as u64 / LEAF_BYTES == leaf {
                let text = damaged(&got.unwrap_err());
                let place = format!("bytes {} to ", leaf * LEAF_BYTES);
                assert!(text.starts_with(name) && text.contains(&place), "{text}");
                assert!(text.contains("expected hash ") && text.contains(", got "), "{text}");
                refused += 1;
            } else {
                assert!(got.unwrap() == content[page..page + 4096], "page {page}");
            }
        }
        assert!(refused > 0);
        // A request that touches it fails as a whole.
        damaged(&read(&disk, 0, content.len()).unwrap_err());
    }
}

#[test]
fn a_leaf_is_checked_once_and_a_damaged_one_each_time() {
    let (files, content) = (Files::new(), Files::content());
    let disk = files.disk();
    assert!(read(&disk, 0, 4096).unwrap() == content[..4096]);
    // The whole leaf was checked, and is not again.
    files.base.flip(2 * 4096);
    assert!(read(&disk, 2 * 4096, 4096).unwrap() != content[2 * 4096..3 * 4096]);
    let other = files.disk();
    for _ in 0..2 {
        damaged(&read(&other, 4096, 4096).unwrap_err());
    }
    files.base.flip(2 * 4096);
    assert!(read(&other, 4096, 4096).unwrap() == content[4096..8192]);
}

#[test]
fn a_block_that_is_completed_by_a_write_is_checked_too() {
    let files = Files::new();
    files.base.flip(9 * 4096);
    let mut disk = files.disk();
    let mut part = [5; 512];
    damaged(&disk.write(8 * 4096, &IoList::of(&mut part)).unwrap_err());
    // A whole block needs nothing of the base.
    let mut whole = [5; 4096];
    disk.write(8 * 4096, &IoList::of(&mut whole)).unwrap();
    assert!(read(&disk, 8 * 4096, 4096).unwrap() == whole);
}

#[test]
fn a_damaged_or_missing_tree_serves_nothing() {
    let files = Files::new();
    files.base.tree.write_all_at(&[1], 4096 + 40).unwrap();
    let text = damaged(&read(&files.disk(), 0, 512).unwrap_err());
    assert!(text.contains("hash tree: node at byte 4096: expected "), "{text}");
    files.base.tree.set_len(100).unwrap();
    let text = damaged(&read(&files.disk(), 0, 512).unwrap_err());
    assert!(text.contains("reading the hash tree at byte 4096"), "{text}");
    // The layer has its own.
    assert!(read(&files.disk(), 3 * 4096, 4096).unwrap() == block(1, 3));
}

#[test]
fn a_disk_keeps_its_trees_through_a_freeze_and_a_rebase() {
    let (files, content) = (Files::new(), Files::content());
    let mut disk = files.disk();
    disk.freeze(tempfile::tempfile().unwrap().into());
    // The same file again, and the frozen layer, which has no tree, above it.
    let again = LayerSpec { data: files.over.file(), map: map(&OVER).into() };
    disk.rebase(std::os::fd::AsFd::as_fd(&files.over.file), vec![again]).unwrap();
    files.over.flip(4 * 4096);
    files.base.flip(9 * 4096);
    damaged(&read(&disk, 4 * 4096, 4096).unwrap_err());
    damaged(&read(&disk, 9 * 4096, 4096).unwrap_err());
    assert!(read(&disk, 40 * 4096, 4096).unwrap() == content[40 * 4096..41 * 4096]);
    // A merged layer is another file, written on this host: it is read as it is.
    let merged = published(1, BYTES, &OVER);
    let spec = LayerSpec { data: merged.file(), map: map(&OVER).into() };
    disk.rebase(std::os::fd::AsFd::as_fd(&files.over.file), vec![spec]).unwrap();
    merged.flip(40 * 4096);
    assert!(read(&disk, 40 * 4096, 4096).unwrap() != content[40 * 4096..41 * 4096]);
    assert!(read(&disk, 3 * 4096, 4096).unwrap() == block(1, 3));
    damaged(&read(&disk, 9 * 4096, 4096).unwrap_err());
}
