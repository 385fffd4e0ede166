//! What a guest does to its balloon. An input is a sequence of events.

use crate::events::Events;
use crate::scratch;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_vmm::virtio::fuzzing::{Devices, register, status};
use dayfly_vmm::virtio::{MMIO_BASE, MMIO_SIZE, VsockSpec};
use std::os::unix::net::UnixListener;
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "balloon",
    what: "reports, page numbers and statistics of the balloon",
    stateful: true,
    most_bytes: 2048,
    heap: Heap { fixed: 16 << 20, per_byte: 8 << 10 },
    run: balloon,
    seeds,
}];

const PAGE: u64 = 4096;
/// End of the low RAM; a second region begins at 4 GiB.
const LOW: u64 = 4 << 20;
const HIGH: u64 = 1 << 32;
const HIGH_BYTES: u64 = 64 << 10;
const RAM: u64 = LOW + HIGH_BYTES;
/// Each page from here on has [`CONTENT`], until it is named as free or stored to.
const DATA: u64 = 2 << 20;
const PAGES: usize = 512;
const CONTENT: [u8; 4096] = [7; 4096];
/// Buffers that the device only reads lie from here on.
const BUFFERS: u64 = 1 << 20;
/// The place of the device: vsock and entropy come first.
const SLOT: u64 = 2;

const INFLATE: u8 = 0;
const REPORT: u8 = 3;
const QUEUES: u8 = 4;

const REPORTS: u8 = 0;
const NUMBERS: u8 = 1;
const BYTES: u8 = 2;
const DESCRIPTOR: u8 = 3;
const PUBLISH: u8 = 4;
const KICK: u8 = 5;
const TURN: u8 = 6;
const STORE: u8 = 7;
const TARGET: u8 = 8;
const WATCH: u8 = 9;
const RESTORE: u8 = 10;
const ACTUAL: u8 = 11;
const RESET: u8 = 12;
const EVENTS: u8 = 13;

/// Where the rings of a queue are.
fn ring(queue: u8, part: u64) -> u64 {
    0x4_0000 + 0x1_0000 * u64::from(queue) + 0x4000 * part
}

struct World {
    mem: GuestMemoryMmap,
    devices: Devices,
    _folder: tempfile::TempDir,
    without: u32,
    /// Which pages from [`DATA`] on may have lost their content.
    named: Vec<bool>,
}

fn devices(mem: &GuestMemoryMmap) -> (Devices, tempfile::TempDir) {
    let folder = tempfile::tempdir_in(scratch::folder()).unwrap();
    let path = folder.path().join("v");
    let listener = UnixListener::bind(&path).unwrap().into();
    let vsock = VsockSpec { listener, path, guest_cid: 3 };
    (Devices::new(mem.clone(), Vec::new(), 0, vsock).unwrap(), folder)
}

impl World {
    fn new(without: u32) -> Self {
        let ranges = [(0, LOW), (HIGH, HIGH_BYTES)];
        let ranges = ranges.map(|(at, len)| (GuestAddress(at), usize::try_from(len).unwrap()));
        let mem = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        for page in (DATA..LOW).step_by(CONTENT.len()) {
            mem.write_slice(&CONTENT, GuestAddress(page)).unwrap();
        }
        let (devices, _folder) = devices(&mem);
        let world = Self { mem, devices, _folder, without, named: vec![false; PAGES] };
        world.set_up();
        world
    }

    fn write(&self, offset: u64, value: u32) {
        let at = MMIO_BASE + SLOT * MMIO_SIZE + offset;
        assert!(self.devices.set().mmio_write(at, &value.to_le_bytes()), "no register at {at:#x}");
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        let at = MMIO_BASE + SLOT * MMIO_SIZE + offset;
        assert!(self.devices.set().mmio_read(at, &mut data), "no register at {at:#x}");
        u32::from_le_bytes(data)
    }

