//! Real namespaces, thrown away afterwards: each test has a host's of its own, and what it calls the world.

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const A: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 2);
const B: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 3);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
const HOST: Ipv4Addr = Ipv4Addr::new(10, 88, 255, 254);
const GATEWAY_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 1];
const HEADER: usize = 12;

fn mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0xdf, a, b, c, d]
}

/// Does `act` in a network namespace that goes with it, and with mounts that do: a test that fails leaves nothing.
fn alone<R: Send>(act: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            use rustix::mount::{MountPropagationFlags, mount_change};
            let own = rustix::thread::UnshareFlags::NEWNET | rustix::thread::UnshareFlags::NEWNS;
            // SAFETY: these change what this short-lived thread and those it starts see, and nothing that others share with them.
            unsafe { rustix::thread::unshare_unsafe(own) }.expect("these tests need CAP_SYS_ADMIN");
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            run("ip link set lo up");
            act()
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A command in the calling thread's namespace.
fn run(line: &str) -> String {
    let out = std::process::Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn spec(folder: &tempfile::TempDir, second: u8, uplink: &str) -> TenantSpec {
    let first = Ipv4Addr::new(10, second, 0, 0);
    TenantSpec { pin: folder.path().join(uplink), first, bits: 16, uplink: uplink.to_owned() }
}

fn sum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// Header, Ethernet, IPv4, UDP from port 1000 to port 2000, and a word of four bytes.
fn packet(from: Ipv4Addr, to: Ipv4Addr, word: &[u8; 4]) -> Vec<u8> {
    let mut ip = vec![0x45, 0, 0, 32, 0, 1, 0, 0, 64, 17, 0, 0];
    ip.extend(from.octets());
    ip.extend(to.octets());
    let check = sum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&check);
    let udp = [&1000_u16.to_be_bytes()[..], &2000_u16.to_be_bytes(), &[0, 12, 0, 0], word].concat();
    [&[0; HEADER][..], &GATEWAY_MAC, &mac(from), &[8, 0], &ip, &udp].concat()
}

fn send(tap: &Tap, packet: &[u8]) {
    assert_eq!(rustix::io::write(tap, packet).unwrap(), packet.len());
}

/// The next frame of a tap within half a second, without its header.
fn heard(tap: &Tap) -> Option<Vec<u8>> {
    let wait = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    let fd = tap.as_fd();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap();
    let mut bytes = vec![0; 4096];
    let length = rustix::io::read(tap, &mut bytes).ok()?;
    bytes.truncate(length);
    Some(bytes.split_off(HEADER))
}

/// Source and word of the next IPv4 packet of a tap.
fn said(tap: &Tap) -> Option<(Ipv4Addr, Vec<u8>)> {
    let frame = heard(tap)?;
    assert_eq!(frame[12..14], [8, 0], "{frame:x?}");
    let source = <[u8; 4]>::try_from(&frame[26..30]).unwrap();
    Some((source.into(), frame[42..46].to_vec()))
}

fn two(tenant: &Tenant) -> (Tap, Tap) {
    (tenant.tap("vm1", A, mac(A)).unwrap(), tenant.tap("vm2", B, mac(B)).unwrap())
}

#[test]
fn guests_reach_each_other_and_nobody_speaks_as_somebody_else() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let tenant = Tenant::open_or_create(&spec(&folder, 88, "dayflya")).unwrap();
        let (a, b) = two(&tenant);
        send(&a, &packet(A, B, b"good"));
        assert_eq!(said(&b), Some((A, b"good".to_vec())));
        // Neither as the other, nor as somebody of the world, nor as the gateway.
        for other in [B, GATEWAY, HOST, Ipv4Addr::new(8, 8, 8, 8), Ipv4Addr::new(10, 88, 0, 9)] {
            send(&a, &packet(other, B, b"evil"));
        }
        assert_eq!(heard(&b), None);
        send(&b, &packet(B, A, b"back"));
        assert_eq!(said(&a), Some((B, b"back".to_vec())));
        tenant.remove().unwrap();
    });
}

