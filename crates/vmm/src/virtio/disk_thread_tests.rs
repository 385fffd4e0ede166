//! A read of a disk that takes long ([`super::held`]): it holds no other device. If it is in
//! flight, it holds no other read of its disk either.

#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::held::{
    CONTENT, Held, MISSING, Missing, PACKETS, PAGE, STATUS, is_read, kick, link, offer,
    offer_write, packet, pair, receive, sleeps_in, used,
};
use super::registers::register;
use super::set::MMIO_BASE;
use super::testing::{
    Driver, Machine, copy_memory, disk, disk_in_memory, memory, reads, starve_rings, until,
    until_empty, writes,
};
use crate::disk::{DiskReads, Reads};
use crate::meter::Thread;
use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::mpsc::{TryRecvError, channel};
use std::time::Duration;
use vm_memory::{Bytes as _, GuestAddress};

const ROUNDS: u8 = 100;
const ROUNDS_OF_STORM: u16 = 300;
/// Ends only a hang.
const LONG: Duration = Duration::from_secs(300);

/// Sets the flag when it is dropped, so that a test that fails ends too.
struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The two ways to read: one request after the other, and in flight together.
const WAYS: [fn() -> Reads; 2] = [Reads::default, Reads::always];

#[test]
fn packets_and_connections_go_on_while_a_request_of_a_disk_is_held() {
    WAYS.iter().for_each(|reads| packets_go_on(*reads));
}

fn packets_go_on(reads: fn() -> Reads) {
    let mut held = Held::new(reads);
    let mut connection = held.guest.accept(7, 1 << 16);
    for round in 0..ROUNDS {
        held.exchange(round, &mut connection);
    }
    let mem = held.guest.mem();
    assert!(held.disk.queues[0].take_used(&mem).is_empty(), "the request was not held");
    assert_eq!(held.set().no_space(), None);
    held.missing.give();
    is_read(&mem, &mut held.disk);
}

#[test]
fn a_read_that_is_held_lets_others_of_its_disk_end_and_new_ones_begin() {
    let mut held = Held::new(Reads::always);
    let mem = held.guest.mem();
    for round in 0..ROUNDS {
        let old = held.disk.queues[0].avail_idx;
        offer(&mem, &mut held.disk, writes(PACKETS, PAGE as u32));
        held.kick_if_wanted(old);
        let done = held.disk.queues[0].wait_used(&mem, 1);
        assert_eq!(done, [(u32::from(round + 1) * 3 % 256, 1 + PAGE as u32)]);
    }
    held.missing.give();
    is_read(&mem, &mut held.disk);
}

#[test]
fn the_time_of_the_thread_is_noted_while_a_read_is_held() {
    let mut held = Held::new(Reads::always);
    let mem = held.guest.mem();
    let (noted, mut looks) = (|held: &Held| held.set().meter.thread_ns(Thread::Disks), 0);
    let mut last = noted(&held);
    // The first look only notes when the thread began.
    until("the bill has two more looks at the thread's clock", || {
        let old = held.disk.queues[0].avail_idx;
        offer(&mem, &mut held.disk, writes(PACKETS, PAGE as u32));
        held.kick_if_wanted(old);
        held.disk.queues[0].wait_used(&mem, 1);
        let now = noted(&held);
        looks += u32::from(now > last);
        last = now;
        looks == 2
    });
    held.missing.give();
    is_read(&mem, &mut held.disk);
}

#[test]
fn a_pause_waits_for_the_request_that_is_held_and_stops_the_other_devices_at_once() {
    WAYS.iter().for_each(|reads| a_pause_waits(*reads));
}

