//! Connections between a guest and programs of its host. An input is a sequence of events.

use crate::events::Events;
use crate::scratch;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_vmm::virtio::fuzzing::vsock::{BUFFER, Connections, HEADER, Header, op};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "vsock",
    what: "connections, credit and shutdown",
    stateful: true,
    most_bytes: 2048,
    heap: Heap { fixed: 8 << 20, per_byte: 64 << 10 },
    run: vsock,
    seeds,
}];

const GUEST: u8 = 0;
const KNOWN: u8 = 1;
const CONNECT: u8 = 2;
const HOST_WRITES: u8 = 3;
const HOST_READS: u8 = 4;
const HOST_ENDS: u8 = 5;
const PACKETS: u8 = 6;
const LATER: u8 = 7;
const FORGET: u8 = 8;
const CALL: u8 = 9;
const EVENTS: u8 = 10;
/// The unit of time that passes; 100 of them are the longest wait for an answer.
const STEP: Duration = Duration::from_millis(1200);

/// Of a connection: the guest's buffer, what the guest has taken, what was sent to it.
#[derive(Default, Clone, Copy)]
struct Credit {
    buffer: u32,
    taken: u32,
    sent: u32,
}

struct World {
    connections: Connections,
    folder: tempfile::TempDir,
    listener: UnixListener,
    streams: Vec<UnixStream>,
    credit: HashMap<(u32, u32), Credit>,
    data_packets: u32,
}

fn listen(path: &std::path::Path) -> UnixListener {
    let listener = UnixListener::bind(path).unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(scratch::folder()).unwrap();
        let path = folder.path().join("v");
        let connections = Connections::new(listen(&path).into(), path).unwrap();
        let listener = listen(&folder.path().join("v_1"));
        let (streams, credit) = (Vec::new(), HashMap::new());
        Self { connections, folder, listener, streams, credit, data_packets: 0 }
    }

    fn guest(&mut self, header: &Header, length: usize) {
        if header.src_cid == 3 && header.dst_cid == 2 && header.kind == 1 {
            let entry = self.credit.entry((header.dst_port, header.src_port)).or_default();
            (entry.buffer, entry.taken) = (header.buf_alloc, header.fwd_cnt);
        }
        let length = length % 8192;
        let header = Header { len: u32::try_from(length).unwrap(), ..*header };
        self.connections.on_packet(&header, &mut vec![1; length]);
    }

    /// Counts a packet to the guest. Its data must not exceed the guest's last credit.
    fn count(&mut self, header: &Header, data: &[u8]) {
        let key = (header.src_port, header.dst_port);
        match header.op {
            op::REQUEST => {
                self.credit.insert(key, Credit::default());
            }
            op::RESPONSE => self.credit.entry(key).or_default().sent = 0,
            op::RW => {
                let entry = self.credit.entry(key).or_default();
                entry.sent = entry.sent.wrapping_add(u32::try_from(data.len()).unwrap());
                let outstanding = entry.sent.wrapping_sub(entry.taken);
                assert!(outstanding <= entry.buffer, "{outstanding} of {}", entry.buffer);
                self.data_packets += 1;
            }
            _ => assert!(data.is_empty(), "operation {} with data", header.op),
        }
    }

    fn event(&mut self, events: &mut Events<'_>) -> Option<()> {
        match events.byte()? % EVENTS {
            GUEST => {
                let bytes: [u8; HEADER] = std::array::from_fn(|_| events.byte().unwrap_or(0));
                assert_eq!(Header::decode(&bytes).encode(), bytes, "a header");
                self.guest(&Header::decode(&bytes), usize::from(events.word()?));
            }
            KNOWN => {
                let (which, op) = (usize::from(events.byte()?), u16::from(events.byte()? % 9));
                let (flags, length) = (u32::from(events.byte()?), usize::from(events.word()?));
                let (buf_alloc, fwd_cnt) = (events.long()?, events.long()?);
                let all = self.connections.all();
                if let Some((host, guest, _)) = all.get(which % all.len().max(1)) {
                    let header = Header {
                        src_cid: 3,
                        dst_cid: 2,
                        src_port: *guest,
                        dst_port: *host,
                        kind: 1,
                        op,
                        flags,
                        buf_alloc,
                        fwd_cnt,
                        len: 0,
                    };
                    self.guest(&header, length);
                }
            }
            kind @ (CONNECT | HOST_WRITES | HOST_READS | HOST_ENDS) => {
                self.host_event(kind, events)?;
            }
            PACKETS => {
                let room = 1 + usize::from(events.word()? % 8192);
                for _ in 0..events.byte()? {
                    let Some((header, data)) = self.connections.next_packet(room) else { break };
                    self.count(&header, &data);
                }
            }
            LATER => {
                self.connections.later(STEP * u32::from(events.byte()?));
            }
            FORGET => {
                self.connections.forget_guest();
                self.credit.clear();
            }
            _ => {
                let (src_port, buf_alloc) = (u32::from(events.word()?), events.long()?);
                let (src_cid, dst_cid, dst_port, kind) = (3, 2, 1, 1);
                let op = op::REQUEST;
                let header = Header {
                    src_cid,
                    dst_cid,
                    src_port,
                    dst_port,
                    kind,
                    op,
                    buf_alloc,
                    ..Header::default()
                };
                self.guest(&header, 0);
            }
        }
        Some(())
    }

    /// What programs of the host do.
    fn host_event(&mut self, kind: u8, events: &mut Events<'_>) -> Option<()> {
        match kind {
            CONNECT => {
                let line = events.bytes()?;
                if let Ok(mut stream) = UnixStream::connect(self.folder.path().join("v")) {
                    stream.set_nonblocking(true).unwrap();
                    let _ = stream.write(line);
                    self.streams.push(stream);
                }
            }
            HOST_WRITES => {
                let (which, length) = (usize::from(events.byte()?), usize::from(events.word()?));
                if let Some(mut stream) = self.streams.get(which) {
                    let _ = stream.write(&vec![2; length]);
                }
            }
            HOST_READS => {
                let (which, length) = (usize::from(events.byte()?), usize::from(events.word()?));
                if let Some(mut stream) = self.streams.get(which) {
                    let _ = stream.read(&mut vec![0; length]);
                }
            }
            _ => {
                let (which, how) = (usize::from(events.byte()?), events.byte()? % 3);
                match (self.streams.get(which), how) {
                    (None, _) => {}
                    (Some(_), 0) => drop(self.streams.remove(which)),
                    (Some(stream), 1) => drop(stream.shutdown(Shutdown::Write)),
                    (Some(stream), _) => drop(stream.shutdown(Shutdown::Read)),
                }
            }
        }
        Some(())
    }

    fn settle(&mut self) {
        if let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(true).unwrap();
            self.streams.push(stream);
        }
        self.connections.events().unwrap();
        for (host, guest, buffered) in self.connections.all() {
            assert!(buffered <= BUFFER as usize, "{buffered} bytes of {host} and {guest}");
        }
        assert!(self.connections.within_limits(), "too many connections");
    }
}

