#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::registers::register;
use super::testing::{DATA, Driver, Machine, copy_memory, disk, memory, reads, until, writes};
use super::{DeviceError, DeviceStates, KindState, LoadError, MMIO_BASE, TransportStateError};
use crate::disk::{FreezeFiles, LayerSpec};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

const OK: u8 = 0;
const EVENT_IDX: u64 = 1 << 29;

/// Makes a request available: header at `at`, then data, then status.
fn request(
    driver: &mut Driver,
    mem: &GuestMemoryMmap,
    at: u64,
    kind: u32,
    sector: u64,
    len: u32,
    write: bool,
) {
    mem.write_obj(kind, GuestAddress(at)).unwrap();
    mem.write_obj(0_u32, GuestAddress(at + 4)).unwrap();
    mem.write_obj(sector, GuestAddress(at + 8)).unwrap();
    mem.write_obj(0xff_u8, GuestAddress(at + 16)).unwrap();
    let data = if write { writes(at + 32, len) } else { reads(at + 32, len) };
    driver.queues[0].add(mem, &[reads(at, 16), data, writes(at + 16, 1)]);
}

fn status(mem: &GuestMemoryMmap, at: u64) -> u8 {
    mem.read_obj(GuestAddress(at + 16)).unwrap()
}

fn data(mem: &GuestMemoryMmap, at: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    mem.read_slice(&mut out, GuestAddress(at + 32)).unwrap();
    out
}

#[test]
fn slots_lie_where_the_core_expects_them() {
    let machine =
        Machine::new(memory(), vec![disk(4, &[], vec![], true), disk(4, &[], vec![], false)]);
    let slots = machine.set.slots();
    let places: Vec<_> = slots.iter().map(|s| (s.base, s.size, s.gsi)).collect();
    assert_eq!(places, [0, 1, 2, 3, 4].map(|n| (0xd000_0000 + n * 0x1000, 0x1000, 10 + n as u32)));
    let ids: Vec<_> = (0..5).map(|slot| machine.read(slot, register::DEVICE_ID)).collect();
    assert_eq!(ids, [2, 2, 19, 4, 5]);
    let mut byte = [7];
    assert!(!machine.set.mmio_read(MMIO_BASE - 1, &mut byte));
    assert!(!machine.set.mmio_read(MMIO_BASE + 0x5000, &mut byte));
    assert!(!machine.set.mmio_write(u64::MAX, &byte));
    assert_eq!(byte, [7]);
}

#[test]
fn a_disk_reads_and_writes_through_the_device_thread() {
    let mem = memory();
    let base: Vec<u8> = (0..8192_u32).map(|n| (n / 512) as u8 + 1).collect();
    let machine = Machine::new(mem.clone(), vec![disk(4, &base, vec![], true)]).run();
    let mut driver = Driver::start(&machine, 0, 0);
    request(&mut driver, &mem, DATA, 0, 1, 1024, true);
    driver.kick(&machine, 0);
    assert_eq!(driver.queues[0].wait_used(&mem, 1), [(0, 1025)]);
    assert_eq!((status(&mem, DATA), data(&mem, DATA, 1024)), (OK, [[2; 512], [3; 512]].concat()));
    // The device thread raises the interrupt after it has returned the buffers.
    until("the interrupt is raised", || machine.read(0, register::INTERRUPT_STATUS) == 1);
    machine.write(0, register::INTERRUPT_ACK, 1);
    assert_eq!(machine.read(0, register::INTERRUPT_STATUS), 0);

    mem.write_slice(&[9; 512], GuestAddress(DATA + 32)).unwrap();
    request(&mut driver, &mem, DATA, 1, 2, 512, false);
    request(&mut driver, &mem, DATA + 0x1000, 0, 0, 4096, true);
    driver.kick(&machine, 0);
    assert_eq!(driver.queues[0].wait_used(&mem, 2), [(3, 1), (6, 4097)]);
    let now = data(&mem, DATA + 0x1000, 4096);
    assert_eq!((now[1024], now[1535], now[1536], now[0]), (9, 9, 4, 1));
}

