//! A block device whose queue the tests fill by hand.

use super::block::{Block, Notes, QUEUES};
use super::interrupt::Interrupt;
use super::ring::{Broken, Ring};
use super::testing::{DATA, NEXT, Piece, WRITE, disk, memory, reads, writes};
use crate::disk::page_map::PageMap;
use crate::disk::{Disk, Reads, Room};
use crate::memory::writes::Writes;
use crate::meter::{Meter, Thread, ThreadClock};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueState};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

pub const BLOCKS: u64 = 32;
pub const SECTORS: u64 = BLOCKS * 8;
pub const HEADER: u64 = DATA;
pub const STATUS: u64 = DATA + 0x100;
pub const BODY: u64 = DATA + 0x1000;
pub const RINGS: [u64; 3] = [0x1000, 0x3000, 0x5000];

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

/// A block device and a queue, called without a thread.
pub struct Bench {
    pub mem: GuestMemoryMmap,
    pub pages: PageMap,
    pub room: Room,
    pub meter: Meter,
    pub clock: ThreadClock,
    pub block: Block,
    pub queue: Queue,
    pub features: u64,
    pub interrupt: Interrupt,
    pub reads: Reads,
    pub noted: Writes,
    pub avail: u16,
    pub used: u16,
}

impl Bench {
    pub fn new(writable: bool) -> Self {
        Self::of(Disk::open(disk(BLOCKS, &[7; 10_000], vec![], writable)).unwrap())
    }

    pub fn of(disk: Disk) -> Self {
        let block = Block::new(disk, 3);
        let [desc_table, avail_ring, used_ring] = RINGS;
        let (max_size, size, ready) = (QUEUES[0], QUEUES[0], true);
        let queue = QueueState {
            max_size,
            size,
            ready,
            desc_table,
            avail_ring,
            used_ring,
            ..Default::default()
        };
        let queue = Queue::try_from(queue).unwrap();
        let features = block.features();
        let interrupt = Interrupt::new().unwrap();
        let mem = memory();
        let pages = PageMap::new(&mem);
        let room = Room::default();
        let meter = Meter::default();
        let clock = ThreadClock::new(&meter, Thread::Disks);
        let (reads, noted) = (Reads::default(), Writes::default());
        Self {
            mem,
            pages,
            room,
            meter,
            clock,
            block,
            queue,
            features,
            interrupt,
            reads,
            noted,
            avail: 0,
            used: 0,
        }
    }

    pub fn descriptor(
        &self,
        table: u64,
        index: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let at = GuestAddress(table + u64::from(index) * 16);
        self.mem.write_obj(Descriptor::new(address, len, flags, next), at).unwrap();
    }

    pub fn chain(&self, table: u64, pieces: &[Piece]) {
        for (piece, index) in pieces.iter().zip(0..) {
            let more = if usize::from(index) + 1 == pieces.len() { 0 } else { NEXT };
            let flags = more | if piece.write { WRITE } else { 0 };
            self.descriptor(table, index, piece.address, piece.len, flags, index + 1);
        }
    }

    pub fn publish(&mut self, head: u16) {
        let at = RINGS[1] + 4 + u64::from(self.avail % QUEUES[0]) * 2;
        self.mem.write_obj(head, GuestAddress(at)).unwrap();
        self.avail = self.avail.wrapping_add(1);
        self.mem.write_obj(self.avail, GuestAddress(RINGS[1] + 2)).unwrap();
    }

    pub fn serve(&mut self) -> Result<bool, Broken> {
        self.serve_until(&|| false)
    }

    pub fn serve_until(&mut self, stop: &dyn Fn() -> bool) -> Result<bool, Broken> {
        let mut ring = Ring::new(&mut self.queue, &self.mem, &self.noted);
        let (pages, room, meter) = (&mut self.pages, &mut self.room, &self.meter);
        let notes = &mut Notes { pages, room, meter, clock: &mut self.clock };
        let reads = &mut self.reads;
        self.block.serve(&mut ring, self.features, &self.interrupt, notes, reads, stop)
    }

    /// Serves one chain at descriptor 0 and returns the used length.
    pub fn one(&mut self) -> Result<u32, Broken> {
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

    pub fn header(&self, kind: u32, sector: u64) {
        self.mem.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.mem.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        self.mem.write_obj(0xaa_u8, GuestAddress(STATUS)).unwrap();
    }

    pub fn status(&self) -> u8 {
        self.mem.read_obj(GuestAddress(STATUS)).unwrap()
    }

    /// Serves a request of the usual shape; returns status and used length.
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
