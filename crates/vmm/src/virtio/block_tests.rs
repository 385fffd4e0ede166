use super::block::QUEUES;
use super::block_bench::{BLOCKS, BODY, Bench, HEADER, IOERR, OK, RINGS, SECTORS, STATUS, UNSUPP};
use super::ring::Broken;
use super::testing::{DATA, HIGH_END, INDIRECT, LOW_END, NEXT, WRITE, disk, reads, writes};
use crate::disk::{Disk, DiskTraffic, TreeSpec};
use dayfly_units::Digest;
use dayfly_units::tree::{LEAF_BYTES, TreeBuilder};
use std::os::unix::fs::FileExt as _;
use virtio_bindings::virtio_blk as spec;
use vm_memory::{Bytes as _, GuestAddress};

#[test]
fn reads_take_buffers_of_any_cut() {
    let mut bench = Bench::new(true);
    let cuts =
        [writes(BODY, 1), writes(BODY + 1, 0), writes(BODY + 1, 700), writes(BODY + 701, 323)];
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &cuts), (OK, 1025));
    assert_eq!(bench.bytes(BODY, 1024), [7; 1024]);
    // The data crosses the border of two regions, and header and status are cut into pieces.
    let border = LOW_END / 2;
    bench.header(spec::VIRTIO_BLK_T_IN, 18);
    let cut =
        [reads(HEADER, 5), reads(HEADER + 5, 11), writes(border - 600, 1024), writes(STATUS, 1)];
    bench.chain(RINGS[0], &cut);
    assert_eq!((bench.one(), bench.status()), (Ok(1025), OK));
    assert_eq!(bench.bytes(border - 600, 1024), [vec![7; 10_000 - 9216], vec![0; 240]].concat());
    // The status may be the last byte of the data buffer.
    bench.header(spec::VIRTIO_BLK_T_IN, 0);
    bench.chain(RINGS[0], &[reads(HEADER, 16), writes(BODY, 513)]);
    assert_eq!((bench.one(), bench.bytes(BODY, 513)), (Ok(513), [vec![7; 512], vec![0]].concat()));
}

#[test]
fn sectors_past_the_end_and_odd_lengths_are_errors() {
    let mut bench = Bench::new(true);
    for (sector, len) in [
        (SECTORS, 512),
        (SECTORS - 1, 1024),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (u64::MAX / 512 + 1, 512),
        (0, 511),
        (0, 1),
        (0, 513),
    ] {
        for (kind, body) in
            [(spec::VIRTIO_BLK_T_IN, writes(BODY, len)), (spec::VIRTIO_BLK_T_OUT, reads(BODY, len))]
        {
            assert_eq!(bench.request(kind, sector, &[body]), (IOERR, 1), "{kind} {sector} {len}");
        }
    }
    assert_eq!(
        bench.request(spec::VIRTIO_BLK_T_IN, SECTORS, &[]),
        (OK, 1),
        "nothing, at the very end"
    );
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, SECTORS + 1, &[]), (IOERR, 1));
    assert_eq!(bench.block.counters().refused, 17);
}

#[test]
fn wrong_directions_are_errors() {
    let mut bench = Bench::new(true);
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &[reads(BODY, 512)]), (IOERR, 1));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_OUT, 0, &[writes(BODY, 512)]), (IOERR, 1));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_FLUSH, 0, &[writes(BODY, 512)]), (IOERR, 1));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_FLUSH, 0, &[reads(BODY, 512)]), (IOERR, 1));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_GET_ID, 0, &[reads(BODY, 20)]), (IOERR, 1));
    // A readable buffer follows a writable one.
    bench.header(spec::VIRTIO_BLK_T_IN, 0);
    bench.chain(
        RINGS[0],
        &[reads(HEADER, 8), writes(BODY, 512), reads(HEADER + 8, 8), writes(STATUS, 1)],
    );
    assert_eq!((bench.one(), bench.status()), (Ok(1), IOERR));
    // The header is too short.
    bench.chain(RINGS[0], &[reads(HEADER, 15), writes(STATUS, 1)]);
    assert_eq!((bench.one(), bench.status()), (Ok(1), IOERR));
    assert_eq!(bench.bytes(BODY, 512), [0; 512]);
}

