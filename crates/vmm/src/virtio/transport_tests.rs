use super::registers::{register, status};
use super::testing::{DATA, Driver, LOW_END, Machine, disk, memory};
use super::transport::{Effect, Transport};
use super::{MMIO_BASE, TransportStateError};
use proptest::prelude::*;
use vm_memory::GuestMemoryMmap;

const FEATURES: u64 = 0x21;
const SIZES: &[u16] = &[8, 256];
const READY_TO_SET_UP: u32 = 11;

fn fresh() -> (GuestMemoryMmap, Transport) {
    (memory(), Transport::new(2, FEATURES, SIZES))
}

/// A transport whose status is FEATURES_OK.
fn agreed() -> (GuestMemoryMmap, Transport) {
    let (mem, mut t) = fresh();
    t.write(&mem, register::STATUS, 1);
    t.write(&mem, register::STATUS, 3);
    t.write(&mem, register::DRIVER_FEATURES_SEL, 1);
    t.write(&mem, register::DRIVER_FEATURES, 1);
    t.write(&mem, register::STATUS, READY_TO_SET_UP);
    assert_eq!(t.read(register::STATUS), READY_TO_SET_UP);
    (mem, t)
}

fn place_queue(mem: &GuestMemoryMmap, t: &mut Transport, size: u32, addresses: [u64; 3]) -> bool {
    t.write(mem, register::QUEUE_NUM, size);
    let lows = [register::QUEUE_DESC_LOW, register::QUEUE_DRIVER_LOW, register::QUEUE_DEVICE_LOW];
    for (low, address) in lows.into_iter().zip(addresses) {
        t.write(mem, low, u32::try_from(address & 0xffff_ffff).unwrap());
        t.write(mem, low + 4, u32::try_from(address >> 32).unwrap());
    }
    t.write(mem, register::QUEUE_READY, 1);
    t.read(register::QUEUE_READY) == 1
}

#[test]
fn what_the_driver_finds_first() {
    let (mem, mut t) = fresh();
    let read = |t: &Transport| {
        [register::MAGIC, register::VERSION, register::DEVICE_ID].map(|r| t.read(r))
    };
    assert_eq!(read(&t), [0x7472_6976, 2, 2]);
    let mut features = Vec::new();
    for sel in [0, 1, 2, u32::MAX] {
        t.write(&mem, register::DEVICE_FEATURES_SEL, sel);
        features.push(t.read(register::DEVICE_FEATURES));
    }
    assert_eq!(features, [0x3000_0021, 1, 0, 0]);
    for (sel, max) in [(0, 8), (1, 256), (2, 0), (u32::MAX, 0)] {
        t.write(&mem, register::QUEUE_SEL, sel);
        assert_eq!((t.read(register::QUEUE_NUM_MAX), t.read(register::QUEUE_READY)), (max, 0));
    }
    for at in [0xb0, 0xb4, 0xb8, 0xbc] {
        assert_eq!(t.read(at), u32::MAX, "no shared memory at {at:#x}");
    }
    assert_eq!(t.read(register::CONFIG_GENERATION), 0);
}

#[test]
fn steps_cannot_be_left_out_or_taken_back() {
    let (mem, mut t) = fresh();
    for jump in [2, 4, 8, 6, 12, 14] {
        t.write(&mem, register::STATUS, jump);
        assert_eq!(t.read(register::STATUS), 0, "{jump}");
    }
    let (mem, mut t) = agreed();
    for back in [1, 3, 9, 10, 2] {
        t.write(&mem, register::STATUS, back);
        assert_eq!(t.read(register::STATUS), READY_TO_SET_UP, "{back}");
    }
    assert_eq!(t.write(&mem, register::STATUS, 15), Effect::Activated);
    assert_eq!(t.write(&mem, register::STATUS, 15), Effect::None, "it is live already");
    assert!(t.live());
    assert_eq!(t.write(&mem, register::STATUS, u32::from(status::FAILED) | 15), Effect::None);
    assert!(!t.live());
    assert_eq!(t.write(&mem, register::STATUS, 15), Effect::None);
    assert!(!t.live(), "a driver that gave up has to reset");
    assert_eq!(t.write(&mem, register::STATUS, 0), Effect::Reset);
    assert_eq!(t.read(register::STATUS), 0);
}