fn a_pause_waits(reads: fn() -> Reads) {
    let mut held = Held::new(reads);
    let mem = held.guest.mem();
    let set = Arc::clone(&held.guest.machine.set);
    let (paused, is_paused) = channel();
    let pausing = std::thread::spawn(move || {
        set.pause();
        paused.send(()).unwrap();
    });
    until("the gate is wanted", || held.set().gate.wanted());
    held.send(1);
    until("both threads wait: one to enter, one until the disk has left", || {
        held.set().gate.waiting() == 2
    });
    // A request that comes now is not begun, whatever is in flight.
    let old = held.disk.queues[0].avail_idx;
    offer(&mem, &mut held.disk, writes(PACKETS, PAGE as u32));
    held.kick_if_wanted(old);
    assert_eq!(is_paused.try_recv(), Err(TryRecvError::Empty), "a request is in flight");
    held.missing.give();
    is_paused.recv().unwrap();
    pausing.join().unwrap();
    is_read(&mem, &mut held.disk);
    let saved = held.set().save();
    let queue = &saved.devices[0].transport.queues[0];
    assert_eq!((queue.next_avail, queue.next_used), (1, 1));
    assert_eq!(saved.devices[held.net.slot].transport.queues[1].next_avail, 0);
    assert!(rustix::io::read(&held.wire, &mut [0; PAGE]).is_err(), "a packet passed in the pause");
    // A clone of this instant has the packet to send, and only the second request to do.
    let clone = Machine::with_nets(copy_memory(&mem), vec![disk(4, &[9; PAGE], vec![], true)], 1);
    clone.set.load(&saved).unwrap();
    let (tap, wire) = pair();
    clone.set.connect(&link(), Some(tap)).unwrap();
    let clone = clone.run();
    assert_eq!(receive(&wire), packet(1));
    clone.disk_turn();
    let (ring, at) = (&held.disk.queues[0], GuestAddress(MISSING));
    assert_eq!((used(&clone.mem, ring), clone.mem.read_obj::<u8>(at).unwrap()), (2, CONTENT));
    held.set().resume();
    assert_eq!(receive(&held.wire), packet(1));
    // A turn with reads in flight takes kicks meanwhile, so kicks do not count turns here.
    until("the second request is answered", || used(&mem, ring) == 2);
}

#[test]
fn a_reset_waits_for_the_request_that_is_held_and_nothing_of_it_is_written_after() {
    WAYS.iter().for_each(|reads| a_reset_waits(*reads));
}

fn a_reset_waits(reads: fn() -> Reads) {
    let mut held = Held::new(reads);
    let mem = held.guest.mem();
    let (number, known) = channel();
    let rings = held.disk.queues[0].clone();
    std::thread::scope(|scope| {
        let (machine, mem) = (&held.guest.machine, &mem);
        let vcpu = scope.spawn(move || {
            number.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
            // A driver that breaks the rules: new addresses, a queue that stops, then a reset.
            machine.write(0, register::QUEUE_SEL, 0);
            machine.write(0, register::QUEUE_DEVICE_LOW, 0xffff_f000);
            machine.write(0, register::QUEUE_READY, 0);
            machine.write(0, register::STATUS, 0);
            // The driver may use the memory again.
            for at in [rings.desc, rings.avail, rings.used] {
                mem.write_slice(&[0xee; 0x3000], GuestAddress(at)).unwrap();
            }
            mem.write_obj(0xee_u8, GuestAddress(STATUS)).unwrap();
            machine.read(0, register::INTERRUPT_STATUS)
        });
        // The kernel shows the system call in which a thread sleeps.
        let call = format!("/proc/self/task/{}/syscall", known.recv().unwrap());
        let futex = format!("{} ", libc::SYS_futex);
        until("the driver waits for the request", || {
            assert!(!vcpu.is_finished(), "a request is in flight");
            std::fs::read_to_string(&call).is_ok_and(|call| call.starts_with(&futex))
        });
        held.missing.give();
        assert_eq!(vcpu.join().unwrap(), 0);
    });
    held.guest.machine.disk_turn();
    for at in [held.disk.queues[0].desc, held.disk.queues[0].avail, held.disk.queues[0].used] {
        let mut bytes = vec![0; 0x3000];
        mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0xee), "written after the reset");
    }
    assert_eq!(mem.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), 0xee);
    // A new driver, and the page is there now.
    held.disk = Driver::start(&held.guest.machine, 0, 0);
    offer(&mem, &mut held.disk, writes(MISSING, PAGE as u32));
    held.disk.kick(&held.guest.machine, 0);
    is_read(&mem, &mut held.disk);
}

/// Pauses at any moment stop both threads, and lose nothing of either.
#[test]
fn a_storm_of_pauses_stops_both_threads_and_loses_nothing() {
    WAYS.iter().for_each(|reads| a_storm_of_pauses(*reads));
}

