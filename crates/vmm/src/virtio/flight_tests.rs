//! Reads in flight together: the same disk and memory as without them, in another order.

#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::block_bench::{Bench, IOERR, OK, RINGS};
use super::held::{MISSING, Missing};
use super::testing::{
    DATA, NEXT, WRITE, disk, disk_in_memory, memory_file, refuse, starve_rings, until,
};
use crate::disk::page_map::Stretch;
use crate::disk::{Disk, DiskSpec, IoList, Reads, TreeSpec};
use dayfly_units::Digest;
use dayfly_units::tree::{LEAF_BYTES, TreeBuilder};
use proptest::prelude::*;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use virtio_bindings::virtio_blk as spec;
use vm_memory::{Bytes as _, GuestAddress};

/// More than the 16 leaves that may be in flight.
const LEAVES: u64 = 20;
const SECTORS: u64 = LEAVES * LEAF_BYTES / 512;
/// Guest memory of a request: header, status, and data.
const AREA: u64 = 0x4_0000;
const STATUS_AT: u64 = 0x100;
const BODY_AT: u64 = 0x1000;
/// Most requests of a batch.
const BATCH: usize = 32;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Read,
    Write(u8),
    Zero { exact: bool },
}

#[derive(Debug, Clone, Copy)]
struct Request {
    kind: Kind,
    sector: u64,
    sectors: u64,
}

impl Request {
    const fn read(sector: u64, sectors: u64) -> Self {
        Self { kind: Kind::Read, sector, sectors }
    }

    fn reads(&self) -> bool {
        matches!(self.kind, Kind::Read)
    }

    fn meets(&self, other: &Self) -> bool {
        self.sector < other.sector + other.sectors && other.sector < self.sector + self.sectors
    }

    const fn area(number: usize) -> u64 {
        DATA + (number as u64 + 1) * AREA
    }

    /// Puts the request into memory, as number `number` of its batch.
    fn put(&self, bench: &mut Bench, number: usize) {
        let (area, bytes) = (Self::area(number), self.sectors * 512);
        let (kind, sector, out, len) = match self.kind {
            Kind::Read => (spec::VIRTIO_BLK_T_IN, self.sector, WRITE, bytes),
            Kind::Write(_) => (spec::VIRTIO_BLK_T_OUT, self.sector, 0, bytes),
            Kind::Zero { exact: true } => (spec::VIRTIO_BLK_T_WRITE_ZEROES, 0, 0, 16),
            Kind::Zero { exact: false } => (spec::VIRTIO_BLK_T_DISCARD, 0, 0, 16),
        };
        bench.mem.write_obj(kind, GuestAddress(area)).unwrap();
        bench.mem.write_obj(sector, GuestAddress(area + 8)).unwrap();
        bench.mem.write_obj(0xaa_u8, GuestAddress(area + STATUS_AT)).unwrap();
        let body = match self.kind {
            Kind::Read => vec![0xee; bytes as usize],
            Kind::Write(fill) => (0..bytes).map(|n| fill ^ (n / 100) as u8).collect(),
            Kind::Zero { .. } => [self.sector, self.sectors].map(u64::to_le_bytes).concat(),
        };
        bench.mem.write_slice(&body, GuestAddress(area + BODY_AT)).unwrap();
        // Two buffers, so that some reads are vectored.
        let (first, at) = (len / 3, number as u16 * 4);
        let parts = [
            (area, 16, 0),
            (area + BODY_AT, first, out),
            (area + BODY_AT + first, len - first, out),
            (area + STATUS_AT, 1, WRITE),
        ];
        for (n, (address, len, flags)) in (0_u16..).zip(parts) {
            let more = if n == 3 { 0 } else { NEXT };
            bench.descriptor(RINGS[0], at + n, address, len as u32, flags | more, at + n + 1);
        }
        bench.publish(at);
    }
}

/// Serves a batch; returns what was used, in the order in which it was answered.
fn served(bench: &mut Bench, batch: &[Request]) -> Vec<[u32; 2]> {
    put_all(bench, batch);
    serve_all(bench, batch)
}

fn put_all(bench: &mut Bench, batch: &[Request]) {
    for (number, request) in batch.iter().enumerate() {
        request.put(bench, number);
    }
}

fn serve_all(bench: &mut Bench, batch: &[Request]) -> Vec<[u32; 2]> {
    while bench.serve().unwrap() {}
    let idx: u16 = bench.mem.read_obj(GuestAddress(RINGS[2] + 2)).unwrap();
    let mut used = Vec::new();
    while bench.used != idx {
        let at = RINGS[2] + 4 + u64::from(bench.used % 256) * 8;
        used.push(bench.mem.read_obj(GuestAddress(at)).unwrap());
        bench.used = bench.used.wrapping_add(1);
    }
    assert_eq!(used.len(), batch.len(), "each request is answered once, and none is in flight");
    used
}

