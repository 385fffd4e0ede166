//! Questions to the gateway: which ones the packet filter passes to the DNS service, and the rate
//! limit.

use super::frames::{self, Packet, TCP, UDP};
use super::reach::{spec, tap};
use super::*;
use std::net::TcpListener;

#[test]
fn the_gateway_answers_dns() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflys"), &[]).unwrap();
        let a = tap(&vm_netns, "vm1", A);
        let sockets =
            || (TcpListener::bind((GATEWAY, 53)).unwrap(), UdpSocket::bind((GATEWAY, 53)).unwrap());
        let (_tcp, udp) = vm_netns.run(sockets).unwrap();
        udp.set_read_timeout(Some(TIMEOUT)).unwrap();
        // The gateway drops the host's packet. The frame that `heard_before_now` awaits takes the
        // same path, so the packet has been handled by then.
        let host = UdpSocket::bind((HOST, 0)).unwrap();
        host.send_to(b"host", (GATEWAY, 53)).unwrap();
        assert_eq!(heard_before_now(&a, A), NOTHING);
        let question = frames::udp(4000, 53, b"ask?");
        // As one packet, and in two fragments.
        send(&a, &frames::ipv4(A, GATEWAY, UDP, &question));
        let fragment = |fragment, body| {
            let (owner, from, to, protocol, options, to_mac) =
                (A, A, GATEWAY, UDP, &[][..], GATEWAY_MAC);
            Packet { owner, from, to, protocol, fragment, options, to_mac, body }.bytes()
        };
        send(&a, &fragment(0x2000, &question[..8]));
        send(&a, &fragment(1, &question[8..]));
        for _ in 0..2 {
            let (length, from) = udp.recv_from(&mut [0; 64]).expect("a question");
            assert_eq!((length, from), (4, (A, 4000).into()));
            udp.send_to(b"yes!", from).unwrap();
            assert_eq!(said(&a), Some((GATEWAY, b"yes!".to_vec())));
        }
        send(&a, &frames::ipv4(A, GATEWAY, TCP, &frames::syn([A, GATEWAY], 4000, 53)));
        let answer = heard(&a).expect("a connection");
        assert_eq!((answer[23], answer[47]), (TCP, 0x12), "SYN and ACK");
        vm_netns.remove().unwrap();
    });
}

#[test]
fn a_flood_of_questions_is_dropped_before_it_costs_more_and_others_are_heard() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyz"), &[]).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let dns = vm_netns.run(|| UdpSocket::bind((GATEWAY, 53)).unwrap()).unwrap();
        dns.set_read_timeout(Some(TIMEOUT)).unwrap();
        let (begun, mut arrived, sent) = (Instant::now(), 0_u32, 20_000);
        let question = frames::ipv4(A, GATEWAY, UDP, &frames::udp(4000, 53, b"ask?"));
        // The socket's queue would overflow without reading in between.
        for _ in 0..sent / 100 {
            (0..100).for_each(|_| send(&a, &question));
            send(&b, &frames::ipv4(B, GATEWAY, UDP, &frames::udp(4000, 53, b"ask?")));
            while dns.recv_from(&mut [0; 8]).expect("the other guest's question").1.ip() == A {
                arrived += 1;
            }
        }
        // A burst, and the rate times the elapsed time.
        let most = 2000.0 + 1000.0 * (begun.elapsed().as_secs_f64() + 1.0);
        assert!(f64::from(arrived) <= most, "{arrived} of {sent} arrived, expected at most {most}");
        assert!(arrived >= 2000, "{arrived} of {sent} arrived");
        vm_netns.remove().unwrap();
    });
}

#[test]
fn questions_do_not_fill_the_table_of_connections() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyrc"), &[]).unwrap();
        let a = tap(&vm_netns, "vm1", A);
        let tracked = || -> u32 {
            let read = || run("cat /proc/sys/net/netfilter/nf_conntrack_count");
            vm_netns.run(read).unwrap().trim().parse().unwrap()
        };
        let sockets =
            || (TcpListener::bind((GATEWAY, 53)).unwrap(), UdpSocket::bind((GATEWAY, 53)).unwrap());
        let (_tcp, udp) = vm_netns.run(sockets).unwrap();
        udp.set_read_timeout(Some(TIMEOUT)).unwrap();
        // Fewer answers than a tap's queue holds.
        for port in 1000..1200 {
            send(&a, &frames::ipv4(A, GATEWAY, UDP, &frames::udp(port, 53, b"ask?")));
            udp.send_to(b"yes!", udp.recv_from(&mut [0; 8]).expect("a question").1).unwrap();
            send(&a, &frames::ipv4(A, GATEWAY, TCP, &frames::syn([A, GATEWAY], port, 53)));
            send(&a, &frames::ipv4(A, GATEWAY, UDP, &frames::udp(port, 9, b"ask?")));
        }
        let answers = heard_before_now(&a, A);
        for protocol in [TCP, UDP] {
            assert_eq!(
                answers.iter().filter(|frame| frame[23] == protocol).count(),
                200,
                "no process listened"
            );
        }
        // At most the connections that `heard_before_now` makes.
        assert!(tracked() <= 2, "{} connections", tracked());
        vm_netns.remove().unwrap();
    });
}
