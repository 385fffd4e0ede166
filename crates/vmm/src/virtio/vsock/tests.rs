use super::connection::BUFFER_BYTES;
use super::muxer::{MAX_CONNECTIONS, socket_path};
use super::packet::{Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use super::testing::{Flow, Guest, ended, line, pattern};
use crate::virtio::registers::register;
use crate::virtio::testing::{DATA, Machine, memory, reads, until, writes};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use vm_memory::{Bytes as _, GuestAddress};

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
fn a_host_that_does_not_read_delays_no_other_and_loses_nothing_at_the_close() {
    let mut guest = Guest::start();
    let (mut slow, mut slow_flow) = guest.accept(7, 1 << 16);
    let sent = pattern(4 << 20);
    // Send until the credit is used up: the socket's buffer and the device's are full.
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
    // Linux waits 8 s for the reset, and then sends one itself.
    guest.send(&slow_flow.header(op::RST), &[]);
    // The connection's ports are free at once.
    let mut got = Vec::new();
    slow.read_to_end(&mut got).unwrap();
    assert!(got == sent[..at], "{} of {at} bytes", got.len());
    guest.send(&quick_flow.header(op::RW), b"still");
    let mut got = [0; 5];
    quick.read_exact(&mut got).unwrap();
}

#[test]
fn a_guest_that_takes_no_data_delays_no_other_connection() {
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
    // The guest ends first.
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

    // The host ends first.
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
            assert!(
                flags & SHUTDOWN_SEND == 0 || got.len() == sent.len(),
                "the end came before the data"
            );
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
    assert_eq!(
        (response.src_port, response.dst_port, response.buf_alloc),
        (1025, 5000, BUFFER_BYTES)
    );
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
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        stream.write_all(bad.as_bytes()).unwrap();
        assert!(ended(&mut stream), "{bad:?}");
    }
    guest.poll();
    assert!(guest.inbox.is_empty());
    // The line comes in pieces, with data right behind it.
    let mut stream = UnixStream::connect(guest.machine.folder.path().join("v")).unwrap();
    for piece in ["CONN", "ECT 9", "\nhello"] {
        stream.write_all(piece.as_bytes()).unwrap();
        guest.machine.take_caller();
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
    machine.take_caller();
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
    // The thread falls asleep, so that only the reset can wake it.
    guest.machine.turn();
    guest.machine.set.pause();
    guest.machine.set.resume();
    guest.machine.write(guest.driver.slot, register::STATUS, 0);
    assert_eq!(old.read(&mut [0; 8]).unwrap(), 0);
    let waiting = guest.connect(8);
    guest.machine.take_caller();
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
    // The header names more data than the chain has.
    let header = Header { len: 1, ..Flow::new(7, 1, 1).header(op::RW) };
    mem.write_slice(&header.encode(), GuestAddress(DATA + 0x80_0000)).unwrap();
    guest.driver.queues[1].add(&mem, &[reads(DATA + 0x80_0000, 44)]);
    guest.driver.kick(&guest.machine, 1);
    assert!(ended(&mut stream));
    assert_eq!(guest.machine.read(guest.driver.slot, register::STATUS), 15 + 64);
}

/// After a load no packet overtakes the reset event, and a connection made at once waits for it.
#[test]
fn after_a_load_the_guest_hears_of_the_reset_first() {
    let mut guest = Guest::start();
    let (stream, flow) = guest.accept(7, 1 << 16);
    guest.machine.set.pause();
    // The guest is about to send on the connection, and to open another one.
    let saved = guest.machine.set.save();
    let mem = guest.mem();
    let mut driver = guest.driver.clone();
    drop((stream, guest));

    let machine = Machine::new(mem.clone(), vec![]);
    let listener = UnixListener::bind(socket_path(&machine.folder.path().join("v"), 99)).unwrap();
    machine.set.load(&saved).unwrap();
    for (header, at) in
        [(flow.header(op::RW), 0), (Flow::new(55, 99, 1 << 16).header(op::REQUEST), 0x1000)]
    {
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
    machine.take_caller();
    machine.turn();
    assert!(driver.queues[0].take_used(&mem).is_empty(), "a packet overtook the event");
    assert!(
        driver.queues[1].take_used(&mem).is_empty(),
        "a packet of the past was served before the event"
    );

    let old = driver.queues[2].avail_idx;
    driver.queues[2].add(&mem, &[writes(DATA - 0x1000, 8)]);
    assert!(driver.queues[2].kick_wanted(&mem, old), "the device asked to hear of the buffer");
    driver.kick_if_wanted(&machine, 2, old);
    let mut guest = Guest { machine, driver, inbox: Vec::new(), next_tx: 0 };
    let (request, _) = guest.expect(op::REQUEST);
    assert_eq!(request.dst_port, 1024);
    let (reset, _) = guest.expect(op::RST);
    assert_eq!(
        (reset.src_port, reset.dst_port),
        (flow.host_port, 7),
        "the old connection is unknown"
    );
    guest.expect(op::RESPONSE);
    listener.accept().unwrap();
    let flow = Flow::new(1024, request.src_port, 1 << 16);
    guest.send(&flow.header(op::RESPONSE), &[]);
    assert_eq!(line(&mut early), format!("OK {}\n", request.src_port));
}

/// A guest without connections gets no reset event, so a new connection need not wait.
#[test]
fn after_a_load_a_guest_without_connections_is_connected_to_at_once() {
    let mut guest = Guest::start();
    // This connection is over, because the guest has got SHUTDOWN for both directions.
    let (stream, _flow) = guest.accept(7, 1 << 16);
    drop(stream);
    until("the guest hears of the end", || {
        guest.poll();
        let flags = guest
            .inbox
            .iter()
            .filter(|(h, _)| h.op == op::SHUTDOWN)
            .fold(0, |all, (h, _)| all | h.flags);
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

    // A reset event that was not sent before the next save is sent after the next load.
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
    // The host's program does not read, so the credit runs out, and the guest sends on.
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
    // The host gets the data before that, then the end of stream.
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got);
    assert!(got.len() < sent);
}

#[test]
fn more_connections_than_allowed_are_closed_at_once() {
    let guest = Guest::start();
    let path = guest.machine.folder.path().join("v");
    let mut held: Vec<_> =
        (0..MAX_CONNECTIONS).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut over = UnixStream::connect(&path).unwrap();
    over.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    assert_eq!(over.read(&mut [0; 1]).unwrap(), 0);
    held.pop();
    guest.machine.turn();
    // One that ended makes room.
    let mut guest = guest;
    let _stream = guest.connect(9);
    guest.expect(op::REQUEST);
}
