#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::record::{MAGIC, MAX_RUNS, PageMapError, Run, VERSION, decode, encode, read};
use super::{PageMap, Stretch};
use crate::arch::layout;
use crate::config::{DISK_BLOCK_BYTES, MAX_DISKS, MAX_LAYERS};
use crate::disk::layer::MAX_BLOCKS;
use crate::disk::{Disk, DiskSpec, IoList};
use crate::golden::golden;
use crate::memory;
use dayfly_units::PAGE_SIZE;
use dayfly_units::sealed::{self, SealError};
use proptest::prelude::*;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

const RAM: u64 = 64 << 20;
const FRAMES: u32 = 16_384;
const PAGE: usize = 4096;

const fn run(first: u32, count: u32, disk: u8, layer: u8, block: u32) -> Run {
    Run { first, count, disk, layer, block }
}

fn sample() -> Vec<Run> {
    let last_block = MAX_BLOCKS as u32 - 1;
    vec![run(0, 3, 0, 0, 7), run(3, 1, 7, 64, last_block), run(FRAMES - 2, 2, 1, 2, 0)]
}

#[test]
fn what_was_recorded_reads_back() {
    assert_eq!(decode(&encode(&sample()), RAM).unwrap(), sample());
    assert_eq!(decode(&encode(&[]), RAM).unwrap(), []);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&encode(&sample()), 0).unwrap();
    assert_eq!(read(&file, RAM).unwrap(), sample());
}

#[test]
fn a_record_of_version_1_is_read() {
    let bytes = golden("page-map-1", &encode(&sample()));
    assert!(bytes == encode(&sample()));
    assert_eq!(decode(&bytes, RAM).unwrap(), sample());
}

/// Version 1, byte by byte. Every later reader must still read this.
#[test]
fn the_layout_is_as_documented() {
    let bytes = encode(&[run(0x0403_0201, 0x0807_0605, 0x09, 0x0a, 0x0e0d_0c0b)]);
    assert_eq!(bytes[..8], *b"DFpgmap\n");
    assert_eq!(bytes[40..44], [1, 0, 0, 0]);
    assert_eq!(bytes[sealed::HEADER_BYTES..], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]);
}

#[test]
fn every_truncation_and_every_flipped_bit_is_refused() {
    let whole = encode(&sample());
    for len in 0..whole.len() {
        assert!(decode(&whole[..len], RAM).is_err(), "truncated to {len}");
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&flipped, RAM).is_err(), "flipped bit {bit}");
    }
}

#[test]
fn runs_that_no_vm_can_have_are_refused() {
    let last = MAX_BLOCKS as u32 - 1;
    for bad in [
        vec![run(0, 0, 0, 0, 0)],
        vec![run(FRAMES, 1, 0, 0, 0)],
        vec![run(FRAMES - 1, 2, 0, 0, 0)],
        vec![run(u32::MAX, u32::MAX, 0, 0, 0)],
        vec![run(5, 2, 0, 0, 0), run(6, 1, 0, 0, 9)],
        vec![run(5, 2, 0, 0, 0), run(4, 1, 0, 0, 9)],
        vec![run(0, 1, MAX_DISKS as u8, 0, 0)],
        vec![run(0, 1, 0, MAX_LAYERS as u8 + 1, 0)],
        vec![run(0, 1, 0, 0, last + 1)],
        vec![run(0, 2, 0, 0, last)],
        vec![run(0, 1, 0, 0, u32::MAX)],
    ] {
        let number = bad.len() - 1;
        let refused = decode(&encode(&bad), RAM);
        assert!(
            matches!(refused, Err(PageMapError::Run { number: n, .. }) if n == number),
            "{bad:?}"
        );
    }
    let ragged = sealed::seal(&MAGIC, VERSION, &[0; 15]);
    assert!(matches!(decode(&ragged, RAM), Err(PageMapError::Ragged(15))));
}

#[test]
fn more_than_a_run_for_each_frame_is_refused_before_it_is_read() {
    let most = u64::from(FRAMES) * 14;
    let bytes = sealed::seal(&MAGIC, VERSION, &vec![0; most as usize + 1]);
    let refused = decode(&bytes, RAM);
    assert!(
        matches!(refused, Err(PageMapError::Seal(SealError::Length { cap, .. })) if cap == most)
    );
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(matches!(read(&file, RAM), Err(PageMapError::Length { max, .. }) if max == most + 96));
    // For RAM of any size.
    let refused = read(&file, layout::MAX_MEMORY_BYTES);
    assert!(
        matches!(refused, Err(PageMapError::Length { max, .. }) if max == MAX_RUNS as u64 * 14 + 96)
    );
}

/// A list of the pages at these guest addresses.
fn pages(memory: &GuestMemoryMmap, at: impl IntoIterator<Item = u64>) -> IoList<'_> {
    let mut list = IoList::new();
    at.into_iter().for_each(|at| list.push(memory.get_slice(GuestAddress(at), PAGE).unwrap()));
    list
}

