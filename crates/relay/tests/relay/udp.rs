//! Flows through a relay.

use crate::common::{FOREVER, LONG, Running, relay, wide};
use dayfly_relay::arguments::{Kind, Limits};
use dayfly_relay::udp::Idle;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

fn local() -> UdpSocket {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

fn client(relay: &Running) -> UdpSocket {
    let client = local();
    client.connect(relay.at).unwrap();
    client
}

fn heard(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 1 << 16];
    let (count, from) = socket.recv_from(&mut buffer).unwrap();
    buffer.truncate(count);
    (buffer, from)
}

fn with(limits: Limits, idle: Idle, of_port: usize) -> (UdpSocket, Running) {
    let guest = local();
    let relay = relay(Kind::Udp, guest.local_addr().unwrap(), limits, idle, of_port);
    (guest, relay)
}

/// Sends until the guest hears it.
fn until_heard(client: &UdpSocket, guest: &UdpSocket, word: &[u8]) -> SocketAddr {
    guest.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut buffer = [0; 64];
    let from = loop {
        let _refused = client.send(word);
        match guest.recv_from(&mut buffer) {
            Ok((count, from)) if &buffer[..count] == word => break from,
            _ => {}
        }
    };
    guest.set_read_timeout(None).unwrap();
    from
}

#[test]
fn answers_go_to_the_client_that_asked() {
    let (guest, relay) = with(wide(), FOREVER, 512);
    let (one, other) = (client(&relay), client(&relay));
    one.send(b"one").unwrap();
    let (said, flow) = heard(&guest);
    assert_eq!(said, b"one");
    other.send(b"other").unwrap();
    let (said, flow_of_other) = heard(&guest);
    assert_eq!(said, b"other");
    assert_ne!(flow, flow_of_other);
    guest.send_to(b"to other", flow_of_other).unwrap();
    guest.send_to(&[7; 65_507], flow).unwrap();
    assert_eq!(heard(&other).0, b"to other");
    assert_eq!(heard(&one).0, [7; 65_507]);
    one.send(b"more").unwrap();
    assert_eq!(heard(&guest), (b"more".to_vec(), flow));
}

#[test]
fn flows_of_a_port_and_of_the_vm_are_limited() {
    for (limits, of_port) in [(wide(), 1), (Limits { flows: 1, ..wide() }, 512)] {
        let (guest, relay) = with(limits, FOREVER, of_port);
        let (one, other) = (client(&relay), client(&relay));
        one.send(b"one").unwrap();
        heard(&guest);
        other.send(b"dropped").unwrap();
        one.send(b"two").unwrap();
        assert_eq!(heard(&guest).0, b"two");
    }
}

#[test]
fn an_idle_flow_ends_and_another_client_gets_its_place() {
    let idle = Idle { once: Duration::ZERO, lasting: LONG };
    let (guest, relay) = with(wide(), idle, 1);
    let (one, other) = (client(&relay), client(&relay));
    one.send(b"one").unwrap();
    heard(&guest);
    until_heard(&other, &guest, b"other");
}

#[test]
fn a_flow_lasts_when_its_client_sends_again_after_an_answer() {
    // Of two kinds of flows only one ends.
    let (guest, relay) = with(wide(), Idle { once: LONG, lasting: Duration::ZERO }, 1);
    let (one, other) = (client(&relay), client(&relay));
    one.send(b"question").unwrap();
    let (_, flow) = heard(&guest);
    guest.send_to(b"answer", flow).unwrap();
    heard(&one);
    other.send(b"dropped").unwrap();
    one.send(b"again").unwrap();
    assert_eq!(heard(&guest).0, b"again");
    until_heard(&other, &guest, b"other");
}

#[test]
fn a_guest_that_does_not_listen_ends_no_flow() {
    let (guest, relay) = with(wide(), FOREVER, 512);
    let client = client(&relay);
    client.send(b"first").unwrap();
    let (_, flow) = heard(&guest);
    let to = guest.local_addr().unwrap();
    drop(guest);
    client.send(b"no program").unwrap();
    client.send(b"listens").unwrap();
    let guest = UdpSocket::bind(to).unwrap();
    assert_eq!(until_heard(&client, &guest, b"now"), flow);
}

#[test]
fn a_flow_of_the_machine_carries_datagrams_in_frames() {
    let guest = local();
    let relay = relay(Kind::Framed, guest.local_addr().unwrap(), wide(), FOREVER, 512);
    let mut supervisor = TcpStream::connect(relay.at).unwrap();
    supervisor.write_all(&[0, 2, b'h', b'i', 0, 0, 0, 1, b'!']).unwrap();
    let (said, flow) = heard(&guest);
    assert_eq!(said, b"hi");
    assert_eq!((heard(&guest).0, heard(&guest).0), (Vec::new(), b"!".to_vec()));
    // In parts.
    for part in [&b"\0"[..], b"\x04pa", b"rt\0\x01"] {
        supervisor.write_all(part).unwrap();
    }
    assert_eq!(heard(&guest).0, b"part");
    supervisor.write_all(b"x").unwrap();
    assert_eq!(heard(&guest).0, b"x");
    guest.send_to(b"yes", flow).unwrap();
    let mut frame = [0; 5];
    supervisor.read_exact(&mut frame).unwrap();
    assert_eq!(&frame, b"\0\x03yes");
}

#[test]
fn a_supervisor_that_reads_late_gets_whole_frames() {
    let guest = local();
    let limits = Limits { buffer_bytes: Some(8192), ..wide() };
    let relay = relay(Kind::Framed, guest.local_addr().unwrap(), limits, FOREVER, 512);
    let mut supervisor = TcpStream::connect(relay.at).unwrap();
    supervisor.write_all(&[0, 1, b'?']).unwrap();
    let (_, flow) = heard(&guest);
    let datagram = vec![5; 3000];
    // More than all queues take: what does not fit is lost, as UDP permits.
    for _ in 0..2000 {
        guest.send_to(&datagram, flow).unwrap();
    }
    supervisor.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let (mut got, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while let Ok(count) = supervisor.read(&mut buffer) {
        got.extend_from_slice(&buffer[..count]);
    }
    let frame = [&3000_u16.to_be_bytes()[..], &datagram].concat();
    assert!(got.len() > frame.len() && got.len() % frame.len() == 0, "{}", got.len());
    assert!(got.chunks(frame.len()).all(|got| got == frame));
    // It goes on.
    guest.send_to(b"yes", flow).unwrap();
    let mut frame = [0; 5];
    supervisor.set_read_timeout(None).unwrap();
    supervisor.read_exact(&mut frame).unwrap();
    assert_eq!(&frame, b"\0\x03yes");
}

#[test]
fn long_datagrams_come_in_pieces_of_any_size() {
    let guest = local();
    let relay = relay(Kind::Framed, guest.local_addr().unwrap(), wide(), FOREVER, 512);
    let mut supervisor = TcpStream::connect(relay.at).unwrap();
    for (count, piece) in [(65_507, 30_001), (65_507, 7001), (1, 1), (40_000, 65_000)] {
        let datagram: Vec<u8> = (0..count).map(|at: u32| u8::try_from(at % 251).unwrap()).collect();
        let length = u16::try_from(datagram.len()).unwrap();
        let frame = [&length.to_be_bytes()[..], &datagram].concat();
        let (first, second) = ([&frame[..], &frame].concat(), datagram);
        for piece in first.chunks(piece) {
            supervisor.write_all(piece).unwrap();
        }
        for _ in 0..2 {
            assert!(heard(&guest).0 == second);
        }
    }
}