/// Status and data of each request of a batch.
fn answers(bench: &Bench, batch: &[Request]) -> Vec<(u8, Vec<u8>)> {
    let answer = |(number, request): (usize, &Request)| {
        let status = bench.bytes(Request::area(number) + STATUS_AT, 1)[0];
        (status, bench.bytes(Request::area(number) + BODY_AT, request.sectors as usize * 512))
    };
    batch.iter().enumerate().map(answer).collect()
}

fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// How the files of a disk are made, and how it is read.
type Way = (fn() -> File, fn() -> Reads);

/// One request after the other; in flight, with reads that end in their submission, if temporary
/// files are on ext4; in flight, with reads that end later.
const WAYS: [Way; 3] =
    [(file, Reads::default), (file, Reads::always), (memory_file, Reads::always)];

/// A disk over a base with a hash tree, as long as the disk. Its files come from `make`.
fn checked(make: fn() -> File, damaged: Option<u64>) -> DiskSpec {
    let content: Vec<u8> = (0..SECTORS).flat_map(|n| [n as u8 | 0x80; 512]).collect();
    let base = make();
    let mut tree = TreeBuilder::new(file(), SECTORS * 512).unwrap();
    base.write_all_at(&content, 0).unwrap();
    tree.update(0, &content).unwrap();
    let (tree, root) = tree.finish(Digest([0; 32])).unwrap();
    if let Some(at) = damaged {
        base.write_all_at(&[1], at).unwrap();
    }
    let mut spec = disk(SECTORS / 8, &[], vec![], true);
    (spec.base, spec.writable) = (base.into(), Some(make().into()));
    spec.trees = vec![Some(TreeSpec { file: tree.into(), root })];
    spec
}

fn bench(spec: DiskSpec, reads: Reads) -> Bench {
    Bench { reads, ..Bench::of(Disk::open(spec).unwrap()) }
}

fn request() -> impl Strategy<Value = Request> {
    let kind = prop_oneof![
        5 => Just(Kind::Read),
        3 => any::<u8>().prop_map(Kind::Write),
        1 => any::<bool>().prop_map(|exact| Kind::Zero { exact }),
    ];
    (kind, 0..SECTORS, 1..100_u64).prop_map(|(kind, sector, sectors)| {
        let sectors = sectors.min(SECTORS - sector);
        Request { kind, sector, sectors }
    })
}

#[derive(Debug, Clone)]
enum Step {
    Batch(Vec<Request>),
    Freeze,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => proptest::collection::vec(request(), 1..BATCH).prop_map(Step::Batch),
        1 => Just(Step::Freeze),
    ]
}

fn freeze(bench: &mut Bench, make: fn() -> File) {
    let disk = bench.block.disk();
    let next = make();
    disk.prepare_freeze(file().as_fd(), next.as_fd()).unwrap();
    disk.freeze(next.into());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Any requests, in batches, give the same answers, memory, page map and disk with reads in
    /// flight as one after the other. A read that meets a write of its batch may give the bytes
    /// before or after it, so there are none.
    #[test]
    fn reads_in_flight_are_reads_one_after_the_other(
        steps in proptest::collection::vec(step(), 1..8)
    ) {
        let [first, second, third] = WAYS;
        let ways = [first, second, third, (file as fn() -> File, Reads::new as fn() -> Reads)];
        let mut all = ways.map(|(make, reads)| bench(checked(make, None), reads()));
        prop_assert!(all[1].reads.kind().io_uring, "{:?}", all[1].reads.kind());
        for step in steps {
            let Step::Batch(mut batch) = step else {
                all.iter_mut().zip(ways).for_each(|(bench, (make, _))| freeze(bench, make));
                continue;
            };
            let changes: Vec<_> = batch.iter().copied().filter(|one| !one.reads()).collect();
            batch.retain(|one| !one.reads() || !changes.iter().any(|other| one.meets(other)));
            let results = all.each_mut().map(|bench| {
                let mut used = served(bench, &batch);
                used.sort_unstable();
                (used, answers(bench, &batch), bench.pages.stretches(), bench.meter.disks(4))
            });
            for other in &results[1..] {
                prop_assert_eq!(&results[0], other);
            }
        }
        let whole: Vec<_> = (0..SECTORS / 64).map(|n| Request::read(n * 64, 64)).collect();
        let disks = all.each_mut().map(|bench| {
            let parts = whole.chunks(BATCH / 2).map(|batch| {
                served(bench, batch);
                answers(bench, batch)
            });
            let parts: Vec<_> = parts.collect();
            (parts, bench.block.disk().written().runs().collect::<Vec<_>>())
        });
        for other in &disks[1..] {
            prop_assert_eq!(&disks[0], other);
        }
    }
}

