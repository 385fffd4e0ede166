//! Tests of the muxer alone, with sockets and a simulated clock, and with arbitrary packets from
//! the guest.

use super::connection::{ANSWER_TIME, BUFFER_BYTES, LINGER_TIME};
use super::muxer::{MAX_CONNECTIONS, Muxer, root_socket_path, socket_path};
use super::packet::{HEADER_BYTES, Header, SHUTDOWN_SEND, op};
use super::testing::{CID, Flow, ended, line};
use crate::disk::IoList;
use proptest::prelude::*;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::epoll::{Epoll, EventSet};

/// A muxer without its device, with a simulated clock.
struct Bench {
    muxer: Muxer,
    epoll: Arc<Epoll>,
    folder: tempfile::TempDir,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let epoll = Arc::new(Epoll::new().unwrap());
        let muxer = Muxer::new(3, listener.into(), path, Arc::clone(&epoll), 1);
        Self { muxer, epoll, folder, now: Instant::now() }
    }

    fn connect(&mut self, first: &str) -> UnixStream {
        let mut stream = UnixStream::connect(self.folder.path().join("v")).unwrap();
        stream.write_all(first.as_bytes()).unwrap();
        self.muxer.accept(self.now);
        self.events();
        stream
    }

    fn events(&mut self) {
        let mut events = [vmm_sys_util::epoll::EpollEvent::default(); 64];
        let count = self.epoll.wait(0, &mut events).unwrap();
        for event in &events[..count] {
            let set = EventSet::from_bits_truncate(event.events());
            self.muxer.event(event.data(), set, self.now);
        }
    }

    fn packet(&mut self, room: usize) -> Option<(Header, Vec<u8>)> {
        let mut bytes = vec![0; room];
        let (header, len) = self.muxer.next_packet(&IoList::of(&mut bytes), self.now)?;
        bytes.truncate(len);
        Some((header, bytes))
    }

    fn guest(&mut self, header: &Header, data: &mut [u8]) {
        self.muxer.on_packet(header, &IoList::of(data), self.now);
    }

    fn later(&mut self, time: Duration) {
        self.now += time;
        self.muxer.expire(self.now);
    }
}

#[test]
fn what_waits_too_long_is_given_up() {
    let mut bench = Bench::new();
    let mut silent = bench.connect("CONN");
    let mut unanswered = bench.connect("CONNECT 7\n");
    assert_eq!(bench.muxer.len(), 2);
    bench.later(ANSWER_TIME);
    assert!(ended(&mut silent), "no first line");
    assert_eq!(bench.muxer.len(), 1, "the driver may take as long as it wants");
    assert_eq!(bench.packet(0).unwrap().0.op, op::REQUEST);
    bench.later(ANSWER_TIME - Duration::from_millis(1));
    assert_eq!(bench.muxer.len(), 1);
    bench.later(Duration::from_millis(1));
    assert!(ended(&mut unanswered), "no answer");
    assert_eq!(bench.packet(0).unwrap().0.op, op::RST);
    assert_eq!((bench.muxer.len(), bench.muxer.deadline()), (0, None));
}

#[test]
fn a_socket_for_root_is_reached_from_privileged_ports_of_the_guest_alone() {
    let mut bench = Bench::new();
    let path = bench.folder.path().join("v");
    let listen = |path: &std::path::Path| {
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    };
    let root = listen(&root_socket_path(&path, 1026));
    let mut ask = |port: u32| {
        let flow = Flow::new(port, 1026, 1 << 16);
        bench.guest(&flow.header(op::REQUEST), &mut []);
        bench.packet(0).map(|(header, _)| header.op)
    };
    for port in [1024, 1025, 49_152, u32::MAX - 1] {
        assert_eq!(ask(port), Some(op::RST), "from {port}");
    }
    assert!(root.accept().is_err(), "an unprivileged program got through");
    for port in [1, 700, 1023] {
        assert_eq!(ask(port), Some(op::RESPONSE), "from {port}");
        root.accept().unwrap();
    }
    // A listener for all programs gets connections from every port, if no listener for root exists.
    let all = listen(&socket_path(&path, 1026));
    assert_eq!(ask(5000), Some(op::RESPONSE));
    all.accept().unwrap();
    drop(root);
    std::fs::remove_file(root_socket_path(&path, 1026)).unwrap();
    assert_eq!(ask(5), Some(op::RESPONSE));
    all.accept().unwrap();
}

