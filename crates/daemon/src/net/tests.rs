use crate::base::config::Config;
use crate::base::prefix::Prefix;
use crate::model::facts::Facts;
use crate::model::state::Phase;
use crate::net::bounds::MAX_CONNECTIONS;
use crate::net::names::server_world::alone;
use crate::net::network::{State, guest};
use crate::net::publish::with_choice;
use crate::net::relay;
use crate::net::{Attachment, Lease, MAX_PUBLISHED, NetError, Networks, Published, mac, mac_text};
use crate::vm::record::Record;
use crate::vm::registry::Registry;
use dayfly_api::types::{NetworkRequest, PortProtocol, Publish, VmNetwork};
use dayfly_units::sync::lock;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[test]
fn a_prefix_has_a_gateway_guests_and_a_host() {
    let prefix: Prefix = "10.88.0.0/29".parse().unwrap();
    assert_eq!(prefix.gateway(), Ipv4Addr::new(10, 88, 0, 1));
    let guests: Vec<String> =
        (1..).map_while(|n| prefix.address(n)).map(|a| a.to_string()).collect();
    // .6 is the host's, and .7 is the broadcast address.
    assert_eq!(guests, ["10.88.0.2", "10.88.0.3", "10.88.0.4", "10.88.0.5"]);
    for (place, guest) in (1..).zip(&guests) {
        assert_eq!(prefix.index(guest.parse().unwrap()), Some(place));
    }
    for other in ["10.88.0.0", "10.88.0.1", "10.88.0.6", "10.88.0.7", "10.87.0.2", "10.88.0.8"] {
        assert_eq!(prefix.index(other.parse().unwrap()), None, "{other}");
    }
    for bad in
        ["", "10.88.0.0", "10.88.0.1/16", "10.88.0.0/7", "10.88.0.0/30", "x/16", "10.88.0.0/x"]
    {
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
    assert_eq!(
        (state.place(prefix), state.place(prefix), state.place(prefix)),
        (Some(1), Some(3), None)
    );
    let macs: BTreeSet<_> = (1..5).map(|n| mac(prefix.address(n).unwrap())).collect();
    assert_eq!(macs.len(), 4);
    assert!(macs.iter().all(|mac| mac[0] & 3 == 2), "locally administered, of one");
}

/// A test's network. The namespace of the creating thread serves as the host's.
fn network(folder: &tempfile::TempDir) -> Networks {
    let config = Config {
        run: folder.path().to_owned(),
        network: Some("10.88.0.0/28".parse().unwrap()),
        ..crate::fixture::config(folder.path())
    };
    std::thread::spawn(move || {
        crate::fixture::own_network();
        Networks::new(&config, &crate::vm::survey::addresses(&config).unwrap())
    })
    .join()
    .unwrap()
}

/// Whether this is a separate process for the test `name`; if not, runs the test in one. Programs
/// that other tests start have copies of all descriptors between fork and exec, and a tap with such
/// a copy is removed instead of used again.
fn in_a_process(name: &str) -> bool {
    const ALONE: &str = "DAYFLY_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    let output = std::process::Command::new(own).args([name, "--exact"]).env(ALONE, "1").output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

#[test]
fn addresses_go_round_and_what_was_sent_to_the_last_owner_is_dropped() {
    const NAME: &str =
        "net::tests::addresses_go_round_and_what_was_sent_to_the_last_owner_is_dropped";
    if !in_a_process(NAME) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let networks = network(&folder);
    assert_eq!(networks.missing(), None);
    let Ok(network) = networks.get() else { unreachable!() };
    let mut first = networks.lease().unwrap();
    let (address, tap) = (first.address(), first.link(&Default::default()).1);
    assert_eq!((address.to_string().as_str(), tap.len()), ("10.88.0.2", 1));
    network
        .vm_netns
        .run(|| {
            std::net::UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"late", (address, 9)).unwrap()
        })
        .unwrap();
    assert!(first.link(&Default::default()).1.is_empty(), "only one VMM gets the tap");
    drop((first, tap));
    assert_eq!((networks.count(), network.clean(), networks.count()), ((0, 0), 1, (0, 1)));
    // All other taps come first, then this tap again, without packets in it.
    let mut others: Vec<Lease> = (0..12).map(|_| networks.lease().unwrap()).collect();
    assert_eq!(others[0].address(), address, "a tap that waits is taken before one is made");
    let fd = others[0].link(&Default::default()).1;
    assert_eq!(rustix::io::read(&fd[0], &mut [0; 64]).unwrap_err(), rustix::io::Errno::AGAIN);
    let all: BTreeSet<Ipv4Addr> = others.iter().map(Lease::address).collect();
    assert_eq!(all.len(), 12);
    assert!(matches!(networks.lease(), Err(NetError::Full { taken: 12, .. })));
    assert_eq!(networks.count(), (12, 0));
    // The returned addresses have not been cleaned yet, so the next lease cleans them.
    drop((others, fd));
    assert_eq!(networks.count(), (0, 0));
    drop(networks.lease().unwrap());
    network.clean();
    assert_eq!(networks.count(), (0, 12));
    // The address of an earlier daemon's VM is given to no other VM.
    networks.end();
    let networks = self::network(&folder);
    let adopted = networks.adopt(address, &Default::default()).unwrap();
    assert!(networks.adopt(address, &Default::default()).is_none());
    assert_ne!(networks.lease().unwrap().address(), address);
    drop(adopted);
    networks.end();
    assert!(!folder.path().join("netns").exists());
    assert!(Networks::none("so").lease().unwrap_err().to_string().contains("so"));
}

/// The names of the taps in a network's namespace.
fn taps(network: &crate::net::network::Network) -> BTreeSet<String> {
    let text = network.vm_netns.run(|| std::fs::read_to_string("/proc/thread-self/net/dev"));
    let text = text.unwrap().unwrap();
    let names = text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    names.filter(|name| name.starts_with("vm")).collect()
}

/// The description of a tap is the VMM's alone: what a VMM does with it and with duplicates of it
/// neither blocks the daemon nor keeps an address.
#[test]
fn what_a_vmm_does_with_its_tap_is_nothing_to_the_daemon() {
    if !in_a_process("net::tests::what_a_vmm_does_with_its_tap_is_nothing_to_the_daemon") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let networks = network(&folder);
    let Ok(network) = networks.get().cloned() else { panic!("{:?}", networks.missing()) };
    let mut leases: Vec<Lease> = (0..3).map(|_| networks.lease().unwrap()).collect();
    let blocking: Vec<_> = leases
        .iter_mut()
        .flat_map(|lease| lease.link(&Default::default()).1)
        .inspect(|tap| rustix::io::ioctl_fionbio(tap, false).unwrap())
        .collect();
    let addresses: Vec<Ipv4Addr> = leases.iter().map(Lease::address).collect();
    // The first VMM has ended with its descriptor. The others' are duplicated into processes that
    // live, in one case with packets in the queue.
    let mut blocking = blocking.into_iter();
    drop(blocking.next());
    let held: Vec<_> = blocking.collect();
    let send = || std::net::UdpSocket::bind("0.0.0.0:0")?.send_to(b"late", (addresses[2], 9));
    network.vm_netns.run(send).unwrap().unwrap();
    drop(leases);
    let (cleaned, done) = std::sync::mpsc::channel();
    let cleaning = network.clone();
    std::thread::spawn(move || cleaned.send(cleaning.clean()));
    assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok(3), "the daemon waits for a VMM");
    assert_eq!(networks.count(), (0, 1), "one waits, the places of the others are free");
    assert_eq!(taps(&network), [String::from("vm1")].into());
    let mut again: Vec<Lease> = (0..12).map(|_| networks.lease().unwrap()).collect();
    assert!(addresses.iter().all(|address| again.iter().any(|one| one.address() == *address)));
    for tap in again.iter_mut().flat_map(|lease| lease.link(&Default::default()).1) {
        let flags = rustix::fs::fcntl_getfl(&tap).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
        assert_eq!(rustix::io::read(&tap, &mut [0; 64]).unwrap_err(), rustix::io::Errno::AGAIN);
    }
    drop((held, again));
    networks.end();
}

