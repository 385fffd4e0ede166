//! A block device against a model, and with arbitrary descriptors.

#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::block_bench::{BLOCKS, BODY, Bench, HEADER, OK, RINGS, SECTORS, STATUS};
use super::testing::{HIGH, LOW_END, Piece, disk, reads, writes};
use crate::config::DISK_BLOCK_BYTES;
use crate::disk::{Disk, LayerSpec};
use proptest::prelude::*;
use std::os::fd::{AsFd as _, OwnedFd};
use virtio_bindings::virtio_blk as spec;
use vm_memory::{Bytes as _, GuestAddress};

#[derive(Debug, Clone)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u8),
    Zero(u64, u64, bool),
    Flush,
    Freeze,
    Clone,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SECTORS, 1..40_u64).prop_map(|(s, n)| (s, n.min(SECTORS - s)));
    prop_oneof![
        4 => range().prop_map(|(s, n)| Step::Read(s, n)),
        6 => (range(), any::<u8>()).prop_map(|((s, n), fill)| Step::Write(s, n, fill)),
        2 => (range(), any::<bool>()).prop_map(|((s, n), exact)| Step::Zero(s, n, exact)),
        1 => Just(Step::Flush),
        1 => Just(Step::Freeze),
        1 => Just(Step::Clone),
    ]
}

/// `len` bytes cut into buffers of odd sizes that lie apart.
fn cut(len: u64, write: bool) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < len {
        let part = (len - at).min(1 + (at * 7 + 513) % 3000);
        let address = if pieces.len() % 5 == 4 { HIGH + at } else { BODY + at };
        pieces.push(Piece { address, len: u32::try_from(part).unwrap(), write });
        at += part;
    }
    pieces
}

/// Freezes the writable layer; returns its data and its map.
fn freeze(bench: &mut Bench) -> (OwnedFd, OwnedFd) {
    let file = || -> OwnedFd { super::testing::temp_file(&[]).into() };
    let (map, next) = (file(), file());
    let live = bench.block.disk();
    live.prepare_freeze(map.as_fd(), next.as_fd()).unwrap();
    live.freeze(next);
    (live.frozen_file(live.frozen_layers() - 1).try_clone().unwrap(), map)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// The device has the content of a byte array, also after freezes, and for a clone made from
    /// the frozen layers.
    #[test]
    fn a_disk_behind_a_queue_is_its_bytes(steps in proptest::collection::vec(step(), 1..40)) {
        let size = usize::try_from(BLOCKS * DISK_BLOCK_BYTES).unwrap();
        let base: Vec<u8> = (0..20_000_u32).map(|n| (n / 512) as u8 | 0x80).collect();
        let mut model = base.clone();
        model.resize(size, 0);
        let mut layers: Vec<(OwnedFd, OwnedFd)> = Vec::new();
        let mut bench = Bench::of(Disk::open(disk(BLOCKS, &base, vec![], true)).unwrap());
        for step in steps {
            let byte = |sector: u64| usize::try_from(sector * 512).unwrap();
            let span = |sector: u64, count: u64| byte(sector)..byte(sector + count);
            match step {
                Step::Read(sector, count) => {
                    let pieces = cut(count * 512, true);
                    prop_assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, sector, &pieces).0, OK);
                    let bytes = |piece: &Piece| bench.bytes(piece.address, piece.len as usize);
                    let got: Vec<u8> = pieces.iter().flat_map(bytes).collect();
                    prop_assert_eq!(&got, &model[span(sector, count)]);
                }
                Step::Write(sector, count, fill) => {
                    let pieces = cut(count * 512, false);
                    let part = &mut model[span(sector, count)];
                    for (n, byte) in part.iter_mut().enumerate() {
                        *byte = fill ^ (n / 100) as u8;
                    }
                    let mut rest: &[u8] = part;
                    for piece in &pieces {
                        let (now, later) = rest.split_at(piece.len as usize);
                        bench.mem.write_slice(now, GuestAddress(piece.address)).unwrap();
                        rest = later;
                    }
                    let answer = bench.request(spec::VIRTIO_BLK_T_OUT, sector, &pieces);
                    prop_assert_eq!(answer, (OK, 1));
                }
                Step::Zero(sector, count, exact) => {
                    let (first, end) = if exact {
                        (sector, sector + count)
                    } else {
                        (sector.div_ceil(8) * 8, (sector + count) / 8 * 8)
                    };
                    if first < end {
                        model[span(first, end - first)].fill(0);
                    }
                    bench.mem.write_obj([sector, count], GuestAddress(BODY)).unwrap();
                    let zeroes = spec::VIRTIO_BLK_T_WRITE_ZEROES;
                    let kind = if exact { zeroes } else { spec::VIRTIO_BLK_T_DISCARD };
                    prop_assert_eq!(bench.request(kind, 0, &[reads(BODY, 16)]), (OK, 1));
                }
                Step::Flush => {
                    let answer = bench.request(spec::VIRTIO_BLK_T_FLUSH, 0, &[]);
                    prop_assert_eq!(answer, (OK, 1));
                }
                Step::Freeze | Step::Clone if layers.len() == 60 => {}
                Step::Freeze | Step::Clone => {
                    layers.push(freeze(&mut bench));
                    if matches!(step, Step::Clone) {
                        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
                        let layer = |(data, map): &(OwnedFd, OwnedFd)| LayerSpec {
                            data: copy(data),
                            map: copy(map),
                        };
                        let chain = layers.iter().map(layer).collect();
                        let clone = Disk::open(disk(BLOCKS, &base, chain, true));
                        bench = Bench::of(clone.unwrap());
                    }
                }
            }
        }
        let mut got = Vec::new();
        for block in 0..BLOCKS {
            let pieces = [writes(BODY, 4096)];
            let answer = bench.request(spec::VIRTIO_BLK_T_IN, block * 8, &pieces);
            prop_assert_eq!(answer, (OK, 4097));
            got.extend(bench.bytes(BODY, 4096));
        }
        prop_assert_eq!(got, model);
    }

    /// Arbitrary descriptors, indirect tables and full rings lead to an answer or a broken device,
    /// never to a panic.
    #[test]
    fn any_descriptors_are_answered_or_refused(
        table in proptest::collection::vec(
            (
                prop_oneof![
                    Just(HEADER),
                    Just(BODY),
                    Just(STATUS),
                    Just(RINGS[0]),
                    Just(LOW_END - 8),
                    any::<u64>(),
                ],
                prop_oneof![
                    Just(16_u32),
                    Just(1),
                    Just(0),
                    Just(512),
                    Just(48),
                    0..5000_u32,
                    any::<u32>(),
                ],
                0..8_u16,
                0..10_u16,
            ),
            8,
        ),
        kind in prop_oneof![
            Just(0_u32),
            Just(1),
            Just(4),
            Just(8),
            Just(11),
            Just(13),
            any::<u32>(),
        ],
        sector in prop_oneof![0..SECTORS, any::<u64>()],
        heads in proptest::collection::vec(0..9_u16, 1..20),
    ) {
        let mut bench = Bench::new(true);
        bench.header(kind, sector);
        for (index, (address, len, flags, next)) in table.iter().enumerate() {
            bench.descriptor(RINGS[0], index as u16, *address, *len, *flags, *next);
            bench.descriptor(BODY, index as u16, *address, *len, *flags & 3, *next);
        }
        for head in heads {
            bench.publish(head);
            if bench.serve().is_err() {
                break;
            }
        }
    }
}
