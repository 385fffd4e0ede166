//! A machine whose disk is held by a read, for tests.
//!
//! The request reads into a page of guest memory that is missing (userfaultfd(2)), so the kernel
//! holds it until the test gives the page: in preadv(2), or in a kernel thread of the ring. The
//! base is in tmpfs, or else the kernel would copy the cached data while the thread of the disks
//! submits, and hold that thread.

#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::set::DeviceSet;
use super::testing::{
    DATA, Driver, DriverQueue, Machine, Piece, disk_in_memory, memory, reads, until, writes,
};
use super::vsock::testing::{Flow, Guest, op};
use crate::config::LinkConfig;
use crate::disk::Reads;
use crate::virtio::net::HEADER_BYTES;
use dayfly_sys::uffd::Uffd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, Ordering};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

pub const PAGE: usize = 4096;
/// A page in a large page that no test touches otherwise.
pub const MISSING: u64 = 48 << 20;
pub const HEADER: u64 = DATA + 0xc0_0000;
pub const STATUS: u64 = HEADER + 0x1000;
pub const PACKETS: u64 = DATA + 0x80_0000;
/// What the disk has in each byte.
pub const CONTENT: u8 = 7;

/// A page of guest memory that is missing.
pub struct Missing {
    uffd: Uffd,
    host: u64,
}

impl Missing {
    pub fn in_memory(mem: &GuestMemoryMmap) -> Self {
        Self::at(mem, MISSING)
    }

    /// The page at `address`, which nothing has touched.
    pub fn at(mem: &GuestMemoryMmap, address: u64) -> Self {
        let uffd = Uffd::with_kernel_faults().expect("this test needs root");
        let host = mem.get_host_address(GuestAddress(address)).unwrap().addr() as u64;
        uffd.register(host, PAGE as u64).unwrap();
        Self { uffd, host }
    }

    /// Waits until a thread waits for the page.
    pub fn wait(&self) {
        let mut address = None;
        until("a thread waits for the missing page", || {
            address = self.uffd.next().unwrap();
            address.is_some()
        });
        assert_eq!(address.map(|at| at & !(PAGE as u64 - 1)), Some(self.host));
    }

    pub fn give(&self) {
        // SAFETY: the page is in guest memory, to which nothing has a reference.
        unsafe { self.uffd.give(self.host, &[0; PAGE]).unwrap() };
    }
}

/// Makes a read of block 0 into `data` available. Each disk has its own header and status.
pub fn offer(mem: &GuestMemoryMmap, driver: &mut Driver, data: Piece) {
    let (header, status) = (HEADER + 16 * driver.slot as u64, STATUS + driver.slot as u64);
    mem.write_slice(&[0; 16], GuestAddress(header)).unwrap();
    mem.write_obj(0xff_u8, GuestAddress(status)).unwrap();
    driver.queues[0].add(mem, &[reads(header, 16), data, writes(status, 1)]);
}

/// Makes a write of `data` to block 1 available.
pub fn offer_write(mem: &GuestMemoryMmap, driver: &mut Driver, data: Piece) {
    const HEADER_OF_WRITE: u64 = HEADER + 0x800;
    let (kind, sector) = (virtio_bindings::virtio_blk::VIRTIO_BLK_T_OUT, 8_u64);
    mem.write_obj(kind, GuestAddress(HEADER_OF_WRITE)).unwrap();
    mem.write_obj(sector, GuestAddress(HEADER_OF_WRITE + 8)).unwrap();
    let status = STATUS + 0x800;
    driver.queues[0].add(mem, &[reads(HEADER_OF_WRITE, 16), data, writes(status, 1)]);
}

/// Kicks the disks as KVM does: no register is written, so no lock and no turn is taken.
pub fn kick(machine: &Machine) {
    machine.set.disk_kick.as_ref().unwrap().write(1).unwrap();
}

/// Whether the thread `id` of this process sleeps in system call `call`.
pub fn sleeps_in(id: &AtomicI32, call: i64) -> bool {
    let shown = format!("/proc/self/task/{}/syscall", id.load(Ordering::SeqCst));
    let call = format!("{call} ");
    std::fs::read_to_string(shown).is_ok_and(|shown| shown.starts_with(&call))
}

/// The device's index of a used ring.
pub fn used(mem: &GuestMemoryMmap, ring: &DriverQueue) -> u16 {
    mem.load(GuestAddress(ring.used + 2), Ordering::SeqCst).unwrap()
}