#[test]
fn features_that_are_not_offered_or_too_old_are_not_agreed_on() {
    for (low, high, sel_2) in
        [(1 << 7, 1, 0), (0, 0, 0), (0, 3, 0), (0x21, 1 | 1 << 31, 0), (0, 1, 1)]
    {
        let (mem, mut t) = fresh();
        t.write(&mem, register::STATUS, 3);
        for (sel, value) in [(0, low), (1, high), (2, sel_2)] {
            t.write(&mem, register::DRIVER_FEATURES_SEL, sel);
            t.write(&mem, register::DRIVER_FEATURES, value);
        }
        t.write(&mem, register::STATUS, READY_TO_SET_UP);
        assert_eq!(t.read(register::STATUS), 3, "{low:#x} {high:#x} {sel_2:#x}");
        assert_eq!(t.write(&mem, register::STATUS, 15), Effect::None);
        assert_eq!((t.read(register::STATUS), t.features()), (3, 0));
    }
    let (mem, mut t) = agreed();
    t.write(&mem, register::DRIVER_FEATURES_SEL, 0);
    t.write(&mem, register::DRIVER_FEATURES, 0x21);
    assert_eq!(t.features(), 1 << 32, "too late for more");
}

#[test]
fn a_queue_outside_of_memory_or_of_the_rules_does_not_become_ready() {
    let good = [0x1000, 0x2000, 0x3000];
    let (mem, mut t) = agreed();
    for size in [0, 3, 16, 1 << 16, u32::MAX] {
        assert!(!place_queue(&mem, &mut t, size, good), "{size}");
    }
    for bad in [
        [0x1008, 0x2000, 0x3000],
        [0x1000, 0x2001, 0x3000],
        [0x1000, 0x2000, 0x3002],
        [LOW_END - 112, 0x2000, 0x3000],
        [0x1000, LOW_END - 20, 0x3000],
        [0x1000, 0x2000, LOW_END - 64],
        [u64::MAX - 15, 0x2000, 0x3000],
        [0x1000, u64::MAX - 1, 0x3000],
        [0x1000, 0x2000, u64::MAX - 3],
        [0x1000, 0, 0x3000],
    ] {
        assert!(!place_queue(&mem, &mut t, 8, bad), "{bad:x?}");
    }
    assert!(place_queue(&mem, &mut t, 8, good));
    // The registers of a ready queue cannot change.
    let before = t.save(0);
    t.write(&mem, register::QUEUE_NUM, 4);
    t.write(&mem, register::QUEUE_DESC_LOW, 0x9000);
    assert_eq!(t.save(0), before);
    t.write(&mem, register::QUEUE_READY, 0);
    assert!(place_queue(&mem, &mut t, 4, good), "stopped, it can be set up again");
    t.write(&mem, register::STATUS, 15);
    t.write(&mem, register::QUEUE_SEL, 1);
    assert!(!place_queue(&mem, &mut t, 8, good), "after DRIVER_OK it is too late");
    t.write(&mem, register::QUEUE_SEL, 0);
    t.write(&mem, register::QUEUE_READY, 0);
    assert_eq!(t.read(register::QUEUE_READY), 0, "stopping is always allowed");
    assert_eq!(t.write(&mem, register::QUEUE_NOTIFY, 0), Effect::None);
    t.write(&mem, register::QUEUE_READY, 1);
    assert_eq!(t.read(register::QUEUE_READY), 0);
    // A queue cannot be configured before features are agreed.
    let (mem, mut t) = fresh();
    t.write(&mem, register::STATUS, 3);
    assert!(!place_queue(&mem, &mut t, 8, good));
}

