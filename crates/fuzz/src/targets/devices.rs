//! What a guest does to its devices: registers, queues, packets. An input is a sequence of events.

use crate::events::Events;
use crate::scratch;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_vmm::config::LinkConfig;
use dayfly_vmm::disk::room::Limits;
use dayfly_vmm::virtio::fuzzing::{Devices, register, status};
use dayfly_vmm::virtio::{DeviceStates, DiskSpec, KindState, MMIO_BASE, MMIO_SIZE, VsockSpec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "virtio",
    what: "registers and queues of disk, vsock, entropy and network",
    stateful: true,
    most_bytes: 2048,
    heap: Heap { fixed: 16 << 20, per_byte: 8 << 10 },
    run: virtio,
    seeds,
}];

/// Devices by their places: a disk, vsock, rng, net.
const DISK: u8 = 0;
const VSOCK: u8 = 1;
const RNG: u8 = 2;
const NET: u8 = 3;
const QUEUES: [u8; 4] = [1, 3, 1, 2];
const BLOCKS: u64 = 16;
const BASE: [u8; 10_000] = [7; 10_000];
/// End of the low RAM; a second region begins at 4 GiB.
const LOW: u64 = 4 << 20;
const HIGH: u64 = 1 << 32;
const HIGH_BYTES: u64 = 64 << 10;
/// Buffers lie from here on.
const DATA: u64 = 2 << 20;
const OWN: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 7);

const WRITE_REGISTER: u8 = 0;
const DESCRIPTOR: u8 = 1;
const PUBLISH: u8 = 2;
const STORE: u8 = 3;
const KICK: u8 = 4;
const TURN: u8 = 5;
const FROM_WIRE: u8 = 6;
const CONNECT: u8 = 7;
const HOST_WRITES: u8 = 8;
const HOST_READS: u8 = 9;
const LATER: u8 = 10;
const SAVE: u8 = 11;
const READ_REGISTER: u8 = 12;
const LIMIT: u8 = 13;
const RETRY: u8 = 14;
const FLIGHT: u8 = 15;
const EVENTS: u8 = 16;

const REGISTERS: [u64; 20] = [
    register::DEVICE_FEATURES_SEL,
    register::DRIVER_FEATURES,
    register::DRIVER_FEATURES_SEL,
    register::QUEUE_SEL,
    register::QUEUE_NUM,
    register::QUEUE_READY,
    register::QUEUE_NOTIFY,
    register::INTERRUPT_ACK,
    register::STATUS,
    register::QUEUE_DESC_LOW,
    register::QUEUE_DESC_HIGH,
    register::QUEUE_DRIVER_LOW,
    register::QUEUE_DRIVER_HIGH,
    register::QUEUE_DEVICE_LOW,
    register::QUEUE_DEVICE_HIGH,
    register::SHM_LEN_LOW,
    register::CONFIG,
    register::QUEUE_NUM_MAX,
    register::CONFIG_GENERATION,
    register::DEVICE_ID,
];

/// Where the rings of a queue are once the driver is set up.
fn ring(slot: u8, queue: u8, part: u64) -> u64 {
    0x4_0000 * (u64::from(slot) + 1) + 0x1_0000 * u64::from(queue) + 0x4000 * part
}

struct World {
    mem: GuestMemoryMmap,
    devices: Devices,
    now: Instant,
    base: std::fs::File,
    written: std::fs::File,
    wire: OwnedFd,
    streams: Vec<UnixStream>,
    folder: tempfile::TempDir,
}

