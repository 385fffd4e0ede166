//! Disks that are not what they should be.

use super::fuzzing::{BLOCK, INODES, small_disk};
use super::write_layer;
use dayfly_archive::{Kind, Limits, Reader};
use std::fs::File;
use std::os::unix::fs::FileExt;

fn disk(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

fn saved(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    write_layer(&disk(bytes), &mut out).map(|()| out).map_err(|e| e.to_string())
}

#[test]
fn a_small_disk_has_its_entries() {
    let layer = saved(&small_disk()).unwrap();
    let mut reader = Reader::new(layer.as_slice(), Limits::NONE);
    let mut seen = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        let head = &entry.head;
        seen.push((String::from_utf8(head.path.clone()).unwrap(), head.kind, head.xattrs.len()));
    }
    let expected = [
        ("./", Kind::Folder, 0),
        ("a", Kind::File, 1),
        ("b", Kind::HardLink, 1),
        ("d/", Kind::Folder, 1),
        ("l", Kind::Symlink, 0),
        ("z", Kind::Char, 0),
    ];
    assert_eq!(seen, expected.map(|(name, kind, count)| (name.to_owned(), kind, count)));
}

/// The small disk with other bytes at a place.
fn changed(at: usize, bytes: &[u8]) -> String {
    let mut disk = small_disk();
    disk[at..at + bytes.len()].copy_from_slice(bytes);
    saved(&disk).unwrap_err()
}

#[test]
fn what_is_no_file_system_or_a_damaged_one_is_named() {
    let root = INODES + 256;
    let file = INODES + 11 * 256;
    let folder = 7 * BLOCK;
    let cases: [(usize, &[u8], &str); 16] = [
        (1024 + 0x38, &[0, 0], "superblock: expected the magic"),
        (1024 + 0x60, &[0x46, 0, 0, 0], "journal was not replayed"),
        (1024 + 0x60, &[0x42, 0x80, 0, 0], "features"),
        (1024 + 0x18, &[9], "1 to 32 KiB"),
        (1024 + 4, &[0, 0, 1, 0], "blocks"),
        (1024 + 0x28, &[0, 0, 0, 0], "sizes of ext4"),
        (1024 + 0x58, &[0, 3], "sizes of ext4"),
        (2048 + 8, &[200, 0, 0, 0], "blocks below"),
        (root, &[0, 0x70], "a known kind"),
        (root + 0x28, &[0, 0], "a node of depth 0"),
        (root + 0x2a, &[9], "a node of depth 0"),
        (root + 0x28 + 12 + 8, &[99], "blocks below"),
        (file + 0x28 + 12 + 4, &[0], "an extent with blocks"),
        (folder + 4, &[0], "an entry"),
        (folder + 4, &[13], "an entry"),
        (folder + 24 + 8, b"/", "without a slash"),
    ];
    for (at, bytes, expected) in cases {
        let error = changed(at, bytes);
        assert!(error.contains(expected), "{bytes:?} at {at}: {error}");
    }
    assert!(saved(&[0; 100]).unwrap_err().contains("its length"));
}

#[test]
fn a_folder_within_itself_and_blocks_in_many_places_end() {
    // The entry `d` is the root.
    let at = small_disk().windows(9).position(|w| w[8] == b'd' && w[6] == 1).unwrap();
    let error = changed(at, &[2]);
    assert!(error.contains("one place in the tree") || error.contains("twice"), "{error}");
    // Both files of the disk have the same large extent.
    let file = INODES + 11 * 256;
    let error = changed(file + 0x28 + 12 + 4, &[11]);
    assert!(error.contains("blocks"), "{error}");
}
