//! Messages between daemon and packer: packets of a unix socket of type SEQPACKET. The first byte
//! says what a packet is; numbers are little-endian.
//!
//! | to the packer | bytes behind the first | descriptors |
//! |---|---|---|
//! | `b` begin | JSON, [`Begin`] | RAM, the sheet |
//! | `f` files | none | disk files and block indexes, in order |
//! | `p` pack | number u32, frames u32 each | an empty file |
//!
//! | from the packer | bytes behind the first |
//! |---|---|
//! | `f` frames | frame u32, kind u8, hash 32, each; of a block also disk u8, layer u8, block u32 |
//! | `c` classified | digest 32, data bytes u64, hints right u64, hints wrong u64 |
//! | `w` written | number u32 |
//! | `e` error | whether the disk is full u8, UTF-8 text, at most 1,024 bytes |
//!
//! The sheet is a file with the ranges of free frames (first and behind the last, u32 each), and
//! then the hints (frame u32, disk u8, layer u8, zero u16, block u32).

use dayfly_store::{BlockHint, Classified, FoundFrame, MAX_PACK_PAGES};
use dayfly_sys::fdwire;
use dayfly_units::Digest;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;

/// The longest packet: a pack's frames.
pub const MAX_BYTES: usize = 5 + 4 * MAX_PACK_PAGES as usize;
/// The most descriptors of a packet.
pub const MAX_FDS: usize = 200;
const _: () = assert!(MAX_FDS <= fdwire::MAX_FDS);
/// The longest text of an error.
const MAX_TEXT: usize = 1024;
/// Bytes of a frame that is a page, and of one that is a block.
const PAGE_ENTRY: usize = 4 + 1 + 32;
const BLOCK_ENTRY: usize = PAGE_ENTRY + 6;
/// A packet of frames is sent when it has this many bytes.
pub const FULL_BYTES: usize = MAX_BYTES - 256 * BLOCK_ENTRY;
const HINT_BYTES: usize = 12;

/// The first message to a packer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// The name of the tenant that packs name.
    pub tenant: String,
    /// Number of ranges of free frames in the sheet.
    pub free: u64,
    /// Number of hints in the sheet.
    pub hints: u64,
    /// For each disk its files: the digest of each, and whether there is a block index.
    pub disks: Vec<Vec<(Digest, bool)>>,
}

/// A message from the packer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromPacker {
    /// Frames that are neither zero nor free; at least one.
    Frames(Vec<(u32, FoundFrame)>),
    /// All frames were sent.
    Classified(Classified),
    /// The pack with this number is written and synced.
    Written(u32),
    /// It gives up.
    Failed {
        /// The cause.
        text: String,
        /// Whether the disk is full.
        is_no_space: bool,
    },
}

/// The bytes of a packet.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn frame(&mut self) -> Option<(u32, FoundFrame)> {
        let (frame, kind, hash) = (self.u32()?, self.byte()?, Digest(self.array()?));
        let found = match kind {
            0 => FoundFrame::Page(hash),
            1 => {
                let (disk, layer) = (self.byte()?, self.byte()?);
                FoundFrame::Disk(BlockHint { disk, layer, block: self.u32()? }, hash)
            }
            _ => return None,
        };
        Some((frame, found))
    }
}

/// Adds a frame to a packet of frames, which begins with `f`.
pub fn add_frame(packet: &mut Vec<u8>, frame: u32, found: &FoundFrame) {
    if packet.is_empty() {
        packet.push(b'f');
    }
    packet.extend_from_slice(&frame.to_le_bytes());
    match found {
        FoundFrame::Page(hash) => {
            packet.push(0);
            packet.extend_from_slice(&hash.0);
        }
        FoundFrame::Disk(at, hash) => {
            packet.push(1);
            packet.extend_from_slice(&hash.0);
            packet.extend_from_slice(&[at.disk, at.layer]);
            packet.extend_from_slice(&at.block.to_le_bytes());
        }
    }
}

