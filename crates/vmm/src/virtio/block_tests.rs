#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::block::{Block, QUEUES};
use super::interrupt::Interrupt;
use super::ring::{Broken, Ring};
use super::testing::{
    DATA, HIGH, HIGH_END, INDIRECT, LOW_END, NEXT, Piece, WRITE, disk, memory, reads, writes,
};
use crate::config::DISK_BLOCK_BYTES;
use crate::disk::page_map::PageMap;
use crate::disk::{Disk, LayerSpec};
use proptest::prelude::*;
use std::os::fd::{AsFd as _, OwnedFd};
use virtio_bindings::virtio_blk as spec;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueState};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

const BLOCKS: u64 = 32;
const SECTORS: u64 = BLOCKS * 8;
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 0x100;
const BODY: u64 = DATA + 0x1000;
const RINGS: [u64; 3] = [0x1000, 0x3000, 0x5000];

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// A block device and a queue, driven directly.
pub struct Bench {
    pub mem: GuestMemoryMmap,
    pub pages: PageMap,
    pub block: Block,
    queue: Queue,
    features: u64,
    interrupt: Interrupt,
    avail: u16,
    used: u16,
}

impl Bench {
    fn new(writable: bool) -> Self {
        Self::of(Disk::open(disk(BLOCKS, &[7; 10_000], vec![], writable)).unwrap())
    }

    pub fn of(disk: Disk) -> Self {
        let block = Block::new(disk, 3);
        let [desc_table, avail_ring, used_ring] = RINGS;
        let (max_size, size, ready) = (QUEUES[0], QUEUES[0], true);
        let queue =
            QueueState { max_size, size, ready, desc_table, avail_ring, used_ring, ..Default::default() };
        let queue = Queue::try_from(queue).unwrap();
        let features = block.features();
        let interrupt = Interrupt::new().unwrap();
        let mem = memory();
        let pages = PageMap::new(&mem);
        Self { mem, pages, block, queue, features, interrupt, avail: 0, used: 0 }
    }

    fn descriptor(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let at = GuestAddress(table + u64::from(index) * 16);
        self.mem.write_obj(Descriptor::new(address, len, flags, next), at).unwrap();
    }

    fn chain(&self, table: u64, pieces: &[Piece]) {
        for (piece, index) in pieces.iter().zip(0..) {
            let more = if usize::from(index) + 1 == pieces.len() { 0 } else { NEXT };
            let flags = more | if piece.write { WRITE } else { 0 };
            self.descriptor(table, index, piece.address, piece.len, flags, index + 1);
        }
    }

    fn publish(&mut self, head: u16) {
        let at = RINGS[1] + 4 + u64::from(self.avail % QUEUES[0]) * 2;
        self.mem.write_obj(head, GuestAddress(at)).unwrap();
        self.avail = self.avail.wrapping_add(1);
        self.mem.write_obj(self.avail, GuestAddress(RINGS[1] + 2)).unwrap();
    }

    fn serve(&mut self) -> Result<bool, Broken> {
        let noted = crate::memory::writes::Writes::default();
        let mut ring = Ring::new(&mut self.queue, &self.mem, &noted);
        self.block.serve(&mut ring, self.features, &self.interrupt, &mut self.pages, &|| false)
    }

    /// Serves one chain at descriptor 0 and returns the used length.
    fn one(&mut self) -> Result<u32, Broken> {
        self.publish(0);
        self.serve()?;
        let idx: u16 = self.mem.read_obj(GuestAddress(RINGS[2] + 2)).unwrap();
        assert_eq!(idx, self.used.wrapping_add(1), "exactly one chain comes back");
        let at = RINGS[2] + 4 + u64::from(self.used % QUEUES[0]) * 8;
        self.used = idx;
        let [head, len]: [u32; 2] = self.mem.read_obj(GuestAddress(at)).unwrap();
        assert_eq!(head, 0);
        Ok(len)
    }

    fn header(&self, kind: u32, sector: u64) {
        self.mem.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.mem.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        self.mem.write_obj(0xaa_u8, GuestAddress(STATUS)).unwrap();
    }

    fn status(&self) -> u8 {
        self.mem.read_obj(GuestAddress(STATUS)).unwrap()
    }