#[test]
fn work_that_came_while_paused_is_done_after_and_not_before() {
    let mem = memory();
    let machine = Machine::new(mem.clone(), vec![disk(4, &[5; 4096], vec![], true)]).run();
    let mut driver = Driver::start(&machine, 0, 0);
    // The other device thread has nothing to do any more, so it does not wait at the gate.
    machine.turn();
    machine.set.pause();
    machine.set.pause();
    request(&mut driver, &mem, DATA, 0, 0, 512, true);
    driver.kick(&machine, 0);
    until("the thread of the disks waits at the gate", || machine.set.gate.waiting() == 1);
    assert_eq!((driver.queues[0].take_used(&mem).len(), status(&mem, DATA)), (0, 0xff));
    machine.set.resume();
    driver.queues[0].wait_used(&mem, 1);
    assert_eq!((status(&mem, DATA), data(&mem, DATA, 512)), (OK, vec![5; 512]));
}

/// Pausing and resuming at any moment loses no request and no kick.
#[test]
fn a_storm_of_pauses_loses_nothing() {
    for without in [0, EVENT_IDX] {
        let mem = memory();
        let machine = Machine::new(mem.clone(), vec![disk(64, &[], vec![], true)]).run();
        let mut driver = Driver::start(&machine, 0, without);
        let set = std::sync::Arc::clone(&machine.set);
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let storm = std::thread::spawn(move || {
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                set.pause();
                let saved = set.save();
                assert_eq!(set.save(), saved, "something moved while paused");
                set.resume();
                std::thread::yield_now();
            }
        });
        for round in 0..300_u64 {
            let old = driver.queues[0].avail_idx;
            for n in 0..8 {
                let at = DATA + n * 0x1000;
                mem.write_slice(&[(round + n) as u8; 512], GuestAddress(at + 32)).unwrap();
                request(&mut driver, &mem, at, 1, round % 64 * 8 + n, 512, false);
            }
            if without == 0 {
                driver.kick_if_wanted(&machine, 0, old);
            } else {
                driver.kick(&machine, 0);
            }
            assert_eq!(driver.queues[0].wait_used(&mem, 8).len(), 8);
            assert!((0..8).all(|n| status(&mem, DATA + n * 0x1000) == OK));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        storm.join().unwrap();
    }
}

fn copy(file: &File) -> std::os::fd::OwnedFd {
    file.try_clone().unwrap().into()
}

/// A clone continues from a saved machine. One request was available but not kicked at the save.
#[test]
fn a_clone_goes_on_where_its_parent_was_saved() {
    let mem = memory();
    let base = vec![1; 16384];
    let machine = Machine::new(mem.clone(), vec![disk(4, &base, vec![], true)]).run();
    let mut driver = Driver::start(&machine, 0, 0);
    mem.write_slice(&[2; 4096], GuestAddress(DATA + 32)).unwrap();
    request(&mut driver, &mem, DATA, 1, 8, 4096, false);
    driver.kick(&machine, 0);
    driver.queues[0].wait_used(&mem, 1);

    machine.set.pause();
    request(&mut driver, &mem, DATA, 0, 0, 16384, true);
    let saved = machine.set.save();
    let (map, next) = (super::testing::temp_file(&[]), super::testing::temp_file(&[]));
    let files = FreezeFiles { map: copy(&map), next: copy(&next), frozen: None };
    machine.set.freeze_layers(vec![files]).unwrap();
    let bytes = postcard::to_stdvec(&saved).unwrap();
    let clone_mem = copy_memory(&mem);
    let mut clone_driver = driver.clone();
    machine.set.resume();

    // The parent writes on; the clone must not see these writes.
    driver.kick(&machine, 0);
    driver.queues[0].wait_used(&mem, 1);
    mem.write_slice(&[3; 4096], GuestAddress(DATA + 32)).unwrap();
    request(&mut driver, &mem, DATA, 1, 0, 4096, false);
    driver.kick(&machine, 0);
    driver.queues[0].wait_used(&mem, 1);

    let data_of_layer =
        machine.set.slots[0].with_disk(|disk| disk.frozen_file(0).try_clone().unwrap()).unwrap();
    let layers = vec![LayerSpec { data: data_of_layer, map: copy(&map) }];
    let clone = Machine::new(clone_mem.clone(), vec![disk(4, &base, layers, true)]);
    clone.set.load(&postcard::from_bytes::<DeviceStates>(&bytes).unwrap()).unwrap();
    assert_eq!(clone.set.save(), saved);
    let clone = clone.run();
    // No kick: the one from before the save is lost.
    clone_driver.queues[0].wait_used(&clone_mem, 1);
    let expected = [vec![1; 4096], vec![2; 4096], vec![1; 8192]].concat();
    assert_eq!((status(&clone_mem, DATA), data(&clone_mem, DATA, 16384)), (OK, expected));
    until("the clone has its interrupt", || clone.read(0, register::INTERRUPT_STATUS) == 1);

    request(&mut driver, &mem, DATA, 0, 0, 16384, true);
    driver.kick(&machine, 0);
    driver.queues[0].wait_used(&mem, 1);
    let expected = [vec![3; 4096], vec![2; 4096], vec![1; 8192]].concat();
    assert_eq!(data(&mem, DATA, 16384), expected);
}

