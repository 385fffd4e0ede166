//! Tests with a driver, the device, and a pair of packet sockets in place of the tap.

#![expect(clippy::cast_possible_truncation, reason = "tests: small numbers")]

use super::super::testing::{DATA, Driver, Machine, memory, reads, until, writes};
use super::*;
use crate::config::Rate;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vm_memory::{Bytes as _, GuestAddress};

const MAC: [u8; 6] = [2, 0xdf, 10, 88, 0, 7];
const OWN: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 7);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 8);

fn link() -> LinkConfig {
    LinkConfig { mac: MAC, address: OWN, sends: None, receives: None }
}

/// A pair of sockets: the device's end, and the wire's end.
fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// A packet with its virtio header: IPv4 from `source`, `length` bytes of Ethernet.
fn packet(source: Ipv4Addr, length: usize, mark: u8) -> Vec<u8> {
    let mut packet = vec![mark; HEADER_BYTES + length];
    packet[..HEADER_BYTES].fill(0);
    packet[HEADER_BYTES + 12..HEADER_BYTES + 14].copy_from_slice(&[8, 0]);
    packet[HEADER_BYTES + 26..HEADER_BYTES + 30].copy_from_slice(&source.octets());
    packet
}

struct Bench {
    machine: Machine,
    driver: Driver,
    slot: usize,
}

impl Bench {
    fn new(without: u64) -> Self {
        let machine = Machine::with_nets(memory(), vec![], 1).run();
        let slot = machine.slot_of(DEVICE_ID);
        let driver = Driver::start(&machine, slot, without);
        Self { machine, driver, slot }
    }

    fn counters(&self) -> NetTraffic {
        self.machine.set.health()[self.slot].net.unwrap()
    }

    fn send(&mut self, packet: &[u8]) {
        let at = DATA + 0x2_0000 * u64::from(self.driver.queues[1].avail_idx % 64);
        self.machine.mem.write_slice(packet, GuestAddress(at)).unwrap();
        let queue = &mut self.driver.queues[1];
        let old = queue.avail_idx;
        queue.add(&self.machine.mem, &[reads(at, packet.len() as u32)]);
        self.driver.kick_if_wanted(&self.machine, 1, old);
    }

    /// Makes buffers of these lengths available; returns their addresses.
    fn offer(&mut self, lengths: &[u32]) -> Vec<u64> {
        let place = |n: usize| DATA + 0x100_0000 + 0x2_0000 * n as u64;
        let old = self.driver.queues[0].avail_idx;
        for (n, length) in lengths.iter().enumerate() {
            let queue = &mut self.driver.queues[0];
            queue.add(&self.machine.mem, &[writes(place(n), *length)]);
        }
        self.driver.kick_if_wanted(&self.machine, 0, old);
        (0..lengths.len()).map(place).collect()
    }

    fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.machine.mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }
}

fn take(wire: &OwnedFd) -> Option<Vec<u8>> {
    let mut bytes = vec![0; PACKET_BYTES];
    let length = rustix::io::read(wire, &mut bytes).ok()?;
    bytes.truncate(length);
    Some(bytes)
}

fn wait_for(wire: &OwnedFd) -> Vec<u8> {
    let mut got = None;
    until("a packet is on the wire", || {
        got = take(wire);
        got.is_some()
    });
    got.unwrap()
}

#[test]
fn nothing_passes_before_there_is_a_link_and_then_what_is_its_own_does() {
    let mut bench = Bench::new(0);
    let (tap, wire) = pair();
    rustix::io::write(&wire, &packet(OTHER, 60, 1)).unwrap();
    // A packet that the parent had queued, and one that the clone sends too early.
    bench.send(&packet(OTHER, 60, 2));
    bench.send(&packet(OWN, 60, 3));
    bench.offer(&[2000]);
    assert_eq!(bench.driver.queues[1].wait_used(&bench.machine.mem, 2).len(), 2);
    assert_eq!(bench.counters(), NetTraffic { refused_packets: 2, ..NetTraffic::default() });

    bench.machine.set.connect(&link(), Some(tap)).unwrap();
    bench.send(&packet(OTHER, 60, 4));
    bench.send(&packet(OWN, 60, 5));
    assert_eq!(wait_for(&wire), packet(OWN, 60, 5), "the one from its own address, and only that");
    let used = bench.driver.queues[0].wait_used(&bench.machine.mem, 1);
    assert_eq!(used[0].1, 72);
    assert_eq!(bench.driver.queues[1].wait_used(&bench.machine.mem, 2).len(), 2);
    let expected = NetTraffic {
        received_packets: 1,
        received_bytes: 60,
        sent_packets: 1,
        sent_bytes: 60,
        refused_packets: 3,
    };
    assert_eq!(bench.counters(), expected);
    let mut mac = [0; 6];
    bench.machine.set.mmio_read(
        super::super::MMIO_BASE + bench.slot as u64 * super::super::MMIO_SIZE + 0x100,
        &mut mac,
    );
    assert_eq!(mac, MAC);
}