    /// The initialisation of virtio 1.2 section 3.1.1, except for the features in `without`.
    fn set_up(&self) {
        for value in [0, status::ACKNOWLEDGE, status::ACKNOWLEDGE | status::DRIVER] {
            self.write(register::STATUS, u32::from(value));
        }
        for half in 0..2 {
            self.write(register::DEVICE_FEATURES_SEL, half);
            self.write(register::DRIVER_FEATURES_SEL, half);
            let without = if half == 0 { self.without } else { 0 };
            self.write(register::DRIVER_FEATURES, self.read(register::DEVICE_FEATURES) & !without);
        }
        self.write(register::STATUS, 11);
        for queue in 0..QUEUES {
            for part in 0..3 {
                self.mem.write_slice(&[0; 0x1000], GuestAddress(ring(queue, part))).unwrap();
            }
            self.write(register::QUEUE_SEL, u32::from(queue));
            self.write(register::QUEUE_NUM, self.read(register::QUEUE_NUM_MAX));
            let parts =
                [register::QUEUE_DESC_LOW, register::QUEUE_DRIVER_LOW, register::QUEUE_DEVICE_LOW];
            for (part, low) in (0..).zip(parts) {
                self.write(low, u32::try_from(ring(queue, part)).unwrap());
                self.write(low + 4, 0);
            }
            self.write(register::QUEUE_READY, 1);
        }
        self.write(register::STATUS, 15);
    }

    fn turns(&mut self) {
        // A device that never becomes idle would hold the device thread, so turns are counted.
        for _ in 0..64 {
            if !self.devices.turn(Instant::now()).unwrap() {
                return;
            }
        }
    }

    fn descriptor(&self, queue: u8, index: u8, address: u64, (len, flags): (u32, u16)) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&u16::from(index).wrapping_add(1).to_le_bytes());
        let at = ring(queue, 0) + u64::from(index % 64) * 16;
        self.mem.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    fn publish(&self, queue: u8, head: u16) {
        let at = ring(queue, 1);
        let size = if queue == REPORT { 64 } else { 32 };
        let index: u16 = self.mem.read_obj(GuestAddress(at + 2)).unwrap();
        let entry = at + 4 + u64::from(index % size) * 2;
        self.mem.write_obj(head, GuestAddress(entry)).unwrap();
        self.mem.write_obj(index.wrapping_add(1), GuestAddress(at + 2)).unwrap();
    }

    /// Notes that the pages between these addresses may have lost their content.
    fn name(&mut self, start: u64, end: u64) {
        for (page, named) in (0..).zip(&mut self.named) {
            let at = DATA + page * PAGE;
            *named |= start < at + PAGE && at < end;
        }
    }

    /// Where a report lies: in the low RAM, in the high one or behind it, or anywhere.
    fn place(place: u32) -> u64 {
        match place >> 30 {
            0 | 1 => DATA + u64::from(place) % (LOW - DATA),
            2 => HIGH + u64::from(place) % (2 * HIGH_BYTES),
            _ => u64::from(place),
        }
    }

    /// Makes a chain of one buffer, which the device only reads, available.
    fn give(&self, queue: u8, bytes: &[u8]) {
        let at = BUFFERS + u64::from(queue) * PAGE;
        self.mem.write_slice(bytes, GuestAddress(at)).unwrap();
        self.descriptor(queue, 0, at, (u32::try_from(bytes.len()).unwrap(), 0));
        self.publish(queue, 0);
    }

    fn event(&mut self, events: &mut Events<'_>) -> Option<()> {
        match events.byte()? % EVENTS {
            REPORTS => {
                let count = events.byte()? % 4 + 1;
                for index in 0..count {
                    let (at, len) = (Self::place(events.long()?), events.long()? >> 8);
                    self.name(at, at + u64::from(len));
                    let last = index + 1 == count;
                    self.descriptor(REPORT, index, at, (len, 2 | u16::from(!last)));
                }
                self.publish(REPORT, 0);
            }
            NUMBERS => {
                let bytes = events.bytes()?;
                for number in bytes.as_chunks::<4>().0 {
                    let at = u64::from(u32::from_le_bytes(*number)) * PAGE;
                    self.name(at, at + PAGE);
                }
                self.give(INFLATE, bytes);
                // Before another event changes the numbers.
                self.write(register::QUEUE_NOTIFY, u32::from(INFLATE));
                self.turns();
            }
            BYTES => self.give(events.byte()? % 2 + 1, events.bytes()?),
            DESCRIPTOR => {
                let (queue, index) = (events.byte()? % 3 + 1, events.byte()?);
                let (at, len) = (Self::place(events.long()?), events.long()?);
                self.name(at, at + u64::from(len));
                // No table elsewhere: its content would name pages that this target does not see.
                let flags = events.word()? & 3;
                self.descriptor(queue, index, at, (len, flags));
            }
            PUBLISH => self.publish(events.byte()? % 3 + 1, events.word()?),
            KICK => self.write(register::QUEUE_NOTIFY, u32::from(events.byte()?)),
            TURN => self.turns(),
            STORE => {
                let (at, bytes) = (Self::place(events.long()?), events.bytes()?);
                if self.mem.write_slice(bytes, GuestAddress(at)).is_ok() {
                    self.name(at, at + bytes.len() as u64);
                }
            }
            TARGET => {
                let bytes = events.quad()?;
                assert_eq!(self.devices.set().balloon(Some(bytes)).is_ok(), bytes <= RAM);
            }
            WATCH => self.devices.set().writes().watch(events.byte()? & 1 == 1),
            RESTORE => {
                let saved = self.devices.set().save();
                (self.devices, self._folder) = devices(&self.mem);
                self.devices.set().load(&saved).unwrap();
                assert_eq!(self.devices.set().save(), saved, "a clone's state");
            }
            ACTUAL => self.write(register::CONFIG + 4, events.long()?),
            _ => self.set_up(),
        }
        Some(())
    }

    /// What holds whatever the guest does.
    fn check(&self) {
        let mut page = CONTENT;
        for (number, named) in (0..).zip(&self.named) {
            self.mem.read_slice(&mut page, GuestAddress(DATA + number * PAGE)).unwrap();
            assert!(*named || page == CONTENT, "page {number} was not given back");
        }
        let status = self.devices.set().balloon(None).unwrap();
        assert!(status.target_bytes <= RAM && status.actual_bytes <= RAM, "{status:?}");
        planted(|| status.broken.is_some() && status.discarded_bytes > 64 * PAGE);
    }
}

