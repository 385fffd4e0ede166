//! The note on forwarding: it belongs to one namespace, is written atomically, and exists as long
//! as forwarding is on because of it.

use super::reach::{PUBLIC, WORLD, world};
use super::*;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const SWITCH: &str = "/proc/sys/net/ipv4/ip_forward";

const NO_NOTES: [String; 0] = [];

fn forwards() -> bool {
    fs::read_to_string(SWITCH).unwrap().trim() == "1"
}

/// Names of the notes, and of other files that a daemon leaves beside them.
fn notes() -> Vec<String> {
    let names = fs::read_dir("/run")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains("forwarding")).collect()
}

#[test]
fn no_namespace_has_the_note_of_one_that_is_gone() {
    // The kernel gives a new namespace the inode number of an old one, if that number is the
    // smallest free one.
    let paths: Vec<PathBuf> = (0..64).map(|_| alone(|| forwarding::note_path().unwrap())).collect();
    let different: BTreeSet<&PathBuf> = paths.iter().collect();
    assert_eq!(different.len(), paths.len(), "{paths:?}");
    // A namespace of another boot does not have the same note either.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert!(paths.iter().all(|path| path.to_str().unwrap().contains(boot.trim())), "{paths:?}");
}

#[test]
fn notes_of_earlier_boots_are_removed_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let own = forwarding::note_path().unwrap();
        let (boot, _) = own.to_str().unwrap().rsplit_once('.').unwrap();
        let earlier = "/run/dayfly-forwarding.00000000-0000-4000-8000-000000000000.7";
        let others = [&format!("{boot}.7"), "/run/dayfly-forwarding.4026532735", "/run/other.pid"];
        fs::write(earlier, "eth0\n").unwrap();
        others.iter().for_each(|other| fs::write(other, "eth0\n").unwrap());
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyma"), &[]).unwrap();
        assert!(own.exists(), "{:?}", notes());
        assert!(!Path::new(earlier).exists(), "{:?}", notes());
        vm_netns.remove().unwrap();
        assert!(
            !own.exists() && others.iter().all(|other| Path::new(other).exists()),
            "{:?}",
            notes()
        );
    });
}

#[test]
fn a_note_that_cannot_be_written_whole_is_not_there_and_nothing_is_forwarded() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        run("ip link add office type veth peer name end");
        run("mount -t tmpfs -o size=64k none /run && head -c 64k /dev/zero >/run/full");
        // With a truncated note, a daemon would take the missing interfaces for interfaces that
        // came later.
        let refused = forwarding::note().unwrap_err().to_string();
        assert!(refused.contains("/run/dayfly-forwarding"), "{refused}");
        assert_eq!(notes(), NO_NOTES);
        let refused =
            VmNetns::open_or_create(&spec(&folder, 88, "dayflymb"), &[]).unwrap_err().to_string();
        assert!(refused.contains("/run/dayfly-forwarding"), "{refused}");
        assert_eq!((notes().as_slice(), forwards()), (&NO_NOTES[..], false));
    });
}

#[test]
fn a_note_stays_until_forwarding_is_off_again() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, 88, "dayflymc");
        let vm_netns = VmNetns::open_or_create(&spec, &[]).unwrap();
        // The host does not let forwarding be switched off.
        run(&format!("mount --bind /dev/full {SWITCH}"));
        let refused = vm_netns.remove().unwrap_err();
        assert!(refused.to_string().contains(SWITCH), "{refused}");
        run(&format!("umount {SWITCH}"));
        assert_eq!((notes().len(), forwards()), (1, true));
        // The next daemon still knows that the host did not forward.
        VmNetns::open_or_create(&spec, &[]).unwrap().remove().unwrap();
        assert_eq!((notes().as_slice(), forwards()), (&NO_NOTES[..], false));
    });
}

#[test]
fn a_lost_note_does_not_make_the_host_a_router() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let spec = spec(&folder, 88, "dayflymd");
        let _first = VmNetns::open_or_create(&spec, &[]).unwrap();
        std::fs::remove_file(forwarding::note_path().unwrap()).unwrap();
        let next = VmNetns::open_or_create(&spec, &[]).unwrap();
        assert!(nft::has_router("dayflymd").unwrap(), "the next daemon's rules");
        next.remove().unwrap();
        assert_eq!((notes().as_slice(), forwards()), (&NO_NOTES[..], false));
    });
}

