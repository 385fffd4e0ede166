//! A driver for tests: it configures devices through their registers, and writes chains into rings.
//!
//! virtio-queue's `MockSplitQueue` places its used ring over the second half of its available ring,
//! so it cannot hold many requests. Only its descriptor types are used here.

#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::registers::{register, status};
use super::{DeviceSet, MMIO_BASE, MMIO_SIZE, VsockSpec};
use crate::config::DISK_BLOCK_BYTES;
use crate::disk::{DiskSpec, LayerSpec, Reads};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

pub const NEXT: u16 = VRING_DESC_F_NEXT as u16;
pub const WRITE: u16 = VRING_DESC_F_WRITE as u16;
pub const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// End of the low regions of guest memory.
pub const LOW_END: u64 = 64 << 20;
/// Start of the third region. A hole lies before it, so that buffers can cross from a region into
/// the hole.
pub const HIGH: u64 = 1 << 32;
pub const HIGH_END: u64 = HIGH + (1 << 20);
/// Rings lie below this address, buffers from it on.
pub const DATA: u64 = 16 << 20;

pub fn memory() -> GuestMemoryMmap {
    let middle = LOW_END / 2;
    let ranges = [(0, middle), (middle, LOW_END - middle), (HIGH, HIGH_END - HIGH)];
    let ranges = ranges.map(|(start, len)| (GuestAddress(start), usize::try_from(len).unwrap()));
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

/// A copy of guest memory.
pub fn copy_memory(from: &GuestMemoryMmap) -> GuestMemoryMmap {
    let to = memory();
    for (start, len) in [(0, LOW_END), (HIGH, HIGH_END - HIGH)] {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        from.read_slice(&mut bytes, GuestAddress(start)).unwrap();
        to.write_slice(&bytes, GuestAddress(start)).unwrap();
    }
    to
}

pub fn temp_file(bytes: &[u8]) -> std::fs::File {
    use std::io::Write as _;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A disk of `blocks` blocks over a base image, with frozen layers.
pub fn disk(blocks: u64, base: &[u8], layers: Vec<LayerSpec>, writable: bool) -> DiskSpec {
    DiskSpec {
        size_bytes: blocks * DISK_BLOCK_BYTES,
        base: temp_file(base).into(),
        layers,
        writable: writable.then(|| temp_file(&[]).into()),
        trees: Vec::new(),
    }
}

/// An empty file of tmpfs. A ring gives each read of it to a kernel thread, so reads are in flight
/// after their submission. If one waits, those after it overtake it. On ext4, reads of cached data
/// end in their submission.
pub fn memory_file() -> std::fs::File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    rustix::fs::memfd_create("disk", flags).unwrap().into()
}

/// A writable disk of `blocks` blocks whose base is in a file of tmpfs.
pub fn disk_in_memory(blocks: u64, base: &[u8]) -> DiskSpec {
    use std::os::unix::fs::FileExt as _;
    let file = memory_file();
    file.write_all_at(base, 0).unwrap();
    DiskSpec { base: file.into(), ..disk(blocks, &[], vec![], true) }
}

/// Has system call `call` fail with `errno` in the calling thread, if its argument `argument` is at
/// least `least`.
pub fn refuse(call: i64, (argument, least): (u8, u64), errno: i32) {
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch,
    };
    let (len, at_least) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Ge);
    let condition = SeccompCondition::new(argument, len, at_least, least).unwrap();
    let rules = [(call, vec![SeccompRule::new(vec![condition]).unwrap()])].into_iter().collect();
    let refuse = SeccompAction::Errno(errno.cast_unsigned());
    let filter =
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, TargetArch::x86_64).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// Has the kernel report to the calling thread that it has no memory for `least` or more requests
/// of a ring at once.
pub fn starve_rings(least: u64) {
    refuse(libc::SYS_io_uring_enter, (1, least), libc::EAGAIN);
}

/// Devices without a VM, and their files on the host.
pub struct Machine {
    pub mem: GuestMemoryMmap,
    pub set: Arc<DeviceSet>,
    pub folder: tempfile::TempDir,
    threads: Vec<JoinHandle<()>>,
}

impl Machine {
    pub fn new(mem: GuestMemoryMmap, disks: Vec<DiskSpec>) -> Self {
        Self::with_nets(mem, disks, 0)
    }