/// The first request is held by the page that it reads into until the others are answered.
#[test]
fn answers_come_in_another_order_than_their_requests() {
    let mut bench = bench(disk_in_memory(64, &[7; 64 * 4096]), Reads::always());
    let batch: Vec<_> = (0..16).map(|n| Request::read(n * 8, 8)).collect();
    put_all(&mut bench, &batch);
    let missing = Missing::in_memory(&bench.mem);
    bench.descriptor(RINGS[0], 1, MISSING, 4096 / 3, WRITE | NEXT, 2);
    let mem = bench.mem.clone();
    let giving = std::thread::spawn(move || {
        missing.wait();
        until("the others are answered", || {
            mem.read_obj::<u16>(GuestAddress(RINGS[2] + 2)).unwrap() == 15
        });
        missing.give();
    });
    let used = serve_all(&mut bench, &batch);
    giving.join().unwrap();
    assert_eq!(used[15][0], 0);
    assert!(answers(&bench, &batch[1..]).iter().all(|(status, _)| *status == OK));
    assert_eq!(bench.bytes(MISSING, 4096 / 3), [7; 4096 / 3]);
}

#[test]
fn a_leaf_that_several_requests_wait_for_is_hashed_once() {
    for (make, reads) in WAYS {
        let mut bench = bench(checked(make, None), reads());
        let batch: Vec<_> = (0..16).map(|n| Request::read(n * 8, 8)).collect();
        served(&mut bench, &batch);
        assert!(answers(&bench, &batch).iter().all(|(status, _)| *status == OK));
        assert_eq!(bench.block.disk().hashed(), 1);
    }
}

/// A wait submits, so a read that has no other beside it takes one call of the ring, not two.
#[test]
fn a_read_alone_is_submitted_by_the_wait_for_it() {
    let mut bench = bench(disk_in_memory(64, &[7; 4096]), Reads::always());
    let batch = [Request::read(0, 8)];
    for calls in 1..4 {
        served(&mut bench, &batch);
        assert_eq!(bench.reads.enters(), calls);
    }
    assert_eq!(answers(&bench, &batch), [(OK, vec![7; 4096])]);
}

/// The kernel has no memory for a request of a ring where preadv(2) needs none.
#[test]
fn a_ring_that_gets_no_memory_is_closed_and_the_disk_is_read_without_it() {
    let thread = std::thread::spawn(|| {
        let mut bench = bench(checked(memory_file, None), Reads::always());
        starve_rings(1);
        let batch: Vec<_> = (0..40).map(|n| Request::read(n * 32, 8)).collect();
        for batch in batch.chunks(BATCH) {
            served(&mut bench, batch);
            for (request, (status, data)) in batch.iter().zip(answers(&bench, batch)) {
                assert_eq!((status, data[0]), (OK, request.sector as u8 | 0x80), "{request:?}");
            }
            let kind = bench.reads.kind();
            assert_eq!((kind.io_uring, kind.errno), (false, Some(libc::EAGAIN)));
        }
    });
    thread.join().unwrap();
}

#[test]
fn a_leaf_is_checked_before_a_byte_of_it_reaches_the_guest_in_flight_too() {
    let damaged = Some(LEAF_BYTES + 20_000);
    for (make, reads) in WAYS {
        let mut bench = bench(checked(make, damaged), reads());
        let leaf = LEAF_BYTES / 512;
        // Several requests wait for each leaf; one has parts of a good and of the damaged one.
        let batch = [0, 8, leaf, leaf + 16, 2 * leaf - 8, leaf - 8, 2 * leaf, 2 * leaf + 8];
        let batch = batch.map(|sector| Request::read(sector, 16));
        served(&mut bench, &batch);
        for (request, (status, data)) in batch.iter().zip(answers(&bench, &batch)) {
            let bad = request.sector + 16 > leaf && request.sector < 2 * leaf;
            assert_eq!(status, if bad { IOERR } else { OK }, "{request:?}");
            for (n, sector) in (request.sector..request.sector + 16).enumerate() {
                let is_bad = (leaf..2 * leaf).contains(&sector);
                let byte = if is_bad { 0xee } else { sector as u8 | 0x80 };
                // A good part of a request that failed may have arrived.
                assert!(bad && data[n * 512] == 0xee || data[n * 512] == byte, "{request:?}");
            }
        }
        let counters = bench.block.counters();
        assert_eq!((counters.damaged, counters.host_errors), (4, 0));
        assert!(
            bench
                .pages
                .stretches()
                .iter()
                .all(|Stretch { block, .. }| { !(16..32).contains(block) })
        );
    }
}

