//! The work of a freeze, during which the VM stands still.

use super::block_set::tests::chunks_looked_at;
use super::layer::LayerMap;
use super::{Disk, DiskSpec, IoList};
use crate::config::DISK_BLOCK_BYTES;
use dayfly_sys::pagemap::{Entry, read_at};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;

fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// The pages of these bytes that are mapped because this process touched them.
fn touched(bytes: &[u8]) -> usize {
    let mut entries = vec![Entry::default(); bytes.len().div_ceil(4096)];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    read_at(&pagemap, bytes.as_ptr(), &mut entries).unwrap();
    entries.iter().filter(|entry| entry.is_touched()).count()
}

/// Freezes a disk of this size with a few blocks in its writable layer. Returns the chunks at which
/// the freeze looked, the pages of the index that it touched, and the blocks in the map.
fn frozen(size_bytes: u64) -> (u64, usize, Vec<Range<u64>>) {
    let writable = Some(file().into());
    let spec =
        DiskSpec { size_bytes, base: file().into(), layers: vec![], writable, trees: vec![] };
    let mut disk = Disk::open(spec).unwrap();
    for block in [0, 5, 4095, 4096, 70_000, 200_000] {
        disk.write(block * DISK_BLOCK_BYTES, &IoList::of(&mut [1; 4096])).unwrap();
    }
    disk.discard(6 * DISK_BLOCK_BYTES, 3 * DISK_BLOCK_BYTES).unwrap();
    let (map, next) = (file(), file());
    let before = touched(disk.index());
    let _ = chunks_looked_at();
    disk.prepare_freeze(map.as_fd(), next.as_fd()).unwrap();
    disk.freeze(next.into());
    let touched = touched(disk.index()) - before;
    (chunks_looked_at(), touched, LayerMap::read(map.as_fd()).unwrap().runs().collect())
}

#[test]
fn a_freeze_of_a_huge_disk_does_the_work_of_a_small_one_with_the_same_writes() {
    let small = frozen(1 << 30);
    let runs = vec![0..1, 5..9, 4095..4097, 70_000..70_001, 200_000..200_001];
    assert_eq!(small, (4, 0, runs), "four chunks of 16 MiB have a block");
    assert_eq!(frozen(1 << 40), small);
}
