#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::balloon::{BalloonState, GuestMemory};
use super::registers::{register, status};
use super::testing::{
    DATA, Driver, HIGH, HIGH_END, INDIRECT, LOW_END, Machine, WRITE, copy_memory, disk, memory,
    reads, writes,
};
use super::{BalloonStatus, Broken, DeviceError, KindState, LoadError};
use crate::disk::page_map::Run;
use crate::memory::YieldPoints;
use dayfly_sys::pagemap::{self, Entry};
use proptest::prelude::*;
use std::fs::File;
use std::time::Instant;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

const PAGE: u64 = 4096;
const STATISTICS: u64 = 1 << 1;
const REPORTING: u64 = 1 << 5;
const RAM: u64 = LOW_END + HIGH_END - HIGH;

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATS: usize = 2;
const REPORT: usize = 3;

/// A machine whose only thread is the test's.
fn machine() -> (Machine, Driver) {
    let machine = Machine::new(memory(), vec![]);
    let slot = machine.slot_of(5);
    let driver = Driver::start(&machine, slot, 0);
    (machine, driver)
}

/// Serves what was kicked until nothing is left; returns the number of turns.
fn serve(machine: &Machine) -> usize {
    let mut pending = vec![true; machine.set.slots.len()];
    let mut turns = 0;
    while pending.contains(&true) {
        let _deadline = machine.set.serve(Instant::now(), &mut pending);
        turns += 1;
    }
    turns
}

fn state(machine: &Machine) -> BalloonStatus {
    machine.set.balloon(None).unwrap()
}

fn fill(mem: &GuestMemoryMmap, at: u64, pages: u64) {
    for page in 0..pages {
        mem.write_slice(&[7; PAGE as usize], GuestAddress(at + page * PAGE)).unwrap();
    }
}

/// Whether each of the pages from `at` on has memory of the host.
fn present(mem: &GuestMemoryMmap, at: u64, pages: usize) -> Vec<bool> {
    let map = File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![Entry::default(); pages];
    let host = mem.get_host_address(GuestAddress(at)).unwrap();
    pagemap::read_at(&map, host, &mut entries).unwrap();
    entries.iter().map(|entry| entry.is_touched()).collect()
}

fn put_numbers(mem: &GuestMemoryMmap, at: u64, pages: &[u32]) {
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    mem.write_slice(&bytes, GuestAddress(at)).unwrap();
}

#[test]
fn reported_blocks_lose_their_memory_and_others_keep_it() {
    let (machine, mut driver) = machine();
    let mem = &machine.mem;
    fill(mem, DATA, 8);
    fill(mem, HIGH, 2);
    let middle = LOW_END / 2;
    fill(mem, middle - PAGE, 2);
    let pieces = [
        writes(DATA + PAGE, 2 * PAGE as u32),
        // Only one whole page.
        writes(DATA + 5 * PAGE - 1, PAGE as u32 + 2),
        writes(HIGH, PAGE as u32),
        // In two regions.
        writes(middle - PAGE, 2 * PAGE as u32),
    ];
    let head = driver.queues[REPORT].add(mem, &pieces);
    driver.kick(&machine, REPORT);
    serve(&machine);
    assert_eq!(driver.queues[REPORT].take_used(mem), [(u32::from(head), 0)]);
    let yes = true;
    assert_eq!(present(mem, DATA, 8), [yes, false, false, yes, yes, false, yes, yes]);
    assert_eq!(present(mem, HIGH, 2), [false, yes]);
    assert_eq!(
        (present(mem, middle - PAGE, 1), present(mem, middle, 1)),
        (vec![false], vec![false])
    );
    let status = state(&machine);
    assert_eq!((status.discarded_bytes, status.refused), (6 * PAGE, 0));
    assert_eq!((status.driver, status.reports, status.broken), (true, true, None));
    assert_eq!(machine.read(driver.slot, register::INTERRUPT_STATUS), 1);
}