fn vsock(input: &[u8]) -> Outcome {
    let (mut world, mut events, mut count) = (World::new(), Events::new(input), 0);
    while count < 256 && world.event(&mut events).is_some() {
        world.settle();
        count += 1;
    }
    planted(|| world.data_packets >= 3 && world.connections.all().len() >= 2);
    Outcome::of(count > 0)
}

fn seeds() -> Vec<Vec<u8>> {
    let connect = [&[CONNECT, 10][..], b"CONNECT 7\n", &[PACKETS, 0, 16, 2]].concat();
    let known = |op: u8, length: u16| {
        let [a, b] = length.to_le_bytes();
        [&[KNOWN, 0, op, 0, a, b][..], &65536_u32.to_le_bytes(), &[0; 4]].concat()
    };
    let host = [
        connect.clone(),
        known(2, 0),
        vec![HOST_WRITES, 0, 100, 0, PACKETS, 0, 16, 4, HOST_READS, 0, 9, 0],
        known(5, 50),
        vec![HOST_READS, 0, 50, 0],
        known(6, 0),
        vec![HOST_ENDS, 0, 1, PACKETS, 0, 16, 4],
        known(4, 0),
        vec![LATER, 200, FORGET],
    ];
    let call = [
        vec![CALL, 9, 0, 0, 0, 1, 0, PACKETS, 0, 16, 2],
        known(5, 3000),
        vec![HOST_READS, 0, 0, 8, HOST_WRITES, 0, 0, 8, PACKETS, 0, 16, 4],
        known(7, 0),
        known(3, 0),
    ];
    let mut odd = vec![GUEST];
    odd.extend((0..46).map(|n| n * 5));
    vec![host.concat(), call.concat(), odd, [&[CONNECT, 4][..], b"CONN", &[LATER, 255]].concat()]
}
