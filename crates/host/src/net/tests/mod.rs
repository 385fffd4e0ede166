//! Tests in real namespaces, which end with the test. Each test has a namespace for the host, and
//! one that stands for the outside world.

mod connections;
mod egress;
mod forwards;
mod frames;
mod networks;
mod questions;
mod reach;

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

const A: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 2);
const B: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 3);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
const HOST: Ipv4Addr = Ipv4Addr::new(10, 88, 255, 254);
const GATEWAY_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 1];
const HEADER: usize = 12;
/// No frames.
const NOTHING: [Vec<u8>; 0] = [];

fn mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0xdf, a, b, c, d]
}

/// Runs `act` in a new network and mount namespace. A test that fails leaves nothing on the host.
fn alone<R: Send>(act: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
            let own = rustix::thread::UnshareFlags::NEWNET | rustix::thread::UnshareFlags::NEWNS;
            // SAFETY: the call changes only the namespaces of this short-lived thread and of
            // processes that it starts, and nothing that it shares with other threads.
            unsafe { rustix::thread::unshare_unsafe(own) }.expect("these tests need CAP_SYS_ADMIN");
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            // A private /run, because the notes on forwarding are in /run.
            mount("none", "/run", "tmpfs", MountFlags::empty(), None).unwrap();
            run("ip link set lo up");
            // The kernel handles what a thread sends on the thread's CPU. On one CPU, no packet
            // overtakes another that was sent by the same path.
            let cpu = u32::try_from(rustix::thread::sched_getcpu()).unwrap();
            crate::numa::stay_on(&[cpu]).unwrap();
            act()
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs a command in the calling thread's namespace, and returns its output.
fn run(line: &str) -> String {
    let out = std::process::Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Returns once both ends of the world's link carry packets, as `carries` does.
fn carry(world: &Netns) {
    run("ip link show dev out");
    world.run(|| run("ip link show dev in")).unwrap();
}

fn spec(folder: &tempfile::TempDir, second: u8, uplink: &str) -> VmNetnsSpec {
    let first = Ipv4Addr::new(10, second, 0, 0);
    let (pin, uplink, reach) = (folder.path().join(uplink), uplink.to_owned(), Vec::new());
    VmNetnsSpec { pin, first, bits: 16, uplink, reach, most_connections: 1024 }
}

/// UDP from port 1000 to port 2000, with four bytes of data.
fn packet(from: Ipv4Addr, to: Ipv4Addr, word: &[u8; 4]) -> Vec<u8> {
    frames::ipv4(from, to, frames::UDP, &frames::udp(1000, 2000, word))
}

fn send(tap: &Tap, packet: &[u8]) {
    assert_eq!(rustix::io::write(tap, packet).unwrap(), packet.len());
}

/// Time limit for a packet that must arrive, for a busy host.
const TIMEOUT: Duration = Duration::from_secs(240);

/// The next frame of a tap, without its header; `None` after the time limit.
fn heard(tap: &Tap) -> Option<Vec<u8>> {
    let wait = Timespec { tv_sec: TIMEOUT.as_secs().try_into().unwrap(), tv_nsec: 0 };
    let fd = tap.as_fd();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap();
    let mut bytes = vec![0; 4096];
    let length = rustix::io::read(tap, &mut bytes).ok()?;
    bytes.truncate(length);
    Some(bytes.split_off(HEADER))
}

/// Every frame that the guest's tap received before a frame that the host sends now.
fn heard_before_now(tap: &Tap, owner: Ipv4Addr) -> Vec<Vec<u8>> {
    const NOW: &[u8; 4] = b"now!";
    UdpSocket::bind((HOST, 0)).unwrap().send_to(NOW, (owner, 9)).unwrap();
    let is_now = |frame: &Vec<u8>| frame.ends_with(NOW);
    std::iter::from_fn(|| Some(heard(tap).expect("what the host sends")))
        .take_while(|frame| !is_now(frame))
        .collect()
}

/// Source and data of the next IPv4 packet of a tap.
fn said(tap: &Tap) -> Option<(Ipv4Addr, Vec<u8>)> {
    let frame = heard(tap)?;
    assert_eq!(frame[12..14], [8, 0], "{frame:x?}");
    let source = <[u8; 4]>::try_from(&frame[26..30]).unwrap();
    Some((source.into(), frame[42..46].to_vec()))
}

/// Two guests of one network.
fn both() -> [Guest; 2] {
    let egress = dayfly_units::Egress::internet;
    [A, B].map(|address| Guest { address, network: Some("both".to_owned()), egress: egress() })
}

fn two(vm_netns: &VmNetns) -> (Tap, Tap) {
    both().iter().for_each(|guest| vm_netns.admit(guest).unwrap());
    (vm_netns.tap("vm1", A, mac(A)).unwrap(), vm_netns.tap("vm2", B, mac(B)).unwrap())
}

#[test]
fn guests_reach_each_other_and_none_speaks_with_another_s_address() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflya"), &[]).unwrap();
        let (a, b) = two(&vm_netns);
        send(&a, &packet(A, B, b"good"));
        assert_eq!(said(&b), Some((A, b"good".to_vec())));
        // A guest cannot send as the other guest, as an outside address, or as the gateway.
        for other in [B, GATEWAY, HOST, Ipv4Addr::new(8, 8, 8, 8), Ipv4Addr::new(10, 88, 0, 9)] {
            send(&a, &packet(other, B, b"evil"));
        }
        assert_eq!(heard_before_now(&b, B), NOTHING);
        send(&b, &packet(B, A, b"back"));
        assert_eq!(said(&a), Some((B, b"back".to_vec())));
        vm_netns.remove().unwrap();
    });
}

