//! What a guest reaches, seen from its tap: of its host only DNS at the gateway, and of the other
//! guests only those of its network.

use super::frames::{self, ICMP, Packet, TCP, UDP};
use super::*;
use dayfly_units::Egress;
use std::collections::BTreeSet;
use std::net::{TcpListener, ToSocketAddrs};

/// A public address of the host, in a network that the host shares with the outside world.
pub(super) const PUBLIC: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub(super) const WORLD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// Addresses of the host in private networks, and the address of its cloud's metadata service.
const PRIVATE: [Ipv4Addr; 3] =
    [Ipv4Addr::new(172, 17, 0, 1), Ipv4Addr::new(100, 64, 3, 3), Ipv4Addr::new(169, 254, 169, 254)];
const SSH: u16 = 22;
/// A port of the host that is published for a guest. Nothing listens on the other ports.
const PUBLISHED: u16 = 8080;

pub(super) fn spec(folder: &tempfile::TempDir, uplink: &str) -> VmNetnsSpec {
    super::spec(folder, 88, uplink)
}

pub(super) fn guest(address: Ipv4Addr, network: Option<&str>, closed: bool) -> Guest {
    let egress = if closed { Egress::none() } else { Egress::internet() };
    Guest { address, network: network.map(str::to_owned), egress }
}

pub(super) fn tap(vm_netns: &VmNetns, name: &str, address: Ipv4Addr) -> Tap {
    vm_netns.tap(name, address, mac(address)).unwrap()
}

/// The outside world: a namespace behind a veth, in which the host has [`PUBLIC`] and the world has
/// [`WORLD`].
pub(super) fn world(folder: &tempfile::TempDir) -> Netns {
    let pin = folder.path().join("world");
    let world = Netns::create(&pin).unwrap();
    let pin = pin.display();
    run(&format!(
        "ip link add out type veth peer name in netns {pin} && ip addr add {PUBLIC}/24 dev out && \
         ip link set out up"
    ));
    world
        .run(|| {
            run(&format!("ip addr add {WORLD}/24 dev in && ip link set in up && ip link set lo up"))
        })
        .unwrap();
    carry(&world);
    world
}

/// All frames that wait in a tap now.
fn waiting(tap: &Tap) -> Vec<Vec<u8>> {
    let next = || {
        let mut bytes = vec![0; 4096];
        let length = rustix::io::read(tap, &mut bytes).ok()?;
        Some(bytes[HEADER..length].to_vec())
    };
    std::iter::from_fn(next).collect()
}

/// The host's services, at every address and at specific addresses.
struct Services(Vec<TcpListener>, Vec<UdpSocket>);

impl Services {
    fn start() -> Self {
        let at = |to: &str| -> (TcpListener, UdpSocket) {
            let to = to.to_socket_addrs().unwrap().next().unwrap();
            (TcpListener::bind(to).unwrap(), UdpSocket::bind(to).unwrap())
        };
        let places =
            [format!("0.0.0.0:{SSH}"), format!("0.0.0.0:{PUBLISHED}"), format!("{PUBLIC}:53")];
        let (tcp, udp): (Vec<_>, Vec<_>) = places.iter().map(|place| at(place)).unzip();
        tcp.iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
        udp.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        Self(tcp, udp)
    }

    /// Whether no service received anything.
    fn untouched(&self) -> bool {
        self.0.iter().all(|tcp| tcp.accept().is_err())
            && self.1.iter().all(|udp| udp.recv_from(&mut [0; 64]).is_err())
    }
}

/// A host with services, a public address and private addresses, and the network of its guests.
fn host(folder: &tempfile::TempDir, uplink: &str) -> (Netns, Services, VmNetns) {
    let world = world(folder);
    run("ip link add priv type veth peer name end && ip link set priv up && ip link set end up");
    for address in PRIVATE {
        run(&format!("ip addr add {address}/24 dev priv"));
    }
    let spec = VmNetnsSpec { most_connections: 1 << 20, ..spec(folder, uplink) };
    let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
    (world, Services::start(), vm_netns)
}

/// All addresses of the host, including the gateway's, and the guest's own address.
fn locals() -> Vec<Ipv4Addr> {
    [&[GATEWAY, HOST, PUBLIC, Ipv4Addr::LOCALHOST, A][..], &PRIVATE].concat()
}

