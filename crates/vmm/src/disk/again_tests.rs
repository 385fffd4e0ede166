//! Zeroes over data below, and disks that are opened again. The tests of the module `tests` compare
//! both with a model.

#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::tests::{Files, SIZE, read, write};
use super::{Disk, DiskSpec, NoSpace, OpenDiskError, ZeroError};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

#[test]
fn a_discard_gives_space_back_if_no_layer_below_has_data() {
    let files = Files::new(0);
    let mut disk = files.open().unwrap();
    write(&mut disk, 0, vec![9; usize::try_from(SIZE).unwrap()]).unwrap();
    let before = files.writable.metadata().unwrap().blocks();
    disk.discard(0, SIZE).unwrap();
    let after = files.writable.metadata().unwrap().blocks();
    assert!(after * 4 < before, "{before} blocks before, {after} after");
}

#[test]
fn a_discard_for_which_there_is_no_room_changes_nothing_that_has_data_below() {
    let files = Files::with_holes(SIZE);
    let mut disk = files.open().unwrap();
    let (before, mut asked) = (read(&disk, 0, SIZE as usize).unwrap(), 0);
    let no_room = |_: &Disk, _, len| {
        asked += len;
        false
    };
    disk.discard_if(0, SIZE, no_room).unwrap();
    assert_eq!(asked, SIZE - SIZE / 5 * 2, "of each five blocks, two are holes");
    assert_eq!(read(&disk, 0, SIZE as usize).unwrap(), before);
    let refused = disk.zero_if(0, SIZE, |_, _, _| Err(NoSpace::Shares)).unwrap_err();
    assert!(matches!(refused, ZeroError::NoSpace(NoSpace::Shares)), "{refused}");
    assert_eq!(read(&disk, 0, SIZE as usize).unwrap(), before);
    assert_eq!(files.writable.metadata().unwrap().blocks(), 0);
}

#[test]
fn zeroes_need_room_only_for_blocks_that_the_writable_layer_does_not_have() {
    let files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    write(&mut disk, 4 * 4096, vec![9; 4096]).unwrap();
    let mut asked = Vec::new();
    let note = |_: &Disk, at, len| {
        asked.push((at, len));
        Ok(())
    };
    disk.zero_if(0, SIZE, note).unwrap();
    assert_eq!(asked, [(0, 4 * 4096), (5 * 4096, SIZE - 5 * 4096)]);
    assert_eq!(read(&disk, 0, SIZE as usize).unwrap(), vec![0; SIZE as usize]);
}

#[test]
fn a_write_that_ended_within_a_block_is_completed_from_below_when_the_disk_is_opened_again() {
    // The file system of the test reports whole blocks, so the search is given what one with
    // smaller blocks reports.
    let files = Files::new(SIZE);
    let disk = files.open().unwrap();
    files.writable.write_all_at(&[9; 1024], 2 * 4096).unwrap();
    disk.copy_up(2 * 4096 + 1024..3 * 4096).unwrap();
    drop(disk);
    let again = Disk::open_again(files.spec()).unwrap();
    let expected = [&[9; 1024], &files.content()[2 * 4096 + 1024..]].concat();
    assert_eq!(read(&again, 2 * 4096, expected.len()).unwrap(), expected);
}

#[test]
fn a_used_layer_of_another_length_or_without_write_access_is_refused() {
    let files = Files::new(SIZE);
    drop(files.open().unwrap());
    assert!(matches!(files.open(), Err(OpenDiskError::File { .. })), "a clone's must be empty");
    assert!(Disk::open_again(files.spec()).is_ok());
    files.writable.set_len(SIZE - 4096).unwrap();
    let refused = Disk::open_again(files.spec()).unwrap_err().to_string();
    assert!(refused.contains("used writable layer: expected 163840 bytes"), "{refused}");
    files.writable.set_len(SIZE).unwrap();
    let read_only = dayfly_sys::reopen::read_only(&files.writable).unwrap();
    let spec = DiskSpec { writable: Some(read_only), ..files.spec() };
    assert!(matches!(Disk::open_again(spec), Err(OpenDiskError::File { .. })));
}
