use super::*;
use crate::fixture::{config, relay_place};
use crate::net::Published;
use crate::net::names::server_world::alone;
use crate::net::publish::with_choice;
use dayfly_api::types::PortProtocol;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

const fn port(host_port: u16, guest_port: u16, protocol: PortProtocol) -> Publish {
    Publish { host: None, host_port, guest_port, protocol }
}

fn at(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Waits until the ports of these tests are free.
async fn until_ended() {
    ended(&[5001, 5002].into()).await;
}

/// Runs a test in a network namespace, in which nothing else takes ports.
fn with_own_ports(test: impl AsyncFnOnce() + Send) {
    alone(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    });
}

/// The relays of the VM with this folder.
fn relays(place: &Place) -> Vec<ProcessId> {
    let vms = place.dir.path().parent().unwrap();
    scan_below(vms, RELAY_NAME).unwrap().iter().map(|found| found.process).collect()
}

/// Waits until `done` is true, while tasks go on.
async fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        tokio::task::spawn_blocking(std::thread::yield_now).await.unwrap();
    }
}

/// Connects to a published port and says a word, which the guest gets. Clients of a relay that has
/// ended are reset, or wait for the next one.
async fn passes(published: u16, guest: &TcpListener) -> bool {
    let guest = guest.try_clone().unwrap();
    let passed = tokio::task::spawn_blocking(move || {
        let mut client = TcpStream::connect(at(published)).ok()?;
        client.write_all(b"word").ok()?;
        let (mut server, _) = guest.accept().ok()?;
        let mut word = [0; 4];
        server.read_exact(&mut word).ok()?;
        Some(&word == b"word")
    });
    passed.await.unwrap().unwrap_or(false)
}

#[test]
fn a_relay_that_is_killed_is_followed_by_another_with_the_same_ports() {
    with_own_ports(followed);
}

async fn followed() {
    let folder = tempfile::tempdir().unwrap();
    let place = relay_place(folder.path());
    let guest = TcpListener::bind(at(0)).unwrap();
    let to = guest.local_addr().unwrap().port();
    let mut published =
        Published::take(&with_choice(&[port(5001, to, PortProtocol::Tcp)], &[])).unwrap();
    published.connect_to(Ipv4Addr::LOCALHOST, place.clone());
    assert!(passes(5001, &guest).await);
    let [first] = *relays(&place) else { panic!("{:?}", relays(&place)) };
    assert_eq!(uid_of(first.pid).unwrap(), place.uid);
    let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", first.pid)).unwrap();
    assert_eq!(score.trim(), "1000");
    Process::open(first).unwrap().unwrap().kill().unwrap();
    until(|| relays(&place).iter().any(|relay| *relay != first)).await;
    // The listener was there all the time.
    assert!(passes(5001, &guest).await);
    published.close();
    until_ended().await;
    assert_eq!(relays(&place), []);
}

#[test]
fn a_relay_outlives_its_daemon_and_the_next_one_adopts_and_replaces_it() {
    with_own_ports(adopted);
}

async fn adopted() {
    let folder = tempfile::tempdir().unwrap();
    let place = relay_place(folder.path());
    let vm: VmId = place.dir.path().file_name().unwrap().to_str().unwrap().parse().unwrap();
    let (guest, datagrams) = (TcpListener::bind(at(0)).unwrap(), UdpSocket::bind(at(0)).unwrap());
    let (to, udp) = (guest.local_addr().unwrap().port(), datagrams.local_addr().unwrap().port());
    let ports = [port(5001, to, PortProtocol::Tcp), port(5002, udp, PortProtocol::Udp)];
    let mut published = Published::take(&with_choice(&ports, &[])).unwrap();
    published.connect_to(Ipv4Addr::LOCALHOST, place.clone());
    assert!(passes(5001, &guest).await);
    let [first] = *relays(&place) else { panic!("{:?}", relays(&place)) };
    // As when a daemon stops.
    drop(published);
    tokio::task::yield_now().await;
    assert!(passes(5001, &guest).await);
    let mut left = Left::find(&config(folder.path()).vms());
    assert!(left.take(vm, place.uid + 1).is_none(), "of another user");
    assert!(left.take(VmId::random(), place.uid).is_none(), "of another VM");
    let relay = left.take(vm, place.uid).unwrap();
    assert_eq!(relay.id(), first);
    let mut published = Published::adopted(&ports, relay);
    published.connect_to(Ipv4Addr::LOCALHOST, place.clone());
    assert_eq!(published.ports(), ports);
    assert!(passes(5001, &guest).await);
    assert_eq!(relays(&place), [first]);
    // Its ports are bound again when it has ended.
    Process::open(first).unwrap().unwrap().kill().unwrap();
    until(|| relays(&place).iter().any(|relay| *relay != first)).await;
    while !passes(5001, &guest).await {}
    let client = UdpSocket::bind(at(0)).unwrap();
    client.send_to(b"datagram", at(5002)).unwrap();
    let mut said = [0; 8];
    datagrams.recv_from(&mut said).unwrap();
    assert_eq!(&said, b"datagram");
    published.close();
    until_ended().await;
    assert_eq!(relays(&place), []);
    // Also that of UDP, which the relay had.
    drop(Published::take(&with_choice(&ports, &[])).unwrap());
}