#[test]
fn frames_are_pages_of_the_memory_file() {
    let bytes = 5 << 30;
    let memory = memory::anonymous(bytes).unwrap();
    let mut map = PageMap::new(&memory);
    let mut expected = Vec::new();
    for (n, (guest, offset, len)) in (0..).zip(layout::ram(bytes)) {
        let ends = [(guest.0, offset), (guest.0 + len - PAGE_SIZE, offset + len - PAGE_SIZE)];
        for (block, (guest, offset)) in (10 * n..).step_by(2).zip(ends) {
            map.filled(1, u64::from(block) * PAGE_SIZE, &pages(&memory, [guest]));
            expected.push(Stretch { first: (offset / PAGE_SIZE) as u32, count: 1, disk: 1, block });
        }
    }
    assert_eq!(map.stretches(), expected);
    assert_eq!(expected.last().map(|s| s.first), Some((bytes / PAGE_SIZE - 1) as u32));
}

#[test]
fn the_map_grows_with_the_frames_that_met_a_block_and_not_beyond_its_bound() {
    let memory = memory::anonymous(RAM).unwrap();
    let mut map = PageMap::new(&memory);
    let empty = map.heap_bytes();
    map.filled(0, 0, &pages(&memory, [0]));
    assert_eq!(map.heap_bytes(), empty + 2048);
    for round in 0..3 {
        for first in (0..RAM).step_by(256 << 10) {
            // From last to first, so that no two are consecutive.
            let list = pages(&memory, (0..64).rev().map(|n| first + n * PAGE_SIZE));
            map.written(round, first, &list);
        }
    }
    let bound = (RAM / 1024 + RAM / (2 << 20) * 8) as usize;
    assert_eq!((map.heap_bytes(), map.stretches().len()), (bound, FRAMES as usize));
    // Disks and blocks that no VM has.
    map.filled(MAX_DISKS as u8, 0, &pages(&memory, [0]));
    map.filled(0, MAX_BLOCKS * PAGE_SIZE, &pages(&memory, [PAGE_SIZE]));
    assert_eq!(map.stretches().len(), FRAMES as usize - 2);
    // Memory that is not guest RAM.
    let mut ours = [0; 3 * PAGE];
    map.filled(0, 0, &IoList::of(&mut ours));
    map.lost(&IoList::of(&mut ours));
    assert_eq!((map.heap_bytes(), map.stretches().len()), (bound, FRAMES as usize - 2));
}

/// A base with a non-zero block for each `true` in `data`, a hole for each `false`, and then `more`
/// bytes.
fn base(data: &[bool], more: usize) -> File {
    let file = tempfile::tempfile().unwrap();
    for (block, _) in (0_u64..).zip(data).filter(|(_, data)| **data) {
        file.write_all_at(&[block as u8 | 0x40; PAGE], block * DISK_BLOCK_BYTES).unwrap();
    }
    file.set_len((data.len() * PAGE) as u64).unwrap();
    file.write_all_at(&vec![0x7f; more], (data.len() * PAGE) as u64).unwrap();
    file
}

fn disk_over(base: &File, blocks: u64, writable: bool) -> Disk {
    let writable = writable.then(|| tempfile::tempfile().unwrap().into());
    let base = base.try_clone().unwrap().into();
    let (size_bytes, layers, trees) = (blocks * DISK_BLOCK_BYTES, vec![], vec![]);
    Disk::open(DiskSpec { size_bytes, base, layers, writable, trees }).unwrap()
}

fn freeze(disk: &mut Disk) {
    let [map, next] = [(); 2].map(|()| tempfile::tempfile().unwrap());
    disk.prepare_freeze(map.as_fd(), next.as_fd()).unwrap();
    disk.freeze(next.into());
}

#[test]
fn blocks_are_found_in_the_file_that_has_them() {
    let base = base(&[true, true, false, true], 512);
    let mut disk = disk_over(&base, 16, true);
    let all = [Stretch { first: 100, count: 16, disk: 2, block: 0 }];
    let held = |disk: &Disk| {
        let mut runs = Vec::new();
        disk.held(&all, &mut runs);
        runs
    };
    // Not the hole, not the block of which the base has only a sector, nothing past it.
    assert_eq!(held(&disk), [run(100, 2, 2, 0, 0), run(103, 1, 2, 0, 3)]);
    let write = |disk: &mut Disk, block: u64| {
        disk.write(block * DISK_BLOCK_BYTES, &IoList::of(&mut [1; PAGE])).unwrap();
    };
    write(&mut disk, 1);
    write(&mut disk, 9);
    let unwritten = [run(100, 1, 2, 0, 0), run(103, 1, 2, 0, 3)];
    assert_eq!(held(&disk), unwritten, "nothing of the writable layer");
    freeze(&mut disk);
    assert_eq!(
        held(&disk),
        [run(100, 1, 2, 0, 0), run(101, 1, 2, 1, 1), run(103, 1, 2, 0, 3), run(109, 1, 2, 1, 9)]
    );
    write(&mut disk, 9);
    write(&mut disk, 10);
    disk.discard(0, 2 * DISK_BLOCK_BYTES).unwrap();
    assert_eq!(held(&disk), [run(103, 1, 2, 0, 3)], "written since the freeze");
    freeze(&mut disk);
    assert_eq!(
        held(&disk),
        [run(100, 2, 2, 2, 0), run(103, 1, 2, 0, 3), run(109, 2, 2, 2, 9)],
        "discarded blocks are zeroes over data, else holes"
    );
    freeze(&mut disk);
    assert_eq!(
        held(&disk),
        [run(100, 2, 2, 2, 0), run(103, 1, 2, 0, 3), run(109, 2, 2, 2, 9)],
        "a layer without blocks counts"
    );
    assert_eq!(held(&disk_over(&base, 16, false)), [run(100, 2, 2, 0, 0), run(103, 1, 2, 0, 3)]);
    assert_eq!(held(&Disk::none()), []);
}

