#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::DeviceSet;
use super::block::Block;
use super::block_bench::Bench;
use super::testing::{
    DATA, Driver, HIGH, LOW_END, Machine, Piece, disk, memory, reads, temp_file, until, writes,
};
use crate::config::DISK_BLOCK_BYTES;
use crate::disk::page_map::{PageMap, Run};
use crate::disk::{Disk, DiskSpec, FreezeFiles, IoList};
use crate::memory::YieldPoints;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, OwnedFd};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD as DISCARD, VIRTIO_BLK_T_IN as IN, VIRTIO_BLK_T_OUT as OUT,
    VIRTIO_BLK_T_WRITE_ZEROES as ZEROES,
};
use vm_memory::{Bytes as _, GuestAddress};

const BLOCKS: u64 = 16;
const PAGE: u64 = 4096;
const BODY: u64 = DATA + 0x1000;
/// The frame of [`BODY`].
const FRAME: u32 = (BODY / PAGE) as u32;
/// The frame of [`HIGH`]: the memory file has no hole.
const HIGH_FRAME: u32 = (LOW_END / PAGE) as u32;
/// Number of the disk in a [`Bench`].
const NUMBER: u8 = 3;

fn bench(writable: bool) -> Bench {
    Bench::of(Disk::open(disk(BLOCKS, &content(), vec![], writable)).unwrap())
}

/// A base image whose sectors all differ.
fn content() -> Vec<u8> {
    (0..BLOCKS * DISK_BLOCK_BYTES).map(|at| (at / 512) as u8 ^ (at % 3) as u8).collect()
}

/// The map's entries: for each frame, disk and block.
fn entries(pages: &PageMap) -> BTreeMap<u32, (u8, u32)> {
    let stretches = pages.stretches().into_iter();
    stretches
        .flat_map(|s| (0..s.count).map(move |n| (s.first + n, (s.disk, s.block + n))))
        .collect()
}

fn blocks<const N: usize>(entries: [(u32, u32); N]) -> BTreeMap<u32, (u8, u32)> {
    entries.map(|(frame, block)| (frame, (NUMBER, block))).into()
}

/// The entries after one request, with an empty map before it.
fn after(kind: u32, sector: u64, body: &[Piece]) -> BTreeMap<u32, (u8, u32)> {
    let mut bench = bench(true);
    assert_eq!(bench.request(kind, sector, body).0, 0);
    entries(&bench.pages)
}

#[test]
fn whole_blocks_in_whole_frames_are_noted_in_both_directions() {
    assert_eq!(after(IN, 0, &[writes(BODY, 8192)]), blocks([(FRAME, 0), (FRAME + 1, 1)]));
    assert_eq!(after(OUT, 24, &[reads(BODY, 4096)]), blocks([(FRAME, 3)]));
    assert_eq!(after(IN, BLOCKS * 8 - 8, &[writes(HIGH, 4096)]), blocks([(HIGH_FRAME, 15)]));
    // The request also covers parts of the blocks before and after.
    let wide = [writes(BODY + 512, 3 * 4096 - 1024)];
    assert_eq!(after(IN, 1, &wide), blocks([(FRAME + 1, 1)]));
}

#[test]
fn what_does_not_fall_on_both_borders_is_not_noted() {
    for kind in [IN, OUT] {
        let piece = if kind == IN { writes } else { reads };
        for (sector, at, len) in [
            (0, BODY + 512, 8192),
            (1, BODY, 8192),
            (0, BODY + 1, 8192),
            (0, BODY, 3584),
            (1, BODY + 512, 3584),
        ] {
            assert_eq!(
                after(kind, sector, &[piece(at, len)]),
                blocks([]),
                "{kind} {sector} {at:#x} {len}"
            );
        }
    }
}

