//! Connections through a relay.

use crate::common::{self, FOREVER, Running, relay, wide};
use dayfly_relay::arguments::{Kind, Limits};
use rustix::net::sockopt::set_socket_linger;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::Duration;

fn with(limits: Limits) -> (TcpListener, Running) {
    let guest = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    rustix::net::listen(&guest, 1024).unwrap();
    let relay = relay(Kind::Tcp, guest.local_addr().unwrap(), limits, FOREVER, 512);
    (guest, relay)
}

fn connected(guest: &TcpListener, relay: &Running) -> (TcpStream, TcpStream) {
    let client = TcpStream::connect(relay.at).unwrap();
    (client, guest.accept().unwrap().0)
}

fn is_reset(stream: &mut TcpStream) -> bool {
    let got = stream.read(&mut [0]).map_err(|e| e.kind());
    matches!(got, Err(io::ErrorKind::ConnectionReset))
}

/// Bytes, each of which differs from its neighbours.
fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn bytes_pass_in_both_directions_and_each_direction_ends_by_itself() {
    let (guest, relay) = with(wide());
    let (mut client, mut server) = connected(&guest, &relay);
    let (there, back) = (bytes(5 << 20), bytes(3 << 20));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut got = Vec::new();
            server.read_to_end(&mut got).unwrap();
            assert!(got == bytes(5 << 20));
            // Only after the client has ended its direction.
            server.write_all(&back).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
        });
        client.write_all(&there).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap();
        assert!(got == bytes(3 << 20));
    });
}

#[test]
fn small_writes_pass_at_once() {
    let (guest, relay) = with(wide());
    let (mut client, mut server) = connected(&guest, &relay);
    let mut word = [0; 4];
    for _ in 0..1000 {
        client.write_all(b"ping").unwrap();
        server.read_exact(&mut word).unwrap();
        server.write_all(b"pong").unwrap();
        client.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"pong");
    }
}

#[test]
fn a_reset_of_either_end_reaches_the_other_one() {
    let (guest, relay) = with(wide());
    let (client, mut server) = connected(&guest, &relay);
    set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    assert!(is_reset(&mut server));
    let (mut client, server) = connected(&guest, &relay);
    set_socket_linger(&server, Some(Duration::ZERO)).unwrap();
    drop(server);
    assert!(is_reset(&mut client));
}

/// Fills a connection until it takes no more.
fn fill(stream: &mut TcpStream) {
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    while stream.write(&[1; 1 << 16]).is_ok() {}
}

#[test]
fn a_reader_that_stalls_stops_no_other_connection_and_its_reset_is_seen() {
    let (guest, relay) = with(wide());
    let (mut stalled, mut unread) = connected(&guest, &relay);
    fill(&mut stalled);
    let (mut client, mut server) = connected(&guest, &relay);
    let there = bytes(4 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| client.write_all(&there).unwrap());
        let mut got = vec![0; there.len()];
        server.read_exact(&mut got).unwrap();
        assert!(got == there);
    });
    // Its bytes wait in front of the reset, which is seen all the same.
    set_socket_linger(&stalled, Some(Duration::ZERO)).unwrap();
    drop(stalled);
    let mut got = Vec::new();
    let end = unread.read_to_end(&mut got).unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn a_thousand_connections_pass_bytes_at_the_same_time() {
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: Some(16_384), maximum: Some(16_384) },
    );
    let (guest, relay) = with(wide());
    let mut pairs: Vec<_> = (0..1000).map(|_| connected(&guest, &relay)).collect();
    for round in 0..3_u32 {
        for (at, (client, _)) in (0_u32..).zip(&mut pairs) {
            client.write_all(&(at + round).to_be_bytes()).unwrap();
        }
        for (_, server) in &mut pairs {
            let mut word = [0; 4];
            server.read_exact(&mut word).unwrap();
            server.write_all(&word).unwrap();
        }
        for (at, (client, _)) in (0_u32..).zip(&mut pairs) {
            let mut word = [0; 4];
            client.read_exact(&mut word).unwrap();
            assert_eq!(u32::from_be_bytes(word), at + round);
        }
    }
}

#[test]
fn one_connection_too_many_is_reset_and_its_place_is_free_after_another_has_ended() {
    let (guest, relay) = with(Limits { connections: 2, ..wide() });
    let (client, server) = connected(&guest, &relay);
    let _other = connected(&guest, &relay);
    let mut third = TcpStream::connect(relay.at).unwrap();
    assert!(is_reset(&mut third));
    drop((client, server));
    let mut fourth = loop {
        let mut client = TcpStream::connect(relay.at).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        // It is reset as long as the first one has not ended for the relay; a reset that comes
        // before the write is the write's error.
        if client.write_all(b"x").is_ok() && !is_reset(&mut client) {
            break client;
        }
    };
    let (mut server, _) = guest.accept().unwrap();
    server.write_all(b"y").unwrap();
    fourth.set_read_timeout(None).unwrap();
    fourth.read_exact(&mut [0]).unwrap();
}

#[test]
fn small_buffers_bound_what_a_stalled_connection_takes() {
    let count = |buffer_bytes| {
        let (guest, relay) = with(Limits { buffer_bytes, ..wide() });
        let (mut client, _unread) = connected(&guest, &relay);
        client.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut sent = 0;
        while let Ok(count) = client.write(&[1; 4096]) {
            sent += count;
        }
        sent
    };
    let (small, usual) = (count(Some(16 << 10)), count(None));
    assert!(small * 2 < usual, "{small} of {usual}");
}

#[test]
fn a_guest_that_does_not_listen_is_a_reset() {
    let (guest, relay) = with(wide());
    drop(guest);
    let mut client = TcpStream::connect(relay.at).unwrap();
    assert!(is_reset(&mut client));
}

#[test]
fn clients_that_came_before_the_relay_are_served() {
    let guest = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (at, socket) = common::port(Kind::Tcp);
    let mut early = TcpStream::connect(at).unwrap();
    early.write_all(b"early").unwrap();
    let to = guest.local_addr().unwrap();
    let _relay = common::relay_at((at, socket), Kind::Tcp, to, wide(), FOREVER, 512);
    let mut got = [0; 5];
    guest.accept().unwrap().0.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"early");
}

#[test]
fn urgent_data_loses_its_urgent_byte_and_nothing_else() {
    let (guest, relay) = with(wide());
    let (client, mut server) = connected(&guest, &relay);
    for _ in 0..3 {
        (&client).write_all(b"before").unwrap();
        rustix::net::send(&client, b"ab!", rustix::net::SendFlags::OOB).unwrap();
        (&client).write_all(b"after").unwrap();
    }
    client.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    server.read_to_string(&mut got).unwrap();
    // The kernel keeps one urgent byte at a time: earlier ones may be in the stream.
    assert_eq!(got.replace('!', ""), "beforeabafter".repeat(3));
}

#[test]
fn short_connections_leave_nothing_while_one_waits_for_its_guest() {
    let guest = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    rustix::net::listen(&guest, 0).unwrap();
    let to = guest.local_addr().unwrap();
    // The guest's queue is full, and it takes no more.
    let _direct = TcpStream::connect(to).unwrap();
    let limits = Limits { connections: 4, ..wide() };
    let relay = relay(Kind::Tcp, to, limits, FOREVER, 512);
    let _waits = TcpStream::connect(relay.at).unwrap();
    for _ in 0..1000 {
        let client = TcpStream::connect(relay.at).unwrap();
        set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    }
    // It still serves: the one that waits has its turn.
    guest.accept().unwrap();
    guest.accept().unwrap();
}
