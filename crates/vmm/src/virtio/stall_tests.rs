//! Disks whose host has no space: requests wait and are done once, none fails.

use super::block_bench::{BLOCKS, BODY, Bench, HEADER, OK, RINGS, STATUS};
use super::testing::{Driver, Machine, disk, memory, reads, writes};
use crate::disk::room::Limits;
use crate::disk::{Disk, DiskSpec, NoSpace, Room};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::io::Errno;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use virtio_bindings::virtio_blk as spec;
use vm_memory::{Bytes as _, GuestAddress};

/// A private tmpfs of 64 KiB, which exists as long as a file on it is open: a layer, and a file
/// that takes all space but that of `blocks` blocks.
fn small_file_system(blocks: u64) -> (OwnedFd, File) {
    use rustix::fs::{Mode, OFlags, openat};
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
        fsopen,
    };
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).expect("this test needs root");
    fsconfig_set_string(context.as_fd(), "size", "65536").unwrap();
    fsconfig_create(context.as_fd()).unwrap();
    let mount =
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let [layer, other] =
        ["layer", "other"].map(|name| openat(&mount, name, flags, Mode::RUSR).unwrap());
    fallocate(&other, FallocateFlags::empty(), 0, (16 - blocks) * 4096).unwrap();
    (layer, other.into())
}

fn over(layer: OwnedFd) -> Bench {
    let spec = DiskSpec { writable: Some(layer), ..disk(BLOCKS, &[7; 8192], vec![], false) };
    Bench::of(Disk::open(spec).unwrap())
}

/// Makes one write of `block` available, without serving it.
fn offer(bench: &mut Bench, block: u64) {
    bench.header(spec::VIRTIO_BLK_T_OUT, block * 8);
    bench.chain(RINGS[0], &[reads(HEADER, 16), reads(BODY, 4096), writes(STATUS, 1)]);
    bench.publish(0);
}

/// The number of requests that came back.
fn done(bench: &Bench) -> u16 {
    bench.mem.read_obj(GuestAddress(RINGS[2] + 2)).unwrap()
}

#[test]
fn a_write_without_space_waits_and_is_done_once_when_there_is_space() {
    let (layer, other) = small_file_system(2);
    let mut bench = over(layer);
    bench.mem.write_slice(&[9; 4096], GuestAddress(BODY)).unwrap();
    for block in 0..2 {
        offer(&mut bench, block);
        bench.serve().unwrap();
    }
    assert_eq!((done(&bench), bench.block.waits()), (2, None));
    offer(&mut bench, 2);
    for _ in 0..3 {
        assert_eq!(bench.serve(), Ok(false));
        assert_eq!((done(&bench), bench.status()), (2, 0xaa), "neither an answer nor an error");
    }
    assert_eq!((bench.block.waits(), bench.block.counters().no_space), (Some(NoSpace::Full), 1));
    assert_eq!(bench.queue.state().next_avail, 2, "a saved queue has the request");
    assert!(bench.block.retry() && !bench.block.retry());
    bench.serve().unwrap();
    assert_eq!((done(&bench), bench.block.waits()), (2, Some(NoSpace::Full)), "still none");

    other.set_len(0).unwrap();
    bench.block.retry();
    bench.serve().unwrap();
    bench.serve().unwrap();
    assert_eq!((done(&bench), bench.status(), bench.block.waits()), (3, OK, None));
    bench.used = 3;
    let read = bench.request(spec::VIRTIO_BLK_T_IN, 2 * 8, &[writes(BODY + 0x2000, 4096)]);
    assert_eq!((read, bench.bytes(BODY + 0x2000, 4096)), ((OK, 4097), vec![9; 4096]));
    assert_eq!(bench.block.counters().host_errors, 0);
}

#[test]
fn zeroes_wait_for_space_too_and_a_reset_ends_the_wait() {
    let (layer, other) = small_file_system(0);
    let mut bench = over(layer);
    let range = [&1_u64.to_le_bytes()[..], &9_u32.to_le_bytes(), &0_u32.to_le_bytes()].concat();
    bench.mem.write_slice(&range, GuestAddress(BODY)).unwrap();
    bench.header(spec::VIRTIO_BLK_T_WRITE_ZEROES, 0);
    bench.chain(RINGS[0], &[reads(HEADER, 16), reads(BODY, 16), writes(STATUS, 1)]);
    bench.publish(0);
    bench.serve().unwrap();
    assert_eq!((done(&bench), bench.block.waits()), (0, Some(NoSpace::Full)));
    other.set_len(0).unwrap();
    bench.block.retry();
    bench.serve().unwrap();
    assert_eq!((done(&bench), bench.status()), (1, OK));
    bench.used = 1;
    let read = bench.request(spec::VIRTIO_BLK_T_IN, 0, &[writes(BODY + 0x2000, 8192)]);
    assert_eq!(read, (OK, 8193));
    let zeros = [vec![7; 512], vec![0; 9 * 512], vec![7; 6 * 512]].concat();
    assert_eq!(bench.bytes(BODY + 0x2000, 8192), zeros);
}

