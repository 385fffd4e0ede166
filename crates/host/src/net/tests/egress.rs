//! Egress policies: what a guest with one reaches, by protocol, and what becomes of connections
//! that were open before a policy changed.

use super::frames::{self, ICMP, TCP, UDP};
use super::reach::{WORLD, guest, spec, tap, world};
use super::*;
use dayfly_units::Egress;
use std::net::{SocketAddr, TcpListener};

/// Another address of the outside world.
const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 3);

fn limited(address: Ipv4Addr, policy: &str) -> Guest {
    Guest { egress: policy.parse().unwrap(), ..guest(address, None, false) }
}

fn policy(text: &str) -> Egress {
    text.parse().unwrap()
}

/// The outside world with two addresses: a UDP socket at port 2000 of each, and a listener at port
/// 80 of both.
fn outside(folder: &tempfile::TempDir) -> (Netns, [UdpSocket; 2], TcpListener) {
    let world = world(folder);
    world.run(|| run(&format!("ip addr add {OTHER}/24 dev in"))).unwrap();
    let sockets = || {
        let udp = [WORLD, OTHER].map(|address| UdpSocket::bind((address, 2000)).unwrap());
        (udp, TcpListener::bind("0.0.0.0:80").unwrap())
    };
    let (udp, tcp) = world.run(sockets).unwrap();
    udp.iter().for_each(|socket| socket.set_read_timeout(Some(TIMEOUT)).unwrap());
    (world, udp, tcp)
}

/// The next packet of a guest that arrives.
fn next(there: &UdpSocket) -> ([u8; 4], SocketAddr) {
    let mut word = [0; 4];
    let (_, from) = there.recv_from(&mut word).expect("what a guest sends");
    (word, from)
}

/// What of a TCP connection, a UDP packet and a ping to `to` gets an answer. UDP goes to port 2000,
/// TCP to port 80, from `port` of the guest.
fn answered(tap: &Tap, from: Ipv4Addr, to: Ipv4Addr, port: u16, there: &[UdpSocket; 2]) -> Vec<u8> {
    send(tap, &frames::ipv4(from, to, TCP, &frames::syn([from, to], port, 80)));
    send(tap, &frames::ipv4(from, to, ICMP, &frames::ping()));
    send(tap, &frames::ipv4(from, to, UDP, &frames::udp(port, 2000, b"ask?")));
    // All packets are handled on one CPU, so what arrives has arrived.
    for socket in there {
        socket.set_nonblocking(true).unwrap();
        while let Ok((_, from)) = socket.recv_from(&mut [0; 4]) {
            socket.send_to(b"yes!", from).unwrap();
        }
        socket.set_nonblocking(false).unwrap();
    }
    // What another address sends again, such as the answer to a SYN, does not count.
    let of = |frame: &Vec<u8>| frame[26..30] == to.octets();
    let heard = heard_before_now(tap, from).into_iter().filter(of);
    let mut all: Vec<u8> = heard.map(|frame| frame[23]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn a_policy_permits_what_it_names_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, there, _web) = outside(&folder);
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyea"), &[]).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let mut port = 3000;
        for (text, to_world, to_other) in [
            ("internet", &[ICMP, TCP, UDP][..], &[ICMP, TCP, UDP][..]),
            ("none", &[], &[]),
            ("192.0.2.0/24", &[ICMP, TCP, UDP], &[ICMP, TCP, UDP]),
            ("192.0.2.2", &[ICMP, TCP, UDP], &[]),
            ("192.0.2.2:tcp", &[TCP], &[]),
            ("192.0.2.2:80", &[TCP], &[]),
            ("192.0.2.2:81,192.0.2.3:udp:80", &[], &[]),
            ("192.0.2.3:79-2000,192.0.2.2:icmp", &[ICMP], &[TCP, UDP]),
            ("192.0.2.2:tcp:1-79,192.0.2.2:udp:2000-2001", &[UDP], &[]),
            ("0.0.0.0/0:tcp:80", &[TCP], &[TCP]),
            ("198.51.100.0/24,example.org", &[], &[]),
        ] {
            vm_netns.admit(&limited(A, text)).unwrap();
            port += 1;
            assert_eq!(answered(&a, A, WORLD, port, &there), to_world, "{text}");
            assert_eq!(answered(&a, A, OTHER, port, &there), to_other, "{text}");
            let refused = vm_netns.refused().unwrap().get(&A).copied().unwrap_or(0);
            let answers = to_world.len() + to_other.len();
            assert_eq!(refused, 6 - u64::try_from(answers).unwrap(), "{text}");
            // No policy permits the host, another guest or a private address.
            assert_eq!(answered(&a, A, HOST, port, &there), [0; 0], "{text}");
            assert_eq!(answered(&a, A, B, port, &there), [0; 0], "{text}");
            vm_netns.dismiss(&[limited(A, text)]).unwrap();
            assert_eq!(vm_netns.refused().unwrap(), [].into(), "{text}");
        }
        assert_eq!(answered(&b, B, WORLD, port, &there), [ICMP, TCP, UDP]);
        vm_netns.remove().unwrap();
    });
}