#[test]
fn chains_that_cannot_be_answered_break_the_device() {
    type Build = fn(&mut Bench);
    let cases: [(&str, Build); 12] = [
        ("no place for the status", |b| b.chain(RINGS[0], &[reads(HEADER, 16), reads(BODY, 512)])),
        ("an empty place for the status", |b| {
            b.chain(RINGS[0], &[reads(HEADER, 16), writes(STATUS, 0)])
        }),
        ("a loop", |b| {
            b.descriptor(RINGS[0], 0, HEADER, 16, NEXT, 1);
            b.descriptor(RINGS[0], 1, BODY, 512, WRITE | NEXT, 0);
        }),
        ("itself", |b| b.descriptor(RINGS[0], 0, HEADER, 16, NEXT, 0)),
        ("a next outside of the table", |b| b.descriptor(RINGS[0], 0, HEADER, 16, NEXT, QUEUES[0])),
        ("a buffer in the hole", |b| {
            b.chain(RINGS[0], &[reads(HEADER, 16), writes(LOW_END, 512), writes(STATUS, 1)]);
        }),
        ("a buffer over memory's end", |b| {
            b.chain(RINGS[0], &[reads(HEADER, 16), writes(HIGH_END - 511, 512), writes(STATUS, 1)]);
        }),
        ("a buffer over the end of addresses", |b| {
            b.chain(RINGS[0], &[reads(HEADER, 16), writes(u64::MAX - 5, 512), writes(STATUS, 1)]);
        }),
        ("more than 2^32 bytes", |b| {
            b.chain(RINGS[0], &[reads(0, u32::MAX), reads(0, u32::MAX), writes(STATUS, 1)]);
        }),
        ("an indirect table of an odd length", |b| {
            b.descriptor(RINGS[0], 0, BODY, 17, INDIRECT, 0)
        }),
        ("an empty indirect table", |b| b.descriptor(RINGS[0], 0, BODY, 0, INDIRECT, 0)),
        ("an indirect table in an indirect table", |b| {
            b.descriptor(BODY, 0, BODY + 0x100, 16, INDIRECT, 0);
            b.descriptor(BODY + 0x100, 0, STATUS, 1, WRITE, 0);
            b.descriptor(RINGS[0], 0, BODY, 16, INDIRECT, 0);
        }),
    ];
    for (what, build) in cases {
        let mut bench = Bench::new(true);
        bench.header(spec::VIRTIO_BLK_T_IN, 0);
        build(&mut bench);
        assert!(matches!(bench.one(), Err(Broken::Chain { head: 0, .. })), "{what}");
    }
    let mut bench = Bench::new(true);
    bench.publish(QUEUES[0]);
    assert!(bench.serve().is_err(), "a head outside of the table");
    let mut bench = Bench::new(true);
    bench.mem.write_obj(QUEUES[0] + 1, GuestAddress(RINGS[1] + 2)).unwrap();
    assert!(matches!(bench.serve(), Err(Broken::Queue(_))), "more available than the queue has");
}

#[test]
fn indirect_tables_work_but_not_longer_than_the_queue() {
    let mut bench = Bench::new(true);
    bench.header(spec::VIRTIO_BLK_T_IN, 0);
    let body: Vec<_> = (0..254).map(|n| writes(BODY + n * 512, 512)).collect();
    let whole = [&[reads(HEADER, 16)], &body[..], &[writes(STATUS, 1)]].concat();
    assert_eq!(whole.len(), 256);
    let table = DATA + 0x10_0000;
    bench.chain(table, &whole);
    bench.descriptor(RINGS[0], 0, table, 256 * 16, INDIRECT, 0);
    assert_eq!((bench.one(), bench.status()), (Ok(254 * 512 + 1), OK));
    let longer = [&whole[..255], &[writes(BODY, 0), writes(STATUS, 1)]].concat();
    bench.chain(table, &longer);
    bench.descriptor(RINGS[0], 0, table, 257 * 16, INDIRECT, 0);
    assert!(matches!(bench.one(), Err(Broken::Chain { .. })));
}

#[test]
fn overlapping_buffers_do_no_harm() {
    let mut bench = Bench::new(true);
    // Data buffers lie over the header and the status, two at the same place. The guest gets what
    // it asked for, and a status.
    let body = [writes(HEADER, 512), writes(HEADER, 512), writes(STATUS - 255, 512)];
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &body), (OK, 1537));
    // A data buffer lies over the rings.
    let mut bench = Bench::new(true);
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &[writes(RINGS[0], 4096)]).0, OK);
}

#[test]
fn types_that_are_unknown_or_not_agreed_on_are_unsupported() {
    let mut bench = Bench::new(true);
    for kind in [2, 3, 5, 9, 10, 12, 14, 16, u32::MAX] {
        assert_eq!(bench.request(kind, 0, &[]), (UNSUPP, 1), "{kind}");
    }
    bench.features = 0;
    for kind in [spec::VIRTIO_BLK_T_DISCARD, spec::VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(bench.request(kind, 0, &[reads(BODY, 16)]), (UNSUPP, 1));
    }
    // Without FLUSH the disk is write-through, and a write still works.
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_OUT, 0, &[reads(BODY, 512)]), (OK, 1));
}