#[test]
fn buffers_are_taken_as_they_follow_each_other() {
    let cut =
        [writes(BODY, 1), writes(BODY + 1, 0), writes(BODY + 1, 511), writes(BODY + 512, 3584)];
    assert_eq!(after(IN, 8, &cut), blocks([(FRAME, 1)]), "one page in pieces");
    let swapped = [writes(BODY + 4096, 4096), writes(BODY, 4096)];
    assert_eq!(after(IN, 0, &swapped), blocks([(FRAME, 1), (FRAME + 1, 0)]));
    let halves = [writes(BODY + 2048, 2048), writes(BODY, 2048)];
    assert_eq!(after(IN, 0, &halves), blocks([]), "the whole page, in another order");
    let apart = [writes(BODY, 2048), writes(BODY + 8192 + 2048, 2048)];
    assert_eq!(after(IN, 0, &apart), blocks([]));
    let twice = [writes(BODY, 4096), writes(BODY, 4096)];
    assert_eq!(after(IN, 0, &twice), blocks([(FRAME, 1)]), "the last one is there");
    let over = [writes(BODY, 4096), writes(BODY + 512, 512), writes(HIGH, 3584)];
    assert_eq!(after(IN, 0, &over), blocks([]), "a part of it was overwritten");
    // Data crosses the border of two adjacent regions, and of two with a hole between them.
    let border = (LOW_END / 2 / PAGE) as u32;
    assert_eq!(
        after(IN, 0, &[writes(LOW_END / 2 - 4096, 8192)]),
        blocks([(border - 1, 0), (border, 1)])
    );
    let far = [writes(LOW_END - 4096, 4096), writes(HIGH, 4096)];
    assert_eq!(after(IN, 0, &far), blocks([(HIGH_FRAME - 1, 0), (HIGH_FRAME, 1)]));
    let many: Vec<_> = (0..64).map(|n| reads(BODY + n * 512, 512)).collect();
    assert_eq!(after(OUT, 8, &many), (0..8).map(|n| (FRAME + n, (NUMBER, n + 1))).collect());
}

#[test]
fn a_later_transfer_replaces_what_an_earlier_one_left() {
    let mut bench = bench(true);
    let mut noted = |kind: u32, sector: u64, piece: Piece| {
        assert_eq!(bench.request(kind, sector, &[piece]).0, 0);
        entries(&bench.pages)
    };
    noted(IN, 0, writes(BODY, 8192));
    assert_eq!(noted(IN, 40, writes(BODY, 4096)), blocks([(FRAME, 5), (FRAME + 1, 1)]));
    assert_eq!(noted(OUT, 48, reads(BODY, 4096)), blocks([(FRAME, 6), (FRAME + 1, 1)]));
    // A part of the same block at its place; then a part of another block; then of the same block
    // at another place.
    assert_eq!(noted(IN, 50, writes(BODY + 1024, 512)), blocks([(FRAME, 6), (FRAME + 1, 1)]));
    assert_eq!(noted(IN, 42, writes(BODY + 1024, 512)), blocks([(FRAME + 1, 1)]));
    assert_eq!(noted(IN, 8, writes(BODY + 4096 + 512, 512)), blocks([]));
    // Writing a part of a frame to disk does not change the frame.
    noted(IN, 0, writes(BODY, 4096));
    assert_eq!(noted(OUT, 1, reads(BODY + 512, 512)), blocks([(FRAME, 0)]));
    assert_eq!(noted(OUT, 100, reads(BODY, 512)), blocks([(FRAME, 0)]));
}

#[test]
fn what_was_refused_is_not_noted_and_what_failed_is_forgotten() {
    let mut bench_ = bench(false);
    assert_eq!(bench_.request(IN, 0, &[writes(BODY, 4096)]).0, 0);
    for (kind, sector, piece) in [
        (OUT, 8, reads(BODY, 4096)),
        (IN, BLOCKS * 8, writes(BODY, 4096)),
        (IN, u64::MAX, writes(BODY, 4096)),
        (IN, 8, writes(BODY, 4095)),
        (IN, 8, reads(BODY, 4096)),
    ] {
        assert_eq!(bench_.request(kind, sector, &[piece]).0, 1);
        assert_eq!(entries(&bench_.pages), blocks([(FRAME, 0)]), "{kind} {sector}");
    }
    // The base was truncated: the host's error comes after some of the data was read.
    let base = temp_file(&content());
    let spec =
        DiskSpec { base: base.try_clone().unwrap().into(), ..disk(BLOCKS, &[], vec![], false) };
    let mut bench = Bench::of(Disk::open(spec).unwrap());
    assert_eq!(bench.request(IN, 0, &[writes(BODY, 4 * 4096)]).0, 0);
    base.set_len(8192).unwrap();
    assert_eq!(bench.request(IN, 8, &[writes(BODY + 512, 8192)]).0, 1);
    assert_eq!(entries(&bench.pages), blocks([(FRAME + 3, 3)]));
}