#[test]
fn an_interrupt_that_was_not_acknowledged_is_raised_again_after_a_load() {
    let mem = memory();
    let machine = Machine::new(mem.clone(), vec![disk(4, &[], vec![], true)]).run();
    let mut driver = Driver::start(&machine, 0, 0);
    request(&mut driver, &mem, DATA, 0, 0, 512, true);
    driver.kick(&machine, 0);
    driver.queues[0].wait_used(&mem, 1);
    machine.set.pause();
    let saved = machine.set.save();
    assert_eq!(saved.devices[0].transport.interrupt_status, 1);
    let clone = Machine::new(copy_memory(&mem), vec![disk(4, &[], vec![], true)]);
    clone.set.load(&saved).unwrap();
    assert!(clone.set.slots[0].interrupt().line().read().is_err(), "raised before the loop runs");
    let clone = clone.run();
    until("the line is raised", || clone.set.slots[0].interrupt().line().read().is_ok());
}

#[test]
fn state_that_does_not_fit_is_refused_and_changes_nothing() {
    let mem = memory();
    let machine = Machine::new(mem.clone(), vec![disk(4, &[], vec![], true)]).run();
    Driver::start(&machine, 0, 0);
    machine.set.pause();
    let good = machine.set.save();
    let fresh = || Machine::new(mem.clone(), vec![disk(4, &[], vec![], true)]);
    fresh().set.load(&good).unwrap();
    let refused = |change: &dyn Fn(&mut DeviceStates)| {
        let mut bad = good.clone();
        change(&mut bad);
        let machine = fresh();
        let before = machine.set.save();
        let error = machine.set.load(&bad).unwrap_err();
        assert_eq!(machine.set.save(), before);
        match error {
            DeviceError::Load(error) => error,
            other => panic!("{other}"),
        }
    };
    let transport = |change: &dyn Fn(&mut super::TransportState)| match refused(&|s| {
        change(&mut s.devices[0].transport);
    }) {
        LoadError::Transport { number: 0, source } => source,
        other => panic!("{other}"),
    };
    // Without the balloon alone, the state is that of an earlier version.
    assert!(matches!(
        refused(&|s| s.devices.truncate(2)),
        LoadError::Count { expected: 3, got: 2 }
    ));
    assert!(matches!(refused(&|s| s.devices.swap(1, 2)), LoadError::Device { number: 1, .. }));
    assert!(matches!(refused(&|s| s.devices[0].kind = KindState::Rng), LoadError::Kind { .. }));
    let error = refused(&|s| match &mut s.devices[0].kind {
        KindState::Block(block) => block.size_bytes += 4096,
        _ => unreachable!(),
    });
    assert!(error.to_string().contains("16384") && error.to_string().contains("20480"), "{error}");
    let error = refused(&|s| match &mut s.devices[1].kind {
        KindState::Vsock(vsock) => vsock.guest_cid = 4,
        _ => unreachable!(),
    });
    assert!(matches!(error, LoadError::Kind { number: 1, .. }), "{error}");
    for status in [2, 4, 7, 8, 13, 14, 16 + 15] {
        assert_eq!(transport(&|t| t.status = status), TransportStateError::Status(status));
    }
    assert_eq!(transport(&|t| t.interrupt_status = 4), TransportStateError::Interrupt(4));
    assert!(matches!(
        transport(&|t| t.driver_features |= 1 << 50),
        TransportStateError::Features { .. }
    ));
    assert!(matches!(
        transport(&|t| t.driver_features &= !(1 << 32)),
        TransportStateError::Features { .. }
    ));
    assert!(matches!(transport(&|t| t.queues.clear()), TransportStateError::Queues { .. }));
    for change in [
        &(|q: &mut super::QueueRegisters| q.size = 512) as &dyn Fn(&mut super::QueueRegisters),
        &|q| q.size = 0,
        &|q| q.size = 100,
        &|q| q.desc = 8,
        &|q| q.desc = u64::MAX - 15,
        &|q| q.driver = super::testing::LOW_END - 2,
        &|q| q.driver = 0,
        &|q| q.device = super::testing::LOW_END,
    ] {
        let error = transport(&|t| change(&mut t.queues[0]));
        assert!(matches!(error, TransportStateError::Queue { index: 0, max: 256, .. }), "{error}");
    }
}