#[test]
fn limits_of_the_daemon_make_a_write_wait_before_the_file_system_is_full() {
    let mut limits = tempfile::NamedTempFile::new().unwrap();
    let mut write = |limits_now: Limits| {
        use std::io::Seek as _;
        limits.rewind().unwrap();
        limits.write_all(&limits_now.encode()).unwrap();
        limits.reopen().unwrap()
    };
    let kept = Limits { share_bytes: 4096, quota_bytes: u64::MAX, floor_bytes: u64::MAX };
    let mut bench = over(memfd_create("layer", MemfdFlags::CLOEXEC).unwrap());
    bench.room = Room::limited(write(kept));
    for block in 0..2 {
        offer(&mut bench, block);
        bench.serve().unwrap();
    }
    assert_eq!((done(&bench), bench.block.waits()), (1, Some(NoSpace::Shares)));
    // A discard needs no space.
    write(Limits { floor_bytes: 0, ..kept });
    bench.block.retry();
    bench.serve().unwrap();
    assert_eq!((done(&bench), bench.block.waits()), (2, None));
}

#[test]
fn the_main_thread_learns_once_that_a_disk_waits_and_requests_go_on_after_a_retry() {
    let (layer, other) = small_file_system(1);
    let spec = DiskSpec { writable: Some(layer), ..disk(BLOCKS, &[7; 8192], vec![], false) };
    let machine = Machine::new(memory(), vec![spec]).run();
    assert!(!machine.set.take_stall() && machine.set.no_space().is_none());
    let mut driver = Driver::start(&machine, 0, 0);
    let mut write = |block: u64, header: u64| {
        machine.mem.write_obj(spec::VIRTIO_BLK_T_OUT, GuestAddress(header)).unwrap();
        machine.mem.write_obj(block * 8, GuestAddress(header + 8)).unwrap();
        let pieces = [reads(header, 16), reads(BODY, 4096), writes(STATUS + block, 1)];
        driver.queues[0].add(&machine.mem, &pieces);
        driver.kick(&machine, 0);
    };
    write(0, HEADER);
    write(1, HEADER + 0x10);
    wait(&machine);
    assert_eq!(machine.set.no_space(), Some(NoSpace::Full));
    machine.set.pause();
    other.set_len(0).unwrap();
    machine.set.retry();
    assert_eq!(machine.set.no_space(), None);
    machine.set.resume();
    assert_eq!(driver.queues[0].wait_used(&machine.mem, 2).len(), 2);
    for block in 0..2 {
        let status: u8 = machine.mem.read_obj(GuestAddress(STATUS + block)).unwrap();
        assert_eq!(status, OK, "block {block}");
    }
    assert!(!machine.set.take_stall());
}

#[test]
fn a_disk_that_waits_is_announced_once_and_another_disk_goes_on() {
    let (layer, other) = small_file_system(0);
    let full = DiskSpec { writable: Some(layer), ..disk(BLOCKS, &[7; 8192], vec![], false) };
    let free = disk(BLOCKS, &[7; 8192], vec![], true);
    let machine = Machine::new(memory(), vec![full, free]).run();
    let mut drivers = [0, 1].map(|slot| Driver::start(&machine, slot, 0));
    let mut write = |slot: usize| {
        let (header, status) = (HEADER + 0x10 * slot as u64, STATUS + slot as u64);
        machine.mem.write_obj(spec::VIRTIO_BLK_T_OUT, GuestAddress(header)).unwrap();
        let pieces = [reads(header, 16), reads(BODY, 4096), writes(status, 1)];
        drivers[slot].queues[0].add(&machine.mem, &pieces);
        drivers[slot].kick(&machine, 0);
        drivers[slot].queues[0].clone()
    };
    let mut waiting = write(0);
    wait(&machine);
    for _ in 0..3 {
        write(1).wait_used(&machine.mem, 1);
        machine.disk_turn();
    }
    assert!(!is_announced(&machine), "announced again");
    assert_eq!(machine.set.no_space(), Some(NoSpace::Full));
    assert!(waiting.take_used(&machine.mem).is_empty());
    other.set_len(0).unwrap();
    machine.set.retry();
    waiting.wait_used(&machine.mem, 1);
    assert!(!is_announced(&machine) && machine.set.no_space().is_none());
}

/// Whether a disk has announced that it waits, without a wait.
fn is_announced(machine: &Machine) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let event = machine.set.stall_event();
    let mut events = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
    poll(&mut events, Some(&Timespec::default())).unwrap() > 0
}

/// Waits until a disk has announced that it waits.
fn wait(machine: &Machine) {
    use rustix::event::{PollFd, PollFlags, poll};
    let event = machine.set.stall_event();
    while poll(&mut [PollFd::from_borrowed_fd(event, PollFlags::IN)], None) == Err(Errno::INTR) {}
    assert!(machine.set.take_stall());
}