#[test]
fn the_gateway_answers_and_no_other_guest_hears_the_question() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyb"), &[]).unwrap();
        let (a, b) = two(&vm_netns);
        let arp = |to: Ipv4Addr| {
            let body = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac(A), &A.octets(), &[0; 6], &to.octets()]
                .concat();
            [&[0; HEADER][..], &[0xff; 6], &mac(A), &[8, 6], &body].concat()
        };
        send(&a, &arp(GATEWAY));
        let answer = heard(&a).expect("an answer");
        assert_eq!((&answer[12..14], &answer[22..28]), (&[8, 6][..], &GATEWAY_MAC[..]));
        send(&a, &arp(B));
        assert_eq!(heard_before_now(&b, B), NOTHING);
        vm_netns.remove().unwrap();
    });
}

#[test]
fn the_world_sees_the_host_and_answers_come_back() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        // The outside world: another namespace behind a veth.
        let world = Netns::create(&folder.path().join("world")).unwrap();
        run(&format!(
            "ip link add out type veth peer name in && ip link set in netns {} && ip addr add \
             192.0.2.1/24 dev out && \
             ip link set out up",
            folder.path().join("world").display()
        ));
        world.run(|| run("ip addr add 192.0.2.2/24 dev in && ip link set in up")).unwrap();
        carry(&world);
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyc"), &[]).unwrap();
        let (a, b) = two(&vm_netns);
        let there = world.run(|| UdpSocket::bind("192.0.2.2:2000").unwrap()).unwrap();
        there.set_read_timeout(Some(TIMEOUT)).unwrap();
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
        // The outside world cannot send to a guest unasked.
        world.run(|| run("ip route add 10.88.0.0/16 via 192.0.2.1")).unwrap();
        there.send_to(b"hey!", (B, 2000)).unwrap();
        assert_eq!(heard_before_now(&b, B), NOTHING);
        // The host reaches guests, which answer it.
        let host = UdpSocket::bind((HOST, 0)).unwrap();
        host.set_read_timeout(Some(TIMEOUT)).unwrap();
        host.send_to(b"hey!", (A, 1000)).unwrap();
        assert_eq!(said(&a), Some((HOST, b"hey!".to_vec())));
        let answer = frames::udp(1000, host.local_addr().unwrap().port(), b"yes!");
        send(&a, &frames::ipv4(A, HOST, frames::UDP, &answer));
        let (_, from) = host.recv_from(&mut word).expect("what a guest answered its host");
        assert_eq!(from.ip(), A);
        vm_netns.remove().unwrap();
        world.remove().unwrap();
    });
}