#[test]
fn a_kick_counts_only_for_a_ready_queue_of_a_live_device() {
    let (mem, mut t) = agreed();
    assert!(place_queue(&mem, &mut t, 8, [0x1000, 0x2000, 0x3000]));
    assert_eq!(t.write(&mem, register::QUEUE_NOTIFY, 0), Effect::None);
    t.write(&mem, register::STATUS, 15);
    assert_eq!(t.write(&mem, register::QUEUE_NOTIFY, 0), Effect::Notify(0));
    for other in [1, 2, 0x1_0000, u32::MAX] {
        assert_eq!(t.write(&mem, register::QUEUE_NOTIFY, other), Effect::None, "{other}");
    }
    assert!(t.need_reset());
    assert_eq!(t.write(&mem, register::QUEUE_NOTIFY, 0), Effect::None);
    assert!(!t.need_reset(), "reported once");
}

#[test]
fn registers_are_words_and_configuration_is_bytes() {
    let machine = Machine::new(memory(), vec![disk(4, &[], vec![], true)]);
    let read = |at: u64, len: usize| {
        let mut data = vec![0xaa; len];
        assert!(machine.set.mmio_read(MMIO_BASE + at, &mut data));
        data
    };
    assert_eq!(read(0, 4), b"virt");
    for len in [1, 2, 3, 8, 16] {
        assert_eq!(read(0, len), vec![0; len]);
    }
    assert_eq!(read(1, 4), [0; 4]);
    assert_eq!(read(0x100, 8), 32_u64.to_le_bytes());
    assert_eq!(read(0x100, 1), [32]);
    assert_eq!(read(0x114, 4), 512_u32.to_le_bytes());
    assert_eq!(read(0x13b, 8), [0; 8], "past the end");
    assert_eq!(read(0xfff, 4), [0; 4]);
    for data in [&[1_u8][..], &[1, 0], &[1, 0, 0, 0, 0, 0, 0, 0], &[]] {
        assert!(machine.set.mmio_write(MMIO_BASE + register::STATUS, data));
        assert_eq!(machine.read(0, register::STATUS), 0);
    }
    machine.write(0, 0x100, 7);
    assert_eq!(read(0x100, 8), 32_u64.to_le_bytes());
}

#[derive(Debug, Clone)]
enum Poke {
    Write(u64, u32),
    Read(u64),
    NeedReset,
    SaveLoad,
}