#[test]
fn the_ids_of_two_disks_differ() {
    let mut bench = Bench::new(true);
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_GET_ID, 0, &[writes(BODY, 20)]), (OK, 21));
    assert_eq!(bench.bytes(BODY, 20), b"dayfly-3\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_GET_ID, 0, &[writes(BODY, 19)]), (IOERR, 1));
}

#[test]
fn a_read_only_disk_says_so_and_is_not_written() {
    let mut bench = Bench::new(false);
    assert_ne!(bench.features & 1 << spec::VIRTIO_BLK_F_RO, 0);
    assert_eq!(bench.features & 1 << spec::VIRTIO_BLK_F_DISCARD, 0);
    bench.features |= 1 << spec::VIRTIO_BLK_F_DISCARD | 1 << spec::VIRTIO_BLK_F_WRITE_ZEROES;
    bench.mem.write_obj([0_u64, 8], GuestAddress(BODY)).unwrap();
    for kind in
        [spec::VIRTIO_BLK_T_OUT, spec::VIRTIO_BLK_T_DISCARD, spec::VIRTIO_BLK_T_WRITE_ZEROES]
    {
        let len = if kind == spec::VIRTIO_BLK_T_OUT { 512 } else { 16 };
        assert_eq!(bench.request(kind, 0, &[reads(BODY, len)]), (IOERR, 1));
    }
    assert_eq!(bench.block.counters().refused, 3, "by the device, before the disk");
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &[writes(BODY, 512)]), (OK, 513));
}

#[test]
fn ranges_to_discard_are_checked_before_any_is_done() {
    let mut bench = Bench::new(true);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let mut run = |kind: u32, ranges: &[Vec<u8>], cut: usize| {
        let bytes = ranges.concat();
        bench.mem.write_slice(&bytes, GuestAddress(BODY)).unwrap();
        let status =
            bench.request(kind, 0, &[reads(BODY, u32::try_from(bytes.len() - cut).unwrap())]).0;
        let read = bench.request(spec::VIRTIO_BLK_T_IN, 0, &[writes(BODY + 0x1000, 8192)]);
        assert_eq!(read.0, OK);
        (status, bench.bytes(BODY + 0x1000, 8192))
    };
    let old = vec![7; 8192];
    for kind in [spec::VIRTIO_BLK_T_DISCARD, spec::VIRTIO_BLK_T_WRITE_ZEROES] {
        for (second, cut) in [
            (range(SECTORS, 1, 0), 0),
            (range(SECTORS - 8, 9, 0), 0),
            (range(u64::MAX, 1, 0), 0),
            (range(0, u32::MAX, 0), 0),
            (range(0, 8, 0), 1),
            (range(1 << 55, 8, 0), 0),
        ] {
            assert_eq!(
                run(kind, &[range(0, 8, 0), second.clone()], cut),
                (IOERR, old.clone()),
                "{kind} {second:?}"
            );
        }
        assert_eq!(run(kind, &[range(0, 8, 0), range(0, 8, 2)], 0), (UNSUPP, old.clone()));
        assert_eq!(run(kind, &vec![range(0, 8, 0); 17], 0), (IOERR, old.clone()));
        assert_eq!(run(kind, &[range(0, 0, 0)], 0), (OK, old.clone()));
    }
    let discard = spec::VIRTIO_BLK_T_DISCARD;
    assert_eq!(
        run(discard, &[range(0, 8, 1)], 0),
        (UNSUPP, old.clone()),
        "unmap is for zeroes only"
    );
    assert_eq!(run(discard, &[range(1, 14, 0)], 0), (OK, old), "no whole block in it");
    let zeros = [vec![7; 512], vec![0; 4096 + 512], vec![7; 3072]].concat();
    assert_eq!(run(spec::VIRTIO_BLK_T_WRITE_ZEROES, &[range(1, 9, 1)], 0), (OK, zeros));
    let zeros = [vec![0; 4096 + 1024], vec![7; 3072]].concat();
    assert_eq!(run(discard, &[range(0, 8, 0), range(0, 1, 0)], 0), (OK, zeros));
}

#[test]
fn errors_of_the_host_are_answered_and_counted() {
    let full = |seal: bool| -> Disk {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("layer", flags).unwrap();
        let mut spec = disk(BLOCKS, &[7; 8192], vec![], false);
        spec.writable = Some(memfd.try_clone().unwrap());
        let disk = Disk::open(spec).unwrap();
        if seal {
            rustix::fs::fcntl_add_seals(&memfd, rustix::fs::SealFlags::WRITE).unwrap();
        }
        disk
    };
    let mut bench = Bench::of(full(true));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_OUT, 0, &[reads(BODY, 512)]), (IOERR, 1));
    assert_eq!((bench.block.counters().host_errors, bench.block.counters().no_space), (1, 0));
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &[writes(BODY, 512)]), (OK, 513));
    assert_eq!(bench.bytes(BODY, 512), [7; 512]);
}