#[test]
fn the_gateway_answers_and_nobody_else_hears_who_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let tenant = Tenant::open_or_create(&spec(&folder, 88, "dayflyb")).unwrap();
        let (a, b) = two(&tenant);
        let arp = |to: Ipv4Addr| {
            let body = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac(A), &A.octets(), &[0; 6], &to.octets()].concat();
            [&[0; HEADER][..], &[0xff; 6], &mac(A), &[8, 6], &body].concat()
        };
        send(&a, &arp(GATEWAY));
        let answer = heard(&a).expect("an answer");
        assert_eq!((&answer[12..14], &answer[22..28]), (&[8, 6][..], &GATEWAY_MAC[..]));
        send(&a, &arp(B));
        assert_eq!(heard(&b), None);
        tenant.remove().unwrap();
    });
}

#[test]
fn the_world_sees_the_host_and_answers_come_back() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        // The world: another namespace behind a veth.
        let world = Netns::create(&folder.path().join("world")).unwrap();
        run(&format!(
            "ip link add out type veth peer name in && ip link set in netns {} && ip addr add 192.0.2.1/24 dev out && \
             ip link set out up",
            folder.path().join("world").display()
        ));
        world.run(|| run("ip addr add 192.0.2.2/24 dev in && ip link set in up")).unwrap();
        let tenant = Tenant::open_or_create(&spec(&folder, 88, "dayflyc")).unwrap();
        let (a, _b) = two(&tenant);
        let there = world.run(|| UdpSocket::bind("192.0.2.2:2000").unwrap()).unwrap();
        there.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        send(&a, &packet(A, "192.0.2.2".parse().unwrap(), b"ask?"));
        let mut word = [0; 8];
        let (length, from) = there.recv_from(&mut word).expect("what a guest sent");
        assert_eq!(
            (&word[..length], from.ip().to_string().as_str()),
            (&b"ask?"[..], "192.0.2.1"),
            "not masqueraded"
        );
        there.send_to(b"yes!", from).unwrap();
        assert_eq!(said(&a), Some(("192.0.2.2".parse().unwrap(), b"yes!".to_vec())));
        // Nobody of the world speaks to a guest unasked.
        world.run(|| run("ip route add 10.88.0.0/16 via 192.0.2.1")).unwrap();
        there.send_to(b"hey!", (B, 2000)).unwrap();
        assert_eq!(heard(&_b), None);
        // The host itself is reached, as what it is, and reaches guests.
        let host = UdpSocket::bind((HOST, 2000)).unwrap();
        host.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        send(&a, &packet(A, HOST, b"host"));
        let (_, from) = host.recv_from(&mut word).expect("what a guest sent its host");
        assert_eq!(from.ip(), A);
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"hey!", (A, 2000)).unwrap();
        assert_eq!(said(&a), Some((HOST, b"hey!".to_vec())));
        // Where clouds tell secrets nobody goes.
        run("ip addr add 169.254.169.254/32 dev lo");
        let secrets = UdpSocket::bind("169.254.169.254:2000").unwrap();
        secrets.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        send(&a, &packet(A, Ipv4Addr::new(169, 254, 169, 254), b"tell"));
        assert!(secrets.recv_from(&mut word).is_err());
        tenant.remove().unwrap();
        world.remove().unwrap();
    });
}

#[test]
fn tenants_do_not_reach_each_other() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let one = Tenant::open_or_create(&spec(&folder, 88, "dayflyd")).unwrap();
        let other = Tenant::open_or_create(&spec(&folder, 89, "dayflye")).unwrap();
        let theirs = Ipv4Addr::new(10, 89, 0, 2);
        let (a, _b) = two(&one);
        let c = other.tap("vm1", theirs, mac(theirs)).unwrap();
        send(&a, &packet(A, theirs, b"hey?"));
        assert_eq!(heard(&c), None);
        // Only for the packet filter's rule: without it they do.
        nft::remove("dayflyd").unwrap();
        nft::remove("dayflye").unwrap();
        send(&a, &packet(A, theirs, b"hey!"));
        assert!(said(&c).is_some(), "what this test shows is not what it says");
        one.remove().unwrap();
        other.remove().unwrap();
    });
}