#[test]
fn a_guest_without_a_way_out_answers_its_host() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns =
            VmNetns::open_or_create(&spec(&folder, "dayflyeb"), &[limited(A, "none")]).unwrap();
        let a = tap(&vm_netns, "vm1", A);
        let host = UdpSocket::bind((HOST, 7000)).unwrap();
        host.set_read_timeout(Some(TIMEOUT)).unwrap();
        host.send_to(b"ask?", (A, 9)).unwrap();
        assert_eq!(said(&a), Some((HOST, b"ask?".to_vec())));
        send(&a, &frames::ipv4(A, HOST, UDP, &frames::udp(9, 7000, b"yes!")));
        assert_eq!(next(&host), (*b"yes!", SocketAddr::from((A, 9))));
        vm_netns.remove().unwrap();
    });
}

#[test]
fn open_connections_are_cut_in_both_directions_or_go_on() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, there, _web) = outside(&folder);
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyec"), &[]).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let [at_world, at_other] = &there;
        let begin = |to, there| {
            send(&a, &packet(A, to, b"ask?"));
            let (word, from) = next(there);
            assert_eq!(word, *b"ask?");
            from
        };
        let guest = [begin(WORLD, at_world), begin(OTHER, at_other)];
        // Both connections have one port, so their packets differ by the other end only.
        assert_eq!(guest[0], guest[1]);
        let speaks = |there: &UdpSocket| {
            there.send_to(b"data", guest[0]).unwrap();
            heard_before_now(&a, A).len()
        };
        let is_heard = |to| {
            let there = if to == WORLD { at_world } else { at_other };
            send(&a, &packet(A, to, b"more"));
            send(&b, &packet(B, to, b"now!"));
            let first = next(there).0;
            first == *b"more" && next(there).0 == *b"now!"
        };
        assert_eq!((speaks(at_world), is_heard(WORLD)), (1, true));
        // The other end speaks first: neither direction needs the other one.
        vm_netns.set_egress(A, &policy("192.0.2.2:udp:2000")).unwrap();
        for when in ["at once", "when what was cut is forgotten"] {
            assert_eq!((speaks(at_world), speaks(at_other)), (1, 0), "{when}");
            assert_eq!((is_heard(WORLD), is_heard(OTHER)), (true, false), "{when}");
            vm_netns.cut(A).unwrap();
        }
        let begun = || conntrack::begun(A).unwrap().into_iter().map(|one| one.to);
        assert_eq!(vm_netns.run(|| begun().collect::<Vec<_>>()).unwrap(), [WORLD]);
        assert_eq!(begun().collect::<Vec<_>>(), [WORLD]);
        // Another policy that permits the connection, and one that permits the one that was cut.
        vm_netns.set_egress(A, &policy("192.0.2.2,example.org")).unwrap();
        vm_netns.cut(A).unwrap();
        assert_eq!((speaks(at_world), is_heard(WORLD), is_heard(OTHER)), (1, true, false));
        vm_netns.set_egress(A, &policy("none")).unwrap();
        // Even if the namespace has forgotten a connection that the host still translates.
        vm_netns.run(|| conntrack::forget(&[A].into())).unwrap().unwrap();
        for _ in 0..2 {
            assert_eq!((speaks(at_world), is_heard(WORLD)), (0, false));
            // A packet of a connection that was cut begins none in the other direction.
            assert_eq!((speaks(at_other), is_heard(OTHER)), (0, false));
            vm_netns.cut(A).unwrap();
        }
        vm_netns.set_egress(A, &policy("internet")).unwrap();
        assert!(is_heard(WORLD) && is_heard(OTHER));
        // What one policy has permitted, another one forbids.
        vm_netns.set_egress(A, &policy("192.0.2.3")).unwrap();
        assert!(is_heard(OTHER));
        vm_netns.set_egress(A, &policy("192.0.2.2")).unwrap();
        assert!(!is_heard(OTHER) && is_heard(WORLD));
        vm_netns.remove().unwrap();
    });
}