    /// A request of the usual shape: status and used length.
    pub fn request(&mut self, kind: u32, sector: u64, body: &[Piece]) -> (u8, u32) {
        self.header(kind, sector);
        let pieces = [&[reads(HEADER, 16)], body, &[writes(STATUS, 1)]].concat();
        self.chain(RINGS[0], &pieces);
        let len = self.one().unwrap();
        (self.status(), len)
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mem.read_slice(&mut out, GuestAddress(at)).unwrap();
        out
    }
}

#[test]
fn reads_take_buffers_of_any_cut() {
    let mut bench = Bench::new(true);
    let cuts = [writes(BODY, 1), writes(BODY + 1, 0), writes(BODY + 1, 700), writes(BODY + 701, 323)];
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &cuts), (OK, 1025));
    assert_eq!(bench.bytes(BODY, 1024), [7; 1024]);
    // Over the border of two regions, and header and status cut into pieces.
    let border = LOW_END / 2;
    bench.header(spec::VIRTIO_BLK_T_IN, 18);
    let cut = [reads(HEADER, 5), reads(HEADER + 5, 11), writes(border - 600, 1024), writes(STATUS, 1)];
    bench.chain(RINGS[0], &cut);
    assert_eq!((bench.one(), bench.status()), (Ok(1025), OK));
    assert_eq!(bench.bytes(border - 600, 1024), [vec![7; 10_000 - 9216], vec![0; 240]].concat());
    // The status may end the last data buffer.
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
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, SECTORS, &[]), (OK, 1), "nothing, at the very end");
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
    // A readable buffer after a writable one.
    bench.header(spec::VIRTIO_BLK_T_IN, 0);
    bench.chain(RINGS[0], &[reads(HEADER, 8), writes(BODY, 512), reads(HEADER + 8, 8), writes(STATUS, 1)]);
    assert_eq!((bench.one(), bench.status()), (Ok(1), IOERR));
    // A header that is too short.
    bench.chain(RINGS[0], &[reads(HEADER, 15), writes(STATUS, 1)]);
    assert_eq!((bench.one(), bench.status()), (Ok(1), IOERR));
    assert_eq!(bench.bytes(BODY, 512), [0; 512]);
}

#[test]
fn chains_that_cannot_be_answered_break_the_device() {
    type Build = fn(&mut Bench);
    let cases: [(&str, Build); 12] = [
        ("no place for the status", |b| b.chain(RINGS[0], &[reads(HEADER, 16), reads(BODY, 512)])),
        ("an empty place for the status", |b| b.chain(RINGS[0], &[reads(HEADER, 16), writes(STATUS, 0)])),
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
        ("an indirect table of an odd length", |b| b.descriptor(RINGS[0], 0, BODY, 17, INDIRECT, 0)),
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
    // Data over the header and the status, twice the same place: the guest gets what it asked for, and a status.
    let body = [writes(HEADER, 512), writes(HEADER, 512), writes(STATUS - 255, 512)];
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, 0, &body), (OK, 1537));
    // Over the rings themselves.
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
fn the_id_tells_disks_apart() {
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
    for kind in [spec::VIRTIO_BLK_T_OUT, spec::VIRTIO_BLK_T_DISCARD, spec::VIRTIO_BLK_T_WRITE_ZEROES] {
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
        let status = bench.request(kind, 0, &[reads(BODY, u32::try_from(bytes.len() - cut).unwrap())]).0;
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
    assert_eq!(run(discard, &[range(0, 8, 1)], 0), (UNSUPP, old.clone()), "unmap is for zeroes only");
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

    // A file system that is full: one of our own, in a mount namespace of this thread.
    let Some(layer) = full_file_system() else {
        assert!(!rustix::process::geteuid().is_root(), "root can mount a tmpfs");
        return;
    };
    let mut spec_ = disk(BLOCKS, &[7; 8192], vec![], false);
    spec_.writable = Some(layer);
    let mut bench = Bench::of(Disk::open(spec_).unwrap());
    let mut statuses = Vec::new();
    for block in 0..BLOCKS {
        statuses.push(bench.request(spec::VIRTIO_BLK_T_OUT, block * 8, &[reads(BODY, 4096)]).0);
    }
    let failed = statuses.iter().filter(|s| **s == IOERR).count() as u64;
    assert!(failed > 0 && failed < BLOCKS, "{statuses:?}");
    assert_eq!(bench.block.counters().no_space, failed);
    // Giving space back makes room.
    bench.mem.write_obj([0_u64, 64], GuestAddress(BODY)).unwrap();
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_DISCARD, 0, &[reads(BODY, 16)]).0, OK);
    assert_eq!(bench.request(spec::VIRTIO_BLK_T_OUT, SECTORS - 8, &[reads(BODY, 4096)]).0, OK);
}

