use super::*;
use crate::net::publish::{Published, with_choice};
use dayfly_api::types::{PortProtocol, Publish};
use tokio::net::TcpListener;

async fn local() -> UdpSocket {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap()
}

async fn client(to: SocketAddr) -> UdpSocket {
    let client = local().await;
    client.connect(to).await.unwrap();
    client
}

async fn heard(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    let (count, from) = socket.recv_from(&mut buffer).await.unwrap();
    buffer.truncate(count);
    (buffer, from)
}

const LONG: Duration = Duration::from_secs(3600);

fn limits(of_port: usize, idle: Duration) -> Limits {
    Limits { of_vm: Arc::new(Semaphore::new(8)), of_port, once: idle, lasting: idle }
}

#[tokio::test]
async fn answers_go_to_the_client_that_asked_and_a_dropped_port_is_free_at_once() {
    let guest = local().await;
    let guest_port = guest.local_addr().unwrap().port();
    let port = Publish { host: None, host_port: 0, guest_port, protocol: PortProtocol::Udp };
    let mut published = Published::take(&with_choice(&[port], &[])).unwrap();
    let chosen = published.ports()[0];
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, chosen.host_port));
    // The choice is held before the guest is there.
    std::net::UdpSocket::bind(at).unwrap_err();
    published.connect_to(Ipv4Addr::LOCALHOST);
    let (one, other) = (client(at).await, client(at).await);
    one.send(b"one").await.unwrap();
    let (said, flow) = heard(&guest).await;
    assert_eq!(said, b"one");
    other.send(b"other").await.unwrap();
    let (said, flow_of_other) = heard(&guest).await;
    assert_eq!(said, b"other");
    assert_ne!(flow, flow_of_other);
    guest.send_to(b"to other", flow_of_other).await.unwrap();
    guest.send_to(&[7; 65_507], flow).await.unwrap();
    assert_eq!(heard(&other).await.0, b"to other");
    assert_eq!(heard(&one).await.0, [7; 65_507]);
    one.send(b"more").await.unwrap();
    assert_eq!(heard(&guest).await, (b"more".to_vec(), flow));
    drop(published);
    // The earlier choice is taken again if it is free, else another one.
    let again = Published::take(&with_choice(&[port], &[chosen])).unwrap();
    assert_eq!(again.ports(), [chosen]);
    let third = Published::take(&with_choice(&[port], &[chosen])).unwrap();
    assert_ne!(third.ports()[0].host_port, chosen.host_port);
}

#[tokio::test]
async fn flows_are_limited_and_end_when_they_are_idle() {
    let (guest, socket) = (local().await, Arc::new(local().await));
    let (to, at) = (guest.local_addr().unwrap(), socket.local_addr().unwrap());
    let relaying = tokio::spawn(relay(Arc::downgrade(&socket), to, limits(1, LONG)));
    let (one, other) = (client(at).await, client(at).await);
    one.send(b"one").await.unwrap();
    heard(&guest).await;
    other.send(b"dropped").await.unwrap();
    one.send(b"two").await.unwrap();
    assert_eq!(heard(&guest).await.0, b"two");
    relaying.abort();
    let _ = relaying.await;
    // The flow of the first client ends at once, and the second gets its place.
    let idle = limits(1, Duration::ZERO);
    tokio::spawn(relay(Arc::downgrade(&socket), to, idle.clone()));
    one.send(b"one").await.unwrap();
    heard(&guest).await;
    let said = async {
        loop {
            other.send(b"other").await.unwrap();
            tokio::select! {
                (said, _) = heard(&guest) => return said,
                () = tokio::task::yield_now() => {}
            }
        }
    };
    assert_eq!(said.await, b"other");
}

#[tokio::test]
async fn a_guest_that_does_not_listen_ends_no_flow() {
    let (guest, socket) = (local().await, Arc::new(local().await));
    let (to, at) = (guest.local_addr().unwrap(), socket.local_addr().unwrap());
    tokio::spawn(relay(Arc::downgrade(&socket), to, limits(1, LONG)));
    let client = client(at).await;
    client.send(b"first").await.unwrap();
    let (_, flow) = heard(&guest).await;
    drop(guest);
    client.send(b"no program").await.unwrap();
    client.send(b"listens").await.unwrap();
    let guest = UdpSocket::bind(to).await.unwrap();
    let said = async {
        loop {
            client.send(b"now").await.unwrap();
            tokio::select! {
                (_, from) = heard(&guest) => return from,
                () = tokio::task::yield_now() => {}
            }
        }
    };
    assert_eq!(said.await, flow);
}

#[tokio::test]
async fn a_flow_is_a_lasting_one_when_its_client_sends_again_after_an_answer() {
    let (guest, socket) = (local().await, Arc::new(local().await));
    let (to, at) = (guest.local_addr().unwrap(), socket.local_addr().unwrap());
    // Of two kinds of flows only one ends.
    let limits = Limits { once: LONG, lasting: Duration::ZERO, ..limits(1, LONG) };
    tokio::spawn(relay(Arc::downgrade(&socket), to, limits));
    let (one, other) = (client(at).await, client(at).await);
    one.send(b"question").await.unwrap();
    let (_, flow) = heard(&guest).await;
    guest.send_to(b"answer", flow).await.unwrap();
    heard(&one).await;
    other.send(b"dropped").await.unwrap();
    one.send(b"again").await.unwrap();
    assert_eq!(heard(&guest).await.0, b"again");
    // The flow's task looks at its time.
    guest.send_to(b"answer", flow).await.unwrap();
    let said = async {
        loop {
            other.send(b"other").await.unwrap();
            tokio::select! {
                (said, _) = heard(&guest) => return said,
                () = tokio::task::yield_now() => {}
            }
        }
    };
    assert_eq!(timeout(Duration::from_secs(120), said).await.unwrap(), b"other");
}

#[tokio::test]
async fn a_flow_of_the_machine_carries_datagrams_in_frames() {
    let guest = local().await;
    let to = guest.local_addr().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut supervisor = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let served = tokio::spawn(framed(listener.accept().await.unwrap().0, to));
    supervisor.write_all(&[0, 2, b'h', b'i', 0, 0, 0, 1, b'!']).await.unwrap();
    let (said, flow) = heard(&guest).await;
    assert_eq!(said, b"hi");
    assert_eq!((heard(&guest).await.0, heard(&guest).await.0), (Vec::new(), b"!".to_vec()));
    guest.send_to(b"yes", flow).await.unwrap();
    let mut frame = [0; 5];
    supervisor.read_exact(&mut frame).await.unwrap();
    assert_eq!(&frame, b"\0\x03yes");
    drop(supervisor);
    served.await.unwrap();
}
