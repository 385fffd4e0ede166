//! Questions to the kernel over netlink(7), several in one system call.
//!
//! The kernel works off the messages of one send in their order, refuses each that it cannot do, and goes on with the
//! next. Only the last is asked to be acknowledged: its answer comes after those of all others.

use netlink_packet_core::{
    Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP,
    NetlinkBuffer, NetlinkHeader,
};
use netlink_sys::{Socket, SocketAddr};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::time::{Duration, Instant};

/// How long an answer may take after the send, or the answer before: how long those took is no reason to leave unread
/// what came. The kernel answers during the send, unless others hold its lock (RTNL).
const PATIENCE: Duration = Duration::from_secs(5);
/// The most bytes of one answer. The kernel fits the parts of a list to what is read; one interface is about 2 KiB.
const ANSWER_BYTES: usize = 16 << 10;
/// Of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;

/// What was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refused {
    /// The message's name, or what was being done.
    pub(super) what: &'static str,
    /// Why.
    pub(super) errno: Errno,
}

/// Messages to be sent together.
#[derive(Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// Where each message begins.
    starts: Vec<usize>,
    asks: Vec<Ask>,
}

struct Ask {
    what: &'static str,
    list: bool,
    /// Refusals that are as good as done.
    fine: &'static [Errno],
}

impl Batch {
    /// Adds a message of type `kind` (RTM_*, SOCK_*) with these NLM_F_* beside NLM_F_REQUEST. A list (NLM_F_DUMP) has
    /// to be the last.
    pub(super) fn push(
        &mut self,
        what: &'static str,
        (kind, flags): (u16, u16),
        body: &dyn Emitable,
        fine: &'static [Errno],
    ) {
        let (start, length) = (self.bytes.len(), HEADER_BYTES + body.buffer_len());
        // A message begins at a multiple of four (NLMSG_ALIGN).
        self.bytes.resize(start + length.next_multiple_of(4), 0);
        let mut header = NetlinkHeader::default();
        header.length = u32::try_from(length).unwrap_or(u32::MAX);
        header.message_type = kind;
        header.flags = flags | NLM_F_REQUEST;
        if let Some((head, rest)) =
            self.bytes.get_mut(start..).and_then(|m| m.split_at_mut_checked(HEADER_BYTES))
        {
            header.emit(head);
            body.emit(rest.get_mut(..length - HEADER_BYTES).unwrap_or_default());
        }
        self.starts.push(start);
        self.asks.push(Ask { what, list: flags & NLM_F_DUMP == NLM_F_DUMP, fine });
    }

    /// Numbers the messages, and asks for the last one's answer; a list has an end of its own.
    fn close(&mut self, first: u32) {
        for (number, start) in (0..).zip(&self.starts) {
            if let Some(message) = self.bytes.get_mut(*start..) {
                NetlinkBuffer::new(message).set_sequence_number(first.wrapping_add(number));
            }
        }
        let last = self.starts.last().and_then(|start| self.bytes.get_mut(*start..));
        if let (Some(message), Some(Ask { list: false, .. })) = (last, self.asks.last()) {
            let mut header = NetlinkBuffer::new(message);
            header.set_flags(header.flags() | NLM_F_ACK);
        }
    }
}

/// A connection to one of the kernel's netlink families. Of an exchange that failed answers may still come: those have
/// other numbers than the next one's, which passes over them.
pub(super) struct Channel {
    socket: Socket,
    buffer: Vec<u8>,
    /// The next message's number.
    next: u32,
}

