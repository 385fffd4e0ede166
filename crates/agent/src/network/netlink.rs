//! Requests to the kernel over netlink(7), several in one system call.
//!
//! The kernel processes the messages of one send in order, refuses those that fail, and continues
//! with the next. Only the last message asks for an acknowledgement, because its answer comes after
//! all other answers.

pub(super) use dayfly_sys::netlink::Raw;
use dayfly_sys::netlink::{self, Messages, refusal};
use netlink_packet_core::{
    Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP,
};
use rustix::io::Errno;
use std::time::Duration;

/// Time limit for each answer, from the send or from the answer before. The kernel answers during
/// the send, unless another process holds the RTNL lock.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of one answer. The kernel fits the parts of a list to the read size; one interface
/// takes about 2 KiB.
const ANSWER_BYTES: usize = 16 << 10;
/// A refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refused {
    /// The message's name, or the operation.
    pub(super) what: &'static str,
    /// The kernel's error.
    pub(super) errno: Errno,
}

/// Messages to be sent together.
#[derive(Default)]
pub(super) struct Batch {
    messages: Messages,
    asks: Vec<Ask>,
}

struct Ask {
    what: &'static str,
    list: bool,
    /// Errors that count as success.
    fine: &'static [Errno],
}

impl Batch {
    /// Adds a message of type `kind` (RTM_*, SOCK_*) with these NLM_F_* flags and NLM_F_REQUEST. A
    /// list (NLM_F_DUMP) must be the last message.
    pub(super) fn push(
        &mut self,
        what: &'static str,
        (kind, flags): (u16, u16),
        body: &dyn Emitable,
        fine: &'static [Errno],
    ) {
        self.messages.push(0, kind, flags, body);
        self.asks.push(Ask { what, list: flags & NLM_F_DUMP == NLM_F_DUMP, fine });
    }

    /// Numbers the messages and requests an acknowledgement of the last one, unless it is a list,
    /// which has its own end message.
    fn close(&mut self, first: u32) {
        let list = self.asks.last().is_some_and(|ask| ask.list);
        self.messages.number(first, if list { 0 } else { NLM_F_ACK });
    }
}

/// A connection to one of the kernel's netlink families. Answers of a failed exchange may arrive
/// later: their sequence numbers differ, so the next exchange skips them.
pub(super) struct Channel {
    inner: netlink::Channel,
    /// The next message's sequence number.
    next: u32,
}

impl Channel {
    /// Opens a socket of `protocol`, such as NETLINK_ROUTE or NETLINK_SOCK_DIAG.
    pub(super) fn open(protocol: isize) -> Result<Self, Errno> {
        Ok(Self { inner: netlink::Channel::open(protocol, TIMEOUT, ANSWER_BYTES)?, next: 0 })
    }

    /// Sends a batch. Calls `each` with the type and payload of every answer except
    /// acknowledgements.
    ///
    /// # Errors
    /// The first refused message; the kernel processed the later messages all the same.
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
            for message in self.inner.receive().map_err(failed)? {
                let message = message.map_err(failed)?;
                let at = usize::try_from(message.sequence_number().wrapping_sub(first))
                    .unwrap_or(usize::MAX);
                let Some(ask) = batch.asks.get(at) else { continue };
                let end = match message.message_type() {
                    NLMSG_NOOP => None,
                    NLMSG_ERROR | NLMSG_DONE => refusal(&message),
                    // A list that changed during the read (NLM_F_DUMP_INTR) may be incomplete.
                    _ if message.flags() & NLM_F_DUMP_INTR != 0 => Some(Errno::AGAIN),
                    kind => {
                        each(kind, message.payload());
                        None
                    }
                };
                if let Some(errno) = end
                    && !ask.fine.contains(&errno)
                {
                    refused.get_or_insert(Refused { what: ask.what, errno });
                }
                let kind = message.message_type();
                if at == last && (kind == NLMSG_ERROR || kind == NLMSG_DONE) {
                    return refused.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// Sends a batch with unused sequence numbers.
    fn send(&mut self, batch: &mut Batch) -> Result<(), Errno> {
        batch.close(self.next);
        self.next = self.next.wrapping_add(u32::try_from(batch.asks.len()).unwrap_or(u32::MAX));
        self.inner.send(&batch.messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_sys::protocols::NETLINK_ROUTE;

    /// Requests the interface with this index (RTM_GETLINK, `struct ifinfomsg`).
    fn ask(batch: &mut Batch, what: &'static str, index: i32) {
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        batch.push(what, (libc::RTM_GETLINK, 0), &Raw(body), &[]);
    }

    #[test]
    fn late_answers_to_an_abandoned_batch_do_not_count_for_the_next_exchange() {
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
