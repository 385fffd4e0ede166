#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::connection::BUFFER_BYTES;
use super::muxer::{MAX_CONNECTIONS, socket_path};
use super::packet::{HEADER_BYTES, Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use crate::virtio::testing::{DATA, Driver, Machine, memory, reads, until, writes};
use crate::virtio::transport::register;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

pub const CID: u64 = 3;
const BUFFER: u64 = 4096;
const BUFFERS: u64 = 64;

/// A guest's vsock driver.
struct Guest {
    machine: Machine,
    driver: Driver,
    inbox: Vec<(Header, Vec<u8>)>,
    next_tx: u64,
}

impl Guest {
    fn start() -> Self {
        Self::on(Machine::new(memory(), vec![]).run())
    }

    fn on(machine: Machine) -> Self {
        let mut driver = Driver::start(&machine, machine.slot_of(19), 0);
        for n in 0..BUFFERS {
            driver.queues[0].add(&machine.mem, &[writes(DATA + n * 0x2000, u32::try_from(BUFFER).unwrap())]);
        }
        for n in 0..8 {
            driver.queues[2].add(&machine.mem, &[writes(DATA - 0x1000 + n * 8, 8)]);
        }
        for queue in [0, 2] {
            driver.kick(&machine, queue);
        }
        Self { machine, driver, inbox: Vec::new(), next_tx: 0 }
    }

    fn mem(&self) -> GuestMemoryMmap {
        self.machine.mem.clone()
    }

    /// Takes packets out of the receive queue and hands the buffers back.
    fn poll(&mut self) {
        let mem = self.mem();
        let old = self.driver.queues[0].avail_idx;
        for (head, len) in self.driver.queues[0].take_used(&mem) {
            let queue = &self.driver.queues[0];
            let address: u64 = mem.read_obj(GuestAddress(queue.desc + u64::from(head) * 16)).unwrap();
            let mut bytes = vec![0; len as usize];
            mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
            let header = Header::decode(bytes[..HEADER_BYTES].try_into().unwrap());
            assert_eq!(header.len as usize + HEADER_BYTES, bytes.len());
            assert_eq!((header.src_cid, header.dst_cid, header.kind), (2, CID, 1));
            self.inbox.push((header, bytes.split_off(HEADER_BYTES)));
            self.driver.queues[0].add(&mem, &[writes(address, u32::try_from(BUFFER).unwrap())]);
        }
        if self.driver.queues[0].avail_idx != old {
            self.driver.kick_if_wanted(&self.machine, 0, old);
        }
    }

    fn expect(&mut self, wanted: u16) -> (Header, Vec<u8>) {
        let mut found = None;
        until(&format!("a packet of operation {wanted} comes"), || {
            self.poll();
            found = self.inbox.iter().position(|(h, _)| h.op == wanted);
            found.is_some()
        });
        self.inbox.remove(found.unwrap())
    }

    fn send(&mut self, header: &Header, data: &[u8]) {
        let mem = self.mem();
        let at = DATA + 0x40_0000 + self.next_tx % 64 * 0x2_0000;
        self.next_tx += 1;
        let header = Header { len: u32::try_from(data.len()).unwrap(), ..*header };
        mem.write_slice(&header.encode(), GuestAddress(at)).unwrap();
        mem.write_slice(data, GuestAddress(at + 0x1000)).unwrap();
        let old = self.driver.queues[1].avail_idx;
        let mut pieces = vec![reads(at, 44)];
        // As MSG_ZEROCOPY does: many pieces.
        for (n, part) in data.chunks(10_000).enumerate() {
            pieces.push(reads(at + 0x1000 + n as u64 * 10_000, u32::try_from(part.len()).unwrap()));
        }
        self.driver.queues[1].add(&mem, &pieces);
        self.driver.kick_if_wanted(&self.machine, 1, old);
        self.driver.queues[1].wait_used(&mem, 1);
    }

    /// A connection from the host to `port`, open.
    fn accept(&mut self, port: u32, credit: u32) -> (UnixStream, Flow) {
        let mut stream = self.connect(port);
        let (request, _) = self.expect(op::REQUEST);
        assert_eq!((request.dst_port, request.buf_alloc), (port, BUFFER_BYTES));
        let mut flow = Flow::new(port, request.src_port, credit);
        flow.hear(&request);
        self.send(&flow.header(op::RESPONSE), &[]);
        assert_eq!(line(&mut stream), format!("OK {}\n", request.src_port));
        (stream, flow)
    }

    fn connect(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.machine.folder.path().join("v")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        stream
    }
}

/// The guest's account of a connection.
#[derive(Debug, Clone)]
pub struct Flow {
    guest_port: u32,
    host_port: u32,
    credit: u32,
    taken: u32,
    pub sent: u32,
    host_forwarded: u32,
}

impl Flow {
    pub const fn new(guest_port: u32, host_port: u32, credit: u32) -> Self {
        Self { guest_port, host_port, credit, taken: 0, sent: 0, host_forwarded: 0 }
    }

    pub fn header(&self, op: u16) -> Header {
        Header {
            src_cid: CID,
            dst_cid: 2,
            src_port: self.guest_port,
            dst_port: self.host_port,
            kind: 1,
            op,
            buf_alloc: self.credit,
            fwd_cnt: self.taken,
            ..Header::default()
        }
    }

    pub fn shutdown(&self, flags: u32) -> Header {
        Header { flags, ..self.header(op::SHUTDOWN) }
    }

    fn hear(&mut self, header: &Header) {
        self.host_forwarded = header.fwd_cnt;
    }

    fn may_send(&self) -> usize {
        (BUFFER_BYTES - self.sent.wrapping_sub(self.host_forwarded)) as usize
    }
}

/// One line, byte by byte: what follows stays in the stream.
pub fn line(stream: &mut UnixStream) -> String {
    let mut out = Vec::new();
    let mut byte = [0];
    while out.last() != Some(&b'\n') {
        stream.read_exact(&mut byte).unwrap();
        out.push(byte[0]);
    }
    String::from_utf8(out).unwrap()
}

/// Whether the other side closed, with or without having read all.
pub fn ended(stream: &mut UnixStream) -> bool {
    match stream.read(&mut [0; 8]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n.wrapping_mul(31) >> 3) as u8).collect()
}