fn a_storm_of_pauses(reads: fn() -> Reads) {
    let disks = (0..2).map(|_| disk_in_memory(4, &[CONTENT; PAGE])).collect();
    let machine = Machine::new(memory(), disks).run_with(reads);
    let mem = machine.mem.clone();
    let mut all: Vec<_> = (0..2).map(|slot| Driver::start(&machine, slot, 0)).collect();
    let mut random = Driver::start(&machine, machine.slot_of(4), 0);
    let stop = AtomicBool::new(false);
    let rings: Vec<_> = all.iter().map(|driver| driver.queues[0].clone()).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                machine.set.pause();
                let before: Vec<_> = rings.iter().map(|ring| used(&mem, ring)).collect();
                let saved = machine.set.save();
                std::thread::yield_now();
                for (slot, ring) in rings.iter().enumerate() {
                    let next_used = saved.devices[slot].transport.queues[0].next_used;
                    let now = (used(&mem, ring), next_used);
                    assert_eq!(now, (before[slot], before[slot]), "something moved while paused");
                }
                assert_eq!(machine.set.save(), saved, "something moved while paused");
                machine.set.resume();
                std::thread::yield_now();
            }
        });
        let _stop = Stop(&stop);
        for _ in 0..ROUNDS_OF_STORM {
            let old = random.queues[0].avail_idx;
            random.queues[0].add(&mem, &[writes(PACKETS, 64)]);
            random.kick_if_wanted(&machine, 0, old);
            for driver in &mut all {
                let old = driver.queues[0].avail_idx;
                offer(&mem, driver, writes(MISSING + driver.slot as u64 * 0x1000, PAGE as u32));
                driver.kick_if_wanted(&machine, 0, old);
            }
            for driver in &mut all {
                let done = driver.queues[0].wait_used(&mem, 1);
                assert!(done.len() == 1 && done[0].1 == 1 + PAGE as u32, "{done:?}");
                let status = GuestAddress(STATUS + driver.slot as u64);
                assert_eq!(mem.read_obj::<u8>(status).unwrap(), 0);
            }
            assert_eq!(random.queues[0].wait_used(&mem, 1).len(), 1);
        }
    });
    for ring in &rings {
        assert_eq!(used(&mem, ring), ROUNDS_OF_STORM);
    }
}

#[test]
fn another_thread_has_its_turn_after_the_request_that_is_held() {
    WAYS.iter().for_each(|reads| another_thread_has_its_turn(*reads));
}

fn another_thread_has_its_turn(reads: fn() -> Reads) {
    let mut held = Held::new(reads);
    let mem = held.guest.mem();
    for _ in 0..2 {
        offer(&mem, &mut held.disk, writes(PACKETS, PAGE as u32));
    }
    let turn = held.set().turns.take();
    held.missing.give();
    let done = held.set().slots[0].with_disk(|_| used(&mem, &held.disk.queues[0]));
    assert_eq!(done, Some(1), "the disk did not wait");
    drop(turn);
    assert_eq!(held.disk.queues[0].wait_used(&mem, 3).len(), 3);
}

#[test]
fn a_vcpu_at_a_register_ends_the_turn_and_waits_for_nothing_at_those_of_an_interrupt() {
    WAYS.iter().for_each(|reads| a_vcpu_ends_the_turn(*reads));
}

fn a_vcpu_ends_the_turn(reads: fn() -> Reads) {
    let mut held = Held::new(reads);
    let mem = held.guest.mem();
    let set = Arc::clone(&held.guest.machine.set);
    let (passed, has_passed) = channel();
    let vcpu = std::thread::spawn(move || {
        let mut value = [0; 4];
        assert!(set.mmio_read(MMIO_BASE + register::INTERRUPT_STATUS, &mut value));
        assert!(set.mmio_write(MMIO_BASE + register::INTERRUPT_ACK, &[0; 4]));
        passed.send(()).unwrap();
        assert!(set.mmio_read(MMIO_BASE + register::STATUS, &mut value));
        u32::from_le_bytes(value)
    });
    has_passed.recv_timeout(LONG).expect("the registers of an interrupt wait for no request");
    for register in [register::INTERRUPT_STATUS, register::INTERRUPT_ACK] {
        assert!(!held.set().slots[0].locks_disk(register), "it would end the disk's turn");
    }
    until("the vCPU asks for a turn", || held.set().turns.wanted());
    assert!(!vcpu.is_finished(), "a request is in flight");
    held.missing.give();
    assert_eq!(vcpu.join().unwrap(), 15);
    is_read(&mem, &mut held.disk);
    assert!(!held.set().turns.wanted());
}

