//! What guests reach of each other and of private networks, by their network and by the owner's
//! ranges.

use super::reach::{WORLD, guest, spec, tap, world};
use super::*;
use ipnet::Ipv4Net;

#[test]
fn guests_reach_each_other_within_a_network_and_not_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, "dayflyu");
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let reaches = |from: (&Tap, Ipv4Addr), to: (&Tap, Ipv4Addr)| {
            send(from.0, &packet(from.1, to.1, b"hey?"));
            match heard_before_now(to.0, to.1).as_slice() {
                [] => false,
                [frame] => frame.ends_with(b"hey?"),
                more => panic!("{more:?}"),
            }
        };
        let (one, other) = ((&a, A), (&b, B));
        assert!(!reaches(one, other) && !reaches(other, one), "guests of no network");
        let of = |address, network| guest(address, Some(network), false);
        vm_netns.admit(&of(A, "blue")).unwrap();
        assert!(!reaches(one, other) && !reaches(other, one), "one of a network and one of none");
        vm_netns.admit(&of(B, "red")).unwrap();
        assert!(!reaches(one, other) && !reaches(other, one), "guests of two networks");
        vm_netns.dismiss(&[of(B, "red")]).unwrap();
        vm_netns.admit(&of(B, "blue")).unwrap();
        assert!(reaches(one, other) && reaches(other, one), "guests of one network");
        // The next daemon keeps the live guests as they were, and removes the others.
        drop(vm_netns);
        let vm_netns = VmNetns::open_or_create(&spec, &[of(A, "blue"), of(B, "blue")]).unwrap();
        assert!(reaches(one, other) && reaches(other, one), "after a daemon's end");
        // A tracked connection ends when its guest's address is dismissed.
        vm_netns.dismiss(&[of(B, "blue")]).unwrap();
        assert!(!reaches(one, other) && !reaches(other, one), "one has left");
        vm_netns.dismiss(&[of(A, "blue")]).unwrap();
        vm_netns.dismiss(&[of(A, "blue")]).unwrap();
        let again = [of(A, "blue"), of(B, "blue")];
        again.iter().for_each(|guest| vm_netns.admit(guest).unwrap());
        assert!(reaches(one, other), "a network of the same name, later");
        drop(vm_netns);
        let vm_netns = VmNetns::open_or_create(&spec, &again[..1]).unwrap();
        assert!(
            !reaches(one, other) && !reaches(other, one),
            "one was gone when the next daemon came"
        );
        vm_netns.remove().unwrap();
    });
}

/// Addresses in private networks, and of clouds' metadata services.
fn secrets() -> Vec<Ipv4Addr> {
    [
        "10.1.2.3",
        "172.16.0.9",
        "172.31.255.1",
        "192.168.1.1",
        "100.64.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "192.0.0.192",
        "168.63.129.16",
        "198.18.0.1",
        "10.88.255.254",
        // The kernel forwards 0.0.0.0/8 except its first address, and the reserved range.
        "0.0.0.7",
        "240.0.0.1",
    ]
    .map(|address| address.parse().unwrap())
    .into()
}

/// Routes of the namespace that `of` does not have.
fn stale(vm_netns: &VmNetns, of: &VmNetnsSpec) -> Vec<Ipv4Net> {
    let index =
        || -> u32 { run("ip -o link show dev uplink").split(':').next().unwrap().parse().unwrap() };
    vm_netns.run(|| ways::stale(index(), &of.ways()).unwrap().into_iter().collect()).unwrap()
}

#[test]
fn the_private_is_out_of_reach_and_the_closed_reach_nothing_outside() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let world = world(&folder);
        // All of them are behind one router.
        let secrets = secrets();
        run(&format!("ip route add default via {WORLD}"));
        for address in &secrets {
            world.run(|| run(&format!("ip addr add {address}/32 dev lo"))).unwrap();
        }
        let there = world.run(|| UdpSocket::bind("0.0.0.0:2000").unwrap()).unwrap();
        there.set_read_timeout(Some(TIMEOUT)).unwrap();
        let plain = spec(&folder, "dayflyv");
        let vm_netns = VmNetns::open_or_create(&plain, &[]).unwrap();
        let (a, b) = (tap(&vm_netns, "vm1", A), tap(&vm_netns, "vm2", B));
        let arrives = |tap: &Tap, from, to| {
            send(tap, &packet(from, to, b"ask?"));
            // Sent by the same path, so it cannot overtake the packet before it.
            send(&a, &packet(A, WORLD, b"now!"));
            let mut word = [0; 4];
            let mut next = || there.recv_from(&mut word).map(|_| word).expect("what a guest sends");
            let first = next();
            first == *b"ask?" && next() == *b"now!"
        };
        let no_secret_arrives_by_routes_alone = |vm_netns: &VmNetns| {
            nft::remove_host("dayflyv").unwrap();
            for &to in &secrets {
                assert!(!arrives(&a, A, to), "{to}, while the host's rules are gone");
            }
            assert!(arrives(&a, A, WORLD) && vm_netns.restore_rules().unwrap());
        };
        assert!(arrives(&a, A, WORLD));
        no_secret_arrives_by_routes_alone(&vm_netns);
        for &to in &secrets {
            assert!(!arrives(&a, A, to), "{to}");
            // Again with only the host's rules, for a host whose own rules translate a public
            // address into a private one.
            let way = NOT_PUBLIC.iter().find(|range| range.contains(&to)).unwrap();
            if !way.contains(&A) {
                vm_netns
                    .run(|| run(&format!("ip route del blackhole {way} 2>/dev/null || :")))
                    .unwrap();
                assert!(!arrives(&a, A, to), "{to}, by the host's rules");
            }
        }
        assert_eq!(heard_before_now(&a, A), NOTHING, "an answer reveals what exists");
        vm_netns.admit(&guest(B, None, true)).unwrap();
        assert!(!arrives(&b, B, WORLD), "a closed guest");
        drop(vm_netns);
        // A daemon whose owner allows some of the ranges; closed guests stay closed.
        let reach = vec!["10.1.0.0/16".parse().unwrap(), "192.168.0.0/16".parse().unwrap()];
        let near = VmNetnsSpec { reach, ..plain.clone() };
        let vm_netns = VmNetns::open_or_create(&near, &[guest(B, None, true)]).unwrap();
        for &to in &secrets {
            let [x, y, ..] = to.octets();
            assert_eq!(arrives(&a, A, to), (x, y) == (10, 1) || (x, y) == (192, 168), "{to}");
        }
        // Starting a daemon with the same ranges takes no route away from guests.
        let (none, both): (Vec<_>, Vec<_>) = (stale(&vm_netns, &near), stale(&vm_netns, &plain));
        assert_eq!((none.as_slice(), both), (&[][..], near.reach.clone()));
        assert!(!arrives(&b, B, WORLD) && !arrives(&b, B, secrets[0]), "a closed guest");
        vm_netns.dismiss(&[guest(B, None, true)]).unwrap();
        assert!(arrives(&b, B, WORLD), "the next guest with the address");
        drop(vm_netns);
        // The next daemon's owner does not allow the ranges any more.
        let vm_netns = VmNetns::open_or_create(&plain, &[]).unwrap();
        for &to in &secrets {
            assert!(!arrives(&a, A, to), "{to}");
        }
        assert!(arrives(&a, A, WORLD));
        no_secret_arrives_by_routes_alone(&vm_netns);
        vm_netns.remove().unwrap();
    });
}