fn balloon(input: &[u8]) -> Outcome {
    let mut events = Events::new(input);
    let Some(without) = events.long() else { return Outcome::Refused };
    let mut world = World::new(without);
    let mut count = 0;
    while count < 512 && world.event(&mut events).is_some() {
        count += 1;
    }
    world.turns();
    world.check();
    Outcome::of(count > 1)
}

fn seeds() -> Vec<Vec<u8>> {
    let kick = |queue: u8| [KICK, queue, TURN];
    let range = |place: u32, len: u32| [place.to_le_bytes(), (len << 8).to_le_bytes()].concat();
    let mut reports = vec![0, 0, 0, 0, REPORTS, 1];
    reports.extend(range(0x1000, 0x3000));
    reports.extend(range(2 << 30, 0x1000));
    reports.extend(kick(REPORT));
    let outside = [&[0, 0, 0, 0, REPORTS, 0][..], &range(3 << 30, 0x1000), &kick(REPORT)].concat();
    let mut numbers = vec![0, 0, 0, 0, NUMBERS, 12];
    for number in [0x201_u32, 0x202, u32::MAX] {
        numbers.extend(number.to_le_bytes());
    }
    let mut statistics = vec![0, 0, 0, 0, BYTES, 1, 20];
    statistics.extend([4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 6, 0, 0, 0, 2, 0, 0, 0, 0, 0]);
    statistics.extend(kick(2));
    statistics.push(TARGET);
    statistics.extend(0x10_0000_u64.to_le_bytes());
    statistics.extend([TURN, ACTUAL, 9, 0, 0, 0]);
    // Without statistics the reports have another number.
    let mut other = vec![2, 0, 0, 0, DESCRIPTOR, 1, 0];
    other.extend([0x1000_u32.to_le_bytes(), 0x1000_u32.to_le_bytes()].concat());
    other.extend([2, 0, PUBLISH, 1, 0, 0]);
    other.extend(kick(2));
    let watched = [&[0, 0, 0, 0, WATCH, 1][..], &reports[4..], &[WATCH, 0, RESET]].concat();
    let clone = [&reports[..reports.len() - 3], &[RESTORE, TURN, STORE, 0, 0, 0, 0, 1, 9]].concat();
    vec![reports, outside, numbers, statistics, other, watched, clone]
}