#[test]
fn pages_in_the_balloon_lose_their_memory() {
    let (machine, mut driver) = machine();
    let mem = &machine.mem;
    fill(mem, DATA, 6);
    let page = (DATA / PAGE) as u32;
    let numbers = [page + 4, page, page + 1, page, u32::MAX, (LOW_END / PAGE) as u32];
    put_numbers(mem, DATA + 0x10_0000, &numbers);
    // The last two bytes are no number.
    driver.queues[INFLATE].add(mem, &[reads(DATA + 0x10_0000, 6 * 4 + 2)]);
    driver.queues[DEFLATE].add(mem, &[reads(DATA + 0x10_0000, 4)]);
    driver.kick(&machine, INFLATE);
    serve(&machine);
    assert_eq!(driver.queues[INFLATE].take_used(mem).len(), 1);
    assert_eq!(driver.queues[DEFLATE].take_used(mem).len(), 1);
    assert_eq!(present(mem, DATA, 6), [false, false, true, true, false, true]);
    let status = state(&machine);
    assert_eq!((status.discarded_bytes, status.refused), (3 * PAGE, 2));
}

#[test]
fn the_target_is_an_interrupt_and_the_guest_says_how_far_it_is() {
    let (machine, driver) = machine();
    let config = |at| machine.read(driver.slot, register::CONFIG + at);
    let set = |bytes| machine.set.balloon(Some(bytes)).unwrap();
    assert_eq!((config(0), config(4), config(8)), (0, 0, 0));
    assert_eq!(set(3 * PAGE + 1).target_bytes, 3 * PAGE);
    assert_eq!((config(0), machine.read(driver.slot, register::INTERRUPT_STATUS)), (3, 2));
    machine.write(driver.slot, register::INTERRUPT_ACK, 2);
    set(3 * PAGE);
    assert_eq!(machine.read(driver.slot, register::INTERRUPT_STATUS), 0);
    machine.write(driver.slot, register::CONFIG + 4, 2);
    machine.write(driver.slot, register::CONFIG, 9);
    assert_eq!((config(0), config(4), state(&machine).actual_bytes), (3, 2, 2 * PAGE));
    machine.write(driver.slot, register::CONFIG + 4, u32::MAX);
    assert_eq!(state(&machine).actual_bytes, RAM);
    let refused = machine.set.balloon(Some(RAM + 1)).unwrap_err();
    assert!(matches!(refused, DeviceError::BalloonTarget { max: RAM, .. }), "{refused}");
    assert_eq!(set(RAM).target_bytes, RAM);

    machine.write(driver.slot, register::STATUS, 0);
    let status = state(&machine);
    assert_eq!((status.driver, status.target_bytes, status.actual_bytes), (false, RAM, 0));
}