#[test]
fn data_of_a_guest_that_has_gone_waits_for_a_slow_host_but_not_for_ever() {
    let mut bench = Bench::new();
    let mut stream = bench.connect("CONNECT 7\n");
    let request = bench.packet(0).unwrap().0;
    let mut flow = Flow::new(7, request.src_port, 1 << 16);
    bench.guest(&flow.header(op::RESPONSE), &mut []);
    line(&mut stream);
    let mut sent = 0;
    while bench.muxer.connections().all(|c| c.buffered() == 0) {
        bench.guest(&flow.header(op::RW), &mut [5; 50_000]);
        sent += 50_000;
    }
    flow.sent = sent;
    bench.guest(&flow.header(op::RST), &mut []);
    assert_eq!(bench.muxer.len(), 1);
    // The ports are free for a new connection meanwhile.
    bench.guest(&flow.header(op::RW), &mut [1]);
    assert_eq!(bench.packet(0).unwrap().0.op, op::RST);
    assert_eq!(bench.muxer.len(), 1, "what uses the ports now does not touch it");
    bench.later(LINGER_TIME - Duration::from_secs(1));
    let mut some = [0; 100_000];
    stream.read_exact(&mut some).unwrap();
    bench.events();
    bench.later(LINGER_TIME - Duration::from_secs(1));
    assert_eq!(bench.muxer.len(), usize::from(bench.muxer.connections().any(|c| c.buffered() > 0)));
    bench.later(LINGER_TIME);
    assert_eq!(bench.muxer.len(), 0);
}

/// An open connection that the host asked for, in which the guest grants `credit` bytes.
fn open(bench: &mut Bench, port: u32, credit: u32) -> (UnixStream, Flow) {
    let mut stream = bench.connect(&format!("CONNECT {port}\n"));
    let request = bench.packet(0).unwrap().0;
    let flow = Flow::new(port, request.src_port, credit);
    bench.guest(&flow.header(op::RESPONSE), &mut []);
    line(&mut stream);
    (stream, flow)
}

#[test]
fn connections_take_turns() {
    let mut bench = Bench::new();
    let mut streams: Vec<_> = [7, 8, 9].map(|port| open(&mut bench, port, 1 << 20).0).into();
    for stream in &mut streams {
        stream.write_all(&[1; 10_000]).unwrap();
    }
    bench.events();
    let ports: Vec<_> = (0..9).map(|_| bench.packet(1000).unwrap().0.dst_port).collect();
    for turn in ports.chunks(3) {
        let mut turn = turn.to_vec();
        turn.sort_unstable();
        assert_eq!(turn, [7, 8, 9], "{ports:?}");
    }
}

#[test]
fn a_guest_that_takes_credit_back_gets_no_more_than_it_said() {
    let mut bench = Bench::new();
    let (mut stream, flow) = open(&mut bench, 7, 100);
    stream.write_all(&[1; 1000]).unwrap();
    bench.events();
    assert_eq!(bench.packet(1000).unwrap().1.len(), 100);
    for (credit, taken) in [(50, 0), (0, 0), (100, 101), (50, u32::MAX)] {
        let header = Header { buf_alloc: credit, fwd_cnt: taken, ..flow.header(op::CREDIT_UPDATE) };
        bench.guest(&header, &mut []);
        while let Some((header, data)) = bench.packet(1000) {
            assert!(data.is_empty(), "{credit} and {taken}: {header:?}");
        }
    }
    let header = Header { buf_alloc: 50, fwd_cnt: 100, ..flow.header(op::CREDIT_UPDATE) };
    bench.guest(&header, &mut []);
    assert_eq!(bench.packet(1000).unwrap().1.len(), 50);
}