#[test]
fn names_open_addresses_which_survive_a_new_daemon() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, there, _web) = outside(&folder);
        let spec = spec(&folder, "dayflyed");
        let rules = "example.org:udp:2000,*.example.net:tcp";
        let guests = [limited(A, rules), limited(B, "*:icmp")];
        let vm_netns = VmNetns::open_or_create(&spec, &guests).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let found = |name: &str, address: Ipv4Addr| Found {
            name: name.split('.').rev().map(|label| label.as_bytes().into()).collect(),
            addresses: vec![(address, Duration::from_secs(300))],
        };
        assert_eq!(answered(&a, A, WORLD, 3000, &there), [0; 0]);
        assert_eq!(vm_netns.open(A, &found("example.org", WORLD)).unwrap(), 0);
        assert_eq!(vm_netns.open(A, &found("www.example.net", OTHER)).unwrap(), 0);
        for name in ["example.com", "example.net", "www.example.org"] {
            assert_eq!(vm_netns.open(A, &found(name, WORLD)).unwrap(), 0);
        }
        assert_eq!(vm_netns.open(B, &found("any.name", OTHER)).unwrap(), 0);
        let reached = |port| {
            assert_eq!(answered(&a, A, WORLD, port, &there), [UDP], "{port}");
            assert_eq!(answered(&a, A, OTHER, port, &there), [TCP], "{port}");
            assert_eq!(answered(&b, B, OTHER, port, &there), [ICMP], "{port}");
            assert_eq!(answered(&b, B, WORLD, port, &there), [0; 0], "{port}");
        };
        reached(3001);
        // A longer time, for an address that is open already.
        let longer = |seconds| {
            let mut found = found("example.org", WORLD);
            found.addresses[0].1 = Duration::from_secs(seconds);
            vm_netns.open(A, &found).unwrap();
        };
        longer(4000);
        drop(vm_netns);
        let vm_netns = VmNetns::open_or_create(&spec, &guests).unwrap();
        reached(3002);
        let number = policies::number(&guests[0].egress);
        let services = policy(rules).services_of_names().len();
        let left = || (0..services).flat_map(|place| nft::reopened(number, place).unwrap());
        let left = vm_netns.run(|| left().find(|(of, _)| *of == WORLD)).unwrap().unwrap().1;
        // The kernel has the time of the answer, and half of it.
        assert!((5_400_001..=6_000_000).contains(&left), "{left} ms");
        // The next guests with these policies begin with nothing.
        vm_netns.dismiss(&guests).unwrap();
        guests.iter().for_each(|guest| vm_netns.admit(guest).unwrap());
        assert_eq!(answered(&a, A, WORLD, 3003, &there), [0; 0]);
        vm_netns.remove().unwrap();
    });
}