impl Channel {
    /// Opens NETLINK_ROUTE, NETLINK_SOCK_DIAG.
    pub(super) fn open(protocol: isize) -> Result<Self, Errno> {
        let failed = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
        let socket = Socket::new(protocol).map_err(failed)?;
        // Connected: takes nothing from other programs.
        socket.connect(&SocketAddr::new(0, 0)).map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self { socket, buffer: Vec::with_capacity(ANSWER_BYTES), next: 0 })
    }

    /// Sends a batch and gives `each` what comes back but acknowledgements: the message's type and what is behind its
    /// header.
    ///
    /// # Errors
    /// The first that was refused; those behind it were done or refused all the same.
    pub(super) fn exchange(
        &mut self,
        mut batch: Batch,
        each: &mut dyn FnMut(u16, &[u8]),
    ) -> Result<(), Refused> {
        let Some(last) = batch.asks.len().checked_sub(1) else { return Ok(()) };
        let first = self.next;
        let what = batch.asks.first().map_or("", |ask| ask.what);
        let failed = |errno| Refused { what, errno };
        self.send(&mut batch).map_err(failed)?;
        let mut refused = None;
        loop {
            self.receive().map_err(failed)?;
            let mut rest = self.buffer.as_slice();
            while !rest.is_empty() {
                let message = NetlinkBuffer::new_checked(rest).map_err(|_| failed(Errno::BADMSG))?;
                let length = usize::try_from(message.length()).unwrap_or(usize::MAX).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
                let at = usize::try_from(message.sequence_number().wrapping_sub(first)).unwrap_or(usize::MAX);
                let Some(ask) = batch.asks.get(at) else { continue };
                let end = match message.message_type() {
                    NLMSG_NOOP => None,
                    // Both begin with the error as a negative number (an empty list on old kernels with nothing).
                    NLMSG_ERROR | NLMSG_DONE => Some(
                        message
                            .payload()
                            .first_chunk()
                            .map_or(0, |code| i32::from_ne_bytes(*code).wrapping_neg()),
                    ),
                    // A list that changed while it was read (NLM_F_DUMP_INTR) may lack something.
                    _ if message.flags() & NLM_F_DUMP_INTR != 0 => Some(libc::EAGAIN),
                    kind => {
                        each(kind, message.payload());
                        None
                    }
                };
                if let Some(code @ 1..) = end {
                    let errno = Errno::from_raw_os_error(code);
                    if !ask.fine.contains(&errno) {
                        refused.get_or_insert(Refused { what: ask.what, errno });
                    }
                }
                let kind = message.message_type();
                if at == last && (kind == NLMSG_ERROR || kind == NLMSG_DONE) {
                    return refused.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// Sends a batch, with numbers that no other had.
    fn send(&mut self, batch: &mut Batch) -> Result<(), Errno> {
        batch.close(self.next);
        self.next = self.next.wrapping_add(u32::try_from(batch.asks.len()).unwrap_or(u32::MAX));
        let sent = self.socket.send(&batch.bytes, 0);
        let sent = sent.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        if sent == batch.bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
    }

    /// The next datagram, whole.
    fn receive(&mut self) -> Result<(), Errno> {
        let until = Instant::now() + PATIENCE;
        loop {
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, libc::MSG_TRUNC) {
                Ok(length) if length > self.buffer.len() => return Err(Errno::MSGSIZE),
                Ok(_) => return Ok(()),
                Err(error) => match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                    Errno::INTR if Instant::now() < until => {}
                    Errno::INTR | Errno::AGAIN => return Err(Errno::TIMEDOUT),
                    errno => return Err(errno),
                },
            }
        }
    }
}

/// A message's body that is there already.
pub(super) struct Raw(pub(super) Vec<u8>);

impl Emitable for Raw {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_sys::protocols::NETLINK_ROUTE;

    /// Asks for the interface with this index (RTM_GETLINK, `struct ifinfomsg`).
    fn ask(batch: &mut Batch, what: &'static str, index: i32) {
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        batch.push(what, (libc::RTM_GETLINK, 0), &Raw(body), &[]);
    }

    #[test]
    fn answers_that_nobody_waited_for_are_not_the_next_exchanges() {
        let mut channel = Channel::open(NETLINK_ROUTE).unwrap();
        let mut given_up = Batch::default();
        for index in [1, 1, i32::MAX] {
            ask(&mut given_up, "given up", index);
        }
        channel.send(&mut given_up).unwrap();

        let mut batch = Batch::default();
        ask(&mut batch, "one that is there", 1);
        ask(&mut batch, "one that is not", i32::MAX);
        let mut answers = 0;
        let refused = channel.exchange(batch, &mut |_, _| answers += 1).unwrap_err();
        assert_eq!(refused, Refused { what: "one that is not", errno: Errno::NODEV });
        assert_eq!(answers, 1);
    }
}