#[test]
fn a_file_that_is_not_what_its_tree_says_is_an_io_error() {
    let base = tempfile::tempfile().unwrap();
    let mut tree = TreeBuilder::new(tempfile::tempfile().unwrap(), 3 * LEAF_BYTES).unwrap();
    let content = vec![7; 3 * usize::try_from(LEAF_BYTES).unwrap()];
    base.write_all_at(&content, 0).unwrap();
    tree.update(0, &content).unwrap();
    let (file, root) = tree.finish(Digest([0; 32])).unwrap();
    base.write_all_at(&[8], LEAF_BYTES + 20_000).unwrap();
    let sectors = LEAF_BYTES / 512;
    let mut spec_ = disk(3 * LEAF_BYTES / 4096, &[], vec![], true);
    spec_.base = base.into();
    spec_.trees = vec![Some(TreeSpec { file: file.into(), root })];
    let mut bench = Bench::of(Disk::open(spec_).unwrap());
    for (sector, status) in [(0, OK), (sectors, IOERR), (2 * sectors - 8, IOERR), (2 * sectors, OK)]
    {
        bench.mem.write_slice(&[1; 512], GuestAddress(BODY)).unwrap();
        let (got, _) = bench.request(spec::VIRTIO_BLK_T_IN, sector, &[writes(BODY, 512)]);
        assert_eq!(got, status, "sector {sector}");
        // No byte of a damaged leaf gets into guest memory.
        let byte = if status == OK { 7 } else { 1 };
        assert_eq!(bench.bytes(BODY, 512), [byte; 512], "sector {sector}");
    }
    let counters = bench.block.counters();
    assert_eq!((counters.damaged, counters.host_errors, counters.refused), (2, 0, 0));
    // A write that needs bytes of it fails too; one of whole blocks replaces it.
    let write = |bench: &mut Bench, length| {
        bench.request(spec::VIRTIO_BLK_T_OUT, sectors + 40, &[reads(BODY, length)]).0
    };
    assert_eq!((write(&mut bench, 512), write(&mut bench, 4096)), (IOERR, OK));
    assert_eq!(bench.block.counters().damaged, 3);
}

#[test]
fn what_a_disk_has_moved_is_counted_for_it_alone_and_a_request_that_fails_is_not() {
    let mut bench = Bench::new(true);
    for _ in 0..2 {
        bench.request(spec::VIRTIO_BLK_T_IN, 0, &[writes(BODY, 512), writes(BODY + 0x1000, 4096)]);
    }
    bench.request(spec::VIRTIO_BLK_T_OUT, 8, &[reads(BODY, 1024)]);
    for kind in [spec::VIRTIO_BLK_T_IN, spec::VIRTIO_BLK_T_OUT, spec::VIRTIO_BLK_T_FLUSH] {
        let data = if kind == spec::VIRTIO_BLK_T_IN { writes(BODY, 512) } else { reads(BODY, 512) };
        assert_eq!(bench.request(kind, SECTORS, &[data]).0, IOERR);
    }
    let mut expected = vec![DiskTraffic::default(); 5];
    expected[3] = DiskTraffic { reads: 2, read_bytes: 2 * 4608, writes: 1, written_bytes: 1024 };
    assert_eq!(bench.meter.disks(5), expected);
}

#[test]
fn a_driver_that_is_faster_than_the_disk_leaves_turns_for_other_disks() {
    let mut bench = Bench::new(false);
    bench.header(spec::VIRTIO_BLK_T_IN, 0);
    bench.chain(RINGS[0], &[reads(HEADER, 16), writes(BODY, 512), writes(STATUS, 1)]);
    bench.publish(0);
    let (mem, avail) = (bench.mem.clone(), std::cell::Cell::new(bench.avail));
    // Makes the same chain available again after each request. Entries of the ring are 0.
    let refill = || {
        avail.set(avail.get() + 1);
        mem.write_obj(avail.get(), GuestAddress(RINGS[1] + 2)).unwrap();
        assert!(avail.get() < 1000, "the disk never gives up its turn");
        false
    };
    for turn in 1..4 {
        assert_eq!(bench.serve_until(&refill), Ok(true));
        assert_eq!(bench.meter.disks(4)[3].reads, turn * 64);
        refill();
    }
}