#[test]
fn statistics_are_those_that_the_driver_gave_last() {
    let (machine, mut driver) = machine();
    let mem = &machine.mem;
    assert_eq!(state(&machine).guest, GuestMemory::default());
    let give = |driver: &mut Driver, free: u64| {
        let mut bytes = Vec::new();
        for (tag, value) in [(5_u16, 1000_u64), (4, free), (6, 300), (999, 1)] {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        bytes.push(9);
        mem.write_slice(&bytes, GuestAddress(DATA)).unwrap();
        driver.queues[STATS].add(mem, &[reads(DATA, bytes.len() as u32)]);
        driver.kick(&machine, STATS);
        serve(&machine);
    };
    // The question comes before the driver's first buffer, which goes back for it.
    give(&mut driver, 100);
    assert_eq!(driver.queues[STATS].take_used(mem).len(), 1);
    give(&mut driver, 200);
    let said = GuestMemory {
        total_bytes: Some(1000),
        free_bytes: Some(200),
        available_bytes: Some(300),
        cached_bytes: None,
    };
    assert_eq!(driver.queues[STATS].take_used(mem), []);
    assert_eq!(state(&machine).guest, said);
    serve(&machine);
    assert_eq!(driver.queues[STATS].take_used(mem).len(), 1);
    serve(&machine);
    assert_eq!(machine.set.balloon(None).unwrap().guest, said, "until the driver answers");
}

#[test]
fn queues_are_numbered_without_those_that_are_not_used() {
    for (without, queue) in [(STATISTICS, 2), (REPORTING, 3), (STATISTICS | REPORTING, 2)] {
        let machine = Machine::new(memory(), vec![]);
        let mut driver = Driver::start(&machine, machine.slot_of(5), without);
        fill(&machine.mem, DATA, 1);
        driver.queues[queue].add(&machine.mem, &[writes(DATA, PAGE as u32)]);
        driver.kick(&machine, queue);
        serve(&machine);
        let reports = without & REPORTING == 0;
        assert_eq!(state(&machine).reports, reports);
        assert_eq!(present(&machine.mem, DATA, 1), [!reports], "without {without:#x}");
    }
}

#[test]
fn a_driver_that_breaks_a_rule_is_reported() {
    let outside = writes(LOW_END - PAGE, 2 * PAGE as u32);
    for (queue, piece) in [
        (REPORT, outside),
        (REPORT, writes(u64::MAX - 10, 100)),
        (REPORT, reads(DATA, PAGE as u32)),
        (INFLATE, writes(DATA, 4)),
        (DEFLATE, writes(DATA, 4)),
        (STATS, writes(DATA, 4)),
    ] {
        let (machine, mut driver) = machine();
        let _asks = state(&machine);
        driver.queues[queue].add(&machine.mem, &[piece]);
        driver.kick(&machine, queue);
        serve(&machine);
        let bits = machine.read(driver.slot, register::STATUS);
        assert_ne!(bits & u32::from(status::NEEDS_RESET), 0, "{queue} {piece:?}");
        let status = state(&machine);
        assert!(!status.driver && status.broken.is_some(), "{status:?}");
        let health = machine.set.health();
        assert!(matches!(health[driver.slot].broken, Some(Broken::Chain { .. })));
        // It can start again.
        let _driver = Driver::start(&machine, driver.slot, 0);
        assert_eq!(state(&machine).broken, None);
    }
}

/// However much a chain names, other devices get their turns.
#[test]
fn a_long_chain_takes_several_turns() {
    let (machine, mut driver) = machine();
    let mem = &machine.mem;
    let table = DATA - 0x1000;
    for n in 0..64_u16 {
        let bytes = [
            &0_u64.to_le_bytes()[..],
            &(LOW_END as u32).to_le_bytes(),
            &(WRITE | u16::from(n < 63)).to_le_bytes(),
            &(n + 1).to_le_bytes(),
        ];
        let at = GuestAddress(table + u64::from(n) * 16);
        mem.write_slice(&bytes.concat(), at).unwrap();
    }
    // It names its own rings too, so after the first turn the device finds no chain any more.
    driver.queues[REPORT].descriptor(mem, 0, table, 64 * 16, INDIRECT, 0);
    driver.queues[REPORT].publish(mem, 0);
    driver.kick(&machine, REPORT);
    serve(&machine);
    assert!(state(&machine).discarded_bytes <= LOW_END);

    let (machine, mut driver) = self::machine();
    let mem = &machine.mem;
    let pieces: Vec<_> = (0..4).map(|_| writes(LOW_END / 2, (LOW_END / 2) as u32)).collect();
    fill(mem, LOW_END - PAGE, 1);
    driver.queues[REPORT].add(mem, &pieces);
    let mut pending = vec![true; machine.set.slots.len()];
    let mut turns = 0;
    while driver.queues[REPORT].take_used(mem).is_empty() {
        turns += 1;
        assert_eq!(state(&machine).discarded_bytes, (turns - 1) * LOW_END);
        let _deadline = machine.set.serve(Instant::now(), &mut pending);
    }
    assert_eq!((turns, state(&machine).discarded_bytes), (2, 2 * LOW_END));
    // So do page numbers, each of which may cost a call.
    let numbers: Vec<u32> = (0..2000).map(|n| (LOW_END / 2 / PAGE) as u32 + 2 * n).collect();
    put_numbers(mem, DATA, &numbers);
    driver.queues[INFLATE].add(mem, &[reads(DATA, 8000)]);
    assert_eq!(serve(&machine), 4, "512 numbers a turn");
    assert_eq!(driver.queues[INFLATE].take_used(mem).len(), 1);
    assert_eq!(state(&machine).discarded_bytes, 2 * LOW_END + 2000 * PAGE);
}

#[test]
fn nothing_is_discarded_while_ram_is_copied() {
    let (machine, mut driver) = machine();
    let mem = &machine.mem;
    fill(mem, DATA, 2);
    put_numbers(mem, DATA + 0x1_0000, &[(DATA / PAGE) as u32]);
    let mut offer = || {
        driver.queues[REPORT].add(mem, &[writes(DATA + PAGE, PAGE as u32)]);
        driver.queues[INFLATE].add(mem, &[reads(DATA + 0x1_0000, 4)]);
        serve(&machine);
        driver.queues[REPORT].take_used(mem).len() + driver.queues[INFLATE].take_used(mem).len()
    };
    machine.set.writes().watch(true);
    assert_eq!((offer(), present(mem, DATA, 2)), (2, vec![true, true]));
    assert!(machine.set.writes().take().is_empty());
    machine.set.writes().watch(false);
    assert_eq!((offer(), present(mem, DATA, 2)), (2, vec![false, false]));
}

#[test]
fn a_discarded_frame_holds_no_block_any_more() {
    let machine = Machine::new(memory(), vec![disk(4, &[5; 8192], vec![], false)]);
    let mem = &machine.mem;
    let mut reader = Driver::start(&machine, 0, 0);
    mem.write_slice(&[0; 16], GuestAddress(DATA)).unwrap();
    let data = writes(DATA + PAGE, 2 * PAGE as u32);
    reader.queues[0].add(mem, &[reads(DATA, 16), data, writes(DATA + 100, 1)]);
    let mut turns = crate::disk::Reads::default();
    let clock =
        &mut crate::meter::ThreadClock::new(&machine.set.meter, crate::meter::Thread::Disks);
    while machine.set.serve_disks(&mut turns, clock) {}
    let runs = || machine.set.page_map(&mut YieldPoints::none());
    let first = ((DATA + PAGE) / PAGE) as u32;
    let (before, after) = (runs(), |runs: Vec<Run>| runs.iter().map(|run| run.count).sum::<u32>());
    assert_eq!((before[0].first, after(before)), (first, 2));
    let mut driver = Driver::start(&machine, machine.slot_of(5), 0);
    driver.queues[REPORT].add(mem, &[writes(DATA + PAGE, PAGE as u32)]);
    serve(&machine);
    let now = runs();
    assert_eq!((now[0].first, after(now)), (first + 1, 1));
}

#[test]
fn a_clone_finishes_what_was_reported_and_keeps_the_target() {
    let (machine, mut driver) = machine();
    let _status = machine.set.balloon(Some(5 * PAGE)).unwrap();
    machine.write(driver.slot, register::CONFIG + 4, 4);
    driver.queues[REPORT].add(&machine.mem, &[writes(DATA, PAGE as u32)]);
    let saved = machine.set.save();
    let balloon = BalloonState { target_pages: 5, actual_pages: 4 };
    assert_eq!(saved.devices[driver.slot].kind, KindState::Balloon(balloon));

    let clone = Machine::new(copy_memory(&machine.mem), vec![]);
    clone.set.load(&saved).unwrap();
    assert_eq!(clone.set.save(), saved);
    fill(&clone.mem, DATA, 1);
    serve(&clone);
    assert_eq!(driver.queues[REPORT].take_used(&clone.mem).len(), 1);
    assert_eq!(present(&clone.mem, DATA, 1), [false]);
    let status = state(&clone);
    assert_eq!((status.target_bytes, status.actual_bytes), (5 * PAGE, 4 * PAGE));

    let mut large = saved;
    let too_large = BalloonState { target_pages: (RAM / PAGE) as u32 + 1, actual_pages: 0 };
    large.devices[driver.slot].kind = KindState::Balloon(too_large);
    let refused = clone.set.load(&large).unwrap_err();
    assert!(matches!(refused, DeviceError::Load(LoadError::Kind { .. })), "{refused}");
}

/// What a clone looks at when it starts stays its template's.
#[test]
fn a_clone_without_work_writes_nothing() {
    let (machine, mut driver) = machine();
    let mem = &machine.mem;
    driver.queues[STATS].add(mem, &[reads(DATA, 20)]);
    for queue in [INFLATE, DEFLATE] {
        mem.write_slice(&[0; 4], GuestAddress(DATA)).unwrap();
        driver.queues[queue].add(mem, &[reads(DATA, 4)]);
    }
    driver.queues[REPORT].add(mem, &[writes(DATA, PAGE as u32)]);
    serve(&machine);
    let saved = machine.set.save();
    let clone = Machine::new(copy_memory(mem), vec![]);
    clone.set.load(&saved).unwrap();
    serve(&clone);
    let (mut before, mut after) = (vec![0; 0x10_0000], vec![0; 0x10_0000]);
    let rings = GuestAddress(driver.queues[INFLATE].desc);
    mem.read_slice(&mut before, rings).unwrap();
    // Another value shows a write of the same one.
    let event = |queue: &super::testing::DriverQueue| {
        GuestAddress(queue.used + 4 + u64::from(queue.size) * 8)
    };
    for queue in &driver.queues {
        clone.mem.write_obj(9999_u16, event(queue)).unwrap();
    }
    serve(&clone);
    for queue in &driver.queues {
        assert_eq!(clone.mem.read_obj::<u16>(event(queue)).unwrap(), 9999);
        let was: u16 = mem.read_obj(event(queue)).unwrap();
        clone.mem.write_obj(was, event(queue)).unwrap();
    }
    clone.mem.read_slice(&mut after, rings).unwrap();
    assert!(before == after);
}

#[test]
fn a_guest_that_was_saved_without_a_balloon_has_none() {
    let first = Machine::with_nets(memory(), vec![], 1);
    let slot = first.slot_of(5);
    let mut saved = first.set.save();
    assert_eq!(slot + 1, saved.devices.len());
    saved.devices.truncate(slot);
    let clone = Machine::with_nets(memory(), vec![], 1);
    clone.set.load(&saved).unwrap();
    assert_eq!((clone.set.save(), clone.set.health().len()), (saved.clone(), slot));
    assert_eq!(clone.set.slots().len(), slot);
    let window = super::MMIO_BASE + slot as u64 * super::MMIO_SIZE;
    assert!(!clone.set.mmio_read(window, &mut [0; 4]));
    assert!(!clone.set.mmio_write(window + register::STATUS, &[1, 0, 0, 0]));
    let refused = clone.set.balloon(Some(0)).unwrap_err();
    assert!(matches!(refused, DeviceError::NoBalloon), "{refused}");

    saved.devices.pop();
    let refused = first.set.load(&saved).unwrap_err();
    let (expected, got) = (slot, slot - 1);
    assert!(matches!(refused, DeviceError::Load(LoadError::Count { expected: e, got: g })
        if (e, g) == (expected, got)));
}

proptest! {
    /// Whatever ranges a guest names, it loses its own whole pages within them, and nothing else.
    #[test]
    fn only_named_pages_are_discarded(
        ranges in prop::collection::vec((0_u64..20 * PAGE, 1_u32..6 * PAGE as u32), 1..5),
        aligned in any::<bool>(),
        numbers in prop::collection::vec(prop_oneof![0_u32..24, any::<u32>()], 0..40),
    ) {
        // The last pages of the low RAM: some ranges end behind it.
        let start = LOW_END - 24 * PAGE;
        let (machine, mut driver) = machine();
        let mem = &machine.mem;
        fill(mem, start, 24);
        let first = (start / PAGE) as u32;
        let pages: Vec<u32> = numbers.iter().map(|number| first.wrapping_add(*number)).collect();
        put_numbers(mem, DATA, &pages);
        if !pages.is_empty() {
            driver.queues[INFLATE].add(mem, &[reads(DATA, pages.len() as u32 * 4)]);
        }
        let ranges: Vec<(u64, u32)> = ranges.into_iter().map(|(at, len)| match aligned {
            true => (at / PAGE * PAGE, len.next_multiple_of(PAGE as u32)),
            false => (at, len),
        }).collect();
        let outside = ranges.iter().any(|(at, len)| at + u64::from(*len) > 24 * PAGE);
        let pieces: Vec<_> = ranges.iter().map(|(at, len)| writes(start + at, *len)).collect();
        driver.queues[REPORT].add(mem, &pieces);
        serve(&machine);

        let named = |page: u64| {
            let inside = |(at, len): &(u64, u32)| {
                *at <= page * PAGE && (page + 1) * PAGE <= at + u64::from(*len)
            };
            pages.contains(&(first + page as u32))
                || !outside && ranges.iter().any(inside)
        };
        let expected: Vec<bool> = (0..24).map(|page| !named(page)).collect();
        prop_assert_eq!(present(mem, start, 24), expected);
        let status = state(&machine);
        prop_assert_eq!(status.broken.is_some(), outside);
    }
}