#[test]
fn taps_that_a_killed_daemon_left_are_removed_and_those_of_its_vms_stay() {
    if !in_a_process(
        "net::tests::taps_that_a_killed_daemon_left_are_removed_and_those_of_its_vms_stay",
    ) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let address = Ipv4Addr::new(10, 88, 0, 3);
    let config = Config { run: folder.path().to_owned(), ..crate::fixture::config(folder.path()) };
    written_down(&config, address, &NetworkRequest::default());
    let config = Config { network: Some("10.88.0.0/28".parse().unwrap()), ..config };
    let start = || Networks::new(&config, &crate::vm::survey::addresses(&config).unwrap());
    std::thread::scope(|threads| {
        let inside = threads.spawn(|| {
            crate::fixture::own_network();
            let killed = start();
            let mut leases: Vec<Lease> = (0..4).map(|_| killed.lease().unwrap()).collect();
            let vmm = leases[1].link(&Default::default()).1;
            assert_eq!((leases[1].address(), vmm.len()), (address, 1));
            killed.get().unwrap().clean();
            // A killed daemon cleans nothing up, and its descriptors are closed.
            std::mem::forget(leases);
            let networks = start();
            let network = networks.get().unwrap();
            assert_eq!(taps(network), [String::from("vm2")].into());
            // The VM ends under the new daemon, and its tap waits for the next one.
            let adopted = networks.adopt(address, &Default::default()).unwrap();
            drop((vmm, adopted));
            assert_eq!((network.clean(), networks.count()), (1, (0, 1)));
            assert_eq!(networks.lease().unwrap().address(), address);
            networks.end();
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Writes a VM's record as it is when its daemon dies.
fn written_down(config: &Config, address: Ipv4Addr, network: &NetworkRequest) {
    let facts = Facts { network: network.clone(), ..crate::fixture::facts() };
    let vm =
        Registry::default().reserve(config, None, facts, crate::fixture::memory(), None).unwrap();
    std::fs::create_dir_all(vm.dir.path()).unwrap();
    vm.update(|live| {
        live.phase = Phase::Running;
        let mac = mac_text(mac(address));
        let network = network.network.clone();
        let (closed, egress) = (false, None);
        live.network =
            Some(VmNetwork { address, mac, network, closed, egress, published: Vec::new() });
    });
    Record::of(&vm).write(&vm.dir).unwrap();
}

#[test]
fn what_a_vm_may_reach_outlives_its_daemon_and_ends_with_the_vm() {
    let folder = tempfile::tempdir().unwrap();
    let asked = NetworkRequest { network: Some("blue".parse().unwrap()), ..Default::default() };
    let addresses = [2, 3].map(|last| Ipv4Addr::new(10, 88, 0, last));
    let config = Config { run: folder.path().to_owned(), ..crate::fixture::config(folder.path()) };
    addresses.iter().for_each(|address| written_down(&config, *address, &asked));
    let networks = network(&folder);
    let Ok(network) = networks.get() else { panic!("{:?}", networks.missing()) };
    let unclaimed =
        || lock(&network.unclaimed).iter().map(|guest| guest.address).collect::<BTreeSet<_>>();
    assert_eq!(unclaimed(), addresses.into());
    // One of the two VMs lives, and the daemon adopts it.
    let adopted = networks.adopt(addresses[0], &asked).unwrap();
    assert_eq!(unclaimed(), [addresses[1]].into());
    networks.adopted_all();
    assert_eq!((unclaimed().len(), network.clean()), (0, 1));
    // The rules contain only the adopted guest: the other one can be admitted again, and each one
    // dismissed once.
    let guest = |address| guest(address, &asked);
    network.vm_netns.admit(&guest(addresses[1])).unwrap();
    drop(adopted);
    assert_eq!(network.clean(), 1);
    network.vm_netns.dismiss(&[guest(addresses[1])]).unwrap();
    networks.end();
}

/// Runs a test in a network namespace, in which nothing else takes ports.
fn with_own_ports(test: impl AsyncFnOnce() + Send) {
    alone(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    });
}

#[test]
fn connections_to_a_vm_s_ports_are_limited_and_one_more_is_refused_at_once() {
    with_own_ports(ports_are_limited);
}

async fn ports_are_limited() {
    let guest = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let guest_port = guest.local_addr().unwrap().port();
    let ports = [5001, 5002].map(|host_port| Publish {
        host: None,
        host_port,
        guest_port,
        protocol: PortProtocol::Tcp,
    });
    let folder = tempfile::tempdir().unwrap();
    let mut published = Published::take(&with_choice(&ports, &[])).unwrap();
    published.connect_to(Ipv4Addr::LOCALHOST, crate::fixture::relay_place(folder.path()));
    let mut held = Vec::new();
    for n in 0..MAX_CONNECTIONS {
        let client = TcpStream::connect(("127.0.0.1", ports[n % 2].host_port)).await.unwrap();
        held.push((client, guest.accept().await.unwrap().0));
    }
    for port in &ports {
        // The reset may come before the connection is seen.
        let refused = match TcpStream::connect(("127.0.0.1", port.host_port)).await {
            Err(e) => e,
            Ok(mut more) => {
                let mut byte = [0];
                tokio::select! {
                    read = more.read(&mut byte) => read.unwrap_err(),
                    _ = guest.accept() => panic!("one more came by port {}", port.host_port),
                }
            }
        };
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionReset);
    }
    // Without a given address, the port is bound to 127.0.0.1 only.
    let elsewhere = std::net::TcpStream::connect((Ipv4Addr::new(127, 0, 0, 2), ports[0].host_port));
    assert_eq!(elsewhere.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    // A closed connection's permit serves another connection.
    drop(held.pop());
    let next = async {
        loop {
            let one_more = TcpStream::connect(("127.0.0.1", ports[0].host_port)).await;
            let Ok(mut more) = one_more else { continue };
            let mut byte = [0];
            tokio::select! {
                accepted = guest.accept() => break drop(accepted.unwrap()),
                refused = more.read(&mut byte) => drop(refused.unwrap_err()),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), next).await.expect("room for one more");
    published.close();
    relay::ended(&[5001, 5002].into()).await;
}

#[test]
fn a_published_port_reaches_its_guest_until_it_is_dropped() {
    with_own_ports(a_port_is_published);
}

async fn a_port_is_published() {
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
    let free = 5001;
    let port = Publish {
        host: Some("127.0.0.1".parse().unwrap()),
        host_port: free,
        guest_port,
        protocol: PortProtocol::Tcp,
    };
    let mut published = Published::take(&[(port, None)]).unwrap();
    let taken = Published::take(&[(port, None)]).unwrap_err();
    assert!(taken.0.message.contains(&free.to_string()), "{taken}");
    // Connections wait until the port leads to a guest.
    let mut early = TcpStream::connect(("127.0.0.1", free)).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    published.connect_to(Ipv4Addr::LOCALHOST, crate::fixture::relay_place(folder.path()));
    early.write_all(b"abc").await.unwrap();
    early.shutdown().await.unwrap();
    let mut said = String::new();
    early.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "cba", "half of a connection does not end the other");
    // At once, and not only when the relay is gone.
    published.close();
    assert!(TcpStream::connect(("127.0.0.1", free)).await.is_err());
    drop(Published::take(&[(port, None)]).expect("a port that is free again"));
    relay::ended(&[free].into()).await;
    for bad in
        [vec![Publish { guest_port: 0, ..port }], vec![port, port], vec![port; MAX_PUBLISHED + 1]]
    {
        assert!(Published::take(&with_choice(&bad, &[])).is_err());
    }
}

#[test]
fn a_name_is_found_as_long_as_its_vm_has_the_address() {
    let folder = tempfile::tempdir().unwrap();
    let networks = network(&folder);
    let Ok(network) = networks.get() else { panic!("{:?}", networks.missing()) };
    let asked = NetworkRequest { network: Some("a".parse().unwrap()), ..Default::default() };
    let vms: Vec<(Ipv4Addr, Attachment)> = ["web", "db"]
        .map(|name| {
            let mut lease = networks.lease().unwrap();
            lease.admit(&asked).unwrap();
            let address = lease.address();
            let mut attachment = Attachment::of(lease);
            attachment.name(dayfly_units::VmId::random(), &name.parse().unwrap());
            (address, attachment)
        })
        .into();
    let [(web, _), (db, _)] = vms.as_slice() else { panic!() };
    let (web, db) = (*web, *db);
    assert_eq!(network.names.resolve(web, "db"), Some(db));
    assert_eq!(network.names.name_of(db, web).as_deref(), Some("web"));
    drop(vms);
    assert_eq!(network.names.len(), (0, 0));
    // A VM without a network has no name.
    Attachment::default().name(dayfly_units::VmId::random(), &"web".parse().unwrap());
    assert_eq!(network.names.len(), (0, 0));
    networks.end();
}