fn poke() -> impl Strategy<Value = Poke> {
    use register as r;
    let offsets = vec![
        r::STATUS,
        r::DEVICE_FEATURES_SEL,
        r::DRIVER_FEATURES,
        r::DRIVER_FEATURES_SEL,
        r::QUEUE_SEL,
        r::QUEUE_NUM,
        r::QUEUE_READY,
        r::QUEUE_NOTIFY,
        r::QUEUE_DESC_LOW,
        r::QUEUE_DESC_HIGH,
        r::QUEUE_DRIVER_LOW,
        r::QUEUE_DRIVER_HIGH,
        r::QUEUE_DEVICE_LOW,
        r::QUEUE_DEVICE_HIGH,
    ];
    let offset = prop_oneof![12 => proptest::sample::select(offsets), 1 => 0..0x100_u64];
    let values = vec![0, 1, 2, 3, 8, 11, 15, 79, 128, 143, 0x1000, 0x2000, 0x3000, 0x21];
    let value = prop_oneof![12 => proptest::sample::select(values), 1 => any::<u32>()];
    prop_oneof![
        30 => (offset, value).prop_map(|(at, value)| Poke::Write(at, value)),
        2 => (0..0x200_u64).prop_map(Poke::Read),
        1 => Just(Poke::NeedReset),
        2 => Just(Poke::SaveLoad),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Any sequence of register accesses leaves a state that the rules allow, and that can be saved
    /// and loaded.
    #[test]
    fn any_register_writes_keep_the_rules(pokes in proptest::collection::vec(poke(), 0..200)) {
        let mem = GuestMemoryMmap::from_ranges(&[(vm_memory::GuestAddress(0), 0x8000)]).unwrap();
        let mut t = Transport::new(2, FEATURES, SIZES);
        for poke in pokes {
            let before = t.save(0);
            match poke {
                Poke::Write(at, value) => {
                    let effect = t.write(&mem, at, value);
                    let after = t.save(0);
                    let reset = at == register::STATUS && value == 0;
                    prop_assert_eq!(effect == Effect::Reset, reset);
                    if !reset {
                        let kept = after.status & before.status;
                        prop_assert_eq!(kept, before.status, "a bit was taken back");
                    }
                    if before.status & 4 != 0 && !reset {
                        for (old, new) in before.queues.iter().zip(&after.queues) {
                            prop_assert!(!new.ready || old == new, "a queue changed while live");
                        }
                        prop_assert_eq!(before.driver_features, after.driver_features);
                    }
                    if let Effect::Notify(queue) = effect {
                        prop_assert!(t.live() && after.queues[queue].ready);
                    }
                }
                Poke::Read(at) => {
                    let _ = t.read(at);
                    prop_assert_eq!(t.save(0), before);
                }
                Poke::NeedReset => {
                    t.need_reset();
                    prop_assert!(!t.live());
                }
                Poke::SaveLoad => {
                    t = Transport::new(2, FEATURES, SIZES).loaded(&mem, &before).unwrap();
                    prop_assert_eq!(t.save(0), before);
                }
            }
            let now = t.save(0);
            prop_assert!([0, 1, 3, 11, 15].contains(&(now.status & 15)));
            prop_assert_eq!(t.features() & !(FEATURES | super::transport::COMMON_FEATURES), 0);
            for queue in &now.queues {
                prop_assert!(!queue.ready || queue.size.is_power_of_two() && now.status & 8 != 0);
            }
        }
    }

    /// Saved registers are refused or work, whatever they are.
    #[test]
    fn any_saved_registers_are_refused_or_sound(
        status in any::<u8>(), interrupt_status in 0..8_u32, driver_features in any::<u64>(),
        size in 0..600_u32, addresses in any::<[u32; 3]>(), ready in any::<bool>(),
        next in any::<[u16; 2]>(),
    ) {
        let (mem, t) = fresh();
        let mut state = t.save(interrupt_status);
        (state.status, state.driver_features) = (status, driver_features);
        let queue = &mut state.queues[1];
        (queue.size, queue.ready) = (size, ready);
        if ready {
            (queue.next_avail, queue.next_used) = (next[0], next[1]);
        }
        (queue.desc, queue.driver, queue.device) =
            (addresses[0].into(), addresses[1].into(), addresses[2].into());
        match t.loaded(&mem, &state) {
            Ok(loaded) => prop_assert_eq!(loaded.save(interrupt_status), state),
            Err(TransportStateError::Interrupt(n)) => prop_assert!(n > 3),
            Err(_) => {}
        }
    }

    /// Register writes go to a device set with a serving thread. Nothing panics, and the devices
    /// work after a reset.
    #[test]
    fn devices_survive_any_register_writes(
        pokes in proptest::collection::vec((0..4_usize, poke(), 0..9_usize), 0..100),
    ) {
        let disks = vec![disk(4, &[], vec![], true), disk(4, &[], vec![], false)];
        let machine = Machine::new(memory(), disks).run();
        for (slot, poke, len) in pokes {
            match poke {
                Poke::Write(at, value) if len == 0 => machine.write(slot, at, value),
                Poke::Write(at, value) => {
                    let bytes = u64::from(value).to_le_bytes();
                    let at = MMIO_BASE + slot as u64 * 0x1000 + at;
                    machine.set.mmio_write(at, &bytes[..len.min(8)]);
                }
                Poke::Read(at) => drop(machine.read(slot, at)),
                Poke::NeedReset => {
                    machine.set.pause();
                    machine.set.resume();
                }
                Poke::SaveLoad => {
                    machine.set.pause();
                    let saved = machine.set.save();
                    machine.set.load(&saved).unwrap();
                    machine.set.resume();
                }
            }
        }
        let mut driver = Driver::start(&machine, machine.slot_of(4), 0);
        driver.queues[0].add(&machine.mem, &[super::testing::writes(DATA, 64)]);
        driver.kick(&machine, 0);
        prop_assert_eq!(driver.queues[0].wait_used(&machine.mem, 1), [(0, 64)]);
    }
}