#[test]
fn every_port_of_every_address_of_the_host_is_silent() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, services, vm_netns) = host(&folder, "dayflyr");
        let a = tap(&vm_netns, "vm1", A);
        let mut sent = 0_u32;
        for to in locals() {
            // Chunks smaller than the connection table, which is emptied after each chunk.
            for ports in (1..=u16::MAX).collect::<Vec<_>>().chunks(8192) {
                for &port in ports {
                    if to == GATEWAY && port == 53 {
                        continue;
                    }
                    send(&a, &frames::ipv4(A, to, TCP, &frames::syn([A, to], 4000, port)));
                    send(&a, &frames::ipv4(A, to, UDP, &frames::udp(4000, port, b"ask?")));
                    sent += 2;
                    if port % 256 == 0 {
                        assert_eq!(waiting(&a), NOTHING, "near port {port} of {to}");
                    }
                }
                vm_netns.dismiss(&[guest(A, None, false)]).unwrap();
            }
            send(&a, &frames::ipv4(A, to, ICMP, &frames::ping()));
            // An unknown protocol, for which a host would send an ICMP error.
            send(&a, &frames::ipv4(A, to, 253, b"what"));
            assert_eq!(heard_before_now(&a, A), NOTHING, "{to}");
        }
        assert!(services.untouched());
        eprintln!("{sent} packets to ports of {} addresses", locals().len());
        // The rules are the reason: without the host's rules its public address answers with a SYN
        // and a refusal.
        nft::remove_host("dayflyr").unwrap();
        for (port, flags) in [(SSH, 0x12), (9, 0x14)] {
            send(&a, &frames::ipv4(A, PUBLIC, TCP, &frames::syn([A, PUBLIC], 4001, port)));
            let answer = heard(&a).expect("what this test shows is not what it says");
            assert_eq!((answer[23], answer[47]), (TCP, flags), "port {port}");
        }
        vm_netns.remove().unwrap();
    });
}

#[test]
fn without_its_rules_the_host_s_own_address_is_silent_and_with_them_everything() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, services, vm_netns) = host(&folder, "dayflyra");
        let a = tap(&vm_netns, "vm1", A);
        let changes = VmNetns::changes_of_rules().unwrap();
        let changed = |within: Option<&Timespec>| {
            let happened = poll(&mut [PollFd::new(&changes, PollFlags::IN)], within).unwrap() == 1;
            while rustix::io::read(&changes, &mut [0; 4096]).is_ok() {}
            happened
        };
        let moment = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert!(!changed(Some(&moment)) && !vm_netns.restore_rules().unwrap());
        // The effect of `nft flush ruleset`.
        nft::remove_host("dayflyra").unwrap();
        assert!(changed(None), "no notice of the change");
        send(&a, &frames::ipv4(A, HOST, TCP, &frames::syn([A, HOST], 4000, SSH)));
        assert_eq!(heard_before_now(&a, A), NOTHING, "the host's address on the link");
        assert!(vm_netns.restore_rules().unwrap() && !vm_netns.restore_rules().unwrap());
        for to in [HOST, PUBLIC] {
            send(&a, &frames::ipv4(A, to, TCP, &frames::syn([A, to], 4001, SSH)));
        }
        assert_eq!(heard_before_now(&a, A), NOTHING);
        assert!(services.untouched());
        vm_netns.remove().unwrap();
    });
}

#[test]
fn the_host_says_nothing_of_packets_that_it_cannot_forward() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, _services, vm_netns) = host(&folder, "dayflyrb");
        let a = tap(&vm_netns, "vm1", A);
        let syn = |to| frames::ipv4(A, to, TCP, &frames::syn([A, to], 4000, SSH));
        // The packet's TTL ends at the host, which is the second router. The host has no route for
        // the second packet.
        send(&a, &frames::with_ttl(syn(WORLD), 2));
        send(&a, &syn(Ipv4Addr::new(203, 0, 113, 5)));
        assert_eq!(heard_before_now(&a, A), NOTHING);
        // The guest learns the path's MTU.
        run("ip link set out mtu 600");
        let mut large = frames::ipv4(A, WORLD, UDP, &frames::udp(4000, 9, &[0; 900]));
        // The don't-fragment flag (RFC 791: bit 1 of the flags).
        large[HEADER + 14 + 6] = 0x40;
        send(&a, &frames::with_ttl(large, 64));
        let said = heard(&a).expect("a smaller size");
        assert_eq!((said[23], said[34], said[35]), (ICMP, 3, 4));
        vm_netns.remove().unwrap();
    });
}