#[test]
fn data_after_the_end_resets_and_another_machines_packets_are_nobodys() {
    let mut bench = Bench::new();
    let (_stream, flow) = open(&mut bench, 7, 100);
    bench.guest(&Header { src_cid: 4, ..flow.header(op::RST) }, &mut []);
    bench.guest(&Header { src_cid: 4, ..flow.header(op::RW) }, &mut [1]);
    assert_eq!((bench.muxer.len(), bench.packet(100)), (1, None));
    bench.guest(&flow.shutdown(SHUTDOWN_SEND), &mut []);
    bench.guest(&flow.header(op::RW), &mut [1]);
    assert_eq!(bench.packet(100).unwrap().0.op, op::RST);
    assert_eq!(bench.muxer.len(), 0);
}

#[test]
fn a_host_that_left_before_the_guest_heard_of_it_leaves_no_trace() {
    let mut bench = Bench::new();
    drop(bench.connect("CONNECT 7\n"));
    bench.events();
    assert_eq!((bench.muxer.len(), bench.packet(0)), (0, None));
    // If the guest has got the REQUEST, it gets a reset.
    let stream = bench.connect("CONNECT 7\n");
    assert_eq!(bench.packet(0).unwrap().0.op, op::REQUEST);
    drop(stream);
    bench.events();
    assert_eq!(bench.packet(0).unwrap().0.op, op::RST);
    assert_eq!(bench.muxer.len(), 0);
}

#[test]
fn resets_for_a_guest_that_takes_none_are_bounded() {
    let mut bench = Bench::new();
    for port in 0..5000 {
        bench.guest(&Flow::new(port, 9, 0).header(op::RW), &mut []);
    }
    let mut count = 0;
    while bench.packet(0).is_some() {
        count += 1;
    }
    assert_eq!(count, 1024);
}

fn any_header() -> impl Strategy<Value = (Header, usize)> {
    let cid = prop_oneof![8 => Just(CID), 1 => any::<u64>()];
    let dst = prop_oneof![8 => Just(2_u64), 1 => any::<u64>()];
    let port = || prop_oneof![6 => 0..3_u32, 1 => any::<u32>()];
    let number = || prop_oneof![3 => 0..100_000_u32, 1 => any::<u32>()];
    let kind = prop_oneof![9 => Just(1_u16), 1 => any::<u16>()];
    let op = prop_oneof![9 => 0..9_u16, 1 => any::<u16>()];
    (cid, dst, port(), port(), kind, op, 0..5_u32, number(), number(), 0..70_000_usize).prop_map(
        |(src_cid, dst_cid, src_port, dst_port, kind, op, flags, buf_alloc, fwd_cnt, len)| {
            let len = if op == 5 { len } else { 0 };
            let header = Header {
                src_cid,
                dst_cid,
                src_port,
                dst_port,
                kind,
                op,
                flags,
                buf_alloc,
                fwd_cnt,
                ..Header::default()
            };
            (header, len)
        },
    )
}

#[derive(Debug, Clone)]
enum Move {
    Guest(Header, usize),
    /// A packet on an existing connection, chosen by number, so that later states are reached.
    Known(usize, Header, usize),
    Connect,
    HostWrites(usize, usize),
    HostReads(usize, usize),
    HostEnds(usize, bool),
    Packets(usize),
    Later,
}