impl FromPacker {
    /// The packet of this message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut packet = Vec::new();
        match self {
            Self::Frames(frames) => {
                packet.push(b'f');
                frames.iter().for_each(|(frame, found)| add_frame(&mut packet, *frame, found));
            }
            Self::Classified(done) => {
                packet.push(b'c');
                packet.extend_from_slice(&done.digest.0);
                for number in [done.data_bytes, done.hints.0, done.hints.1] {
                    packet.extend_from_slice(&number.to_le_bytes());
                }
            }
            Self::Written(number) => {
                packet.push(b'w');
                packet.extend_from_slice(&number.to_le_bytes());
            }
            Self::Failed { text, is_no_space } => {
                packet.extend_from_slice(&[b'e', u8::from(*is_no_space)]);
                packet.extend_from_slice(&text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]);
            }
        }
        packet
    }

    /// Decodes a packet, which may come from a process that a guest has taken over. It allocates at
    /// most two times its length.
    #[must_use]
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let (kind, rest) = packet.split_first()?;
        let mut rest = Reader(rest);
        let message = match kind {
            b'f' => {
                let mut frames = Vec::with_capacity(rest.0.len() / PAGE_ENTRY);
                while !rest.0.is_empty() {
                    frames.push(rest.frame()?);
                }
                // A packet of nothing would cost the packer nothing, and keep the daemon busy.
                if frames.is_empty() {
                    return None;
                }
                Self::Frames(frames)
            }
            b'c' => Self::Classified(Classified {
                digest: Digest(rest.array()?),
                data_bytes: rest.u64()?,
                hints: (rest.u64()?, rest.u64()?),
            }),
            b'w' => Self::Written(rest.u32()?),
            b'e' if rest.0.len() <= 1 + MAX_TEXT => {
                let is_no_space = match rest.byte()? {
                    0 => false,
                    1 => true,
                    _ => return None,
                };
                let text = std::str::from_utf8(std::mem::take(&mut rest.0)).ok()?.to_owned();
                Self::Failed { text, is_no_space }
            }
            _ => return None,
        };
        rest.0.is_empty().then_some(message)
    }
}

/// The packet for a pack of these frames.
#[must_use]
pub fn pack(number: u32, frames: &[u32]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(5 + frames.len() * 4);
    packet.push(b'p');
    packet.extend_from_slice(&number.to_le_bytes());
    frames.iter().for_each(|frame| packet.extend_from_slice(&frame.to_le_bytes()));
    packet
}

/// The number and the frames of the pack that a packet asks for.
#[must_use]
pub fn pack_of(packet: &[u8]) -> Option<(u32, Vec<u32>)> {
    let mut rest = Reader(packet.strip_prefix(b"p")?);
    let number = rest.u32()?;
    let (frames, left) = rest.0.as_chunks();
    let frames = frames.iter().map(|frame| u32::from_le_bytes(*frame)).collect();
    left.is_empty().then_some((number, frames))
}

/// The bytes of the sheet.
#[must_use]
pub fn sheet(free: &[Range<u32>], hints: &[(u32, BlockHint)]) -> Vec<u8> {
    let mut sheet = Vec::with_capacity(free.len() * 8 + hints.len() * HINT_BYTES);
    for range in free {
        sheet.extend_from_slice(&range.start.to_le_bytes());
        sheet.extend_from_slice(&range.end.to_le_bytes());
    }
    for (frame, at) in hints {
        sheet.extend_from_slice(&frame.to_le_bytes());
        sheet.extend_from_slice(&[at.disk, at.layer, 0, 0]);
        sheet.extend_from_slice(&at.block.to_le_bytes());
    }
    sheet
}

/// The ranges of free frames and the hints of a sheet.
pub type Sheet = (Vec<Range<u32>>, Vec<(u32, BlockHint)>);