#[test]
fn freezing_needs_paused_devices_and_files_for_every_writable_disk() {
    let spec = || {
        vec![disk(4, &[], vec![], true), disk(4, &[], vec![], false), disk(4, &[], vec![], true)]
    };
    let machine = Machine::new(memory(), spec()).run();
    let file = || -> std::os::fd::OwnedFd { super::testing::temp_file(&[]).into() };
    let files = || FreezeFiles { map: file(), next: file(), frozen: None };
    assert!(matches!(machine.set.freeze_layers(vec![]), Err(DeviceError::NotPaused(_))));
    machine.set.pause();
    assert!(matches!(
        machine.set.freeze_layers(vec![files()]),
        Err(DeviceError::FreezeCount { expected: 2, got: 1 })
    ));
    let used = super::testing::temp_file(b"x").into();
    let used = FreezeFiles { next: used, ..files() };
    let error = machine.set.freeze_layers(vec![files(), used]);
    assert!(matches!(error, Err(DeviceError::Freeze { number: 2, .. })));
    let other = FreezeFiles { frozen: Some(file()), ..files() };
    let error = machine.set.freeze_layers(vec![files(), other]);
    assert!(matches!(error, Err(DeviceError::Freeze { number: 2, .. })));
    let frozen = || [0, 2].map(|n| machine.set.slots[n].with_disk(|d| d.frozen_layers()).unwrap());
    assert_eq!(frozen(), [0, 0], "all disks or none");
    let before = machine.set.layers();
    assert_eq!(before.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 1]);
    let (first, map) = (files(), file());
    let first = FreezeFiles { map: map.try_clone().unwrap(), ..first };
    machine.set.freeze_layers(vec![first, files()]).unwrap();
    assert_eq!(frozen(), [1, 1]);
    let after = machine.set.layers();
    assert_eq!(after.iter().map(Vec::len).collect::<Vec<_>>(), [2, 0, 2]);
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(after.first(), before.first(), "the frozen file is the one that was writable");
    }
    let top = machine.set.slots[0].with_disk(|d| d.frozen_file(0).try_clone().unwrap()).unwrap();
    let data = super::testing::temp_file(&[0; 4 * 4096]).into();
    machine.set.rebase(0, &top, vec![LayerSpec { data, map }]).unwrap();
    let rebased = machine.set.layers();
    assert_ne!(rebased[0][0], after[0][0]);
    assert_eq!((rebased[0][1], &rebased[1..]), (after[0][1], &after[1..]));
}