#[test]
fn a_host_connection_carries_bytes_both_ways() {
    let mut guest = Guest::start();
    let (mut stream, mut flow) = guest.accept(1024, 1 << 16);
    stream.write_all(b"to the guest").unwrap();
    let (header, data) = guest.expect(op::RW);
    assert_eq!((header.src_port, header.dst_port), (flow.host_port, 1024));
    assert_eq!(data, b"to the guest");
    flow.taken += 12;
    guest.send(&flow.header(op::RW), b"to the host");
    let mut got = [0; 11];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"to the host");
}

#[test]
fn the_host_sends_within_the_guests_credit_and_all_arrives() {
    let mut guest = Guest::start();
    let (stream, mut flow) = guest.accept(7, 10_000);
    let sent = pattern(1 << 20);
    let (mut writer, bytes) = (stream.try_clone().unwrap(), sent.clone());
    let thread = std::thread::spawn(move || {
        writer.write_all(&bytes).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut got: Vec<u8> = Vec::new();
    let mut outstanding = 0;
    loop {
        let mut packet = None;
        until("data, a request for credit, or the end", || {
            guest.poll();
            packet = (!guest.inbox.is_empty()).then(|| guest.inbox.remove(0));
            packet.is_some()
        });
        let (header, data) = packet.unwrap();
        match header.op {
            op::RW => {
                got.extend(&data);
                outstanding += data.len();
                assert!(outstanding <= 10_000, "{outstanding} bytes without credit for them");
            }
            op::CREDIT_REQUEST => {
                flow.taken = u32::try_from(got.len()).unwrap();
                outstanding = 0;
                guest.send(&flow.header(op::CREDIT_UPDATE), &[]);
            }
            op::SHUTDOWN => {
                assert_eq!(header.flags, SHUTDOWN_SEND);
                break;
            }
            other => panic!("operation {other}"),
        }
    }
    thread.join().unwrap();
    assert!(got == sent);
}

#[test]
fn the_guest_gets_credit_as_the_host_reads_and_all_arrives() {
    let mut guest = Guest::start();
    let (stream, mut flow) = guest.accept(7, 1 << 16);
    let sent = pattern(4 << 20);
    let mut reader = stream.try_clone().unwrap();
    let thread = std::thread::spawn(move || {
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        got
    });
    let mut at = 0;
    while at < sent.len() {
        let len = flow.may_send().min(sent.len() - at).min(60_000);
        if len == 0 {
            let (header, _) = guest.expect(op::CREDIT_UPDATE);
            flow.hear(&header);
            continue;
        }
        guest.send(&flow.header(op::RW), &sent[at..at + len]);
        flow.sent = flow.sent.wrapping_add(u32::try_from(len).unwrap());
        at += len;
    }
    guest.send(&flow.shutdown(SHUTDOWN_SEND), &[]);
    assert!(thread.join().unwrap() == sent);
}

#[test]
fn a_host_that_does_not_read_holds_up_nobody_else_and_loses_nothing_at_the_close() {
    let mut guest = Guest::start();
    let (mut slow, mut slow_flow) = guest.accept(7, 1 << 16);
    let sent = pattern(4 << 20);
    // Until the credit is used up: the socket's buffer and ours are full.
    let mut at = 0;
    loop {
        let len = slow_flow.may_send().min(50_000);
        if len == 0 {
            guest.send(&slow_flow.header(op::CREDIT_REQUEST), &[]);
            let (header, _) = guest.expect(op::CREDIT_UPDATE);
            slow_flow.hear(&header);
            if slow_flow.may_send() == 0 {
                break;
            }
            continue;
        }
        guest.send(&slow_flow.header(op::RW), &sent[at..at + len]);
        slow_flow.sent += u32::try_from(len).unwrap();
        at += len;
    }
    assert!(at > BUFFER_BYTES as usize);

    let (mut quick, quick_flow) = guest.accept(8, 1 << 16);
    guest.send(&quick_flow.header(op::RW), b"quick");
    let mut got = [0; 5];
    quick.read_exact(&mut got).unwrap();

    guest.send(&slow_flow.shutdown(SHUTDOWN_SEND | SHUTDOWN_RECEIVE), &[]);
    // Linux gives up waiting for the reset after 8 s and resets by itself.
    guest.send(&slow_flow.header(op::RST), &[]);
    // Its ports are free at once.
    let mut got = Vec::new();
    slow.read_to_end(&mut got).unwrap();
    assert!(got == sent[..at], "{} of {at} bytes", got.len());
    guest.send(&quick_flow.header(op::RW), b"still");
    let mut got = [0; 5];
    quick.read_exact(&mut got).unwrap();
}

#[test]
fn a_guest_that_takes_no_data_holds_up_nobody_else() {
    let mut guest = Guest::start();
    let (mut full, _) = guest.accept(7, 100);
    full.write_all(&[1; 5000]).unwrap();
    let (_, data) = guest.expect(op::RW);
    assert_eq!(data.len(), 100);
    guest.expect(op::CREDIT_REQUEST);
    let (mut other, _) = guest.accept(8, 1 << 16);
    other.write_all(&[2; 3000]).unwrap();
    assert_eq!(guest.expect(op::RW).1, [2; 3000]);
    assert!(guest.inbox.is_empty(), "{:?}", guest.inbox);
}

#[test]
fn each_direction_ends_alone() {
    let mut guest = Guest::start();
    // The guest's first.
    let (mut stream, flow) = guest.accept(7, 1 << 16);
    guest.send(&flow.header(op::RW), b"last words");
    guest.send(&flow.shutdown(SHUTDOWN_SEND), &[]);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"last words");
    stream.write_all(b"answer").unwrap();
    assert_eq!(guest.expect(op::RW).1, b"answer");
    drop(stream);
    let (header, _) = guest.expect(op::SHUTDOWN);
    assert_eq!(header.flags & SHUTDOWN_SEND, SHUTDOWN_SEND);
    guest.expect(op::RST);

    // The host's first.
    let (mut stream, flow) = guest.accept(8, 1 << 16);
    stream.write_all(b"question").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.expect(op::RW).1, b"question");
    assert_eq!(guest.expect(op::SHUTDOWN).0.flags, SHUTDOWN_SEND);
    guest.send(&flow.header(op::RW), b"answer");
    guest.send(&flow.shutdown(SHUTDOWN_SEND | SHUTDOWN_RECEIVE), &[]);
    guest.expect(op::RST);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"answer");
    guest.send(&flow.header(op::RW), b"too late");
    guest.expect(op::RST);
}

