//! What daemon and pager tell each other: JSON with descriptors, in packets of a unix socket that keeps their bounds.

use crate::policy::Policy;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// The most descriptors of a packet; sendmsg(2) takes 253.
pub const MAX_FDS: usize = 200;
const MAX_BYTES: usize = 64 << 10;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// How a pager works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Threads that serve faults: so many slow reads may be under way.
    pub fault_threads: u32,
    /// What is fetched when.
    pub policy: Policy,
    /// Bytes a second that are fetched ahead at most; 0: as fast as can be.
    pub ahead_bytes_per_s: u64,
    /// Seconds that a clone waits for a page at most.
    pub deadline_s: u32,
    /// Milliseconds before a batch that could not be read and that a clone waits for is tried again; five times in all.
    pub retry_ms: u32,
}

/// Windows and threads are guesses: none was measured against another.
impl Default for Settings {
    fn default() -> Self {
        Self {
            fault_threads: 4,
            policy: Policy::default(),
            ahead_bytes_per_s: 0,
            deadline_s: 30,
            retry_ms: 200,
        }
    }
}

/// To the pager.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum ToPager {
    /// First: what it is for. With it come RAM and the sheet: table, places, frames in order and frames elsewhere, one after the other. Packs and the files of
    /// disks come with what follows.
    Begin {
        /// Bytes of the table.
        table_bytes: u64,
        /// Bytes of the places.
        places_bytes: u64,
        /// Bytes of the frames to fetch first, u32 little-endian each.
        order_bytes: u64,
        /// Bytes of the frames that clones have from other templates: of each row the first and the one behind the last, u32 little-endian.
        elsewhere_bytes: u64,
        /// How many packs.
        packs: u32,
        /// How many files each disk has.
        disks: Vec<u32>,
        /// How it works.
        settings: Settings,
    },
    /// With it come more of its files.
    Files,
    /// A clone. With it come a socket, on which its VMM will tell its regions, its process, and its exit record.
    Clone {
        /// Its VM's id.
        vm: String,
    },
}

/// What a pager has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// Faults that were read.
    pub faults: u64,
    /// Of these, on frames that read as zeroes.
    pub zero_faults: u64,
    /// Of these, on batches that were there, or under way.
    pub late_faults: u64,
    /// Batches fetched because of a fault.
    pub asked: u64,
    /// Batches fetched ahead.
    pub ahead: u64,
    /// Bytes put into the template.
    pub bytes: u64,
    /// Bytes read for that, as they are stored.
    pub read_bytes: u64,
    /// Clones that were served.
    pub clones: u64,
    /// Mean time of a fault, from reading to waking, in nanoseconds.
    pub fault_ns: u64,
    /// The longest.
    pub longest_fault_ns: u64,
    /// Milliseconds since it began.
    pub took_ms: u64,
}

/// From the pager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case")]
pub enum FromPager {
    /// Clones may come.
    Begun,
    /// What was to be fetched first is there.
    First,
    /// All is there, and sealed.
    Whole(Report),
    /// It cannot be a pager.
    Failed {
        /// Why.
        cause: String,
    },
}

/// A pair of sockets to talk over.
///
/// # Errors
/// The process has too many descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a packet.
///
/// # Errors
/// The other side is gone, or it is too much for one packet.
pub fn send_bytes(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other(format!("{} descriptors: at most {MAX_FDS}", fds.len())));
    }
    let sent = rustix::io::retry_on_intr(|| {
        sendmsg(&to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Sends `message`.
///
/// # Errors
/// As [`send_bytes`].
pub fn send(to: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_bytes(to, &serde_json::to_vec(message)?, fds)
}

/// The next packet; `None` where the other side has closed. Blocks as the socket does.
///
/// # Errors
/// The packet is longer than any of ours, or has more descriptors.
pub fn receive_bytes(from: impl AsFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(&from, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    let received = match received {
        // The other side closed without having read everything.
        Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        received => received?,
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a packet: expected at most {MAX_BYTES} bytes and {MAX_FDS} descriptors, got more"),
        ));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    bytes.truncate(received.bytes);
    Ok(Some((bytes, fds)))
}

/// The next message.
///
/// # Errors
/// As [`receive_bytes`]; or it is not such a message.
pub fn receive<T: DeserializeOwned>(from: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some((bytes, fds)) = receive_bytes(from)? else { return Ok(None) };
    Ok(Some((serde_json::from_slice(&bytes)?, fds)))
}