#[test]
fn a_freeze_that_names_another_layer_changes_nothing() {
    let specs = [(); 2].map(|()| disk(4, &[], vec![], true));
    // The layers' files, opened again for reading only.
    let layers = specs.each_ref().map(|spec| {
        let number = spec.writable.as_ref().unwrap().as_raw_fd();
        File::open(format!("/proc/self/fd/{number}")).unwrap()
    });
    let machine = Machine::new(memory(), specs.into()).run();
    machine.set.pause();
    let before = machine.set.layers();
    let [first, second] = &layers;
    let freeze = |order: [&File; 2]| {
        let new = [(); 4].map(|()| super::testing::temp_file(&[]));
        let fd = |file: &File| file.try_clone().unwrap().into();
        let files = order.iter().zip(new.chunks(2)).map(|(layer, new)| FreezeFiles {
            map: fd(&new[0]),
            next: fd(&new[1]),
            frozen: Some(fd(layer)),
        });
        let frozen = machine.set.freeze_layers(files.collect());
        (frozen, new.map(|file| file.metadata().unwrap().len()))
    };
    for (order, disk) in [([second, first], 0), ([first, first], 1)] {
        let (refused, lengths) = freeze(order);
        let is_named = matches!(refused, Err(DeviceError::Freeze { number, .. }) if number == disk);
        assert!(is_named, "{refused:?}");
        assert_eq!((machine.set.layers(), lengths), (before.clone(), [0; 4]));
    }
    let (frozen, lengths) = freeze([first, second]);
    assert_eq!(frozen.unwrap().len(), 2, "the writable descriptors");
    assert!(machine.set.layers() != before && lengths.iter().all(|length| *length > 0));
}

#[test]
fn entropy_comes_in_bounded_pieces() {
    let mem = memory();
    let machine = Machine::new(mem.clone(), vec![]).run();
    let mut driver = Driver::start(&machine, machine.slot_of(4), 0);
    driver.queues[0].add(&mem, &[writes(DATA, 100), writes(DATA + 4096, 28)]);
    driver.queues[0].add(&mem, &[writes(DATA + 8192, 1 << 20)]);
    driver.kick(&machine, 0);
    assert_eq!(driver.queues[0].wait_used(&mem, 2), [(0, 128), (2, 4096)]);
    let mut bytes = [0; 100];
    mem.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
    assert!(bytes.iter().filter(|b| **b == 0).count() < 20);
}

#[test]
fn what_was_made_available_before_the_driver_was_ready_is_served_without_a_kick() {
    let mem = memory();
    let machine = Machine::new(mem.clone(), vec![]).run();
    let mut driver = Driver::prepare(&machine, machine.slot_of(4), 0);
    driver.queues[0].add(&mem, &[writes(DATA, 10)]);
    driver.kick(&machine, 0);
    machine.turn();
    assert!(driver.queues[0].take_used(&mem).is_empty(), "not before DRIVER_OK");
    driver.go(&machine);
    assert_eq!(driver.queues[0].wait_used(&mem, 1), [(0, 10)]);
}

#[test]
fn a_chain_without_room_makes_the_device_ask_for_a_reset_until_it_is_reset() {
    let mem = memory();
    let machine = Machine::new(mem.clone(), vec![]).run();
    let slot = machine.slot_of(4);
    let mut driver = Driver::start(&machine, slot, 0);
    driver.queues[0].add(&mem, &[reads(DATA, 100)]);
    driver.kick(&machine, 0);
    until("the device needs a reset", || machine.read(slot, register::STATUS) == 15 + 64);
    assert_eq!(machine.read(slot, register::INTERRUPT_STATUS), 2);
    assert!(machine.set.health()[slot].broken.is_some());
    // The device does nothing more, and a status write does not change that.
    driver.queues[0].add(&mem, &[writes(DATA, 100)]);
    driver.kick(&machine, 0);
    machine.write(slot, register::STATUS, 15);
    assert_eq!(machine.read(slot, register::STATUS), 15 + 64);
    assert!(driver.queues[0].take_used(&mem).is_empty());

    let mut driver = Driver::start(&machine, slot, 0);
    assert!(machine.set.health()[slot].broken.is_none());
    driver.queues[0].add(&mem, &[writes(DATA, 100)]);
    driver.kick(&machine, 0);
    assert_eq!(driver.queues[0].wait_used(&mem, 1), [(0, 100)]);
}

#[test]
fn a_vsock_path_without_room_for_a_port_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(folder.path().join("v")).unwrap();
    let path = std::path::PathBuf::from("/".repeat(97));
    let vsock = super::VsockSpec { listener: listener.into(), path, guest_cid: 3 };
    let error = super::DeviceSet::without_vm(memory(), 0, 0, vsock).unwrap_err();
    assert!(matches!(error, DeviceError::VsockPath { max: 96, .. }), "{error}");
}
