//! Messages to the kernel over netlink(7), several in one system call, and its answers. Which
//! messages are acknowledged, and when an exchange has ended, is up to the caller.

use netlink_packet_core::{Emitable, NLM_F_REQUEST, NLMSG_DONE, NetlinkBuffer, NetlinkHeader};
use netlink_sys::{Socket, SocketAddr};
use rustix::io::Errno;
use rustix::net::sockopt::{
    Timeout, set_socket_send_buffer_size, set_socket_send_buffer_size_force, set_socket_timeout,
    socket_send_buffer_size,
};
use std::io;
use std::time::{Duration, Instant};

/// Bytes of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;
/// Bytes of a send buffer beside the messages. The kernel needs 32 (netlink_sendmsg).
const SLACK_BYTES: usize = 4096;

/// Messages to be sent together.
#[derive(Debug, Default)]
pub struct Messages(Vec<u8>);

impl Messages {
    /// Adds a message of type `kind` with this sequence number, these NLM_F_* flags and
    /// NLM_F_REQUEST.
    pub fn push(&mut self, number: u32, kind: u16, flags: u16, body: &dyn Emitable) {
        let (start, length) = (self.0.len(), HEADER_BYTES + body.buffer_len());
        self.0.resize(start + aligned(length), 0);
        let mut header = NetlinkHeader::default();
        header.length = u32::try_from(length).unwrap_or(u32::MAX);
        header.message_type = kind;
        header.flags = flags | NLM_F_REQUEST;
        header.sequence_number = number;
        if let Some((head, rest)) =
            self.0.get_mut(start..).and_then(|m| m.split_at_mut_checked(HEADER_BYTES))
        {
            header.emit(head);
            body.emit(rest.get_mut(..length - HEADER_BYTES).unwrap_or_default());
        }
    }

    /// Numbers the messages from `first` on, and adds `flags` to the last message.
    pub fn number(&mut self, first: u32, flags: u16) {
        let (mut rest, mut number) = (self.0.as_mut_slice(), first);
        while rest.len() >= HEADER_BYTES {
            let length = aligned_of(&NetlinkBuffer::new(&*rest));
            let Some((message, more)) = rest.split_at_mut_checked(length) else { return };
            let mut header = NetlinkBuffer::new(message);
            header.set_sequence_number(number);
            if more.is_empty() {
                header.set_flags(header.flags() | flags);
            }
            (rest, number) = (more, number.wrapping_add(1));
        }
    }

    /// Whether there is no message.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A message begins at a multiple of four (NLMSG_ALIGN).
const fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

fn aligned_of<T: AsRef<[u8]>>(message: &NetlinkBuffer<T>) -> usize {
    aligned(usize::try_from(message.length()).unwrap_or(usize::MAX >> 1))
}

/// A connection to one of the kernel's netlink families, in the namespace of the thread that opened
/// it.
pub struct Channel {
    socket: Socket,
    buffer: Vec<u8>,
    time_limit: Duration,
}

impl Channel {
    /// Opens a socket of `protocol`, such as NETLINK_ROUTE. An answer has at most `answer_bytes`;
    /// the kernel fits the parts of a list to that. `time_limit` is the time limit for each answer:
    /// the kernel answers during the send, unless another process holds the RTNL lock.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open(protocol: isize, time_limit: Duration, answer_bytes: usize) -> Result<Self, Errno> {
        let socket = Socket::new(protocol).map_err(|e| errno_of(&e))?;
        // A connected socket receives nothing from other programs.
        socket.connect(&SocketAddr::new(0, 0)).map_err(|e| errno_of(&e))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(time_limit))?;
        Ok(Self { socket, buffer: Vec::with_capacity(answer_bytes), time_limit })
    }

    /// Sends messages by one system call.
    ///
    /// # Errors
    /// The kernel refuses all of them, or takes only a part.
    pub fn send(&self, messages: &Messages) -> Result<(), Errno> {
        self.make_room(messages.0.len() + SLACK_BYTES);
        let sent = self.socket.send(&messages.0, 0).map_err(|e| errno_of(&e))?;
        if sent == messages.0.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
    }

    /// Enlarges the send buffer to `bytes`. Without CAP_NET_ADMIN the limit is net.core.wmem_max;
    /// then the kernel refuses a larger message with MSGSIZE.
    fn make_room(&self, bytes: usize) {
        if socket_send_buffer_size(&self.socket).is_ok_and(|has| has >= bytes) {
            return;
        }
        let _ = set_socket_send_buffer_size_force(&self.socket, bytes)
            .or_else(|_| set_socket_send_buffer_size(&self.socket, bytes));
    }

    /// Waits for the kernel's next answers.
    ///
    /// # Errors
    /// TIMEDOUT after the time limit, MSGSIZE if the answers do not fit, or the kernel's error.
    pub fn receive(&mut self) -> Result<Answers<'_>, Errno> {
        let until = Instant::now() + self.time_limit;
        loop {
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, libc::MSG_TRUNC) {
                Ok(length) if length > self.buffer.len() => return Err(Errno::MSGSIZE),
                Ok(_) => return Ok(Answers(&self.buffer)),
                Err(error) => match errno_of(&error) {
                    Errno::INTR if Instant::now() < until => {}
                    Errno::INTR | Errno::AGAIN => return Err(Errno::TIMEDOUT),
                    errno => return Err(errno),
                },
            }
        }
    }
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The messages of one answer; BADMSG for bytes that are no message.
#[derive(Debug)]
pub struct Answers<'a>(&'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = Result<NetlinkBuffer<&'a [u8]>, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let message = NetlinkBuffer::new_checked(self.0).map_err(|_| Errno::BADMSG);
        let length = message.as_ref().map_or(usize::MAX, aligned_of);
        self.0 = self.0.get(length..).unwrap_or_default();
        Some(message)
    }
}