#[test]
fn what_is_refused_takes_no_connection_of_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, there, _web) = outside(&folder);
        let spec = VmNetnsSpec { most_connections: 4, ..spec(&folder, "dayflyee") };
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        let a = tap(&vm_netns, "vm1", A);
        for port in 3000..3010 {
            send(&a, &frames::ipv4(A, WORLD, UDP, &frames::udp(port, 2000, b"ask?")));
        }
        for _ in 0..4 {
            assert_eq!(next(&there[0]).0, *b"ask?");
        }
        vm_netns.set_egress(A, &policy("192.0.2.3")).unwrap();
        vm_netns.cut(A).unwrap();
        // At each count the kernel forgets only a few of the connections that it counted before.
        let mut there_now = 0;
        for port in 3100..4000 {
            send(&a, &frames::ipv4(A, WORLD, UDP, &frames::udp(port, 2000, b"ask?")));
            send(&a, &frames::ipv4(A, OTHER, UDP, &frames::udp(port, 2000, b"more")));
            there[1].set_nonblocking(true).unwrap();
            there_now += usize::from(there[1].recv_from(&mut [0; 4]).is_ok());
            if there_now == 4 {
                break;
            }
        }
        assert_eq!(there_now, 4);
        vm_netns.remove().unwrap();
    });
}

/// Guests that have one policy.
fn many(count: u16, policy: &str) -> Vec<Guest> {
    let address = |n: u16| Ipv4Addr::from(u32::from(A) + u32::from(n));
    (0..count).map(|n| limited(address(n), policy)).collect()
}

#[test]
fn a_new_daemon_opens_as_many_addresses_as_names_may_open() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, "dayflyef");
        let guests = [limited(A, "*:443")];
        let vm_netns = VmNetns::open_or_create(&spec, &guests).unwrap();
        let most = nft::MAX_OPENED;
        let all: Vec<_> = (0..most).map(|n| Ipv4Addr::from(u32::from(WORLD) + n)).collect();
        for some in all.chunks(32) {
            let ttl = Duration::from_secs(3600);
            let addresses = some.iter().map(|address| (*address, ttl)).collect();
            let name = vec![b"org"[..].into(), b"example"[..].into()];
            assert_eq!(vm_netns.open(A, &Found { name, addresses }).unwrap(), 0);
        }
        drop(vm_netns);
        let vm_netns = VmNetns::open_or_create(&spec, &guests).unwrap();
        let number = policies::number(&guests[0].egress);
        let open = || nft::reopened(number, 0).unwrap().into_iter().map(|(address, _)| address);
        let open: std::collections::BTreeSet<_> = vm_netns.run(|| open().collect()).unwrap();
        assert!(open.iter().eq(&all), "{} of {most}", open.len());
        vm_netns.remove().unwrap();
    });
}

#[test]
fn many_guests_go_together() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, "dayflyeg");
        let guests = many(200, "192.0.2.2");
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        guests.iter().for_each(|guest| vm_netns.admit(guest).unwrap());
        vm_netns.dismiss(&guests).unwrap();
        // The addresses are free again; this daemon admits all guests in one transaction.
        for _ in 0..2 {
            let vm_netns = VmNetns::open_or_create(&spec, &guests).unwrap();
            vm_netns.dismiss(&guests).unwrap();
        }
        vm_netns.remove().unwrap();
    });
}

#[test]
fn connections_of_many_guests_are_forgotten_together() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyeh"), &[]).unwrap();
        let addresses = many(400, "none").iter().map(|guest| guest.address).collect();
        vm_netns.run(|| conntrack::forget(&addresses)).unwrap().unwrap();
        vm_netns.remove().unwrap();
    });
}

#[test]
fn one_refused_message_undoes_its_transaction_and_is_named() {
    use nft::Change::{Limit, Unlimit};
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyei"), &[]).unwrap();
        let change = |all: &[nft::Change]| vm_netns.run(|| nft::change(all)).unwrap();
        let error = change(&[Limit(None, A), Unlimit(None, B), Limit(None, B)]).unwrap_err();
        assert_eq!(error.errno, rustix::io::Errno::NOENT);
        assert!(error.what.contains("removing from \"egress\": Address(10.88.0.3)"), "{error}");
        // The first change was undone, so it is not there to be removed.
        assert!(change(&[Unlimit(None, A)]).is_err());
        change(&[]).unwrap();
        vm_netns.remove().unwrap();
    });
}