/// The driver breaks a rule while reads are in flight: they are answered, and the device stops.
#[test]
fn a_broken_chain_leaves_nothing_in_flight() {
    let mut bench = bench(checked(memory_file, None), Reads::always());
    for number in 0..5 {
        Request::read(number as u64 * 8, 8).put(&mut bench, number);
    }
    bench.publish(9999);
    assert!(bench.serve().is_err());
    let idx: u16 = bench.mem.read_obj(GuestAddress(RINGS[2] + 2)).unwrap();
    assert_eq!(idx, 5);
    for number in 0..5 {
        assert_eq!(bench.bytes(Request::area(number) + STATUS_AT, 1), [OK]);
    }
}

#[test]
fn a_file_that_became_shorter_is_an_io_error_in_flight_too() {
    for (make, reads) in WAYS {
        let mut spec = checked(make, None);
        let short = File::from(spec.base.try_clone().unwrap());
        spec.trees.clear();
        let mut bench = bench(spec, reads());
        short.set_len(LEAF_BYTES + 512).unwrap();
        let leaf = LEAF_BYTES / 512;
        let batch = [0, leaf - 8, leaf, leaf + 8].map(|sector| Request::read(sector, 8));
        served(&mut bench, &batch);
        let statuses: Vec<_> = answers(&bench, &batch).iter().map(|answer| answer.0).collect();
        assert_eq!(statuses, [OK, OK, IOERR, IOERR]);
        assert_eq!(bench.block.counters().host_errors, 2);
    }
}

/// Whether a file can be read without waiting is learnt from the file: a batch of reads of cached
/// data takes one system call where it can, and the ring is not used where it cannot.
#[test]
fn a_batch_of_cached_reads_is_one_system_call() {
    for nowait in [true, false] {
        let mut spec = disk(64, &[], vec![], false);
        let base = if nowait { tempfile::tempfile_in("/var/tmp").unwrap() } else { memory_file() };
        base.write_all_at(&[7; 64 * 4096], 0).unwrap();
        let can = IoList::of(&mut [0; 512]).read_cached(base.as_fd(), 0).is_ok();
        let needs = "needs a /var/tmp that can be read without waiting, and a tmpfs that cannot";
        assert_eq!(can, nowait, "this test {needs}");
        spec.base = base.into();
        let mut bench = bench(spec, Reads::new());
        let batch: Vec<_> = (0..32).map(|n| Request::read(n * 16, 8)).collect();
        served(&mut bench, &batch);
        assert!(bench.reads.enters() <= 1, "{nowait}: {}", bench.reads.enters());
        let before = bench.reads.enters();
        served(&mut bench, &batch);
        assert_eq!(bench.reads.enters() - before, u64::from(nowait), "{nowait}");
        // One request alone is no batch.
        served(&mut bench, &batch[..1]);
        assert_eq!(bench.reads.enters() - before, u64::from(nowait), "{nowait}");
        assert!(
            answers(&bench, &batch)
                .iter()
                .all(|(status, data)| *status == OK && data.iter().all(|byte| *byte == 7))
        );
    }
}

#[test]
fn what_a_read_in_flight_wrote_to_memory_is_noted() {
    for (make, reads) in WAYS {
        let mut bench = bench(checked(make, None), reads());
        bench.noted.watch(true);
        let batch: Vec<_> = (0..8).map(|n| Request::read(n * 32, 8)).collect();
        // In the second round there is no hash to check, so the kernel writes to guest memory.
        for round in 0..2 {
            served(&mut bench, &batch);
            let noted = bench.noted.take();
            for number in 0..8 {
                let at = GuestAddress(Request::area(number) + BODY_AT);
                let host = vm_memory::GuestMemoryBackend::get_host_address(&bench.mem, at).unwrap();
                let page = host.addr() / 4096;
                assert!(noted.contains(&page), "round {round}: request {number} is not noted");
            }
        }
    }
}

/// A kernel, or a container, that refuses rings: the disk is read as before, and the cause known.
#[test]
fn without_io_uring_the_disk_is_read_one_request_after_the_other() {
    let thread = std::thread::spawn(|| {
        refuse(libc::SYS_io_uring_setup, (0, 1), libc::EPERM);
        let mut bench = bench(checked(file, None), Reads::new());
        let kind = bench.reads.kind();
        assert_eq!((kind.io_uring, kind.errno), (false, Some(libc::EPERM)));
        let batch: Vec<_> = (0..16).map(|n| Request::read(n * 16, 8)).collect();
        served(&mut bench, &batch);
        assert!(answers(&bench, &batch).iter().all(|(status, _)| *status == OK));
        assert_eq!(bench.reads.enters(), 0);
    });
    thread.join().unwrap();
}