    pub fn with_nets(mem: GuestMemoryMmap, disks: Vec<DiskSpec>, nets: u8) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v");
        let listener = UnixListener::bind(&path).unwrap().into();
        let vsock = VsockSpec { listener, path, guest_cid: 3 };
        let set =
            DeviceSet::without_vm(mem.clone(), u8::try_from(disks.len()).unwrap(), nets, vsock)
                .unwrap();
        set.insert_disks(disks).unwrap();
        Self { mem, set: Arc::new(set), folder, threads: Vec::new() }
    }

    /// Starts both device threads, with a ring if the kernel makes one.
    pub fn run(self) -> Self {
        self.run_with(Reads::new)
    }

    /// Starts both device threads; that of the disks calls `reads`.
    pub fn run_with(mut self, reads: fn() -> Reads) -> Self {
        let set = Arc::clone(&self.set);
        self.threads.push(std::thread::spawn(move || set.run_loop().unwrap()));
        let set = Arc::clone(&self.set);
        self.threads.push(std::thread::spawn(move || set.run_disks(reads()).unwrap()));
        self
    }

    /// Waits until the thread of all devices but the disks has served what was ready before this
    /// call. What that makes ready, the next call waits for.
    pub fn turn(&self) {
        turn_of(&self.set.wake);
    }

    /// As [`Self::turn`], for the thread of the disks. No read may be in flight after its
    /// submission, because a wait for reads empties the eventfd too.
    pub fn disk_turn(&self) {
        turn_of(self.set.disk_kick.as_deref().unwrap());
    }

    /// Waits until the device thread has accepted the connections of the host that wait, and then
    /// read what their callers have sent.
    pub fn take_caller(&self) {
        self.turn();
        self.turn();
    }

    pub fn slot_of(&self, device_id: u32) -> usize {
        self.set.health().iter().position(|h| h.device_id == device_id).unwrap()
    }

    pub fn read(&self, slot: usize, offset: u64) -> u32 {
        let mut data = [0; 4];
        assert!(self.set.mmio_read(MMIO_BASE + slot as u64 * MMIO_SIZE + offset, &mut data));
        u32::from_le_bytes(data)
    }

    pub fn write(&self, slot: usize, offset: u64, value: u32) {
        assert!(
            self.set.mmio_write(MMIO_BASE + slot as u64 * MMIO_SIZE + offset, &value.to_le_bytes())
        );
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.set.stop();
        for thread in self.threads.drain(..) {
            let result = thread.join();
            assert!(result.is_ok() || std::thread::panicking());
        }
    }
}

/// Waits for a whole turn of the thread that `wake` wakes.
///
/// The thread empties `wake` at the begin of a turn. So a whole turn has ended when the thread
/// empties it for the second time.
fn turn_of(wake: &EventFd) {
    for _ in 0..2 {
        wake.write(1).unwrap();
        until_empty(wake);
    }
}

/// Waits until a device thread has emptied the eventfd.
pub fn until_empty(wake: &EventFd) {
    let (epoll, mut events) = (Epoll::new().unwrap(), [EpollEvent::default()]);
    let filled = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, wake.as_raw_fd(), filled).unwrap();
    until("the device thread takes the kick", || epoll.wait(0, &mut events).unwrap() == 0);
}

/// One buffer of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub address: u64,
    pub len: u32,
    pub write: bool,
}

pub fn reads(address: u64, len: u32) -> Piece {
    Piece { address, len, write: false }
}

pub fn writes(address: u64, len: u32) -> Piece {
    Piece { address, len, write: true }
}

/// The driver's side of a queue.
#[derive(Debug, Clone)]
pub struct DriverQueue {
    index: u32,
    pub size: u16,
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    next_descriptor: u16,
    pub avail_idx: u16,
    used_seen: u16,
}

impl DriverQueue {
    pub fn descriptor(
        &self,
        mem: &GuestMemoryMmap,
        index: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let descriptor = Descriptor::new(address, len, flags, next);
        mem.write_obj(descriptor, GuestAddress(self.desc + u64::from(index) * 16)).unwrap();
    }

    /// Makes a chain available. Descriptors are used in a circle.
    pub fn add(&mut self, mem: &GuestMemoryMmap, pieces: &[Piece]) -> u16 {
        let head = self.next_descriptor;
        for (at, piece) in pieces.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let last = at + 1 == pieces.len();
            let flags = if last { 0 } else { NEXT } | if piece.write { WRITE } else { 0 };
            self.descriptor(mem, index, piece.address, piece.len, flags, self.next_descriptor);
        }
        self.publish(mem, head);
        head
    }

    pub fn publish(&mut self, mem: &GuestMemoryMmap, head: u16) {
        let at = self.avail + 4 + u64::from(self.avail_idx % self.size) * 2;
        mem.write_obj(head, GuestAddress(at)).unwrap();
        self.avail_idx = self.avail_idx.wrapping_add(1);
        mem.store(
            self.avail_idx,
            GuestAddress(self.avail + 2),
            std::sync::atomic::Ordering::SeqCst,
        )
        .unwrap();
    }

    /// The chains that the device returned since the last call, as head and length.
    pub fn take_used(&mut self, mem: &GuestMemoryMmap) -> Vec<(u32, u32)> {
        let idx: u16 =
            mem.load(GuestAddress(self.used + 2), std::sync::atomic::Ordering::SeqCst).unwrap();
        let mut out = Vec::new();
        while self.used_seen != idx {
            let at = self.used + 4 + u64::from(self.used_seen % self.size) * 8;
            let pair: [u32; 2] = mem.read_obj(GuestAddress(at)).unwrap();
            out.push((pair[0], pair[1]));
            self.used_seen = self.used_seen.wrapping_add(1);
        }
        // Ask for an interrupt for the next chain (used_event).
        let event = self.avail + 4 + u64::from(self.size) * 2;
        mem.store(self.used_seen, GuestAddress(event), std::sync::atomic::Ordering::SeqCst)
            .unwrap();
        out
    }

    /// Waits until the device has returned `count` chains.
    pub fn wait_used(&mut self, mem: &GuestMemoryMmap, count: usize) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        until("the device hands chains back", || {
            out.extend(self.take_used(mem));
            out.len() >= count
        });
        out
    }

    /// Whether the device wants a kick for the chains made available from `old` on (2.7.10).
    pub fn kick_wanted(&self, mem: &GuestMemoryMmap, old: u16) -> bool {
        let event = self.used + 4 + u64::from(self.size) * 8;
        let event: u16 =
            mem.load(GuestAddress(event), std::sync::atomic::Ordering::SeqCst).unwrap();
        self.avail_idx.wrapping_sub(event).wrapping_sub(1) < self.avail_idx.wrapping_sub(old)
    }
}