#[test]
fn a_device_without_a_tap_is_silent_and_blocks_nothing() {
    let mut bench = Bench::new(0);
    let (tap, wire) = pair();
    bench.machine.set.connect(&link(), Some(tap)).unwrap();
    bench.offer(&[2000; 4]);
    // A packet shorter than any valid one, and then the end of the stream.
    rustix::io::write(&wire, &[0; HEADER_BYTES]).unwrap();
    drop(wire);
    let (done, is_done) = std::sync::mpsc::channel();
    // Not joined, because it hangs if the device thread hangs.
    std::thread::spawn(move || {
        for n in 0..20 {
            bench.send(&packet(OWN, 60, n));
            bench.driver.queues[1].wait_used(&bench.machine.mem, 1);
        }
        let none = bench.driver.queues[0].take_used(&bench.machine.mem).is_empty();
        drop(bench);
        done.send(none).unwrap();
    });
    let within = std::time::Duration::from_secs(600);
    assert_eq!(
        is_done.recv_timeout(within),
        Ok(true),
        "the device's thread is held up, or received something"
    );
}

#[test]
fn without_a_tap_what_is_sent_is_lost_and_the_driver_gets_its_buffers_back() {
    let mut bench = Bench::new(0);
    bench.machine.set.connect(&link(), None).unwrap();
    bench.send(&packet(OWN, 60, 1));
    assert_eq!(bench.driver.queues[1].wait_used(&bench.machine.mem, 1).len(), 1);
}

#[test]
fn only_its_own_address_leaves() {
    let frame = |kind: [u8; 2]| {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&kind);
        frame[26..30].copy_from_slice(&OWN.octets());
        frame[28..32].copy_from_slice(&OWN.octets());
        frame
    };
    let mut ip = packet(OWN, 60, 0).split_off(HEADER_BYTES);
    assert!(is_from(&ip, OWN) && !is_from(&ip, OTHER));
    ip[12..14].copy_from_slice(&[0x86, 0xdd]);
    assert!(!is_from(&ip, OWN), "IPv6");
    assert!(is_from(&frame([8, 6]), OWN) && !is_from(&frame([8, 6]), OTHER), "ARP");
    assert!(is_from(&[&[0; 12][..], &[8, 6], &[0; 28]].concat(), OWN), "a probe");
    for length in 0..34 {
        assert!(!is_from(&frame([8, 6])[..length.min(31)], OWN));
        let ip = &packet(OWN, 60, 0)[HEADER_BYTES..];
        assert_eq!(is_from(&ip[..length], OWN), length >= 30);
    }
}

#[test]
fn a_long_packet_takes_as_many_buffers_as_it_needs_and_waits_for_them() {
    let mut bench = Bench::new(0);
    let (tap, wire) = pair();
    bench.machine.set.connect(&link(), Some(tap)).unwrap();
    let sent = packet(OTHER, 60_000, 9);
    rustix::io::write(&wire, &sent).unwrap();
    bench.offer(&[4096; 14]);
    bench.machine.turn();
    assert!(
        bench.driver.queues[0].take_used(&bench.machine.mem).is_empty(),
        "part of a packet came"
    );
    let first = DATA + 0x100_0000;
    // One more buffer is enough: 14 buffers and this one hold 60,012 bytes.
    let place = first + 0x2_0000 * 14;
    let old = bench.driver.queues[0].avail_idx;
    bench.driver.queues[0].add(&bench.machine.mem, &[writes(place, 4096)]);
    assert!(
        bench.driver.queues[0].kick_wanted(&bench.machine.mem, old),
        "the driver would get no kick"
    );
    bench.driver.kick(&bench.machine, 0);
    let used = bench.driver.queues[0].wait_used(&bench.machine.mem, 15);
    assert_eq!(used.iter().map(|(_, length)| *length as usize).sum::<usize>(), sent.len());
    let mut got = Vec::new();
    for (n, (_, length)) in used.iter().enumerate() {
        got.extend(bench.read(first + 0x2_0000 * n as u64, *length as usize));
    }
    assert_eq!(u16::from_le_bytes([got[10], got[11]]), 15, "num_buffers");
    assert_eq!(got[HEADER_BYTES..], sent[HEADER_BYTES..]);
}