fn any_move() -> impl Strategy<Value = Move> {
    prop_oneof![
        3 => any_header().prop_map(|(h, n)| Move::Guest(h, n)),
        8 => (0..8_usize, any_header()).prop_map(|(c, (h, n))| Move::Known(c, h, n)),
        2 => Just(Move::Connect),
        3 => (0..8_usize, 1..200_000_usize).prop_map(|(c, n)| Move::HostWrites(c, n)),
        3 => (0..8_usize, 1..200_000_usize).prop_map(|(c, n)| Move::HostReads(c, n)),
        1 => (0..8_usize, any::<bool>()).prop_map(|(c, all)| Move::HostEnds(c, all)),
        6 => (0..20_usize).prop_map(Move::Packets),
        1 => Just(Move::Later),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Whatever the guest sends and the host does, nothing panics, buffers keep their bounds, and
    /// no data exceeds the guest's last credit.
    #[test]
    fn hostile_guests_and_odd_hosts_break_nothing(
        moves in proptest::collection::vec(any_move(), 1..80),
    ) {
        let mut bench = Bench::new();
        let listener = UnixListener::bind(socket_path(&bench.folder.path().join("v"), 1)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut streams: Vec<UnixStream> = Vec::new();
        let mut credit = Credit::new();
        for step in moves {
            match step {
                Move::Guest(header, len) => {
                    note(&mut credit, &header);
                    bench.guest(&header, &mut vec![1; len]);
                }
                Move::Known(which, header, len) => {
                    let connections = bench.muxer.connections();
                    let ports: Vec<_> = connections.map(|c| (c.host_port, c.guest_port)).collect();
                    if let Some((host_port, guest_port)) = ports.get(which % ports.len().max(1)) {
                        let (src_port, dst_port) = (*guest_port, *host_port);
                        let (src_cid, dst_cid, kind) = (CID, 2, 1);
                        let header =
                            Header { src_cid, dst_cid, src_port, dst_port, kind, ..header };
                        note(&mut credit, &header);
                        bench.guest(&header, &mut vec![1; len]);
                    }
                }
                Move::Connect => {
                    let stream = bench.connect("CONNECT 1\n");
                    stream.set_nonblocking(true).unwrap();
                    streams.push(stream);
                }
                Move::HostWrites(which, len) => {
                    if let Some(mut stream) = streams.get(which) {
                        let _ = stream.write(&vec![2; len]);
                    }
                }
                Move::HostReads(which, len) => {
                    if let Some(mut stream) = streams.get(which) {
                        let _ = stream.read(&mut vec![0; len]);
                    }
                }
                Move::HostEnds(which, all) => {
                    if which < streams.len() {
                        if all {
                            drop(streams.remove(which));
                        } else {
                            let _ = streams[which].shutdown(Shutdown::Write);
                        }
                    }
                }
                Move::Packets(count) => {
                    for _ in 0..count {
                        let Some((header, data)) = bench.packet(8000) else { break };
                        count_packet(&mut credit, &header, &data)?;
                    }
                }
                Move::Later => bench.later(Duration::from_secs(20)),
            }
            if let Ok((stream, _)) = listener.accept() {
                stream.set_nonblocking(true).unwrap();
                streams.push(stream);
            }
            bench.events();
            for connection in bench.muxer.connections() {
                prop_assert!(connection.buffered() <= BUFFER_BYTES as usize);
            }
            prop_assert!(bench.muxer.len() <= MAX_CONNECTIONS);
        }
    }

    #[test]
    fn a_header_reads_back(bytes in any::<[u8; 32]>(), rest in any::<[u8; 12]>()) {
        let all: [u8; HEADER_BYTES] = [&bytes[..], &rest].concat().try_into().unwrap();
        prop_assert_eq!(Header::decode(&all).encode(), all);
    }
}

/// Of each connection, by the ports of host and guest: the guest's buffer in bytes, the bytes that
/// the guest has taken, and the bytes sent to it.
type Credit = std::collections::HashMap<(u32, u32), (u32, u32, u32)>;

/// Counts a packet to the guest; fails if its data exceed the credit.
fn count_packet(credit: &mut Credit, header: &Header, data: &[u8]) -> Result<(), TestCaseError> {
    let key = (header.src_port, header.dst_port);
    match header.op {
        op::REQUEST | op::RESPONSE => {
            // A new connection, with the credit that the guest reported last.
            let said = match header.op {
                op::RESPONSE => credit.get(&key).copied().unwrap_or_default(),
                _ => Default::default(),
            };
            credit.insert(key, (said.0, said.1, 0));
        }
        op::RW => {
            let entry = credit.entry(key).or_default();
            entry.2 = entry.2.wrapping_add(u32::try_from(data.len()).unwrap());
            let outstanding = entry.2.wrapping_sub(entry.1);
            let most = entry.0;
            prop_assert!(outstanding <= most, "{outstanding} outstanding of {most}");
        }
        _ => prop_assert!(data.is_empty()),
    }
    Ok(())
}

/// Notes the credit that the guest reports on a connection; the count of bytes sent to it stays.
fn note(credit: &mut Credit, header: &Header) {
    if header.src_cid == CID && header.dst_cid == 2 && header.kind == 1 {
        let entry = credit.entry((header.dst_port, header.src_port)).or_default();
        (entry.0, entry.1) = (header.buf_alloc, header.fwd_cnt);
    }
}