/// Decodes a sheet with this many ranges and hints.
#[must_use]
pub fn read_sheet(sheet: &[u8], free: u64, hints: u64) -> Option<Sheet> {
    let (free, hints) = (usize::try_from(free).ok()?, usize::try_from(hints).ok()?);
    let (of_free, of_hints) = sheet.split_at_checked(free.checked_mul(8)?)?;
    if hints.checked_mul(HINT_BYTES)? != of_hints.len() {
        return None;
    }
    let mut rest = Reader(of_free);
    let free = (0..free).map(|_| Some(rest.u32()?..rest.u32()?)).collect::<Option<_>>()?;
    let mut rest = Reader(of_hints);
    let hint = |_| {
        let (frame, disk, layer) = (rest.u32()?, rest.byte()?, rest.byte()?);
        let _zero: [u8; 2] = rest.array()?;
        Some((frame, BlockHint { disk, layer, block: rest.u32()? }))
    };
    Some((free, (0..hints).map(hint).collect::<Option<_>>()?))
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
/// The peer has closed, or the time limit of the socket has passed.
pub fn send(to: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = fdwire::send(to, packet, fds)?;
    if sent == packet.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives the next packet into `buffer`, and its descriptors; `None` if the peer has closed.
/// Several threads may wait at once.
///
/// # Errors
/// The packet has too many bytes or descriptors, or the time limit of the socket has passed.
pub fn receive<'a>(
    from: impl AsFd,
    buffer: &'a mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Option<&'a [u8]>> {
    buffer.resize(MAX_BYTES, 0);
    let received = loop {
        match fdwire::receive(&from, buffer, fds) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The peer closed with unread packets.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            received => break received?,
        }
    };
    if received.truncated || received.fds_truncated || fds.len() > MAX_FDS {
        let text = format!("a packet: at most {MAX_BYTES} bytes and {MAX_FDS} descriptors");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(buffer.get(..received.bytes).filter(|packet| !packet.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Vec<(u32, FoundFrame)> {
        let at = BlockHint { disk: 1, layer: 2, block: 3 };
        let [a, b] = [b"a", b"b"].map(|text| Digest::of(text));
        vec![
            (7, FoundFrame::Page(a)),
            (8, FoundFrame::Disk(at, b)),
            (u32::MAX, FoundFrame::Page(b)),
        ]
    }

    #[test]
    fn messages_are_read_as_they_were_sent_and_no_prefix_of_one_is() {
        let digest = Digest::of(b"ram");
        for message in [
            FromPacker::Frames(frames()),
            FromPacker::Classified(Classified { digest, data_bytes: 1 << 40, hints: (5, 6) }),
            FromPacker::Written(9),
            FromPacker::Failed { text: "RAM: no".to_owned(), is_no_space: false },
            FromPacker::Failed { text: String::new(), is_no_space: true },
        ] {
            let packet = message.encode();
            assert_eq!(FromPacker::decode(&packet).as_ref(), Some(&message));
            let mut longer = packet.clone();
            longer.push(0);
            assert_ne!(FromPacker::decode(&longer), Some(message.clone()));
            for length in 0..packet.len() {
                let cut = FromPacker::decode(&packet[..length]);
                assert_ne!(cut, Some(message.clone()), "{length}");
            }
        }
        let mut longest = vec![b'x'; 2 + MAX_TEXT];
        longest[..2].copy_from_slice(&[b'e', 0]);
        assert!(FromPacker::decode(&longest).is_some());
        longest.push(b'x');
        assert_eq!(FromPacker::decode(&longest), None);
        assert_eq!(FromPacker::decode(b"e\x02text"), None);
        assert_eq!(FromPacker::decode(b"x"), None);
        assert_eq!(FromPacker::decode(b"f"), None, "frames, but none");
    }

    #[test]
    fn a_pack_and_a_sheet_are_read_as_they_were_written() {
        let frames = [3, 2, u32::MAX];
        assert_eq!(pack_of(&pack(5, &frames)), Some((5, frames.to_vec())));
        assert_eq!(pack_of(&pack(5, &frames)[..15]), None);
        let full: Vec<u32> = (0..MAX_PACK_PAGES).collect();
        assert_eq!(pack(0, &full).len(), MAX_BYTES);
        let free = [1..2, 5..u32::MAX];
        let hints = [(4, BlockHint { disk: 1, layer: 2, block: 77 })];
        let bytes = sheet(&free, &hints);
        assert_eq!(read_sheet(&bytes, 2, 1), Some((free.to_vec(), hints.to_vec())));
        for (free, hints) in [(1, 1), (2, 2), (3, 0), (u64::MAX, 1), (0, u64::MAX)] {
            assert_eq!(read_sheet(&bytes, free, hints), None);
        }
    }
}
