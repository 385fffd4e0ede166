//! Messages to the kernel over netlink(7): several in one system call. The kernel acknowledges each
//! message, or the whole transaction.

pub(super) use dayfly_sys::netlink::Raw;
use dayfly_sys::netlink::{Channel, Messages, refusal};
use netlink_packet_core::{Emitable, NLM_F_ACK, NLM_F_DUMP, NLMSG_DONE, NLMSG_ERROR};
use rustix::io::Errno;
use std::time::Duration;

/// Time limit for an answer. The kernel answers during the send, unless another process holds the
/// RTNL lock.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Buffer bytes for acknowledgements; each acknowledgement repeats at most its message.
const ANSWER_BYTES: usize = 64 << 10;
/// A request that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {errno}")]
pub struct NetlinkError {
    /// The request.
    pub what: String,
    /// The kernel's error.
    pub errno: Errno,
}

/// Messages that are sent together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    messages: Messages,
    /// The purpose of each message; `None` for the begin and the end of a transaction or a list.
    asks: Vec<Option<String>>,
    /// The number of messages with NLM_F_ACK. All acknowledgements wait in the socket's buffer,
    /// which has room for less than 300.
    acknowledged: usize,
}

impl Batch {
    /// Adds a message of type `kind` with these NLM_F_* flags.
    pub(super) fn ask(
        &mut self,
        what: impl Into<String>,
        kind: u16,
        flags: u16,
        body: &dyn Emitable,
    ) {
        self.acknowledged += 1;
        self.push(Some(what.into()), kind, flags | NLM_F_ACK, body);
    }

    /// Adds a message without NLM_F_ACK. The kernel answers only if it refuses the message.
    pub(super) fn push(
        &mut self,
        what: Option<String>,
        kind: u16,
        flags: u16,
        body: &dyn Emitable,
    ) {
        self.asks.push(what);
        // The number of an answer is one above the place in `asks`.
        let number = u32::try_from(self.asks.len()).unwrap_or(u32::MAX);
        self.messages.push(number, kind, flags, body);
    }

    /// Adds NLM_F_ACK to the last message, which [`Self::push`] has added, if it has a purpose.
    pub(super) fn acknowledge_last(&mut self) {
        if let Some(Some(_)) = self.asks.last() {
            self.acknowledged += 1;
            self.messages.number(1, NLM_F_ACK);
        }
    }

    /// Sends all messages over a socket of `protocol` in the calling thread's namespace, and waits
    /// for every acknowledgement, or for the first error.
    pub(super) fn send(self, protocol: isize) -> Result<(), NetlinkError> {
        if self.messages.is_empty() {
            return Ok(());
        }
        let first = self.asks.iter().flatten().next().cloned().unwrap_or_default();
        let failed = |errno| NetlinkError { what: first.clone(), errno };
        let mut channel = connected(protocol).map_err(failed)?;
        channel.send(&self.messages).map_err(failed)?;
        let mut missing = self.acknowledged;
        while missing > 0 {
            for message in channel.receive().map_err(failed)? {
                let message = message.map_err(failed)?;
                if message.message_type() != NLMSG_ERROR {
                    continue;
                }
                if let Some(errno) = refusal(&message) {
                    let at = usize::try_from(message.sequence_number())
                        .unwrap_or(usize::MAX)
                        .wrapping_sub(1);
                    let what = self.asks.get(at).cloned().flatten();
                    return Err(NetlinkError {
                        what: what.unwrap_or_else(|| first.clone()),
                        errno,
                    });
                }
                missing -= 1;
            }
        }
        Ok(())
    }
}

const NLA_F_NESTED: u16 = 1 << 15;

/// The attributes (`struct nlattr`) in these bytes: type and value. A truncated attribute ends the
/// iteration.
pub(super) fn nested(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & !NLA_F_NESTED;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of this type.
pub(super) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    nested(bytes).find_map(|(of, value)| (of == kind).then_some(value))
}

/// A connection of `protocol` to the kernel, in the calling thread's namespace.
fn connected(protocol: isize) -> Result<Channel, Errno> {
    Channel::open(protocol, TIMEOUT, ANSWER_BYTES)
}

/// Requests all objects of a kind, over a socket of `protocol` in the calling thread's namespace.
/// Calls `each` with every object's payload.
///
/// # Errors
/// The kernel refuses; `what` names the objects.
pub(super) fn dump(
    what: &str,
    protocol: isize,
    kind: u16,
    body: &dyn Emitable,
    mut each: impl FnMut(&[u8]),
) -> Result<(), NetlinkError> {
    let failed = |errno| NetlinkError { what: what.to_owned(), errno };
    let mut batch = Batch::default();
    batch.push(None, kind, NLM_F_DUMP, body);
    let mut channel = connected(protocol).map_err(failed)?;
    channel.send(&batch.messages).map_err(failed)?;
    loop {
        for message in channel.receive().map_err(failed)? {
            let message = message.map_err(failed)?;
            match message.message_type() {
                NLMSG_DONE | NLMSG_ERROR => {
                    return refusal(&message).map_or(Ok(()), |e| Err(failed(e)));
                }
                _ => each(message.payload()),
            }
        }
    }
}
