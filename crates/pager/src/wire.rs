//! Messages between daemon and pager: JSON with descriptors, in packets of a unix socket of type
//! SEQPACKET.

use crate::policy::Policy;
use dayfly_sys::fdwire;
use dayfly_units::Digest;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;

const MAX_BYTES: usize = 64 << 10;
/// Upper limit for the descriptors of one packet.
pub const MAX_FDS: usize = 200;
const _: () = assert!(MAX_FDS <= fdwire::MAX_FDS);
/// The length of an exit file in which a VMM counts for the bill, before the exit record is
/// appended (`dayfly_vmm::meter`). That of a VMM of an earlier version is empty.
pub const EXIT_PAGE_BYTES: u64 = 4096;

/// The settings of a pager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Number of fault threads, and so of concurrent slow reads.
    pub fault_threads: u32,
    /// When to fetch which frames.
    pub policy: Policy,
    /// Limit of the prefetcher in bytes per second; 0 means no limit.
    pub ahead_bytes_per_s: u64,
    /// The most seconds that a clone waits for a page before it is killed.
    pub deadline_s: u32,
    /// Milliseconds before an unreadable batch that a clone waits for is tried again; five attempts
    /// in all.
    pub retry_ms: u32,
}

/// Windows and number of threads are not tuned by measurement.
impl Default for Settings {
    fn default() -> Self {
        Self {
            // Four serve one clone, and one remains for the others.
            fault_threads: 5,
            policy: Policy::default(),
            ahead_bytes_per_s: 0,
            deadline_s: 30,
            retry_ms: 200,
        }
    }
}

/// A message to the pager.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum ToPager {
    /// The first message. With it come the memfd of RAM and the sheet: a file that has table,
    /// places, first frames and frames elsewhere, concatenated. Packs, disk files and then the hash
    /// trees of those that have one follow in [`ToPager::Files`].
    Begin {
        /// Bytes of the table.
        table_bytes: u64,
        /// Bytes of the places.
        places_bytes: u64,
        /// Bytes of the frames to fetch first, each u32 little-endian.
        order_bytes: u64,
        /// Bytes of the ranges of frames that clones map from other templates: for each range the
        /// first frame and the frame behind the last, each u32 little-endian.
        elsewhere_bytes: u64,
        /// Number of packs.
        packs: u32,
        /// Number of files of each disk.
        disks: Vec<u32>,
        /// For each disk file the root of its hash tree, if it has one.
        roots: Vec<Option<Digest>>,
        /// The pager's settings.
        settings: Settings,
    },
    /// With it come further packs, disk files and hash trees, in the order of the plan.
    Files,
    /// A new clone. With it come a socket on which its VMM will send its regions, a pidfd of the
    /// VMM, and the exit file, open for appending.
    Clone {
        /// The VM's id.
        vm: String,
    },
}

/// Counts of a pager's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// Faults read.
    pub faults: u64,
    /// Faults on frames that read as zeroes.
    pub zero_faults: u64,
    /// Faults on batches that were present, or that another thread was fetching.
    pub late_faults: u64,
    /// Batches fetched because of a fault.
    pub asked: u64,
    /// Batches fetched ahead of faults.
    pub ahead: u64,
    /// Bytes put into the template.
    pub bytes: u64,
    /// Stored bytes read for that.
    pub read_bytes: u64,
    /// Clones served.
    pub clones: u64,
    /// Mean nanoseconds of a fault, from reading to waking.
    pub fault_ns: u64,
    /// Nanoseconds of the longest fault.
    pub longest_fault_ns: u64,
    /// Milliseconds since the pager began.
    pub took_ms: u64,
    /// Times that a fault thread has served a clone.
    #[serde(default)]
    pub turns: u64,
    /// Pages that another process had made with other content.
    #[serde(default)]
    pub replaced: u64,
}

/// A message from the pager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case")]
pub enum FromPager {
    /// Ready for clones.
    Begun,
    /// The working set is present, except for the last batch, which may still be on its way.
    First,
    /// Everything is present, and the memfd is sealed.
    Whole(Report),
    /// The pager cannot begin.
    Failed {
        /// The cause.
        cause: String,
    },
}

/// A pair of connected SEQPACKET sockets.
///
/// # Errors
/// The process has too many descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a packet.
///
/// # Errors
/// The peer has closed, or the packet is too large.
pub fn send_bytes(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = fdwire::send(to, bytes, fds)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Sends `message`.
///
/// # Errors
/// As [`send_bytes`].
pub fn send(to: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_bytes(to, &serde_json::to_vec(message)?, fds)
}

/// Receives the next packet; `None` if the peer has closed. Blocks if the socket does.
///
/// # Errors
/// The packet has too many bytes or descriptors.
pub fn receive_bytes(from: impl AsFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_BYTES];
    let mut fds = Vec::new();
    let received = loop {
        match fdwire::receive(&from, &mut bytes, &mut fds) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The peer closed with unread packets.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            received => break received?,
        }
    };
    if received.truncated || received.fds_truncated || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "a packet: expected at most {MAX_BYTES} bytes and {MAX_FDS} descriptors, got more"
            ),
        ));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    bytes.truncate(received.bytes);
    Ok(Some((bytes, fds)))
}

/// Receives the next message; `None` if the peer has closed.
///
/// # Errors
/// As [`receive_bytes`], or the packet is not such a message.
pub fn receive<T: DeserializeOwned>(from: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some((bytes, fds)) = receive_bytes(from)? else { return Ok(None) };
    Ok(Some((serde_json::from_slice(&bytes)?, fds)))
}