#[test]
fn a_failed_write_leaves_the_frame_as_it_was_noted() {
    let memfd = rustix::fs::memfd_create("layer", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let writable = Some(memfd.try_clone().unwrap());
    let spec = DiskSpec { writable, ..disk(BLOCKS, &content(), vec![], false) };
    let mut bench = Bench::of(Disk::open(spec).unwrap());
    rustix::fs::fcntl_add_seals(&memfd, rustix::fs::SealFlags::WRITE).unwrap();
    assert_eq!(bench.request(IN, 0, &[writes(BODY, 4096)]).0, 0);
    assert_eq!(bench.request(OUT, 8, &[reads(BODY, 8192)]).0, 1);
    assert_eq!(entries(&bench.pages), blocks([(FRAME, 0)]));
}

/// A machine with a driver for each of its disks.
struct Rig {
    machine: Machine,
    drivers: Vec<Driver>,
}

impl Rig {
    fn new(disks: Vec<DiskSpec>) -> Self {
        let count = disks.len();
        let machine = Machine::new(memory(), disks).run();
        let drivers = (0..count).map(|slot| Driver::start(&machine, slot, 0)).collect();
        Self { machine, drivers }
    }

    /// Performs one transfer through the device thread.
    fn transfer(&mut self, disk: usize, kind: u32, sector: u64, piece: Piece) {
        let (mem, driver) = (&self.machine.mem, &mut self.drivers[disk]);
        mem.write_obj(kind, GuestAddress(DATA)).unwrap();
        mem.write_obj(sector, GuestAddress(DATA + 8)).unwrap();
        mem.write_obj(0xff_u8, GuestAddress(DATA + 16)).unwrap();
        driver.queues[0].add(mem, &[reads(DATA, 16), piece, writes(DATA + 16, 1)]);
        driver.kick(&self.machine, 0);
        driver.queues[0].wait_used(mem, 1);
        until("the status is there", || mem.read_obj::<u8>(GuestAddress(DATA + 16)).unwrap() == 0);
    }

    fn set(&self) -> &DeviceSet {
        &self.machine.set
    }

    fn page_map(&self) -> Vec<Run> {
        self.set().page_map(&mut YieldPoints::none())
    }

    /// Freezes the layers; returns the map, which is the same while the devices are paused and
    /// after that.
    fn freeze(&self, writable: usize) -> Vec<Run> {
        let file = || -> OwnedFd { temp_file(&[]).into() };
        let files = |_| FreezeFiles { map: file(), next: file(), frozen: None };
        self.set().pause();
        self.set().freeze_layers((0..writable).map(files).collect()).unwrap();
        let paused = self.page_map();
        self.set().resume();
        assert_eq!(self.page_map(), paused);
        paused
    }
}

const fn run(first: u32, count: u32, disk: u8, layer: u8, block: u32) -> Run {
    Run { first, count, disk, layer, block }
}

#[test]
fn a_saved_map_names_disk_and_layer_and_leaves_out_what_nothing_holds() {
    let writable = || disk(BLOCKS, &content()[..8 * 4096], vec![], true);
    let read_only = disk(BLOCKS, &content(), vec![], false);
    let mut rig = Rig::new(vec![writable(), read_only, writable()]);
    rig.transfer(0, IN, 0, writes(BODY, 4 * 4096));
    rig.transfer(1, IN, 64, writes(BODY + 8 * PAGE, 2 * 4096));
    rig.transfer(2, OUT, 16, reads(BODY + 4 * PAGE, 2 * 4096));
    rig.transfer(2, IN, 48, writes(HIGH, 4 * 4096)); // the disk's base ends after two of them
    // The frame had a block of another disk.
    rig.transfer(2, IN, 0, writes(BODY + PAGE, 4096));
    let f = FRAME;
    assert_eq!(
        rig.freeze(2),
        [
            run(f, 1, 0, 0, 0),
            run(f + 1, 1, 2, 0, 0),
            run(f + 2, 2, 0, 0, 2),
            run(f + 4, 2, 2, 1, 2),
            run(f + 8, 2, 1, 0, 8),
            run(HIGH_FRAME, 2, 2, 0, 6),
        ]
    );
    // In the second layer: blocks 3 and 4 of the last disk, from other frames, and a part of block
    // 0 of the first disk.
    rig.transfer(2, OUT, 24, reads(BODY + 32 * PAGE, 2 * 4096));
    rig.transfer(0, OUT, 1, reads(BODY + 512, 512));
    // A discarded block: its layer has it, as a hole.
    rig.machine.mem.write_obj([64_u64, 8], GuestAddress(BODY + 40 * PAGE)).unwrap();
    rig.transfer(0, DISCARD, 0, reads(BODY + 40 * PAGE, 16));
    rig.transfer(0, IN, 64, writes(BODY + 41 * PAGE, 4096));
    assert_eq!(
        rig.page_map(),
        [
            run(f + 1, 1, 2, 0, 0),
            run(f + 2, 2, 0, 0, 2),
            run(f + 4, 1, 2, 1, 2),
            run(f + 8, 2, 1, 0, 8),
            run(HIGH_FRAME, 2, 2, 0, 6),
        ],
        "nothing of a layer that is not frozen, which may be written again"
    );
    assert_eq!(
        rig.freeze(2),
        [
            run(f, 1, 0, 2, 0),
            run(f + 1, 1, 2, 0, 0),
            run(f + 2, 2, 0, 0, 2),
            run(f + 4, 1, 2, 1, 2),
            run(f + 5, 1, 2, 2, 3),
            run(f + 8, 2, 1, 0, 8),
            run(f + 32, 2, 2, 2, 3),
            run(HIGH_FRAME, 2, 2, 0, 6),
        ]
    );
}

#[derive(Debug, Clone)]
enum Step {
    /// A request: to the second disk, as a write, first sector, offset from [`BODY`], and buffers.
    /// A buffer is the number of bytes skipped before it, and its length.
    Move(bool, bool, u64, u64, Vec<(u64, u64)>),
    /// Zeroes a range: on the second disk, first sector, number of sectors, exactly rather than by
    /// discard.
    Zero(bool, u64, u64, bool),
    /// The guest writes to a frame.
    Touch(u64, u8),
    Freeze(bool),
}

const SECTORS: u64 = BLOCKS * 8;
/// Number of frames with buffers of the model's guest.
const ROOM: u64 = 8;

fn step() -> impl Strategy<Value = Step> {
    let gap = prop_oneof![5 => Just(0_u64), 1 => Just(512), 1 => 1..5000_u64];
    let len = prop_oneof![4 => Just(4096_u64), 2 => Just(512), 2 => Just(8192), 1 => 1..5000_u64];
    let start = prop_oneof![
        4 => (0..ROOM).prop_map(|n| n * PAGE),
        2 => (0..ROOM * 8).prop_map(|n| n * 512),
        1 => 0..PAGE,
    ];
    let sector = || prop_oneof![3 => (0..BLOCKS).prop_map(|n| n * 8), 2 => 0..SECTORS];
    let buffers = proptest::collection::vec((gap, len), 1..5);
    prop_oneof![
        8 => (any::<bool>(), any::<bool>(), sector(), start, buffers)
            .prop_map(|(disk, write, sector, start, buffers)| {
                Step::Move(disk, write, sector, start, buffers)
            }),
        1 => (any::<bool>(), 0..SECTORS, 1..20_u64, any::<bool>())
            .prop_map(|(disk, sector, count, exact)| {
                Step::Zero(disk, sector, count.min(SECTORS - sector), exact)
            }),
        1 => (0..ROOM, any::<u8>()).prop_map(|(frame, fill)| Step::Touch(frame, fill)),
        1 => any::<bool>().prop_map(Step::Freeze),
    ]
}

/// The model: it computes, byte by byte, the entries that the map should have.
#[derive(Default)]
struct Model {
    entries: BTreeMap<u32, (u8, u32)>,
    /// Frames whose bytes may differ from their block's, because a write changed the frame or the
    /// block.
    stale: BTreeSet<u32>,
}

impl Model {
    /// Applies a transfer; `moved` are pairs of a byte of memory and the byte of the disk.
    fn moved(&mut self, disk: u8, into_memory: bool, moved: &[(u64, u64)]) {
        if !into_memory {
            let written: BTreeSet<_> =
                moved.iter().map(|(_, at)| (disk, (at / PAGE) as u32)).collect();
            self.changed(&written);
        }
        let mut frames: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
        for (byte, at) in moved {
            frames.entry((byte / PAGE) as u32).or_default().push((byte % PAGE, *at));
        }
        for (frame, bytes) in frames {
            let block = (bytes[0].1 / PAGE) as u32;
            let same = bytes.iter().all(|(byte, at)| *at == u64::from(block) * PAGE + byte);
            let held = self.entries.get(&frame).copied();
            if same && bytes.len() as u64 == PAGE {
                self.entries.insert(frame, (disk, block));
                self.stale.remove(&frame);
            } else if into_memory && !(same && held == Some((disk, block))) {
                self.entries.remove(&frame);
            }
        }
    }

    /// Marks the frames of these blocks as stale.
    fn changed(&mut self, blocks: &BTreeSet<(u8, u32)>) {
        self.stale.extend(
            self.entries.iter().filter(|(_, held)| blocks.contains(held)).map(|(frame, _)| frame),
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    /// With two disks and one memory, the map equals the model's. An entry is true unless a write
    /// changed its frame or its block.
    #[test]
    fn an_entry_is_true_until_something_changes_its_frame_or_its_block(
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let mut bench = bench(true);
        let second = Disk::open(disk(BLOCKS, &content()[..20_000], vec![], true));
        let mut other = Block::new(second.unwrap(), 5);
        let mut model = Model::default();
        // A buffer for header, ranges and status.
        let scratch = BODY + 64 * PAGE;
        for (round, step) in (0_u8..).zip(steps) {
            let swap = matches!(
                step,
                Step::Move(true, ..) | Step::Zero(true, ..) | Step::Freeze(true)
            );
            let number = if swap { 5 } else { NUMBER };
            if swap {
                std::mem::swap(&mut bench.block, &mut other);
            }
            match step {
                Step::Move(_, write, sector, start, buffers) => {
                    let (mut pieces, mut moved) = (Vec::new(), Vec::new());
                    let (mut at, mut left) = (BODY + start, (SECTORS - sector) * 512);
                    for (gap, len) in buffers {
                        at += gap;
                        let len = len.min(left);
                        let piece = if write { reads } else { writes };
                        pieces.push(piece(at, len as u32));
                        let offset = SECTORS * 512 - left;
                        moved.extend((0..len).map(|n| (at + n, offset + n)));
                        (at, left) = (at + len, left - len);
                    }
                    // The transfer must have whole sectors.
                    let last = moved.len() as u64 % 512;
                    if last != 0 && left >= 512 - last {
                        let piece = if write { reads } else { writes };
                        pieces.push(piece(at, (512 - last) as u32));
                        let offset = SECTORS * 512 - left;
                        moved.extend((0..512 - last).map(|n| (at + n, offset + n)));
                    }
                    let (status, _) = bench.request(if write { OUT } else { IN }, sector, &pieces);
                    prop_assert_eq!(status, 0);
                    model.moved(number, !write, &moved);
                }
                Step::Zero(_, sector, count, exact) => {
                    bench.mem.write_obj([sector, count], GuestAddress(scratch)).unwrap();
                    let kind = if exact { ZEROES } else { DISCARD };
                    prop_assert_eq!(bench.request(kind, 0, &[reads(scratch, 16)]).0, 0);
                    let zeroed = sector / 8..(sector + count).div_ceil(8);
                    model.changed(&zeroed.map(|block| (number, block as u32)).collect());
                }
                Step::Touch(frame, fill) => {
                    let at = GuestAddress(BODY + frame * PAGE + 100);
                    bench.mem.write_slice(&[fill ^ round; 700], at).unwrap();
                    model.stale.insert(FRAME + frame as u32);
                }
                Step::Freeze(_) => {
                    let (map, next) = (temp_file(&[]), temp_file(&[]));
                    let live = bench.block.disk();
                    if live.frozen_layers() < 60 {
                        live.prepare_freeze(map.as_fd(), next.as_fd()).unwrap();
                        live.freeze(next.into());
                    }
                }
            }
            if swap {
                std::mem::swap(&mut bench.block, &mut other);
            }
            prop_assert_eq!(&entries(&bench.pages), &model.entries);
        }
        for (frame, (number, block)) in entries(&bench.pages) {
            if model.stale.contains(&frame) {
                continue;
            }
            let live = if number == 5 { &mut other } else { &mut bench.block };
            let mut there = vec![0; PAGE as usize];
            live.disk().read(u64::from(block) * PAGE, &IoList::of(&mut there)).unwrap();
            let bytes = bench.bytes(u64::from(frame) * PAGE, PAGE as usize);
            prop_assert_eq!(bytes, there, "frame {}", frame);
        }
    }

    /// If descriptors overlap and repeat, the map stays within RAM and its bound, and nothing
    /// panics.
    #[test]
    fn overlapping_buffers_are_noted_or_not_and_never_too_many(
        requests in proptest::collection::vec(
            (
                any::<bool>(),
                0..SECTORS,
                proptest::collection::vec((0..4 * PAGE, 0..9000_u32), 1..8),
            ),
            1..12,
        ),
    ) {
        let mut bench = bench(true);
        for (write, sector, buffers) in requests {
            let piece = if write { reads } else { writes };
            let pieces: Vec<_> =
                buffers.into_iter().map(|(at, len)| piece(HIGH + at, len)).collect();
            bench.request(if write { OUT } else { IN }, sector, &pieces);
        }
        let noted = entries(&bench.pages);
        let room = HIGH_FRAME..HIGH_FRAME + 7;
        let in_bounds = |(frame, (_, block)): (&u32, &(u8, u32))| {
            room.contains(frame) && u64::from(*block) < BLOCKS
        };
        prop_assert!(noted.iter().all(in_bounds));
    }
}