#[test]
fn ports_of_a_relay_that_ends_are_waited_for() {
    with_own_ports(waited_for);
}

async fn waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let place = relay_place(folder.path());
    let guest = UdpSocket::bind(at(0)).unwrap();
    let to = guest.local_addr().unwrap().port();
    let free = port(0, to, PortProtocol::Udp);
    let mut published = Published::take(&with_choice(&[free], &[])).unwrap();
    let chosen = published.ports()[0];
    published.connect_to(Ipv4Addr::LOCALHOST, place.clone());
    until(|| !relays(&place).is_empty()).await;
    // Until it is gone the relay has the port. The next VM gets it all the same.
    published.close();
    let again = Published::take_when_free(&with_choice(&[free], &[chosen])).await.unwrap();
    assert_eq!(again.ports(), [chosen]);
    // Another VM's is a conflict.
    let taken = Published::take_when_free(&with_choice(&[chosen], &[])).await.unwrap_err();
    assert!(taken.0.message.contains(&chosen.host_port.to_string()), "{taken}");
}

#[test]
fn a_relay_ends_with_its_vmm_and_no_other_one_follows() {
    with_own_ports(ends);
}

async fn ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut spawn = Spawn::new(Program::Path("/bin/sleep".into()), "sleep");
    spawn.argv.push("1000".into());
    let vmm = Arc::new(Process::from_child(spawn.run().unwrap()).unwrap());
    let place = Place { vmm: vmm.clone(), ..relay_place(folder.path()) };
    let ports = [port(5001, 80, PortProtocol::Tcp)];
    let mut published = Published::take(&with_choice(&ports, &[])).unwrap();
    published.connect_to(Ipv4Addr::LOCALHOST, place.clone());
    until(|| !relays(&place).is_empty()).await;
    let [relay] = *relays(&place) else { panic!("{:?}", relays(&place)) };
    vmm.kill().unwrap();
    // Reaped, because this process waits for it.
    until(|| Process::open(relay).unwrap().is_none()).await;
    assert_eq!(relays(&place), []);
    published.close();
    assert!(!is_ending(relay), "it has ended before");
    drop(Published::take(&with_choice(&ports, &[])).unwrap());
}

#[test]
fn the_time_of_relays_never_goes_down_and_is_of_no_other_process() {
    let spent = Spent::before(5);
    let own = ProcessId::own().unwrap();
    let begun = cpu_time::own();
    while cpu_time::own() < begun + Duration::from_millis(2) {}
    spent.begins(own);
    let running_us = spent.us();
    assert!(running_us >= 2005, "{running_us}");
    assert_eq!(spent.ended_us(), 5);
    let other = ProcessId { start_ticks: own.start_ticks + 1, ..own };
    spent.begins(other);
    spent.ends(other);
    assert!(spent.us() >= running_us && spent.ended_us() == 5, "one of two has ended");
    spent.ends(own);
    let ended_us = spent.ended_us();
    assert!(ended_us >= running_us, "{ended_us} after {running_us}");
    assert_eq!(spent.us(), ended_us);
    // A relay that has ended, whose pid another process has now.
    spent.begins(other);
    assert_eq!(spent.us(), ended_us);
    spent.ends(other);
    assert_eq!(spent.us(), ended_us);
}
