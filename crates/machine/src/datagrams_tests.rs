use super::*;
use crate::places::MAX_OF_PORT;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;

const LONG: Duration = Duration::from_secs(3600);
const LASTING: Idle = Idle { once: LONG, lasting: LONG };

/// A port, and the listener that stands for the machine.
fn port(idle: Idle, rooms: &Arc<Rooms>) -> (UdpPort, SocketAddr, TcpListener) {
    let machine = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = machine.local_addr().unwrap();
    let connect: Connect = Arc::new(move |_| TcpStream::connect(at));
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    let port = UdpPort::start(socket, 1, connect, Arc::clone(rooms), idle).unwrap();
    (port, address, machine)
}

fn client(to: SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    client.connect(to).unwrap();
    client
}

fn datagram(flow: &mut TcpStream) -> Vec<u8> {
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    let length = read_datagram(flow, &mut buffer).unwrap().unwrap();
    buffer.truncate(length);
    buffer
}

fn answer(flow: &mut TcpStream, bytes: &[u8]) {
    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
    flow.write_all(&[&length[..], bytes].concat()).unwrap();
}

fn heard(client: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    let count = client.recv(&mut buffer).unwrap();
    buffer.truncate(count);
    buffer
}

#[test]
fn each_client_gets_the_answers_to_its_own_datagrams_and_the_port_is_freed() {
    let rooms = Arc::new(Rooms::default());
    let (port, at, machine) = port(LASTING, &rooms);
    let (one, other) = (client(at), client(at));
    one.send(b"one").unwrap();
    let mut flow = machine.accept().unwrap().0;
    assert_eq!(datagram(&mut flow), b"one");
    other.send(b"other").unwrap();
    let mut flow_of_other = machine.accept().unwrap().0;
    assert_eq!(datagram(&mut flow_of_other), b"other");
    answer(&mut flow_of_other, b"to other");
    answer(&mut flow, b"");
    assert_eq!((heard(&one), heard(&other)), (Vec::new(), b"to other".to_vec()));
    // The largest datagram that UDP carries over IPv4, and one that it does not.
    answer(&mut flow, &vec![7; MAX_DATAGRAM_BYTES]);
    answer(&mut flow, &vec![8; 65_507]);
    assert_eq!(heard(&one), vec![8; 65_507]);
    one.send(&vec![9; 65_507]).unwrap();
    assert_eq!(datagram(&mut flow), vec![9; 65_507]);
    drop(port);
    drop(UdpSocket::bind(at).expect("a port that is free again"));
    // The end of the port ends its flows, which give their bytes back.
    assert_eq!(flow.read(&mut [0]).unwrap(), 0);
    assert_eq!(flow_of_other.read(&mut [0]).unwrap(), 0);
    assert_eq!(rooms.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn an_idle_flow_ends_and_the_next_datagram_begins_another() {
    let at_once = Idle { once: Duration::ZERO, lasting: Duration::ZERO };
    let (_port, at, machine) = port(at_once, &Arc::default());
    let client = client(at);
    // A flow may end before its first datagram is sent, which UDP permits.
    let accepted = Mutex::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..3 {
                let mut flow = machine.accept().unwrap().0;
                let mut all = Vec::new();
                flow.read_to_end(&mut all).unwrap();
                *accepted.lock().unwrap() += 1;
            }
        });
        while *accepted.lock().unwrap() < 3 {
            client.send(b"x").unwrap();
            std::thread::yield_now();
        }
    });
}

#[test]
fn flows_are_limited_and_more_clients_are_not_heard() {
    let (_port, at, machine) = port(LASTING, &Arc::default());
    let mut held = Vec::new();
    for _ in 0..MAX_OF_PORT {
        let client = client(at);
        client.send(b"x").unwrap();
        held.push((client, machine.accept().unwrap().0));
    }
    client(at).send(b"more").unwrap();
    // The first client's next datagram comes after that one.
    let (first, mut flow) = held.swap_remove(0);
    first.send(b"y").unwrap();
    assert_eq!((datagram(&mut flow), datagram(&mut flow)), (b"x".to_vec(), b"y".to_vec()));
    // A place becomes free, and the next connection is not that of the datagram before.
    drop((first, flow));
    machine.set_nonblocking(true).unwrap();
    let another = client(at);
    let mut flow = loop {
        another.send(b"later").unwrap();
        match machine.accept() {
            Ok((flow, _)) => break flow,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    flow.set_nonblocking(false).unwrap();
    assert_eq!(datagram(&mut flow), b"later");
}

#[test]
fn bytes_that_wait_are_limited() {
    let all = Arc::<AtomicUsize>::default();
    let held: Vec<_> =
        (0..).map_while(|_| Waiting::new(&[0; 65_507], &all)).take(1 << 20).collect();
    assert_eq!(held.len(), MAX_WAITING_BYTES / 65_507);
    drop(held);
    assert_eq!(all.load(Ordering::Relaxed), 0);
}