#[test]
fn vm_network_namespaces_do_not_reach_each_other() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let near = |second, uplink| {
            let reach = vec!["10.0.0.0/8".parse().unwrap()];
            let spec = VmNetnsSpec { reach, ..spec(&folder, second, uplink) };
            VmNetns::open_or_create(&spec, &[]).unwrap()
        };
        let (one, other) = (near(88, "dayflyd"), near(89, "dayflye"));
        let theirs = Ipv4Addr::new(10, 89, 0, 2);
        let (a, _b) = two(&one);
        let c = other.tap("vm1", theirs, mac(theirs)).unwrap();
        send(&a, &packet(A, theirs, b"hey?"));
        let now = UdpSocket::bind("0.0.0.0:0").unwrap();
        now.send_to(b"now!", (theirs, 9)).unwrap();
        assert_eq!(heard(&c).unwrap()[42..], *b"now!");
        // The packet filter's rule is the reason: without the rules the packet arrives.
        nft::remove_host("dayflyd").unwrap();
        nft::remove_host("dayflye").unwrap();
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
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        let a = vm_netns.tap("vm1", A, mac(A)).unwrap();
        drop(vm_netns);
        let vm_netns = VmNetns::open_or_create(&spec, &both()).unwrap();
        let b = vm_netns.tap("vm2", B, mac(B)).unwrap();
        send(&a, &packet(A, B, b"good"));
        assert!(said(&b).is_some());
        assert!(vm_netns.tap("vm1", A, mac(A)).unwrap_err().is_busy(), "a tap was made twice");
        // A network that was made only in part is made again.
        run("ip link del dayflyf");
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        drop(vm_netns.tap("vm1", A, mac(A)).unwrap());
        drop((a, b));
        vm_netns.remove().unwrap();
        vm_netns.remove().unwrap();
        assert!(!spec.pin.exists());
        assert!(!nft::has_host("dayflyf").unwrap(), "the packet filter's table stayed");
        assert!(
            !run("ip link").contains("dayfly") && !run("ip route show table all").contains("10.88")
        );
        assert!(
            !std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap().contains("dayflyf")
        );
        assert_eq!(run("cat /proc/sys/net/ipv4/ip_forward"), "0\n", "the host forwards as before");
        // A foreign network with these addresses stays in place, and nothing of ours remains.
        run("ip link add other type veth peer name end && ip link set other up && ip route add \
             10.88.0.0/16 dev other");
        let refused = VmNetns::open_or_create(&spec, &[]).unwrap_err().to_string();
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
            let error =
                VmNetns::open_or_create(&VmNetnsSpec { bits, ..spec.clone() }, &[]).unwrap_err();
            assert!(matches!(error, NetError::Addresses(_, got) if got == bits), "{error}");
        }
        let within = VmNetnsSpec { first: A, ..spec.clone() };
        assert!(matches!(
            VmNetns::open_or_create(&within, &[]).unwrap_err(),
            NetError::Addresses(A, 16)
        ));
        let small = VmNetnsSpec { bits: 29, ..spec };
        let vm_netns = VmNetns::open_or_create(&small, &[]).unwrap();
        for last in [0, 1, 6, 7, 8, 200] {
            let address = Ipv4Addr::new(10, 88, 0, last);
            let error = vm_netns.tap("dft", address, mac(address)).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "address {address}: expected one of 10.88.0.0/29 that is neither its first \
                     two nor its last two"
                )
            );
        }
        let taps = [2, 3, 4, 5].map(|last| {
            let address = Ipv4Addr::new(10, 88, 0, last);
            vm_netns.tap(&format!("dft{last}"), address, mac(address)).unwrap()
        });
        vm_netns.remove_taps(&["dft2".to_owned(), "dft3".to_owned()]).unwrap();
        drop(taps);
        vm_netns.remove().unwrap();
    });
}