#[test]
fn many_packets_pass_in_both_directions_in_order() {
    const MANY: usize = 3000;
    let mut bench = Bench::new(0);
    let (tap, wire) = pair();
    bench.machine.set.connect(&link(), Some(tap)).unwrap();
    let other = wire.try_clone().unwrap();
    let echo = std::thread::spawn(move || {
        for n in 0..MANY {
            let got = wait_for(&other);
            assert_eq!(usize::from(got[HEADER_BYTES + 50]), n % 251);
            while rustix::io::write(&other, &got).is_err() {
                std::thread::yield_now();
            }
        }
    });
    let mut places = std::collections::VecDeque::new();
    let mut sent = 0;
    let mut seen = 0;
    while seen < MANY {
        while places.len() < 32 {
            let at = DATA + 0x200_0000 / 2 + 0x1000 * (seen + places.len()) as u64 % 0x4_0000;
            let old = bench.driver.queues[0].avail_idx;
            bench.driver.queues[0].add(&bench.machine.mem, &[writes(at, 2048)]);
            bench.driver.kick_if_wanted(&bench.machine, 0, old);
            places.push_back(at);
        }
        if sent < MANY && sent - seen < 16 {
            bench.driver.queues[1].take_used(&bench.machine.mem);
            bench.send(&packet(OWN, 64, (sent % 251) as u8));
            sent += 1;
        }
        for _ in bench.driver.queues[0].take_used(&bench.machine.mem) {
            let at = places.pop_front().unwrap();
            let mark = bench.read(at + HEADER_BYTES as u64 + 50, 1)[0];
            assert_eq!(usize::from(mark), seen % 251, "packet {seen}");
            seen += 1;
        }
    }
    echo.join().unwrap();
}

#[test]
fn a_limit_lets_as_much_pass_as_it_says() {
    let mut bench = Bench::new(0);
    let (tap, wire) = pair();
    let rate = Rate { bytes_per_second: 100_000, burst_bytes: 2_000 };
    bench.machine.set.connect(&LinkConfig { sends: Some(rate), ..link() }, Some(tap)).unwrap();
    let begun = Instant::now();
    for n in 0..40 {
        bench.send(&packet(OWN, 1000, n));
    }
    for _ in 0..40 {
        wait_for(&wire);
    }
    // Of 40,000 bytes 2,000 pass at once, and the last packet may go into debt.
    let took = begun.elapsed().as_secs_f64();
    assert!(took > 0.35, "{took} s for 0.38");
}

#[test]
fn a_driver_that_cannot_complete_checksums_gets_complete_ones() {
    let mut whole = packet(OTHER, 60, 0);
    whole[0] = 1;
    whole[6..8].copy_from_slice(&34_u16.to_le_bytes());
    whole[8..10].copy_from_slice(&6_u16.to_le_bytes());
    let text = &mut whole[HEADER_BYTES + 34..];
    text.copy_from_slice(&(0..26).collect::<Vec<u8>>());
    text[6..8].fill(0);
    let mut untouched = whole.clone();
    assert!(acceptable(&mut untouched, FEATURES));
    assert_eq!(untouched, whole);
    assert!(acceptable(&mut whole, 0));
    assert_eq!(whole[0], 0);
    let words =
        whole[HEADER_BYTES + 34..].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let all: u32 = words.sum();
    assert_eq!((all & 0xffff) + (all >> 16), 0xffff, "RFC 1071: it sums to all ones");
    // The checksum's start and field must lie within the packet.
    for (start, offset) in [(u16::MAX, 0), (34, u16::MAX), (60, 0)] {
        let mut bad = packet(OTHER, 60, 0);
        bad[0] = 1;
        bad[6..8].copy_from_slice(&start.to_le_bytes());
        bad[8..10].copy_from_slice(&offset.to_le_bytes());
        assert!(!acceptable(&mut bad, 0), "{start} {offset}");
    }
    let mut large = packet(OTHER, 60, 0);
    large[1] = 1;
    assert!(!acceptable(&mut large, FEATURES & !GUEST_TSO));
}

#[test]
fn what_no_driver_may_do_needs_a_reset() {
    let mut bench = Bench::new(0);
    let (tap, wire) = pair();
    bench.machine.set.connect(&link(), Some(tap)).unwrap();
    // A readable buffer in the receive queue breaks the device.
    let queue = &mut bench.driver.queues[0];
    queue.add(&bench.machine.mem, &[reads(DATA, 2000)]);
    bench.driver.kick(&bench.machine, 0);
    rustix::io::write(&wire, &packet(OTHER, 60, 1)).unwrap();
    until("the device wants a reset", || bench.machine.set.health()[bench.slot].broken.is_some());
    // After a reset the device works again, with its link.
    bench.driver = Driver::start(&bench.machine, bench.slot, 0);
    bench.send(&packet(OWN, 60, 5));
    assert_eq!(wait_for(&wire), packet(OWN, 60, 5));
}