/// The error in an NLMSG_ERROR or NLMSG_DONE, which begins with the negative error number; `None`
/// for an acknowledgement (error 0) and for the end of a list.
#[must_use]
pub fn refusal(message: &NetlinkBuffer<&[u8]>) -> Option<Errno> {
    let code = match message.payload().first_chunk() {
        Some(code) => i32::from_ne_bytes(*code).wrapping_neg(),
        // An empty list on old kernels has no payload.
        None if message.message_type() == NLMSG_DONE => 0,
        None => libc::EBADMSG,
    };
    // A positive number is no error of the kernel, and no acknowledgement either.
    (code != 0).then(|| Errno::from_raw_os_error(if code > 0 { code } else { libc::EBADMSG }))
}

/// A message body that is already encoded.
#[derive(Debug)]
pub struct Raw(pub Vec<u8>);

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

    #[test]
    fn messages_are_aligned_and_numbered_and_the_last_has_the_flags() {
        let mut messages = Messages::default();
        assert!(messages.is_empty());
        for body in [&b"abc"[..], b"", b"12345678"] {
            messages.push(7, 16, 4, &Raw(body.to_vec()));
        }
        messages.number(u32::MAX, 0x100);
        let all: Vec<_> = Answers(&messages.0).map(Result::unwrap).collect();
        let numbers: Vec<_> = all.iter().map(NetlinkBuffer::sequence_number).collect();
        assert_eq!(numbers, [u32::MAX, 0, 1]);
        let flags: Vec<_> = all.iter().map(NetlinkBuffer::flags).collect();
        assert_eq!(flags, [5, 5, 0x105]);
        assert_eq!((all[0].payload(), all[2].payload()), (&b"abc"[..], &b"12345678"[..]));
        assert_eq!(messages.0.len(), 20 + 16 + 24);
    }

    #[test]
    fn an_answer_that_is_no_message_ends_the_answers() {
        let mut answers = Answers(b"short");
        assert_eq!(answers.next().unwrap().unwrap_err(), Errno::BADMSG);
        assert!(answers.next().is_none());
    }

    #[test]
    fn an_error_number_is_negative_and_may_be_missing_at_the_end_of_a_list() {
        let refusal_of = |kind: u16, payload: &[u8]| {
            let mut messages = Messages::default();
            messages.push(1, kind, 0, &Raw(payload.to_vec()));
            Answers(&messages.0).next().unwrap().map(|message| refusal(&message)).unwrap()
        };
        let error = netlink_packet_core::NLMSG_ERROR;
        assert_eq!(refusal_of(error, &(-libc::ENODEV).to_ne_bytes()), Some(Errno::NODEV));
        assert_eq!(refusal_of(error, &0_i32.to_ne_bytes()), None);
        assert_eq!(refusal_of(error, b""), Some(Errno::BADMSG));
        assert_eq!(refusal_of(NLMSG_DONE, b""), None);
    }
}