#[test]
fn what_a_daemon_left_is_found_again_and_in_the_end_nothing_stays() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, 88, "dayflyf");
        let tenant = Tenant::open_or_create(&spec).unwrap();
        let a = tenant.tap("vm1", A, mac(A)).unwrap();
        drop(tenant);
        let tenant = Tenant::open_or_create(&spec).unwrap();
        let b = tenant.tap("vm2", B, mac(B)).unwrap();
        send(&a, &packet(A, B, b"good"));
        assert!(said(&b).is_some());
        assert!(tenant.tap("vm1", A, mac(A)).unwrap_err().is_busy(), "a tap was made twice");
        // What is left of one that was made in part is made anew.
        run("ip link del dayflyf");
        let tenant = Tenant::open_or_create(&spec).unwrap();
        drop(tenant.tap("vm1", A, mac(A)).unwrap());
        drop((a, b));
        tenant.remove().unwrap();
        tenant.remove().unwrap();
        assert!(!spec.pin.exists());
        assert_eq!(nft::rules("dayflyf"), 0, "the packet filter's table stayed");
        assert!(!run("ip link").contains("dayfly") && !run("ip route show table all").contains("10.88"));
        assert!(!std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap().contains("dayflyf"));
        for _ in 0..2 {
            nft::set("dayflyf", spec.first, 16).unwrap();
            assert_eq!(nft::rules("dayflyf"), 2, "one to masquerade, one against what nobody asked for");
        }
        // Another network with these addresses is not pushed aside, and nothing stays of ours.
        run(
            "ip link add other type veth peer name end && ip link set other up && ip route add 10.88.0.0/16 dev other",
        );
        let refused = Tenant::open_or_create(&spec).unwrap_err().to_string();
        assert!(refused.contains("10.88.0.0/16"), "{refused}");
        assert!(!spec.pin.exists() && !run("ip link").contains("dayfly"));
    });
}

#[test]
fn addresses_that_are_none_of_a_network_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, 88, "dayfly8");
        for bits in [0, 7, 30, 32, 33, 255] {
            let error = Tenant::open_or_create(&TenantSpec { bits, ..spec.clone() }).unwrap_err();
            assert!(matches!(error, NetError::Addresses(_, got) if got == bits), "{error}");
        }
        let within = TenantSpec { first: A, ..spec.clone() };
        assert!(matches!(Tenant::open_or_create(&within).unwrap_err(), NetError::Addresses(A, 16)));
        let small = TenantSpec { bits: 29, ..spec };
        let tenant = Tenant::open_or_create(&small).unwrap();
        for last in [0, 1, 6, 7, 8, 200] {
            let address = Ipv4Addr::new(10, 88, 0, last);
            let error = tenant.tap("dft", address, mac(address)).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "address {address}: expected one of 10.88.0.0/29 that is neither its first two nor its last two"
                )
            );
        }
        let taps = [2, 3, 4, 5].map(|last| {
            let address = Ipv4Addr::new(10, 88, 0, last);
            tenant.tap(&format!("dft{last}"), address, mac(address)).unwrap()
        });
        tenant.remove_taps(taps.into()).unwrap();
        tenant.remove().unwrap();
    });
}

#[test]
fn a_tap_forgets_what_waits_in_it() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let tenant = Tenant::open_or_create(&spec(&folder, 88, "dayflyg")).unwrap();
        let (a, b) = two(&tenant);
        for _ in 0..10 {
            send(&a, &packet(A, B, b"late"));
        }
        std::thread::sleep(Duration::from_millis(100));
        b.drain().unwrap();
        assert_eq!(heard(&b), None);
        let begun = Instant::now();
        let address = |n: u8| Ipv4Addr::new(10, 88, 1, n);
        let taps: Vec<Tap> =
            (0..100).map(|n| tenant.tap(&format!("many{n}"), address(n), mac(address(n))).unwrap()).collect();
        let made = begun.elapsed();
        drop(taps);
        eprintln!("100 taps: made in {made:?}, gone in {:?}", begun.elapsed() - made);
        for bad in ["", "a/b", "a b", "%d", "0123456789abcdef"] {
            assert!(matches!(Tap::open(bad), Err(NetError::Name(_))), "{bad:?}");
        }
        tenant.remove().unwrap();
    });
}

