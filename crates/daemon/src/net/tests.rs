use super::*;
use dayfly_api::types::Publish;
use std::collections::BTreeSet;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[test]
fn a_prefix_has_a_gateway_guests_and_a_host() {
    let prefix: Prefix = "10.88.0.0/29".parse().unwrap();
    assert_eq!(prefix.gateway(), Ipv4Addr::new(10, 88, 0, 1));
    let guests: Vec<String> = (1..).map_while(|n| prefix.address(n)).map(|a| a.to_string()).collect();
    // The host has .6, and .7 is for broadcasts.
    assert_eq!(guests, ["10.88.0.2", "10.88.0.3", "10.88.0.4", "10.88.0.5"]);
    for (place, guest) in (1..).zip(&guests) {
        assert_eq!(prefix.index(guest.parse().unwrap()), Some(place));
    }
    for other in ["10.88.0.0", "10.88.0.1", "10.88.0.6", "10.88.0.7", "10.87.0.2", "10.88.0.8"] {
        assert_eq!(prefix.index(other.parse().unwrap()), None, "{other}");
    }
    for bad in ["", "10.88.0.0", "10.88.0.1/16", "10.88.0.0/7", "10.88.0.0/30", "x/16", "10.88.0.0/x"] {
        assert!(bad.parse::<Prefix>().unwrap_err().contains("10.88.0.0/16"), "{bad}");
    }
    assert_eq!(prefix.to_string(), "10.88.0.0/29");
}

#[test]
fn places_are_given_in_a_circle_and_each_to_one() {
    let prefix: Prefix = "10.88.0.0/29".parse().unwrap();
    let mut state = State::default();
    let first: Vec<u32> = (0..4).map(|_| state.place(prefix).unwrap()).collect();
    assert_eq!(first, [1, 2, 3, 4]);
    assert_eq!(state.place(prefix), None);
    state.taken.remove(&1);
    state.taken.remove(&3);
    assert_eq!((state.place(prefix), state.place(prefix), state.place(prefix)), (Some(1), Some(3), None));
    let macs: BTreeSet<_> = (1..5).map(|n| mac(prefix.address(n).unwrap())).collect();
    assert_eq!(macs.len(), 4);
    assert!(macs.iter().all(|mac| mac[0] & 3 == 2), "locally administered, of one");
}

/// The network of a test, in a namespace that is the host's for it: the thread that makes it is there, and all others are not.
fn network(folder: &tempfile::TempDir) -> Networks {
    let config = Config {
        run: folder.path().to_owned(),
        network: Some("10.88.0.0/28".parse().unwrap()),
        ..crate::fixture::config(folder.path())
    };
    std::thread::spawn(move || {
        // SAFETY: NEWNET changes what this short-lived thread sees, and nothing that others share with it.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
            .expect("CAP_SYS_ADMIN");
        Networks::new(&config)
    })
    .join()
    .unwrap()
}

#[test]
fn addresses_go_round_and_what_was_sent_to_the_last_owner_comes_to_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let networks = network(&folder);
    assert_eq!(networks.missing(), None);
    let Ok(network) = &networks.0 else { unreachable!() };
    let first = networks.lease().unwrap();
    let (address, tap) = (first.address(), first.link(&Default::default()).unwrap().1);
    assert_eq!((address.to_string().as_str(), tap.len()), ("10.88.0.2", 1));
    network
        .tenant
        .run(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"late", (address, 9)).unwrap())
        .unwrap();
    drop((first, tap));
    // All others come first, then the same tap again, with nothing in it.
    let others: Vec<Lease> = (0..12).map(|_| networks.lease().unwrap()).collect();
    assert_eq!(others[0].address(), address, "a tap that waits is taken before one is made");
    let fd = others[0].link(&Default::default()).unwrap().1;
    assert_eq!(rustix::io::read(&fd[0], &mut [0; 64]).unwrap_err(), rustix::io::Errno::AGAIN);
    let all: BTreeSet<Ipv4Addr> = others.iter().map(Lease::address).collect();
    assert_eq!(all.len(), 12);
    assert!(matches!(networks.lease(), Err(NetError::Full { taken: 12, .. })));
    assert_eq!(networks.count(), (12, 0));
    drop(others);
    assert_eq!(networks.count(), (0, 12));
    // What an earlier daemon's VM has is nobody else's.
    networks.end();
    let networks = self::network(&folder);
    let adopted = networks.adopt(address).unwrap();
    assert!(networks.adopt(address).is_none());
    assert_ne!(networks.lease().unwrap().address(), address);
    drop(adopted);
    networks.end();
    assert!(!folder.path().join("netns").exists());
    assert!(Networks::none("so").lease().unwrap_err().to_string().contains("so"));
}

#[tokio::test]
async fn a_published_port_leads_to_its_guest_until_it_is_dropped() {
    let guest = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let guest_port = guest.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = guest.accept().await.unwrap();
            let mut said = Vec::new();
            stream.read_to_end(&mut said).await.unwrap();
            said.reverse();
            stream.write_all(&said).await.unwrap();
        }
    });
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let port = Publish { host: Some("127.0.0.1".parse().unwrap()), host_port: free, guest_port };
    let mut published = Published::take(&[port]).unwrap();
    let taken = Published::take(&[port]).unwrap_err();
    assert!(taken.0.message.contains(&free.to_string()), "{taken}");
    // Connections wait until there is somebody.
    let mut early = TcpStream::connect(("127.0.0.1", free)).await.unwrap();
    published.lead_to(Ipv4Addr::LOCALHOST);
    early.write_all(b"abc").await.unwrap();
    early.shutdown().await.unwrap();
    let mut said = String::new();
    early.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "cba", "half of a connection does not end the other");
    drop(published);
    assert!(TcpStream::connect(("127.0.0.1", free)).await.is_err());
    drop(Published::take(&[port]).expect("a port that is free again"));
    for bad in [
        vec![Publish { host_port: 0, ..port }],
        vec![Publish { guest_port: 0, ..port }],
        vec![port, port],
        vec![port; MAX_PUBLISHED + 1],
    ] {
        assert!(Published::take(&bad).is_err());
    }
}