/// A packet of the guest with the address [`A`], without options.
fn plain(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, fragment: u16, body: &[u8]) -> Vec<u8> {
    let to_mac = GATEWAY_MAC;
    Packet { owner: A, from, to, protocol, fragment, options: &[], to_mac, body }.bytes()
}

/// Packets to `to` with forged sources: another guest, the gateway, the host, loopback, unused,
/// broadcast, and outside addresses.
fn forged(to: Ipv4Addr) -> Vec<Vec<u8>> {
    let others = ["0.0.0.0", "255.255.255.255", "127.0.0.1", "8.8.8.8", "10.88.7.7", "224.0.0.1"]
        .map(|from| from.parse().unwrap())
        .into_iter()
        .chain([B, GATEWAY, HOST, PUBLIC]);
    let mut packets = Vec::new();
    for from in others {
        for port in [SSH, PUBLISHED, 53, 9] {
            packets.push(plain(from, to, TCP, 0, &frames::syn([from, to], 4000, port)));
            packets.push(plain(from, to, UDP, 0, &frames::udp(4000, port, b"evil")));
        }
        packets.push(plain(from, to, ICMP, 0, &frames::ping()));
    }
    packets
}

/// Packets to a port of `to` that no ordinary program sends.
fn irregular(to: Ipv4Addr, port: u16) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    let (tcp, udp) = (frames::syn([A, to], 4000, port), frames::udp(4000, port, b"part of it"));
    // A first fragment alone, a last fragment alone, both, and a header in two fragments.
    for (fragment, body) in
        [(0x2000, &udp[..16]), (2, &udp[16..]), (0x2000, &tcp[..8]), (1, &tcp[8..])]
    {
        let protocol = if body.len() == 12 { TCP } else { UDP };
        packets.push(plain(A, to, protocol, fragment, body));
    }
    // Source routes through the gateway and the host, strict and loose (RFC 791: options 137 and
    // 131).
    for option in [137, 131] {
        let options = &[&[option, 11, 4][..], &GATEWAY.octets(), &HOST.octets(), &[0]].concat();
        let (protocol, to_mac) = (TCP, GATEWAY_MAC);
        let body = &tcp;
        packets.push(
            Packet { owner: A, from: A, to, protocol, fragment: 0, options, to_mac, body }.bytes(),
        );
    }
    // A TTL that ends at the gateway or at the host.
    for ttl in [0, 1, 2] {
        packets.push(frames::with_ttl(plain(A, to, TCP, 0, &tcp), ttl));
    }
    // To the broadcast MAC.
    let (protocol, to_mac, body) = (UDP, [0xff; 6], &frames::udp(4000, port, b"evil"));
    packets.push(
        Packet { owner: A, from: A, to, protocol, fragment: 0, options: &[], to_mac, body }.bytes(),
    );
    packets
}