#[test]
fn the_host_is_no_router_between_its_other_networks() {
    let folder = tempfile::tempdir().unwrap();
    alone(|| {
        let world = world(&folder);
        let far = Ipv4Addr::new(198, 51, 100, 2);
        let lan = |name: &str, second: u8| {
            let pin = folder.path().join(name);
            let lan = Netns::create(&pin).unwrap();
            let own = format!("198.51.{second}");
            run(&format!(
                "ip link add {name} type veth peer name in netns {} && ip addr add {own}.1/24 dev \
                 {name} && ip link set {name} up",
                pin.display()
            ));
            let inside = format!(
                "ip addr add {own}.2/24 dev in && ip link set in up && ip route add default via \
                 {own}.1"
            );
            lan.run(|| run(&inside)).unwrap();
            lan
        };
        let office = lan("office", 100);
        world.run(|| run(&format!("ip route add default via {PUBLIC}"))).unwrap();
        let there = office.run(|| UdpSocket::bind((far, 2000)).unwrap()).unwrap();
        there.set_read_timeout(Some(TIMEOUT)).unwrap();
        let passes = |to: Ipv4Addr, there: &UdpSocket| {
            world
                .run(|| UdpSocket::bind((WORLD, 0)).unwrap().send_to(b"hey!", (to, 2000)).unwrap())
                .unwrap();
            // The host itself sends a second packet after it.
            UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"now!", (to, 2000)).unwrap();
            let mut word = [0; 4];
            let mut next =
                || there.recv_from(&mut word).map(|_| word).expect("what the host sends");
            let first = next();
            first == *b"hey!" && next() == *b"now!"
        };
        assert!(!passes(far, &there), "before");
        let forwards = || run("cat /proc/sys/net/ipv4/ip_forward").trim() == "1";
        let one = VmNetns::open_or_create(&spec(&folder, 88, "dayflyx"), &[]).unwrap();
        let two = VmNetns::open_or_create(&spec(&folder, 89, "dayflyy"), &[]).unwrap();
        assert!(forwards() && !passes(far, &there), "with two daemons");
        one.remove().unwrap();
        assert!(forwards() && !passes(far, &there), "with one that came later");
        // A program that finds forwarding on may use it for its own networks.
        let later = lan("later", 101);
        let new = Ipv4Addr::new(198, 51, 101, 2);
        let containers = later.run(|| UdpSocket::bind((new, 2000)).unwrap()).unwrap();
        containers.set_read_timeout(Some(TIMEOUT)).unwrap();
        assert!(passes(new, &containers), "a network of a program that came later");
        // A later network of the host that is no bridge or veth, such as a tunnel, is not
        // forwarded.
        let tunnel = Tap::open("tunnel0").unwrap();
        let behind = Ipv4Addr::new(198, 51, 102, 2);
        run(&format!(
            "ip addr add 198.51.102.1/24 dev tunnel0 && ip link set tunnel0 up && \
             ip neigh add {behind} lladdr 02:00:00:00:00:09 dev tunnel0"
        ));
        world
            .run(|| UdpSocket::bind((WORLD, 0)).unwrap().send_to(b"hey!", (behind, 2000)).unwrap())
            .unwrap();
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"now!", (behind, 2000)).unwrap();
        let ours = std::iter::repeat_with(|| heard(&tunnel).expect("what the host sends"));
        let first =
            ours.into_iter().find(|frame| frame.ends_with(b"hey!") || frame.ends_with(b"now!"));
        assert!(first.unwrap().ends_with(b"now!"), "a network that came later");
        two.remove().unwrap();
        assert!(!forwards() && !passes(far, &there), "afterwards");
        // A host that was a router stays a router.
        run("echo 1 >/proc/sys/net/ipv4/ip_forward");
        assert!(passes(far, &there));
        let vm_netns = VmNetns::open_or_create(&spec(&folder, 88, "dayflyx"), &[]).unwrap();
        assert!(passes(far, &there));
        vm_netns.remove().unwrap();
        assert!(passes(far, &there) && forwards());
        for netns in [world, office, later] {
            netns.remove().unwrap();
        }
    });
}