#[test]
fn a_tap_forgets_what_waits_in_it() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyg"), &[]).unwrap();
        let (a, b) = two(&vm_netns);
        for _ in 0..10 {
            send(&a, &packet(A, B, b"late"));
        }
        assert_eq!(said(&b), Some((A, b"late".to_vec())));
        // The other packets arrived before this one.
        assert_eq!(heard_before_now(&b, B).len(), 9);
        for _ in 0..10 {
            send(&a, &packet(A, B, b"late"));
        }
        // A new description of the tap has a new queue.
        drop(b);
        let b = vm_netns.tap("vm2", B, mac(B)).unwrap();
        assert_eq!(heard_before_now(&b, B), NOTHING);
        let begun = Instant::now();
        let address = |n: u8| Ipv4Addr::new(10, 88, 1, n);
        let taps: Vec<Tap> = (0..100)
            .map(|n| vm_netns.tap(&format!("many{n}"), address(n), mac(address(n))).unwrap())
            .collect();
        let made = begun.elapsed();
        drop(taps);
        eprintln!("100 taps: made in {made:?}, gone in {:?}", begun.elapsed() - made);
        for bad in ["", "a/b", "a b", "%d", "0123456789abcdef"] {
            assert!(matches!(Tap::open(bad), Err(NetError::Name(_))), "{bad:?}");
        }
        vm_netns.remove().unwrap();
    });
}

#[test]
fn what_was_made_in_part_or_changed_is_made_whole() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, 88, "dayflyh");
        let works = |vm_netns: &VmNetns| {
            let (a, b) = two(vm_netns);
            send(&a, &packet(A, B, b"good"));
            said(&b).is_some()
                && run("ip route").contains("10.88.0.0/16")
                && nft::has_host("dayflyh").unwrap()
        };
        // A daemon died after creating the namespace, or the uplink too.
        drop(Netns::create(&spec.pin).unwrap());
        assert!(works(&VmNetns::open_or_create(&spec, &[]).unwrap()));
        VmNetns::open_or_create(&spec, &[]).unwrap().remove().unwrap();
        drop(Netns::create(&spec.pin).unwrap());
        run("ip link add dayflyh type veth peer name uplink");
        run(&format!("ip link set uplink netns {}", spec.pin.display()));
        assert!(works(&VmNetns::open_or_create(&spec, &[]).unwrap()));
        // The effect of `nft flush ruleset`.
        nft::remove_host("dayflyh").unwrap();
        assert!(works(&VmNetns::open_or_create(&spec, &[]).unwrap()));
        // Other addresses, and fewer.
        let small = VmNetnsSpec { bits: 24, ..spec.clone() };
        // A range with the same last address as the whole network, and a disjoint range.
        let upper = VmNetnsSpec { first: Ipv4Addr::new(10, 88, 128, 0), bits: 17, ..spec.clone() };
        let other = VmNetnsSpec { first: Ipv4Addr::new(10, 99, 0, 0), ..spec.clone() };
        let all = [
            (&small, "10.88.0.0/24"),
            (&spec, "10.88.0.0/16"),
            (&upper, "10.88.128.0/17"),
            (&other, "10.99.0.0/16"),
            (&spec, "10.88.0.0/16"),
        ];
        for (changed, prefix) in all {
            let vm_netns = VmNetns::open_or_create(changed, &[]).unwrap();
            let routes = [run("ip route"), vm_netns.run(|| run("ip route")).unwrap()];
            assert!(routes.iter().all(|all| all.contains(prefix)), "{prefix}: {routes:?}");
            assert_eq!(run("ip route").lines().count(), 1, "{prefix}: {routes:?}");
        }
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        assert!(works(&vm_netns));
        vm_netns.remove().unwrap();
    });
}