#[test]
fn what_the_host_sent_before_it_closed_arrives_before_the_end() {
    let mut guest = Guest::start();
    let (mut stream, _) = guest.accept(7, 1 << 20);
    let sent = pattern(150_000);
    stream.write_all(&sent).unwrap();
    drop(stream);
    let mut got: Vec<u8> = Vec::new();
    let mut flags = 0;
    until("all of it and the end", || {
        guest.poll();
        for (header, data) in guest.inbox.drain(..) {
            match header.op {
                op::RW => got.extend(data),
                op::SHUTDOWN => flags |= header.flags,
                other => panic!("operation {other}"),
            }
            assert!(flags & SHUTDOWN_SEND == 0 || got.len() == sent.len(), "the end came before the data");
        }
        flags == SHUTDOWN_SEND | SHUTDOWN_RECEIVE
    });
    assert!(got == sent);
}

#[test]
fn a_guest_that_closes_with_the_hosts_data_unread_does_not_cost_the_host_its_own() {
    let mut guest = Guest::start();
    let (mut stream, flow) = guest.accept(7, 4);
    stream.write_all(&[1; 10_000]).unwrap();
    guest.expect(op::RW);
    guest.send(&flow.header(op::RW), b"result");
    guest.send(&flow.shutdown(SHUTDOWN_SEND | SHUTDOWN_RECEIVE), &[]);
    guest.expect(op::RST);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"result");
    assert_eq!(stream.write_all(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn the_guest_connects_to_sockets_of_the_host() {
    let mut guest = Guest::start();
    let path = socket_path(&guest.machine.folder.path().join("v"), 1025);
    let listener = UnixListener::bind(path).unwrap();
    let mut flow = Flow::new(5000, 1025, 1 << 16);
    guest.send(&flow.header(op::REQUEST), &[]);
    let (response, _) = guest.expect(op::RESPONSE);
    assert_eq!((response.src_port, response.dst_port, response.buf_alloc), (1025, 5000, BUFFER_BYTES));
    let (mut stream, _) = listener.accept().unwrap();
    guest.send(&flow.header(op::RW), b"ready");
    guest.send(&flow.shutdown(SHUTDOWN_SEND | SHUTDOWN_RECEIVE), &[]);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"ready");
    guest.expect(op::RST);

    flow.host_port = 1026;
    guest.send(&flow.header(op::REQUEST), &[]);
    let (reset, _) = guest.expect(op::RST);
    assert_eq!((reset.src_port, reset.dst_port), (1026, 5000));
}

#[test]
fn a_refused_or_malformed_connect_ends_the_stream() {
    let mut guest = Guest::start();
    let mut refused = guest.connect(7);
    let (request, _) = guest.expect(op::REQUEST);
    let flow = Flow::new(7, request.src_port, 0);
    guest.send(&flow.header(op::RST), &[]);
    assert_eq!(refused.read(&mut [0; 8]).unwrap(), 0);
    for bad in [
        "CONNECT x\n",
        "CONNECT \n",
        "CONNECT 4294967296\n",
        "GET / HTTP/1.1\r\n\r\n",
        "connect 7\n",
        "CONNECT +7\n",
        "CONNECT 0000000000000000007\n",
        "\n",
    ] {
        let mut stream = UnixStream::connect(guest.machine.folder.path().join("v")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(bad.as_bytes()).unwrap();
        assert!(ended(&mut stream), "{bad:?}");
    }
    guest.poll();
    assert!(guest.inbox.is_empty());
    // In pieces, and with data right behind it.
    let mut stream = UnixStream::connect(guest.machine.folder.path().join("v")).unwrap();
    for piece in ["CONN", "ECT 9", "\nhello"] {
        stream.write_all(piece.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    let (request, _) = guest.expect(op::REQUEST);
    let flow = Flow::new(9, request.src_port, 1 << 16);
    guest.send(&flow.header(op::RESPONSE), &[]);
    assert_eq!(guest.expect(op::RW).1, b"hello");
}

#[test]
fn a_connect_waits_for_the_driver() {
    let machine = Machine::new(memory(), vec![]).run();
    let mut stream = UnixStream::connect(machine.folder.path().join("v")).unwrap();
    stream.write_all(b"CONNECT 1024\n").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let mut guest = Guest::on(machine);
    let (request, _) = guest.expect(op::REQUEST);
    let flow = Flow::new(1024, request.src_port, 1 << 16);
    guest.send(&flow.header(op::RESPONSE), &[]);
    assert_eq!(line(&mut stream), format!("OK {}\n", request.src_port));
}

#[test]
fn a_driver_that_resets_forgets_connections_but_not_those_it_never_heard_of() {
    let mut guest = Guest::start();
    let (mut old, _) = guest.accept(7, 1 << 16);
    // Let the thread fall asleep, so that only the reset can wake it.
    std::thread::sleep(Duration::from_millis(100));
    guest.machine.write(guest.driver.slot, register::STATUS, 0);
    assert_eq!(old.read(&mut [0; 8]).unwrap(), 0);
    let waiting = guest.connect(8);
    std::thread::sleep(Duration::from_millis(50));
    let Guest { machine, .. } = guest;
    let mut guest = Guest::on(machine);
    assert_eq!(guest.expect(op::REQUEST).0.dst_port, 8);
    drop(waiting);
}

#[test]
fn a_driver_that_breaks_the_rules_ends_its_connections() {
    let mut guest = Guest::start();
    let (mut stream, _) = guest.accept(7, 1 << 16);
    let mem = guest.mem();
    // A header that names more data than there is.
    let header = Header { len: 1, ..Flow::new(7, 1, 1).header(op::RW) };
    mem.write_slice(&header.encode(), GuestAddress(DATA + 0x80_0000)).unwrap();
    guest.driver.queues[1].add(&mem, &[reads(DATA + 0x80_0000, 44)]);
    guest.driver.kick(&guest.machine, 1);
    assert!(ended(&mut stream));
    assert_eq!(guest.machine.read(guest.driver.slot, register::STATUS), 15 + 64);
}

/// After a load nothing overtakes the news that the connections are gone, and a connection made at once waits for it.
#[test]
fn after_a_load_the_guest_hears_of_the_reset_first() {
    let mut guest = Guest::start();
    let (stream, flow) = guest.accept(7, 1 << 16);
    guest.machine.set.pause();
    // The guest was about to send, and to connect.
    let saved = guest.machine.set.save();
    let mem = guest.mem();
    let mut driver = guest.driver.clone();
    drop((stream, guest));

    let machine = Machine::new(mem.clone(), vec![]);
    let listener = UnixListener::bind(socket_path(&machine.folder.path().join("v"), 99)).unwrap();
    machine.set.load(&saved).unwrap();
    for (header, at) in [(flow.header(op::RW), 0), (Flow::new(55, 99, 1 << 16).header(op::REQUEST), 0x1000)] {
        let at = DATA + 0x80_0000 + at;
        mem.write_slice(&header.encode(), GuestAddress(at)).unwrap();
        driver.queues[1].add(&mem, &[reads(at, 44)]);
    }
    let mut early = UnixStream::connect(machine.folder.path().join("v")).unwrap();
    early.write_all(b"CONNECT 1024\n").unwrap();
    let machine = machine.run();

    let used = driver.queues[2].wait_used(&mem, 1);
    assert_eq!(used, [(0, 4)]);
    assert_eq!(mem.read_obj::<u32>(GuestAddress(DATA - 0x1000)).unwrap(), 0, "TRANSPORT_RESET");
    std::thread::sleep(Duration::from_millis(100));
    assert!(driver.queues[0].take_used(&mem).is_empty(), "a packet overtook the event");
    assert!(driver.queues[1].take_used(&mem).is_empty(), "a packet of the past was served before the event");

    let old = driver.queues[2].avail_idx;
    driver.queues[2].add(&mem, &[writes(DATA - 0x1000, 8)]);
    assert!(driver.queues[2].kick_wanted(&mem, old), "the device asked to hear of the buffer");
    driver.kick_if_wanted(&machine, 2, old);
    let mut guest = Guest { machine, driver, inbox: Vec::new(), next_tx: 0 };
    let (request, _) = guest.expect(op::REQUEST);
    assert_eq!(request.dst_port, 1024);
    let (reset, _) = guest.expect(op::RST);
    assert_eq!((reset.src_port, reset.dst_port), (flow.host_port, 7), "the old connection is unknown");
    guest.expect(op::RESPONSE);
    listener.accept().unwrap();
    let flow = Flow::new(1024, request.src_port, 1 << 16);
    guest.send(&flow.header(op::RESPONSE), &[]);
    assert_eq!(line(&mut early), format!("OK {}\n", request.src_port));
}

/// A guest without connections is not told of their end, so that nothing waits for its answer.
#[test]
fn after_a_load_a_guest_without_connections_is_connected_to_at_once() {
    let mut guest = Guest::start();
    // One that is over: the guest was told of the end of both directions.
    let (stream, _flow) = guest.accept(7, 1 << 16);
    drop(stream);
    until("the guest hears of the end", || {
        guest.poll();
        let flags =
            guest.inbox.iter().filter(|(h, _)| h.op == op::SHUTDOWN).fold(0, |all, (h, _)| all | h.flags);
        flags == SHUTDOWN_SEND | SHUTDOWN_RECEIVE
    });
    guest.machine.set.pause();
    let saved = guest.machine.set.save();
    let (mem, driver) = (guest.mem(), guest.driver.clone());
    drop(guest);
    let machine = Machine::new(mem.clone(), vec![]);
    machine.set.load(&saved).unwrap();
    let mut guest = Guest { machine: machine.run(), driver, inbox: Vec::new(), next_tx: 0 };
    let mut stream = guest.connect(8);
    let (request, _) = guest.expect(op::REQUEST);
    let flow = Flow::new(8, request.src_port, 1 << 16);
    guest.send(&flow.header(op::RESPONSE), &[]);
    assert_eq!(line(&mut stream), format!("OK {}\n", request.src_port));
    assert!(guest.driver.queues[2].take_used(&mem).is_empty(), "no event");

    // What was loaded and not told yet is told to the clone's clone.
    let connected = |machine: &Machine| match machine.set.save().devices[0].kind {
        crate::virtio::KindState::Vsock(state) => state.connected,
        _ => panic!("not the vsock device"),
    };
    assert!(connected(&guest.machine));
    guest.machine.set.pause();
    let saved = guest.machine.set.save();
    let untold = Machine::new(mem, vec![]);
    untold.set.load(&saved).unwrap();
    assert!(connected(&untold));
}

#[test]
fn a_guest_that_sends_without_credit_is_reset() {
    let mut guest = Guest::start();
    let (mut stream, mut flow) = guest.accept(7, 1 << 16);
    let mut sent = 0;
    // Nobody reads: at some point there is no more credit, and the guest goes on regardless.
    let reset = loop {
        guest.send(&flow.header(op::RW), &[1; 60_000]);
        sent += 60_000;
        guest.poll();
        if let Some(at) = guest.inbox.iter().position(|(h, _)| h.op == op::RST) {
            break guest.inbox.remove(at).0;
        }
        assert!(sent < 4 << 20, "never reset");
        flow.sent += 60_000;
    };
    assert_eq!(reset.dst_port, 7);
    // The host gets what came before, then the end.
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got);
    assert!(got.len() < sent);
}

#[test]
fn more_connections_than_allowed_are_closed_at_once() {
    let guest = Guest::start();
    let path = guest.machine.folder.path().join("v");
    let mut held: Vec<_> = (0..MAX_CONNECTIONS).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut over = UnixStream::connect(&path).unwrap();
    over.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(over.read(&mut [0; 1]).unwrap(), 0);
    held.pop();
    let mut guest = guest;
    until("one that ended makes room", || {
        let _stream = guest.connect(9);
        std::thread::sleep(Duration::from_millis(5));
        guest.poll();
        guest.inbox.iter().any(|(h, _)| h.op == op::REQUEST)
    });
}