/// An empty file on a tmpfs of 64 KiB that nobody else sees.
fn full_file_system() -> Option<OwnedFd> {
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    };
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
    fsconfig_set_string(context.as_fd(), "size", "65536").ok()?;
    fsconfig_create(context.as_fd()).ok()?;
    let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).ok()?;
    use rustix::fs::{Mode, OFlags};
    rustix::fs::openat(&mount, "layer", OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR).ok()
}

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

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// The device is its bytes, over freezes, and for a clone from the frozen layers.
    #[test]
    fn a_disk_behind_a_queue_is_its_bytes(steps in proptest::collection::vec(step(), 1..40)) {
        let size = usize::try_from(BLOCKS * DISK_BLOCK_BYTES).unwrap();
        let base: Vec<u8> = (0..20_000_u32).map(|n| (n / 512) as u8 | 0x80).collect();
        let mut model = base.clone();
        model.resize(size, 0);
        let mut layers: Vec<(OwnedFd, OwnedFd)> = Vec::new();
        let mut bench = Bench::of(Disk::open(disk(BLOCKS, &base, vec![], true)).unwrap());
        for step in steps {
            let span = |s: u64, n: u64| usize::try_from(s * 512).unwrap()..usize::try_from((s + n) * 512).unwrap();
            match step {
                Step::Read(sector, count) => {
                    let pieces = cut(count * 512, true);
                    prop_assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, sector, &pieces).0, OK);
                    let got: Vec<u8> = pieces.iter().flat_map(|p| bench.bytes(p.address, p.len as usize)).collect();
                    prop_assert_eq!(&got, &model[span(sector, count)]);
                }
                Step::Write(sector, count, fill) => {
                    let pieces = cut(count * 512, false);
                    let part = &mut model[span(sector, count)];
                    part.iter_mut().enumerate().for_each(|(n, byte)| *byte = fill ^ (n / 100) as u8);
                    let mut rest: &[u8] = part;
                    for piece in &pieces {
                        let (now, later) = rest.split_at(piece.len as usize);
                        bench.mem.write_slice(now, GuestAddress(piece.address)).unwrap();
                        rest = later;
                    }
                    prop_assert_eq!(bench.request(spec::VIRTIO_BLK_T_OUT, sector, &pieces), (OK, 1));
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
                Step::Flush => prop_assert_eq!(bench.request(spec::VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1)),
                Step::Freeze | Step::Clone if layers.len() == 60 => {}
                Step::Freeze | Step::Clone => {
                    let file = || -> OwnedFd { super::testing::temp_file(&[]).into() };
                    let (map, next) = (file(), file());
                    let live = bench.block.disk();
                    live.prepare_freeze(map.as_fd(), next.as_fd()).unwrap();
                    live.freeze(next);
                    let data = live.frozen_file(live.frozen_layers() - 1).try_clone().unwrap();
                    layers.push((data, map));
                    if matches!(step, Step::Clone) {
                        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
                        let chain = layers.iter().map(|(d, m)| LayerSpec { data: copy(d), map: copy(m) });
                        bench = Bench::of(Disk::open(disk(BLOCKS, &base, chain.collect(), true)).unwrap());
                    }
                }
            }
        }
        let mut got = Vec::new();
        for block in 0..BLOCKS {
            prop_assert_eq!(bench.request(spec::VIRTIO_BLK_T_IN, block * 8, &[writes(BODY, 4096)]), (OK, 4097));
            got.extend(bench.bytes(BODY, 4096));
        }
        prop_assert_eq!(got, model);
    }

    /// Any descriptors whatever, indirect tables and rings full of them: an answer or a broken device, no panic.
    #[test]
    fn any_descriptors_are_answered_or_refused(
        table in proptest::collection::vec(
            (
                prop_oneof![Just(HEADER), Just(BODY), Just(STATUS), Just(RINGS[0]), Just(LOW_END - 8), any::<u64>()],
                prop_oneof![Just(16_u32), Just(1), Just(0), Just(512), Just(48), 0..5000_u32, any::<u32>()],
                0..8_u16,
                0..10_u16,
            ),
            8,
        ),
        kind in prop_oneof![Just(0_u32), Just(1), Just(4), Just(8), Just(11), Just(13), any::<u32>()],
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