/// Waits until `done`, at most 5 min, which end only a hang; the sleep does not decide the result.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(300), "waiting until {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A driver of one device, with its queues.
#[derive(Debug, Clone)]
pub struct Driver {
    pub slot: usize,
    pub queues: Vec<DriverQueue>,
}

impl Driver {
    /// Sets the status up to FEATURES_OK, with all offered features except `without`.
    pub fn negotiate(machine: &Machine, slot: usize, without: u64) {
        machine.write(slot, register::STATUS, 0);
        let mut bits = u32::from(status::ACKNOWLEDGE);
        machine.write(slot, register::STATUS, bits);
        bits |= u32::from(status::DRIVER);
        machine.write(slot, register::STATUS, bits);
        let mut features = 0;
        for half in 0..2 {
            machine.write(slot, register::DEVICE_FEATURES_SEL, half);
            features |= u64::from(machine.read(slot, register::DEVICE_FEATURES)) << (32 * half);
        }
        features &= !without;
        for half in 0..2 {
            machine.write(slot, register::DRIVER_FEATURES_SEL, half);
            let part = features >> (32 * half) & 0xffff_ffff;
            machine.write(slot, register::DRIVER_FEATURES, u32::try_from(part).unwrap());
        }
        bits |= u32::from(status::FEATURES_OK);
        machine.write(slot, register::STATUS, bits);
        assert_eq!(machine.read(slot, register::STATUS), bits);
    }

    /// Performs the whole initialisation of 3.1.1.
    pub fn start(machine: &Machine, slot: usize, without: u64) -> Self {
        let driver = Self::prepare(machine, slot, without);
        driver.go(machine);
        driver
    }

    /// Sets DRIVER_OK.
    pub fn go(&self, machine: &Machine) {
        machine.write(self.slot, register::STATUS, 15);
        assert_eq!(machine.read(self.slot, register::STATUS), 15);
    }

    /// Performs the whole initialisation except DRIVER_OK.
    pub fn prepare(machine: &Machine, slot: usize, without: u64) -> Self {
        Self::negotiate(machine, slot, without);
        let mut queues = Vec::new();
        for index in 0.. {
            machine.write(slot, register::QUEUE_SEL, index);
            let max = machine.read(slot, register::QUEUE_NUM_MAX);
            if max == 0 {
                break;
            }
            let base = 0x10_0000 * (slot as u64 + 1) + 0x1_0000 * u64::from(index);
            let (desc, avail, used) = (base, base + 0x4000, base + 0x8000);
            machine.mem.write_slice(&[0; 0xc000], GuestAddress(base)).unwrap();
            machine.write(slot, register::QUEUE_NUM, max);
            for (low, high, address) in [
                (register::QUEUE_DESC_LOW, register::QUEUE_DESC_HIGH, desc),
                (register::QUEUE_DRIVER_LOW, register::QUEUE_DRIVER_HIGH, avail),
                (register::QUEUE_DEVICE_LOW, register::QUEUE_DEVICE_HIGH, used),
            ] {
                machine.write(slot, low, u32::try_from(address).unwrap());
                machine.write(slot, high, 0);
            }
            machine.write(slot, register::QUEUE_READY, 1);
            assert_eq!(machine.read(slot, register::QUEUE_READY), 1);
            let size = u16::try_from(max).unwrap();
            let (next_descriptor, avail_idx, used_seen) = (0, 0, 0);
            queues.push(DriverQueue {
                index,
                size,
                desc,
                avail,
                used,
                next_descriptor,
                avail_idx,
                used_seen,
            });
        }
        Self { slot, queues }
    }

    pub fn kick(&self, machine: &Machine, queue: usize) {
        machine.write(self.slot, register::QUEUE_NOTIFY, self.queues[queue].index);
    }

    /// Kicks only if the device asked for it, as Linux does.
    pub fn kick_if_wanted(&self, machine: &Machine, queue: usize, old: u16) {
        if self.queues[queue].kick_wanted(&machine.mem, old) {
            self.kick(machine, queue);
        }
    }
}