/// The thread of the disks takes the kick of disk 0 while it waits for a read of disk 1, whose turn
/// then ends because its driver breaks a rule. Disk 0 had its turn before.
#[test]
fn a_kick_that_came_in_the_turn_of_a_disk_that_breaks_is_not_lost() {
    static THREAD: AtomicI32 = AtomicI32::new(0);
    let disks = (0..2).map(|_| disk_in_memory(4, &[CONTENT; PAGE])).collect();
    let machine = Machine::new(memory(), disks).run_with(|| always_on(&THREAD));
    let mem = machine.mem.clone();
    let mut all: Vec<_> = (0..2).map(|slot| Driver::start(&machine, slot, 0)).collect();
    let missing = Missing::in_memory(&mem);
    // A thread that is awake might take the first request before its kick.
    until("the thread of the disks sleeps", || sleeps_in(&THREAD, libc::SYS_read));
    offer(&mem, &mut all[1], writes(MISSING, PAGE as u32));
    kick(&machine);
    missing.wait();
    offer(&mem, &mut all[0], writes(PACKETS, PAGE as u32));
    all[1].queues[0].publish(&mem, 9999);
    kick(&machine);
    until_empty(machine.set.disk_kick.as_deref().unwrap());
    missing.give();
    assert_eq!(all[0].queues[0].wait_used(&mem, 1), [(0, 1 + PAGE as u32)]);
    assert_eq!(all[1].queues[0].wait_used(&mem, 1), [(0, 1 + PAGE as u32)]);
    until("the device asks for a reset", || machine.set.health()[1].broken.is_some());
}

/// The second write is held by the page that it reads, so no request after it begins. The read
/// before it is in flight then, and not only ready.
#[test]
fn a_read_is_submitted_before_the_writes_after_it_are_performed() {
    static THREAD: AtomicI32 = AtomicI32::new(0);
    let disks = vec![disk_in_memory(4, &[CONTENT; PAGE])];
    let machine = Machine::new(memory(), disks).run_with(|| always_on(&THREAD));
    let mem = machine.mem.clone();
    let mut driver = Driver::start(&machine, 0, 0);
    let (read, write) = (Missing::in_memory(&mem), Missing::at(&mem, MISSING + (4 << 20)));
    // A thread that is awake might take the read before the writes are there.
    until("the thread of the disks sleeps", || sleeps_in(&THREAD, libc::SYS_read));
    offer(&mem, &mut driver, writes(MISSING, PAGE as u32));
    offer_write(&mem, &mut driver, reads(PACKETS, PAGE as u32));
    offer_write(&mem, &mut driver, reads(MISSING + (4 << 20), PAGE as u32));
    kick(&machine);
    write.wait();
    read.wait();
    write.give();
    read.give();
    assert_eq!(driver.queues[0].wait_used(&mem, 3).len(), 3);
}

/// Reads in flight together, by the calling thread, which is noted in `thread`.
fn always_on(thread: &AtomicI32) -> Reads {
    thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
    Reads::always()
}

/// The thread of the disks in the two tests below, once it runs.
static STARVED: AtomicI32 = AtomicI32::new(0);
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);
static SIGNALS: AtomicU32 = AtomicU32::new(0);

/// Reads of a thread for which the kernel has memory for two requests of a ring at once, not more.
fn starved() -> Reads {
    let reads = always_on(&STARVED);
    starve_rings(3);
    reads
}

fn interrupted() -> Reads {
    always_on(&INTERRUPTED)
}

