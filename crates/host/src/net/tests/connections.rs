//! The number of connections of a guest, and that no connection outlives its guest.

use super::frames::{self, TCP, UDP};
use super::reach::{PUBLIC, WORLD, guest, spec, tap, world};
use super::*;
use std::collections::BTreeSet;

/// A guest whose connections are not touched.
const C: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 4);

#[test]
fn the_connections_of_a_guest_are_limited_and_its_address_keeps_none() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let world = world(&folder);
        let there = world.run(|| UdpSocket::bind((WORLD, 2000)).unwrap()).unwrap();
        there.set_read_timeout(Some(TIMEOUT)).unwrap();
        let spec = VmNetnsSpec { most_connections: 8, ..spec(&folder, "dayflyw") };
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        let [a, b, c] =
            [("vm1", A), ("vm2", B), ("vm3", C)].map(|(name, own)| tap(&vm_netns, name, own));
        let open = |tap: &Tap, own, ports: std::ops::Range<u16>| {
            for port in ports {
                send(tap, &frames::ipv4(own, WORLD, UDP, &frames::udp(port, 2000, b"ask?")));
            }
            // Sent by the same path as the packets before it, so it arrives after them.
            send(&c, &frames::ipv4(C, WORLD, UDP, &frames::udp(3000, 2000, b"now!")));
            let mut word = [0; 4];
            let next = || {
                there
                    .recv_from(&mut word)
                    .map(|(_, from)| (word, from))
                    .expect("what the host sends")
            };
            let mut all = Vec::new();
            all.extend(
                std::iter::repeat_with(next)
                    .map_while(|(word, from)| (word == *b"ask?").then_some(from)),
            );
            all
        };
        let first = open(&a, A, 3000..3100);
        assert_eq!(first.len(), 8);
        for from in &first {
            there.send_to(b"yes!", from).unwrap();
            assert_eq!(said(&a), Some((WORLD, b"yes!".to_vec())));
        }
        assert_eq!(
            open(&a, A, 3000..3100).len(),
            8,
            "those that there are go on, and no more begin"
        );
        let others = open(&b, B, 3000..3004);
        assert_eq!(others.len(), 4, "another guest has its own");
        // The next guest with the address inherits no connection: it has the full number, and
        // receives no packet for the previous guest.
        vm_netns.dismiss(&[guest(A, None, false)]).unwrap();
        for from in &first {
            there.send_to(b"late", from).unwrap();
        }
        assert_eq!(heard_before_now(&a, A), NOTHING);
        there.send_to(b"yes!", others[0]).unwrap();
        assert_eq!(
            said(&b),
            Some((WORLD, b"yes!".to_vec())),
            "another guest's connection is forgotten, too"
        );
        // At each count the kernel forgets only a few of the connections that it counted before.
        let mut again = BTreeSet::new();
        for port in (3200..4000).step_by(10) {
            again.extend(open(&a, A, port..port + 10).into_iter().map(|from| from.port()));
            if again.len() >= 8 {
                break;
            }
        }
        assert_eq!(again.len(), 8);
        vm_netns.remove().unwrap();
    });
}

#[test]
fn what_belongs_to_no_connection_does_not_leave() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let world = world(&folder);
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflycb"), &[]).unwrap();
        let a = tap(&vm_netns, "vm1", A);
        use rustix::net::{AddressFamily, RecvFlags, SocketType, ipproto, recv, socket};
        // Receives every TCP segment that reaches the world, with its IP header.
        let raw = || socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::TCP)).unwrap();
        let there = world.run(raw).unwrap();
        for flags in [0, frames::SYN_FIN, 0x29, frames::SYN] {
            let segment = frames::segment([A, WORLD], 4000, 80, flags);
            send(&a, &frames::ipv4(A, WORLD, TCP, &segment));
        }
        let wait = Timespec { tv_sec: TIMEOUT.as_secs().try_into().unwrap(), tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&there, PollFlags::IN)], Some(&wait)).unwrap(), 1);
        let mut packet = [0; 64];
        recv(&there, &mut packet, RecvFlags::empty()).unwrap();
        // Invalid segments would leave with the guest's own address, because NAT translates only
        // packets of a connection.
        assert_eq!((packet[33], &packet[12..16]), (frames::SYN, &PUBLIC.octets()[..]));
        vm_netns.remove().unwrap();
    });
}

/// Sends UDP from a port to a port.
fn say(tap: &Tap, ends: [Ipv4Addr; 2], ports: [u16; 2], word: &[u8; 4]) {
    send(tap, &frames::ipv4(ends[0], ends[1], UDP, &frames::udp(ports[0], ports[1], word)));
}

#[test]
fn connections_that_others_began_with_a_guest_end_with_it() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, "dayflyca");
        let blue = [A, B, C].map(|address| guest(address, Some("blue"), false));
        let vm_netns = VmNetns::open_or_create(&spec, &blue).unwrap();
        let [a, b, c] =
            [("vm1", A), ("vm2", B), ("vm3", C)].map(|(name, own)| tap(&vm_netns, name, own));
        let host = UdpSocket::bind((HOST, 7000)).unwrap();
        host.set_read_timeout(Some(TIMEOUT)).unwrap();
        let next = || {
            let mut word = [0; 4];
            host.recv_from(&mut word).map(|(_, from)| (from.ip(), word)).expect("what a guest says")
        };
        // Another guest and the host send packets and get answers.
        let begin = || {
            say(&a, [A, B], [1000, 2000], b"ask?");
            assert_eq!(said(&b), Some((A, b"ask?".to_vec())));
            say(&b, [B, A], [2000, 1000], b"yes!");
            assert_eq!(said(&a), Some((B, b"yes!".to_vec())));
            for (tap, own) in [(&b, B), (&c, C)] {
                host.send_to(b"ask?", (own, 9)).unwrap();
                assert_eq!(said(tap), Some((HOST, b"ask?".to_vec())));
                say(tap, [own, HOST], [9, 7000], b"yes!");
                assert_eq!(next(), (own.into(), *b"yes!"));
            }
        };
        let over = |b: &Tap, when| {
            say(&a, [A, B], [1000, 2000], b"late");
            assert_eq!(heard_before_now(b, B), NOTHING, "{when}");
            say(b, [B, A], [2000, 1000], b"late");
            assert_eq!(heard_before_now(&a, A), NOTHING, "{when}");
            say(b, [B, HOST], [9, 7000], b"late");
            say(&c, [C, HOST], [9, 7000], b"now!");
            assert_eq!(
                next(),
                (C.into(), *b"now!"),
                "{when}, and the connection of another guest goes on"
            );
        };
        begin();
        vm_netns.dismiss(&blue[1..2]).unwrap();
        over(&b, "its guest is dismissed");
        vm_netns.admit(&blue[1]).unwrap();
        begin();
        drop(vm_netns);
        let vm_netns = VmNetns::open_or_create(&spec, &[blue[0].clone(), blue[2].clone()]).unwrap();
        over(&b, "its guest was gone when the next daemon came");
        vm_netns.remove().unwrap();
    });
}
