//! The header of a vsock packet (virtio 1.2 section 5.10.6).
//!
//! The virtio-vsock crate is not used, because it takes a packet's data from one descriptor in one
//! piece of memory. Since 6.7, Linux sends a header and many pages (MSG_ZEROCOPY).

/// Bytes of a header.
pub const HEADER_BYTES: usize = 44;
/// The host's context id (VMADDR_CID_HOST).
pub const HOST_CID: u64 = 2;
/// The only type of socket supported here: SOCK_STREAM.
pub const TYPE_STREAM: u16 = 1;

/// Operations of a packet (`enum virtio_vsock_op`).
pub mod op {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub const RESPONSE: u16 = 2;
    /// Refuses or ends a connection.
    pub const RST: u16 = 3;
    /// Ends one or both directions of a connection.
    pub const SHUTDOWN: u16 = 4;
    /// Carries data.
    pub const RW: u16 = 5;
    /// Reports the sender's credit, unasked or as an answer.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for the receiver's credit.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// Flag of SHUTDOWN: its sender will receive no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of SHUTDOWN: its sender will send no more.
pub const SHUTDOWN_SEND: u32 = 2;

/// A packet's header, with its fields in wire order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header {
    /// Context id of the sender.
    pub src_cid: u64,
    /// Context id of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Bytes of data after the header.
    pub len: u32,
    /// Type of socket: [`TYPE_STREAM`].
    pub kind: u16,
    /// Operation: one of [`op`].
    pub op: u16,
    /// Flags of SHUTDOWN.
    pub flags: u32,
    /// Bytes that the sender buffers for the connection.
    pub buf_alloc: u32,
    /// Bytes that the sender has taken out of its buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Reads a header from its wire format; any bytes are valid.
    #[must_use]
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(part(bytes, 0)),
            dst_cid: u64::from_le_bytes(part(bytes, 8)),
            src_port: u32::from_le_bytes(part(bytes, 16)),
            dst_port: u32::from_le_bytes(part(bytes, 20)),
            len: u32::from_le_bytes(part(bytes, 24)),
            kind: u16::from_le_bytes(part(bytes, 28)),
            op: u16::from_le_bytes(part(bytes, 30)),
            flags: u32::from_le_bytes(part(bytes, 32)),
            buf_alloc: u32::from_le_bytes(part(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(part(bytes, 40)),
        }
    }

    /// The header in its wire format.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        out
    }

    /// The reset that answers this packet. A packet of no connection gets one (5.10.6.4.1).
    #[must_use]
    pub const fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            len: 0,
            kind: self.kind,
            op: op::RST,
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        }
    }
}

fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