extern "C" fn count_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_ring_short_of_memory_waits_for_what_is_in_flight_and_no_request_is_lost() {
    let mut held = Held::new(starved);
    let mem = held.guest.mem();
    assert_eq!(held.set().disk_reads(), Some(DiskReads { io_uring: true, errno: None }));
    let old = held.disk.queues[0].avail_idx;
    for _ in 0..4 {
        offer(&mem, &mut held.disk, writes(PACKETS, PAGE as u32));
    }
    held.kick_if_wanted(old);
    // The kernel shows number and arguments of the call in which a thread sleeps: the ring, no
    // request to submit, one completion to wait for.
    let call = format!("/proc/self/task/{}/syscall", STARVED.load(Ordering::SeqCst));
    let enter = libc::SYS_io_uring_enter.to_string();
    until("the thread waits and submits nothing", || {
        std::fs::read_to_string(&call).is_ok_and(|call| {
            let words: Vec<_> = call.split(' ').collect();
            words.first() == Some(&enter.as_str()) && words.get(2..4) == Some(&["0x0", "0x1"][..])
        })
    });
    assert!(held.disk.queues[0].take_used(&mem).is_empty());
    held.missing.give();
    let done = held.disk.queues[0].wait_used(&mem, 5);
    assert!(done.len() == 5 && done.iter().all(|(_, len)| *len == 1 + PAGE as u32), "{done:?}");
    // Nothing is in flight and four requests are too many for the kernel, so the ring is closed.
    let closed = DiskReads { io_uring: false, errno: Some(libc::EAGAIN) };
    until("the VM shows that the ring is closed", || held.set().disk_reads() == Some(closed));
    let old = held.disk.queues[0].avail_idx;
    offer(&mem, &mut held.disk, writes(PACKETS, PAGE as u32));
    held.kick_if_wanted(old);
    assert_eq!(held.disk.queues[0].wait_used(&mem, 1).len(), 1);
    assert_eq!(mem.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), 0);
}

#[test]
fn signals_do_not_end_the_wait_for_a_read() {
    // SAFETY: a zeroed sigaction is a valid one; the handler only adds to an atomic number.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int) = count_signal;
        action.sa_sigaction = handler as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let mut held = Held::new(interrupted);
    let (process, thread) = (std::process::id(), INTERRUPTED.load(Ordering::SeqCst));
    until("the wait was interrupted often", || {
        for _ in 0..100 {
            // SAFETY: integers. The thread runs until `held` is dropped, and the signal has a
            // handler.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
        }
        SIGNALS.load(Ordering::SeqCst) > 20_000
    });
    let mem = held.guest.mem();
    assert!(held.disk.queues[0].take_used(&mem).is_empty(), "the read was not held");
    held.missing.give();
    is_read(&mem, &mut held.disk);
}

#[test]
fn devices_without_disks_have_no_thread_for_disks() {
    let machine = Machine::new(memory(), vec![]);
    assert!(machine.set.disk_kick.is_none());
    machine.set.run_disks(crate::disk::Reads::default()).unwrap();
}

/// Set in the process that [`a_process_that_is_killed_with_a_read_in_flight_ends`] kills.
const VICTIM: &str = "DAYFLY_VICTIM";

/// A process that ends with the test, however that ends.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_is_killed_with_a_read_in_flight_ends() {
    if std::env::var_os(VICTIM).is_some() {
        let _held = Held::new(Reads::always);
        println!("held");
        loop {
            std::thread::park();
        }
    }
    let name = "virtio::disk_thread_tests::a_process_that_is_killed_with_a_read_in_flight_ends";
    let victim = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(VICTIM, "1")
        .stdout(std::process::Stdio::piped())
        .spawn();
    let mut victim = Victim(victim.unwrap());
    let lines = BufReader::new(victim.0.stdout.take().unwrap()).lines();
    let (held, is_held) = channel();
    std::thread::spawn(move || {
        let mut lines = lines.map_while(Result::ok);
        held.send(lines.any(|line| line.ends_with("held")))
    });
    assert_eq!(is_held.recv_timeout(LONG), Ok(true), "the victim's read is in flight");
    victim.0.kill().unwrap();
    let mut status = None;
    until("the killed process is gone", || {
        status = victim.0.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status.unwrap()),
        Some(libc::SIGKILL)
    );
}
