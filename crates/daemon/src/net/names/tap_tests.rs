//! Frames at a tap, as a guest sends them, to the service at the gateway of a VM network namespace.

use crate::net::names::index::{Index, Policy};
use crate::net::names::limits::most_within;
use crate::net::names::message::kind;
use crate::net::names::message_tests::{bomb, question};
use crate::net::names::server::serve;
use crate::net::names::server_world::{LONGEST, address, code_of, gateway, ip, prefix, run, scope};
use crate::net::names::sockets;
use dayfly_host::net::{GATEWAY_MAC, HEADER_BYTES as TAP_HEADER, Tap, VmNetns, VmNetnsSpec};
use dayfly_units::VmId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use simple_dns::RCODE;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::watch;

fn sum(bytes: &[u8]) -> u16 {
    let word = |two: &[u8]| u32::from(two[0]) << 8 | two.get(1).map_or(0, |byte| u32::from(*byte));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// A UDP packet from port 1000 to the gateway's port 53, with a tap's header.
fn frame(from: Ipv4Addr, mac: [u8; 6], message: &[u8]) -> Vec<u8> {
    let word = |n: usize| u16::try_from(n).unwrap().to_be_bytes();
    let mut header =
        [&[0x45, 0][..], &word(28 + message.len()), &[0, 1, 0, 0, 64, 17, 0, 0]].concat();
    header.extend(from.octets());
    header.extend(prefix().gateway().octets());
    let check = sum(&header).to_be_bytes();
    header[10..12].copy_from_slice(&check);
    let udp = [&word(1000)[..], &word(53), &word(8 + message.len()), &[0, 0], message].concat();
    let none = vec![0; usize::try_from(TAP_HEADER).unwrap()];
    [&none[..], &GATEWAY_MAC, &mac, &[8, 0], &header, &udp].concat()
}

/// The message in the next UDP packet from the gateway.
fn heard(tap: &Tap) -> Option<Vec<u8>> {
    let wait = Timespec::try_from(LONGEST).unwrap();
    let fd = tap.as_fd();
    let mut bytes = vec![0; 4096];
    loop {
        if poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap() == 0 {
            return None;
        }
        let length = rustix::io::read(tap, &mut bytes).ok()?;
        let frame = &bytes[usize::try_from(TAP_HEADER).unwrap()..length];
        if frame[12..14] == [8, 0] && frame[23] == 17 && frame[34..36] == [0, 53] {
            return Some(frame[42..].to_vec());
        }
    }
}

#[test]
fn a_guest_is_answered_and_a_flood_of_another_s_is_not_its_business() {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|threads| {
        let inside = threads.spawn(|| {
            crate::fixture::own_network();
            run("ip link set lo up");
            let spec = VmNetnsSpec {
                pin: folder.path().join("netns"),
                first: prefix().first,
                bits: prefix().bits,
                uplink: "dayflydns".into(),
                reach: Vec::new(),
                most_connections: 100,
            };
            let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
            let macs = [crate::net::mac(ip(2)), crate::net::mac(ip(3))];
            let taps = [2, 3]
                .map(|n| vm_netns.tap(&format!("vm{n}"), ip(n), crate::net::mac(ip(n))).unwrap());
            // The service's sockets are in the VM network namespace, the service itself is not.
            let sockets = vm_netns.run(|| sockets::bind(gateway()).unwrap()).unwrap();
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            let index = Arc::new(Index::default());
            let guests = [(2, "evil"), (3, "good")].map(|(last, name)| {
                index.insert(ip(last), VmId::random(), &name.parse().unwrap(), Policy::default())
            });
            let _within = runtime.enter();
            let (_sender, servers) = watch::channel(Arc::from([]));
            let serving = serve(index, scope(), servers, sockets, None).unwrap();
            let ask = |n: usize, message: &[u8]| {
                let address = ip(u8::try_from(n + 2).unwrap());
                let frame = frame(address, macs[n], message);
                assert_eq!(rustix::io::write(&taps[n], &frame).unwrap(), frame.len());
            };
            let own = question(7, "good.dayfly.internal", kind::A);
            ask(1, &own);
            let answer = heard(&taps[1]).expect("an answer");
            assert_eq!(address(&answer), Some(ip(3)));
            // The other VM's name does not exist for this VM.
            ask(1, &question(8, "evil.dayfly.internal", kind::A));
            assert_eq!(code_of(&heard(&taps[1]).unwrap()), RCODE::NameError);
            // Small and large questions, all of which must be parsed; frames have at most 1500
            // bytes.
            let bomb = bomb([7, 0x0100], 1400);
            let (stats, begun) = (serving.stats(), std::time::Instant::now());
            let before = stats.questions.load(Relaxed);
            // A host that needs half a second for a round refuses none.
            for n in 1..=200_u8 {
                for _ in 0..50 {
                    ask(0, &own);
                    ask(0, &bomb);
                }
                ask(1, &question(n.into(), "good.dayfly.internal", kind::A));
                let answer = heard(&taps[1]).expect("an answer");
                assert_eq!((address(&answer), answer[1]), (Some(ip(3)), n));
                let read = stats.questions.load(Relaxed) - before - u64::from(n);
                assert!(read <= most_within(begun.elapsed()), "{read} in {n} rounds: {stats:?}");
                if n >= 30 && stats.over_limit.load(Relaxed) > 1000 {
                    break;
                }
            }
            drop((serving, guests));
            vm_netns.remove().unwrap();
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}