/// Asserts that the read into the missing page has ended.
pub fn is_read(mem: &GuestMemoryMmap, driver: &mut Driver) {
    assert_eq!(driver.queues[0].wait_used(mem, 1), [(0, 1 + PAGE as u32)]);
    let mut page = [0; PAGE];
    mem.read_slice(&mut page, GuestAddress(MISSING)).unwrap();
    assert_eq!((page, mem.read_obj(GuestAddress(STATUS)).unwrap()), ([CONTENT; PAGE], 0_u8));
}

/// A machine whose first disk is held by a read.
pub struct Held {
    /// Dropped first, which ends the wait.
    pub missing: Missing,
    pub guest: Guest,
    pub disk: Driver,
    pub net: Driver,
    pub wire: OwnedFd,
}

impl Held {
    pub fn new(reads: fn() -> Reads) -> Self {
        let disks = vec![disk_in_memory(4, &[CONTENT; PAGE])];
        let machine = Machine::with_nets(memory(), disks, 1).run_with(reads);
        let (tap, wire) = pair();
        machine.set.connect(&link(), Some(tap)).unwrap();
        let net = Driver::start(&machine, machine.slot_of(1), 0);
        let mut disk = Driver::start(&machine, 0, 0);
        let guest = Guest::on(machine);
        let missing = Missing::in_memory(&guest.machine.mem);
        offer(&guest.machine.mem, &mut disk, writes(MISSING, PAGE as u32));
        kick(&guest.machine);
        missing.wait();
        Self { missing, guest, disk, net, wire }
    }

    pub fn set(&self) -> &DeviceSet {
        &self.guest.machine.set
    }

    /// Kicks the disk if it wants that.
    pub fn kick_if_wanted(&self, old: u16) {
        if self.disk.queues[0].kick_wanted(&self.guest.machine.mem, old) {
            kick(&self.guest.machine);
        }
    }

    /// Makes a packet from the guest available.
    pub fn send(&mut self, mark: u8) {
        let mem = &self.guest.machine.mem;
        let at = PACKETS + 0x1000 * u64::from(mark);
        mem.write_slice(&packet(mark), GuestAddress(at)).unwrap();
        let old = self.net.queues[1].avail_idx;
        self.net.queues[1].add(mem, &[reads(at, packet(mark).len() as u32)]);
        self.net.kick_if_wanted(&self.guest.machine, 1, old);
    }

    /// A packet to the wire, one from it, and a message each way on a connection.
    pub fn exchange(&mut self, round: u8, connection: &mut (std::os::unix::net::UnixStream, Flow)) {
        self.send(round);
        assert_eq!(receive(&self.wire), packet(round));
        let mem = self.guest.mem();
        let place = PACKETS + 0x1000 * (128 + u64::from(round));
        let old = self.net.queues[0].avail_idx;
        self.net.queues[0].add(&mem, &[writes(place, PAGE as u32)]);
        self.net.kick_if_wanted(&self.guest.machine, 0, old);
        rustix::io::write(&self.wire, &packet(round)).unwrap();
        assert_eq!(self.net.queues[0].wait_used(&mem, 1).len(), 1);

        let (stream, flow) = connection;
        self.guest.send(&flow.header(op::RW), &[round; 9]);
        let mut got = [0; 9];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got, [round; 9]);
        stream.write_all(&[round; 5]).unwrap();
        let (_, data) = self.guest.expect(op::RW);
        assert_eq!(data, [round; 5]);
    }
}

pub fn link() -> LinkConfig {
    let address = Ipv4Addr::new(10, 88, 0, 7);
    LinkConfig { mac: [2; 6], address, sends: None, receives: None }
}

/// The device's end of a wire, and the other.
pub fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

pub fn receive(wire: &OwnedFd) -> Vec<u8> {
    let (mut bytes, mut length) = (vec![0; 2 * PAGE], None);
    until("a packet is on the wire", || {
        length = rustix::io::read(wire, &mut bytes).ok();
        length.is_some()
    });
    bytes.truncate(length.unwrap());
    bytes
}

/// A packet with its virtio header: IPv4 from the guest's address, 60 bytes of Ethernet.
pub fn packet(mark: u8) -> Vec<u8> {
    let mut packet = vec![mark; HEADER_BYTES + 60];
    packet[..HEADER_BYTES].fill(0);
    packet[HEADER_BYTES + 12..HEADER_BYTES + 14].copy_from_slice(&[8, 0]);
    packet[HEADER_BYTES + 26..HEADER_BYTES + 30].copy_from_slice(&[10, 88, 0, 7]);
    packet
}