#[test]
fn a_tap_answers_for_its_gateway_alone() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyi"), &[]).unwrap();
        let (_a, _b) = two(&vm_netns);
        let of = "/proc/sys/net/ipv4/conf/vm1";
        let set = vm_netns
            .run(|| run(&format!("cat {of}/arp_ignore {of}/proxy_arp {of}/rp_filter")))
            .unwrap();
        assert_eq!(set, "0\n0\n1\n");
        vm_netns.remove().unwrap();
    });
}

#[test]
fn taps_are_removed_together() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyj"), &[]).unwrap();
        let (a, b) = two(&vm_netns);
        let address = |n: u8| Ipv4Addr::new(10, 88, 1, n);
        let taps: Vec<Tap> = (0..200)
            .map(|n| vm_netns.tap(&format!("many{n}"), address(n), mac(address(n))).unwrap())
            .collect();
        // The taps are gone although the test holds descriptors of them, and one that is gone
        // already is no error.
        let names: Vec<String> = (0..201).map(|n| format!("many{n}")).collect();
        let begun = Instant::now();
        vm_netns.remove_taps(&names).unwrap();
        eprintln!("200 taps: gone together in {:?}", begun.elapsed());
        drop(taps);
        vm_netns.remove_taps(&names).unwrap();
        vm_netns.remove_taps(&[]).unwrap();
        assert!(!vm_netns.run(|| run("ip link")).unwrap().contains("many"));
        send(&a, &packet(A, B, b"good"));
        assert!(said(&b).is_some(), "one that was not meant is gone");
        vm_netns.remove().unwrap();
    });
}

/// What a process can do with the description of a tap that it has: a VMM that was taken over may
/// duplicate it and clear its flags.
#[test]
fn a_tap_is_opened_anew_whatever_was_done_with_the_description_before() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyk"), &[]).unwrap();
        let (a, b) = two(&vm_netns);
        let spoilt = OwnedFd::from(b);
        rustix::io::ioctl_fionbio(&spoilt, false).unwrap();
        vm_netns.run(|| run("ip link set dev vm2 address 02:df:00:00:00:99")).unwrap();
        vm_netns.run(|| run("ip route del 10.88.0.3")).unwrap();
        let second = spoilt.try_clone().unwrap();
        drop(spoilt);
        assert!(vm_netns.tap("vm2", B, mac(B)).unwrap_err().is_busy(), "a duplicate has it");
        drop(second);
        let wanted = [
            TapSpec { name: "vm2".to_owned(), address: B, mac: mac(B) },
            TapSpec { name: "vm3".to_owned(), address: GATEWAY, mac: mac(B) },
        ];
        // A process that another test starts has all descriptors until it executes its program.
        let is_busy = |tap: &Result<Tap, NetError>| tap.as_ref().is_err_and(NetError::is_busy);
        let mut taps = vm_netns.taps(&wanted).unwrap();
        for _ in 0..1000 {
            if !is_busy(&taps[0]) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            taps = vm_netns.taps(&wanted).unwrap();
        }
        assert!(matches!(taps.pop(), Some(Err(NetError::Foreign(GATEWAY, ..)))));
        let b = taps.pop().unwrap().unwrap();
        let flags = rustix::fs::fcntl_getfl(&b).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
        send(&a, &packet(A, B, b"good"));
        assert_eq!(said(&b), Some((A, b"good".to_vec())));
        send(&b, &packet(B, A, b"back"));
        assert_eq!(said(&a), Some((B, b"back".to_vec())));
        // Taps that an earlier daemon left are removed, others and the uplink stay.
        vm_netns.remove_other_taps(&["vm1".to_owned()].into()).unwrap();
        let left = vm_netns.run(|| run("ip -o link")).unwrap();
        assert!(left.contains("vm1") && left.contains("uplink") && !left.contains("vm2"), "{left}");
        vm_netns.remove().unwrap();
    });
}