fn memory() -> GuestMemoryMmap {
    let ranges = [(0, LOW), (HIGH, HIGH_BYTES)];
    let ranges = ranges.map(|(at, len)| (GuestAddress(at), usize::try_from(len).unwrap()));
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

/// An empty file in memory.
fn file() -> std::fs::File {
    dayfly_pager::guest::memory(0).unwrap()
}

impl World {
    fn new() -> Self {
        let mem = memory();
        let folder = tempfile::tempdir_in(scratch::folder()).unwrap();
        let path = folder.path().join("v");
        let listener = UnixListener::bind(&path).unwrap().into();
        let (base, written) = (file(), file());
        base.write_all_at(&BASE, 0).unwrap();
        let disk = DiskSpec {
            size_bytes: BLOCKS * 4096,
            base: base.try_clone().unwrap().into(),
            layers: Vec::new(),
            writable: Some(written.try_clone().unwrap().into()),
            trees: Vec::new(),
        };
        let vsock = VsockSpec { listener, path, guest_cid: 3 };
        let devices = Devices::new(mem.clone(), vec![disk], 1, vsock).unwrap();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (tap, wire) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let link =
            LinkConfig { mac: [2, 0xdf, 10, 88, 0, 7], address: OWN, sends: None, receives: None };
        devices.connect(&link, Some(tap)).unwrap();
        let (now, streams) = (Instant::now(), Vec::new());
        Self { mem, devices, now, base, written, wire, streams, folder }
    }

    fn write(&self, slot: u8, offset: u64, value: u32) {
        let at = MMIO_BASE + u64::from(slot) * MMIO_SIZE + offset;
        assert!(self.devices.set().mmio_write(at, &value.to_le_bytes()), "no register at {at:#x}");
    }

    fn read(&self, slot: u8, offset: u64) -> u32 {
        let mut data = [0; 4];
        let at = MMIO_BASE + u64::from(slot) * MMIO_SIZE + offset;
        assert!(self.devices.set().mmio_read(at, &mut data), "no register at {at:#x}");
        u32::from_le_bytes(data)
    }

    /// The initialisation of virtio 1.2 section 3.1.1, except for the features in `without`.
    fn set_up(&self, slot: u8, without: u32) {
        for value in [0, status::ACKNOWLEDGE, status::ACKNOWLEDGE | status::DRIVER] {
            self.write(slot, register::STATUS, u32::from(value));
        }
        for half in 0..2 {
            self.write(slot, register::DEVICE_FEATURES_SEL, half);
            self.write(slot, register::DRIVER_FEATURES_SEL, half);
            let without = if half == 0 { without } else { 0 };
            let features = self.read(slot, register::DEVICE_FEATURES) & !without;
            self.write(slot, register::DRIVER_FEATURES, features);
        }
        self.write(slot, register::STATUS, 11);
        for queue in 0..QUEUES[usize::from(slot)] {
            self.write(slot, register::QUEUE_SEL, u32::from(queue));
            let most = self.read(slot, register::QUEUE_NUM_MAX);
            self.write(slot, register::QUEUE_NUM, most);
            let parts =
                [register::QUEUE_DESC_LOW, register::QUEUE_DRIVER_LOW, register::QUEUE_DEVICE_LOW];
            for (part, low) in (0..).zip(parts) {
                let at = u32::try_from(ring(slot, queue, part)).unwrap();
                self.write(slot, low, at);
                self.write(slot, low + 4, 0);
            }
            self.write(slot, register::QUEUE_READY, 1);
        }
        self.write(slot, register::STATUS, 15);
    }

    fn turns(&mut self) {
        // A device that never becomes idle would hold the device thread, so turns are counted.
        for _ in 0..64 {
            if !self.devices.turn(self.now).unwrap() {
                return;
            }
        }
    }

    fn publish(&self, slot: u8, queue: u8, head: u16) {
        let at = ring(slot, queue, 1);
        let index: u16 = self.mem.read_obj(GuestAddress(at + 2)).unwrap();
        let entry = at + 4 + u64::from(index % 256) * 2;
        self.mem.write_obj(head, GuestAddress(entry)).unwrap();
        self.mem.write_obj(index.wrapping_add(1), GuestAddress(at + 2)).unwrap();
    }

    fn event(&mut self, events: &mut Events<'_>) -> Option<()> {
        match events.byte()? % EVENTS {
            TURN => self.turns(),
            LATER => self.now += Duration::from_millis(u64::from(events.word()?)),
            SAVE => drop(self.devices.set().save()),
            RETRY => {
                let _waits = self.devices.set().take_stall();
                self.devices.set().retry();
            }
            FLIGHT => self.devices.read_in_flight(),
            kind @ (FROM_WIRE | CONNECT | HOST_WRITES | HOST_READS | LIMIT) => {
                self.host_event(kind, events)?;
            }
            kind => self.guest_event(kind, events)?,
        }
        Some(())
    }

    /// What the guest's driver does.
    fn guest_event(&self, kind: u8, events: &mut Events<'_>) -> Option<()> {
        match kind {
            WRITE_REGISTER => {
                let (slot, offset) = (events.byte()? % 4, events.one(&REGISTERS)?);
                self.write(slot, offset, events.long()?);
            }
            DESCRIPTOR => {
                let (slot, queue, index) = (events.byte()? % 4, events.byte()? % 3, events.byte()?);
                let place = events.long()?;
                // The upper bits choose a region; some descriptors end in a hole.
                let address = match place >> 30 {
                    0 | 1 => DATA + u64::from(place) % (LOW - DATA),
                    2 => HIGH + u64::from(place) % (2 * HIGH_BYTES),
                    _ => u64::from(place),
                };
                let (length, flags, next) = (events.long()?, events.word()?, events.word()?);
                let mut bytes = address.to_le_bytes().to_vec();
                bytes.extend_from_slice(&length.to_le_bytes());
                bytes.extend_from_slice(&flags.to_le_bytes());
                bytes.extend_from_slice(&next.to_le_bytes());
                let at = ring(slot, queue, 0) + u64::from(index) * 16;
                self.mem.write_slice(&bytes, GuestAddress(at)).unwrap();
            }
            PUBLISH => {
                let (slot, queue) = (events.byte()? % 4, events.byte()? % 3);
                self.publish(slot, queue, events.word()?);
            }
            STORE => {
                let place = u64::from(events.long()?) % (LOW - 256);
                let _ = self.mem.write_slice(events.bytes()?, GuestAddress(place));
            }
            KICK => {
                let (slot, queue) = (events.byte()? % 4, u32::from(events.byte()?));
                self.write(slot, register::QUEUE_NOTIFY, queue);
            }
            _ => {
                let _value = self.read(events.byte()? % 4, events.one(&REGISTERS)?);
            }
        }
        Some(())
    }

    /// What programs and the network of the host do.
    fn host_event(&mut self, kind: u8, events: &mut Events<'_>) -> Option<()> {
        match kind {
            FROM_WIRE => {
                let _full = rustix::io::write(&self.wire, events.bytes()?);
            }
            CONNECT => {
                if let Ok(mut stream) = UnixStream::connect(self.folder.path().join("v")) {
                    stream.set_nonblocking(true).unwrap();
                    let _ = stream.write(format!("CONNECT {}\n", events.byte()?).as_bytes());
                    self.streams.push(stream);
                }
            }
            HOST_WRITES => {
                let (which, bytes) = (events.byte()?, events.bytes()?);
                if let Some(mut stream) = self.streams.get(usize::from(which)) {
                    let _ = stream.write(bytes);
                }
            }
            HOST_READS => {
                let which = usize::from(events.byte()?);
                if let Some(mut stream) = self.streams.get(which) {
                    let _ = stream.read(&mut [0; 4096]);
                }
            }
            _ => {
                let quota_bytes = u64::from(events.word()?) * 64;
                let limits = Limits { share_bytes: quota_bytes, quota_bytes, floor_bytes: 0 };
                let limited = file();
                limited.write_all_at(&limits.encode(), 0).unwrap();
                self.devices.set().limit_growth(limited);
            }
        }
        Some(())
    }

    /// What holds whatever the guest does.
    fn check(&self) {
        let mut base = [0; BASE.len()];
        self.base.read_exact_at(&mut base, 0).unwrap();
        assert!(base == BASE, "the base image was written");
        let bytes = self.written.metadata().unwrap().len();
        assert!(bytes <= BLOCKS * 4096, "the disk's file has {bytes} bytes");
        let mut packet = [0; 70_000];
        while let Ok(length @ 1..) = rustix::io::read(&self.wire, &mut packet) {
            check_packet(&packet[..length]);
        }
    }
}

/// A packet of the guest has its own IPv4 address as the source.
fn check_packet(packet: &[u8]) {
    let frame = packet.get(12..).expect("a packet without its header");
    assert!(frame.len() >= 14, "a frame of {} bytes", frame.len());
    if frame[12..14] == [8, 0] && frame.len() >= 34 {
        assert_eq!(frame[26..30], OWN.octets(), "the sender's address");
    }
}

fn virtio(input: &[u8]) -> Outcome {
    let mut events = Events::new(input);
    let Some(set_up) = events.byte() else { return Outcome::Refused };
    let mut world = World::new();
    let without = events.long().unwrap_or(0);
    for slot in (0..4).filter(|slot| set_up >> slot & 1 == 1) {
        world.set_up(slot, without);
    }
    let mut count = 0;
    while count < 512 && world.event(&mut events).is_some() {
        count += 1;
    }
    world.turns();
    world.check();
    let health = world.devices.set().health();
    planted(|| world.written.metadata().unwrap().len() > 12 * 4096);
    planted(|| health.iter().filter(|device| device.broken.is_some()).count() >= 3);
    Outcome::of(count > 1)
}

/// Loads the devices of a saved VM into a set of the same shape.
pub fn load(states: &DeviceStates) {
    let folder = tempfile::tempdir_in(scratch::folder()).unwrap();
    let path = folder.path().join("v");
    let listener = UnixListener::bind(&path).unwrap().into();
    let disk = |_| DiskSpec {
        size_bytes: BLOCKS * 4096,
        base: file().into(),
        layers: Vec::new(),
        writable: Some(file().into()),
        trees: Vec::new(),
    };
    let vsock = VsockSpec { listener, path, guest_cid: 3 };
    let count = |is: fn(&KindState) -> bool| {
        u8::try_from(states.devices.iter().filter(|device| is(&device.kind)).count()).unwrap_or(9)
    };
    let disks = (0..count(|kind| matches!(kind, KindState::Block(_))).min(8)).map(disk).collect();
    let nets = count(|kind| matches!(kind, KindState::Net)).min(1);
    let mut devices = Devices::new(memory(), disks, nets, vsock).unwrap();
    if devices.set().load(states).is_ok() {
        for _ in 0..4 {
            let _more = devices.turn(Instant::now()).unwrap();
        }
        let _saved = devices.set().save();
    }
}

/// Writes events as [`World::event`] reads them.
struct Script(Vec<u8>);

impl Script {
    fn new(set_up: u8) -> Self {
        Self(vec![set_up, 0, 0, 0, 0])
    }

    fn descriptor(&mut self, slot: u8, queue: u8, index: u8, piece: (u32, u32, u16, u16)) {
        let (place, length, flags, next) = piece;
        self.0.extend_from_slice(&[DESCRIPTOR, slot, queue, index]);
        self.0.extend_from_slice(&place.to_le_bytes());
        self.0.extend_from_slice(&length.to_le_bytes());
        self.0.extend_from_slice(&flags.to_le_bytes());
        self.0.extend_from_slice(&next.to_le_bytes());
    }

    /// Stores bytes at the place that a descriptor with `place` names.
    fn store(&mut self, place: u32, bytes: &[u8]) {
        let at = u32::try_from(DATA).unwrap() + place;
        self.0.push(STORE);
        self.0.extend_from_slice(&at.to_le_bytes());
        self.0.push(u8::try_from(bytes.len()).unwrap());
        self.0.extend_from_slice(bytes);
    }

    fn send(&mut self, slot: u8, queue: u8, head: u8) {
        self.0.extend_from_slice(&[PUBLISH, slot, queue, head, 0, KICK, slot, queue, TURN]);
    }

    fn request(&mut self, kind: u32, sector: u64, length: u32, writes: bool) {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.store(0, &header);
        self.descriptor(DISK, 0, 0, (0, 16, 1, 1));
        self.descriptor(DISK, 0, 1, (0x1000, length, 1 | if writes { 2 } else { 0 }, 2));
        self.descriptor(DISK, 0, 2, (0x100, 1, 2, 0));
        self.send(DISK, 0, 0);
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut disk = Script::new(1 << DISK);
    disk.request(0, 0, 4096, true);
    disk.request(1, 8, 4096, false);
    disk.request(4, 0, 0, false);
    disk.request(8, 0, 20, true);
    let mut zeroes = Script::new(1 << DISK);
    zeroes.store(0x1000, &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    zeroes.request(13, 0, 16, false);
    zeroes.request(11, 0, 16, false);
    let flight = Script([&disk.0[..], &[FLIGHT], &disk.0[5..], &[TURN, SAVE]].concat());
    let mut rng = Script::new(1 << RNG);
    rng.descriptor(RNG, 0, 0, (0, 64, 2, 0));
    rng.send(RNG, 0, 0);
    let mut net = Script::new(1 << NET);
    let frame = [
        &[0; 12][..],
        &[0xff; 6],
        &[2, 0xdf, 10, 88, 0, 7, 8, 0, 0x45],
        &[0; 11],
        &[10, 88, 0, 7],
        &[0; 30],
    ];
    net.store(0, &frame.concat());
    net.descriptor(NET, 1, 0, (0, 72, 0, 0));
    net.send(NET, 1, 0);
    net.descriptor(NET, 0, 0, (0x2000, 2000, 2, 0));
    net.send(NET, 0, 0);
    net.0.extend_from_slice(&[FROM_WIRE, 72]);
    net.0.extend_from_slice(&frame.concat());
    net.0.push(TURN);
    let mut vsock = Script::new(1 << VSOCK);
    for n in 0..4_u8 {
        vsock.descriptor(VSOCK, 0, n, (0x4000 + u32::from(n) * 0x1000, 4096, 2, 0));
        vsock.send(VSOCK, 0, n);
    }
    vsock.0.extend_from_slice(&[CONNECT, 7, TURN, HOST_READS, 0]);
    let request = [
        &3_u64.to_le_bytes()[..],
        &2_u64.to_le_bytes(),
        &7_u32.to_le_bytes(),
        &9_u32.to_le_bytes(),
        &0_u32.to_le_bytes(),
        &1_u16.to_le_bytes(),
        &1_u16.to_le_bytes(),
        &0_u32.to_le_bytes(),
        &65536_u32.to_le_bytes(),
        &0_u32.to_le_bytes(),
    ];
    vsock.store(0, &request.concat());
    vsock.descriptor(VSOCK, 1, 0, (0, 44, 0, 0));
    vsock.send(VSOCK, 1, 0);
    vsock.0.extend_from_slice(&[LATER, 0xff, 0xff, TURN, SAVE]);
    let raw = vec![0, 0, 0, 0, 0, WRITE_REGISTER, 0, 8, 1, 0, 0, 0, READ_REGISTER, 3, 8];
    vec![disk.0, zeroes.0, flight.0, rng.0, net.0, vsock.0, raw]
}
