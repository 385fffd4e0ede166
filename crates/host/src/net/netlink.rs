//! Messages to the kernel over netlink(7): several in one system call, each acknowledged.

use netlink_packet_core::{Emitable, NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader};
use netlink_sys::{Socket, SocketAddr};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::time::Duration;

/// How long the kernel may take; it answers during the send, unless others hold its lock (RTNL).
const PATIENCE: Duration = Duration::from_secs(10);
/// Room for acknowledgements, each of which repeats at most its message.
const ANSWER_BYTES: usize = 64 << 10;
/// Of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;

/// What the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {errno}")]
pub struct NetlinkError {
    /// What was asked.
    pub what: String,
    /// Why not.
    pub errno: Errno,
}

/// Messages that are sent together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// What each is for; `None`: it is not acknowledged.
    asks: Vec<Option<String>>,
}

impl Batch {
    /// Adds a message of type `kind` with these NLM_F_*.
    pub(super) fn ask(&mut self, what: impl Into<String>, kind: u16, flags: u16, body: &dyn Emitable) {
        self.push(Some(what.into()), kind, flags | NLM_F_ACK, body);
    }

    /// Adds one that is answered only where it fails.
    pub(super) fn push(&mut self, what: Option<String>, kind: u16, flags: u16, body: &dyn Emitable) {
        let (start, length) = (self.bytes.len(), HEADER_BYTES + body.buffer_len());
        // A message begins at a multiple of four (NLMSG_ALIGN).
        self.bytes.resize(start + length.next_multiple_of(4), 0);
        self.asks.push(what);
        let mut header = NetlinkHeader::default();
        header.length = u32::try_from(length).unwrap_or(u32::MAX);
        header.message_type = kind;
        header.flags = flags | NLM_F_REQUEST;
        header.sequence_number = u32::try_from(self.asks.len()).unwrap_or(u32::MAX);
        let (head, rest) = self.bytes[start..].split_at_mut(HEADER_BYTES);
        header.emit(head);
        body.emit(&mut rest[..length - HEADER_BYTES]);
    }

    /// Has the kernel do all of it, over a socket of `protocol` in the calling thread's namespace.
    pub(super) fn send(self, protocol: isize) -> Result<(), NetlinkError> {
        let first = self.asks.iter().flatten().next().cloned().unwrap_or_default();
        let failed = |errno| NetlinkError { what: first.clone(), errno };
        let os = |e: std::io::Error| failed(Errno::from_io_error(&e).unwrap_or(Errno::IO));
        let socket = Socket::new(protocol).map_err(os)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(os)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).map_err(failed)?;
        let sent = socket.send(&self.bytes, 0).map_err(os)?;
        if sent != self.bytes.len() {
            return Err(failed(Errno::MSGSIZE));
        }
        let mut missing = self.asks.iter().flatten().count();
        let mut buffer = Vec::with_capacity(ANSWER_BYTES);
        while missing > 0 {
            buffer.clear();
            match socket.recv(&mut buffer, 0).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO)) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Err(failed(Errno::TIMEDOUT)),
                Err(errno) => return Err(failed(errno)),
            }
            let mut rest = buffer.as_slice();
            while !rest.is_empty() {
                let message = NetlinkBuffer::new_checked(rest).map_err(|_| failed(Errno::BADMSG))?;
                if message.message_type() == NLMSG_ERROR {
                    let at = usize::try_from(message.sequence_number()).unwrap_or(usize::MAX).wrapping_sub(1);
                    let code = message
                        .payload()
                        .first_chunk()
                        .map_or(libc::EBADMSG, |code| -i32::from_ne_bytes(*code));
                    if code != 0 {
                        let what = self.asks.get(at).cloned().flatten().unwrap_or_else(|| first.clone());
                        return Err(NetlinkError { what, errno: Errno::from_raw_os_error(code) });
                    }
                    missing -= 1;
                }
                let length = usize::try_from(message.length()).unwrap_or(usize::MAX).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
            }
        }
        Ok(())
    }
}

/// A message's body that is there already.
#[derive(Debug)]
pub(super) struct Raw(pub(super) Vec<u8>);

impl Emitable for Raw {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0);
    }
}