#[test]
fn neither_lies_nor_fragments_nor_other_protocols_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let (_world, services, vm_netns) = host(&folder, "dayflyt");
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let dns = vm_netns.run(|| UdpSocket::bind((GATEWAY, 53)).unwrap()).unwrap();
        dns.set_nonblocking(true).unwrap();
        let broadcasts = ["255.255.255.255", "10.88.255.255", "224.0.0.1", "224.0.0.251"]
            .map(|to| to.parse().unwrap());
        let everywhere = [&locals()[..], &broadcasts, &[B]].concat();
        for &to in &everywhere {
            forged(to).iter().for_each(|packet| send(&a, packet));
            let ports: &[u16] = if to == GATEWAY { &[SSH, 9] } else { &[SSH, PUBLISHED, 53, 9] };
            for &port in ports {
                irregular(to, port).iter().for_each(|packet| send(&a, packet));
            }
            if to != GATEWAY {
                send(&a, &frames::arp(A, to));
            }
        }
        for packet in frames::link_local(A) {
            send(&a, &packet);
        }
        // An unknown protocol, and truncated packets.
        send(&a, &[&[0; HEADER][..], &GATEWAY_MAC, &mac(A), &[0x88, 0xb5], b"evil"].concat());
        let whole = frames::ipv4(A, HOST, UDP, &frames::udp(1, 22, b"evil"));
        for bytes in HEADER + 14..whole.len() {
            send(&a, &whole[..bytes]);
        }
        assert_eq!(heard_before_now(&a, A), NOTHING);
        assert_eq!(heard_before_now(&b, B), NOTHING);
        assert!(services.untouched());
        // Nothing reached the gateway's DNS socket.
        let asked = std::iter::from_fn(|| dns.recv_from(&mut [0; 64]).ok());
        assert_eq!(asked.map(|(_, from)| from.ip()).collect::<BTreeSet<_>>(), BTreeSet::new());
        vm_netns.remove().unwrap();
    });
}

#[test]
fn ipv6_is_not_answered_even_if_it_is_switched_on() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyud"), &[]).unwrap();
        assert_eq!(run("ip -6 addr show dev dayflyud"), "");
        assert_eq!(vm_netns.run(|| run("ip -6 addr")).unwrap(), "");
        // Without duplicate address detection, which takes seconds.
        let of = "/proc/sys/net/ipv6/conf/default";
        vm_netns
            .run(|| run(&format!("echo 0 >{of}/accept_dad && echo 0 >{of}/disable_ipv6")))
            .unwrap();
        let a = tap(&vm_netns, "vm1", A);
        assert!(
            vm_netns
                .run(|| run("ip -6 addr show dev vm1"))
                .unwrap()
                .contains("fe80::df:ff:fe00:1/64")
        );
        frames::link_local(A).iter().for_each(|frame| send(&a, frame));
        // The kernel solicits routers and reports its groups; it sends neither an echo reply (129)
        // nor a neighbour advertisement (136).
        let answers = heard_before_now(&a, A).into_iter().filter(|frame| {
            frame[12..14] == [0x86, 0xdd] && frame[20] == 58 && [129, 136].contains(&frame[54])
        });
        assert_eq!(answers.collect::<Vec<_>>(), NOTHING);
        vm_netns.remove().unwrap();
    });
}

#[test]
fn no_outside_host_speaks_as_a_guest_and_nothing_leaves_that_is_no_guest_s() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let world = world(&folder);
        let vm_netns = VmNetns::open_or_create(&spec(&folder, "dayflyuc"), &[]).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        // Sent from the namespace itself, because a guest's forged packets do not leave the tap.
        let there = world.run(|| UdpSocket::bind((WORLD, 2000)).unwrap()).unwrap();
        there.set_read_timeout(Some(TIMEOUT)).unwrap();
        let other = Ipv4Addr::new(8, 8, 8, 8);
        vm_netns.run(|| run(&format!("ip addr add {other}/32 dev lo"))).unwrap();
        let lie = || UdpSocket::bind((other, 0)).unwrap().send_to(b"evil", (WORLD, 2000)).unwrap();
        vm_netns.run(lie).unwrap();
        send(&a, &packet(A, WORLD, b"now!"));
        let mut word = [0; 4];
        let (_, from) = there.recv_from(&mut word).expect("what a guest sends");
        assert_eq!((&word, from.ip()), (b"now!", PUBLIC.into()));
        // Only the routes protect while the host's rules are gone; then outside hosts reach guests
        // with their own addresses.
        nft::remove_host("dayflyuc").unwrap();
        let ways = format!("ip addr add {B}/32 dev lo && ip route add 10.88.0.0/16 via {PUBLIC}");
        world.run(|| run(&ways)).unwrap();
        for from in [B, WORLD] {
            let say = || UdpSocket::bind((from, 0)).unwrap().send_to(b"hey!", (A, 2000)).unwrap();
            world.run(say).unwrap();
        }
        assert_eq!(said(&a), Some((WORLD, b"hey!".to_vec())));
        assert_eq!(heard_before_now(&b, B), NOTHING);
        vm_netns.remove().unwrap();
    });
}
