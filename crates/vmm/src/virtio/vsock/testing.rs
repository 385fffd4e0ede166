//! A guest's vsock driver, and the host's side of its connections.

#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::connection::BUFFER_BYTES;
pub use super::packet::op;
use super::packet::{HEADER_BYTES, Header};
use crate::virtio::testing::{DATA, Driver, Machine, memory, reads, until, writes};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

pub const CID: u64 = 3;
pub const BUFFER: u64 = 4096;
pub const BUFFERS: u64 = 64;

/// A guest's vsock driver.
pub struct Guest {
    pub machine: Machine,
    pub driver: Driver,
    pub inbox: Vec<(Header, Vec<u8>)>,
    pub next_tx: u64,
}

impl Guest {
    pub fn start() -> Self {
        Self::on(Machine::new(memory(), vec![]).run())
    }

    pub fn on(machine: Machine) -> Self {
        let mut driver = Driver::start(&machine, machine.slot_of(19), 0);
        for n in 0..BUFFERS {
            driver.queues[0]
                .add(&machine.mem, &[writes(DATA + n * 0x2000, u32::try_from(BUFFER).unwrap())]);
        }
        for n in 0..8 {
            driver.queues[2].add(&machine.mem, &[writes(DATA - 0x1000 + n * 8, 8)]);
        }
        for queue in [0, 2] {
            driver.kick(&machine, queue);
        }
        Self { machine, driver, inbox: Vec::new(), next_tx: 0 }
    }

    pub fn mem(&self) -> GuestMemoryMmap {
        self.machine.mem.clone()
    }

    /// Takes packets out of the receive queue and makes the buffers available again.
    pub fn poll(&mut self) {
        let mem = self.mem();
        let old = self.driver.queues[0].avail_idx;
        for (head, len) in self.driver.queues[0].take_used(&mem) {
            let queue = &self.driver.queues[0];
            let address: u64 =
                mem.read_obj(GuestAddress(queue.desc + u64::from(head) * 16)).unwrap();
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

    pub fn expect(&mut self, wanted: u16) -> (Header, Vec<u8>) {
        let mut found = None;
        until(&format!("a packet of operation {wanted} comes"), || {
            self.poll();
            found = self.inbox.iter().position(|(h, _)| h.op == wanted);
            found.is_some()
        });
        self.inbox.remove(found.unwrap())
    }

    pub fn send(&mut self, header: &Header, data: &[u8]) {
        let mem = self.mem();
        let at = DATA + 0x40_0000 + self.next_tx % 64 * 0x2_0000;
        self.next_tx += 1;
        let header = Header { len: u32::try_from(data.len()).unwrap(), ..*header };
        mem.write_slice(&header.encode(), GuestAddress(at)).unwrap();
        mem.write_slice(data, GuestAddress(at + 0x1000)).unwrap();
        let old = self.driver.queues[1].avail_idx;
        let mut pieces = vec![reads(at, 44)];
        // Many pieces, as with MSG_ZEROCOPY.
        for (n, part) in data.chunks(10_000).enumerate() {
            pieces.push(reads(at + 0x1000 + n as u64 * 10_000, u32::try_from(part.len()).unwrap()));
        }
        self.driver.queues[1].add(&mem, &pieces);
        self.driver.kick_if_wanted(&self.machine, 1, old);
        self.driver.queues[1].wait_used(&mem, 1);
    }

    /// An open connection from the host to `port`, in which the guest grants `credit` bytes.
    pub fn accept(&mut self, port: u32, credit: u32) -> (UnixStream, Flow) {
        let mut stream = self.connect(port);
        let (request, _) = self.expect(op::REQUEST);
        assert_eq!((request.dst_port, request.buf_alloc), (port, BUFFER_BYTES));
        let mut flow = Flow::new(port, request.src_port, credit);
        flow.hear(&request);
        self.send(&flow.header(op::RESPONSE), &[]);
        assert_eq!(line(&mut stream), format!("OK {}\n", request.src_port));
        (stream, flow)
    }

    pub fn connect(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.machine.folder.path().join("v")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        stream
    }
}

/// The guest's ports and credit of one connection.
#[derive(Debug, Clone)]
pub struct Flow {
    pub guest_port: u32,
    pub host_port: u32,
    pub credit: u32,
    pub taken: u32,
    pub sent: u32,
    pub host_forwarded: u32,
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

    pub fn hear(&mut self, header: &Header) {
        self.host_forwarded = header.fwd_cnt;
    }

    pub fn may_send(&self) -> usize {
        (BUFFER_BYTES - self.sent.wrapping_sub(self.host_forwarded)) as usize
    }
}

/// Reads one line, byte by byte, so that later bytes stay in the stream.
pub fn line(stream: &mut UnixStream) -> String {
    let mut out = Vec::new();
    let mut byte = [0];
    while out.last() != Some(&b'\n') {
        stream.read_exact(&mut byte).unwrap();
        out.push(byte[0]);
    }
    String::from_utf8(out).unwrap()
}

/// Whether the other side closed the stream, with or without having read all.
pub fn ended(stream: &mut UnixStream) -> bool {
    match stream.read(&mut [0; 8]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n.wrapping_mul(31) >> 3) as u8).collect()
}