#[test]
fn what_was_made_in_part_or_changed_is_made_whole() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, 88, "dayflyh");
        let works = |tenant: &Tenant| {
            let (a, b) = two(tenant);
            send(&a, &packet(A, B, b"good"));
            said(&b).is_some() && run("ip route").contains("10.88.0.0/16") && nft::rules("dayflyh") == 2
        };
        // A daemon died when it had the namespace, or the uplink, too.
        drop(Netns::create(&spec.pin).unwrap());
        assert!(works(&Tenant::open_or_create(&spec).unwrap()));
        Tenant::open_or_create(&spec).unwrap().remove().unwrap();
        drop(Netns::create(&spec.pin).unwrap());
        run("ip link add dayflyh type veth peer name uplink");
        run(&format!("ip link set uplink netns {}", spec.pin.display()));
        assert!(works(&Tenant::open_or_create(&spec).unwrap()));
        // `nft flush ruleset`
        nft::remove("dayflyh").unwrap();
        assert!(works(&Tenant::open_or_create(&spec).unwrap()));
        // Other addresses, and fewer of them.
        let small = TenantSpec { bits: 24, ..spec.clone() };
        // With the same last address as all, and with none of theirs.
        let upper = TenantSpec { first: Ipv4Addr::new(10, 88, 128, 0), bits: 17, ..spec.clone() };
        let other = TenantSpec { first: Ipv4Addr::new(10, 99, 0, 0), ..spec.clone() };
        let all = [
            (&small, "10.88.0.0/24"),
            (&spec, "10.88.0.0/16"),
            (&upper, "10.88.128.0/17"),
            (&other, "10.99.0.0/16"),
            (&spec, "10.88.0.0/16"),
        ];
        for (changed, prefix) in all {
            let tenant = Tenant::open_or_create(changed).unwrap();
            let routes = [run("ip route"), tenant.run(|| run("ip route")).unwrap()];
            assert!(routes.iter().all(|all| all.contains(prefix)), "{prefix}: {routes:?}");
            assert_eq!(run("ip route").lines().count(), 1, "{prefix}: {routes:?}");
        }
        let tenant = Tenant::open_or_create(&spec).unwrap();
        assert!(works(&tenant));
        tenant.remove().unwrap();
    });
}

#[test]
fn who_asks_for_nobody_is_told_so_by_the_gateway() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let tenant = Tenant::open_or_create(&spec(&folder, 88, "dayflyi")).unwrap();
        let (a, _b) = two(&tenant);
        // ICMP's unreachable host; administratively prohibited. Neither goes out, whence it would come back.
        let (nobody, secrets) = (Ipv4Addr::new(10, 88, 7, 7), Ipv4Addr::new(169, 254, 169, 254));
        for (to, code) in [(nobody, 1), (secrets, 13)] {
            send(&a, &packet(A, to, b"lost"));
            let told = heard(&a).expect("what became of it");
            assert_eq!(
                (told[23], &told[26..30], told[34], told[35]),
                (1, &GATEWAY.octets()[..], 3, code),
                "{to}"
            );
        }
        let of = "/proc/sys/net/ipv4/conf/vm1";
        let set = tenant.run(|| run(&format!("cat {of}/arp_ignore {of}/proxy_arp {of}/rp_filter"))).unwrap();
        assert_eq!(set, "0\n0\n1\n");
        tenant.remove().unwrap();
    });
}

#[test]
fn taps_are_removed_together() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let tenant = Tenant::open_or_create(&spec(&folder, 88, "dayflyj")).unwrap();
        let (a, b) = two(&tenant);
        let address = |n: u8| Ipv4Addr::new(10, 88, 1, n);
        let taps: Vec<Tap> =
            (0..200).map(|n| tenant.tap(&format!("many{n}"), address(n), mac(address(n))).unwrap()).collect();
        // They are gone though somebody has a descriptor.
        let _held: Vec<_> = taps.iter().map(|tap| tap.try_clone_fd().unwrap()).collect();
        let begun = Instant::now();
        tenant.remove_taps(taps).unwrap();
        eprintln!("200 taps: gone together in {:?}", begun.elapsed());
        tenant.remove_taps(Vec::new()).unwrap();
        assert!(!tenant.run(|| run("ip link")).unwrap().contains("many"));
        send(&a, &packet(A, B, b"good"));
        assert!(said(&b).is_some(), "one that was not meant is gone");
        tenant.remove().unwrap();
    });
}