proptest! {
    /// Any stretches in any order: a block that is found is in its file, all other blocks are in no
    /// file.
    #[test]
    fn what_is_found_is_there_and_what_is_not_is_zero(
        data in proptest::collection::vec(any::<bool>(), 0..24),
        steps in proptest::collection::vec((0..24_u64, 1..6_u64, 0..6_u8), 0..24),
        asked in proptest::collection::vec((0..24_u32, 1..12_u32), 1..12),
    ) {
        let base = base(&data, 0);
        let mut disk = disk_over(&base, 24, true);
        for (block, count, what) in steps {
            let (at, len) = (block * DISK_BLOCK_BYTES, count.min(24 - block) * DISK_BLOCK_BYTES);
            match what {
                0..3 => {
                    let mut content = vec![block as u8 + 0x80 + what; len as usize];
                    disk.write(at, &IoList::of(&mut content)).unwrap();
                }
                3..5 => disk.discard(at, len).unwrap(),
                _ => freeze(&mut disk),
            }
        }
        let mut stretches = Vec::new();
        for (n, (block, count)) in (0..).zip(asked) {
            stretches.push(Stretch { first: n * 32, count: count.min(24 - block), disk: 0, block });
        }
        freeze(&mut disk);
        let mut runs = Vec::new();
        disk.held(&stretches, &mut runs);
        for stretch in stretches {
            for n in 0..stretch.count {
                let at = u64::from(stretch.block + n) * DISK_BLOCK_BYTES;
                let mut content = vec![0; PAGE];
                disk.read(at, &IoList::of(&mut content)).unwrap();
                let frame = stretch.first + n;
                let has = |r: &&Run| (r.first..r.first + r.count).contains(&frame);
                let found: Vec<_> = runs.iter().filter(has).collect();
                let Some(run) = found.first() else {
                    let block = stretch.block + n;
                    prop_assert_eq!(content, vec![0; PAGE], "block {} was not found", block);
                    continue;
                };
                prop_assert_eq!(found.len(), 1);
                prop_assert_eq!(run.block + (frame - run.first), stretch.block + n);
                let file = File::from(disk.file(run.layer).unwrap().0.try_clone().unwrap());
                let mut there = vec![0; PAGE];
                file.read_exact_at(&mut there, at).unwrap();
                prop_assert_eq!(there, content);
            }
        }
    }

    #[test]
    fn any_sealed_payload_is_read_or_refused(
        payload in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        if let Ok(runs) = decode(&sealed::seal(&MAGIC, VERSION, &payload), RAM) {
            prop_assert_eq!(&encode(&runs)[sealed::HEADER_BYTES..], payload);
        }
    }

    /// As before, for runs that are nearly right.
    #[test]
    fn any_runs_are_read_as_they_are_or_refused(
        runs in proptest::collection::vec(
            (
                0..40_u32,
                0..5_u32,
                0..9_u8,
                0..67_u8,
                prop_oneof![0..99_u32, (MAX_BLOCKS as u32 - 3)..(MAX_BLOCKS as u32 + 1)],
            ),
            0..5,
        ),
        frames in 1..40_u64,
    ) {
        let runs: Vec<_> = runs.into_iter().map(|(f, c, d, l, b)| run(f, c, d, l, b)).collect();
        let end = |r: &Run| u64::from(r.first) + u64::from(r.count);
        let good = runs.iter().all(|r| {
            r.count > 0
                && end(r) <= frames
                && r.disk < 8
                && r.layer <= 64
                && u64::from(r.block) + u64::from(r.count) <= MAX_BLOCKS
        }) && runs.windows(2).all(|two| end(&two[0]) <= u64::from(two[1].first));
        let read = decode(&encode(&runs), frames * PAGE_SIZE);
        prop_assert_eq!(read.ok(), good.then_some(runs));
    }
}
