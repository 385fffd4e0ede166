//! Ethernet frames in a byte stream: four bytes length, most significant first, then the frame
//! (the format of QEMU's `-netdev socket`, and of passt(1)).

use std::io::{self, Read};

/// Longest frame in bytes: an IPv4 packet of the largest length behind an Ethernet header.
pub(crate) const MAX_FRAME_BYTES: usize = 14 + 65_535;
/// Bytes of the length in front of a frame.
pub(crate) const LENGTH_BYTES: usize = 4;

/// Reads one frame into `into`, with its length in front, so that it can be passed on in one call.
/// Returns whether there was one: `false` at the stream's end.
///
/// # Errors
/// The source's errors; `InvalidData` for a length of zero or above [`MAX_FRAME_BYTES`].
pub(crate) fn read_frame(from: &mut impl Read, into: &mut Vec<u8>) -> io::Result<bool> {
    let mut length = [0; LENGTH_BYTES];
    if from.read(&mut length[..1])? == 0 {
        return Ok(false);
    }
    from.read_exact(&mut length[1..])?;
    let bytes = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if bytes == 0 || bytes > MAX_FRAME_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("length of a frame: expected 1 to {MAX_FRAME_BYTES} bytes, got {bytes}"),
        ));
    }
    into.clear();
    into.extend_from_slice(&length);
    into.resize(LENGTH_BYTES + bytes, 0);
    from.read_exact(&mut into[LENGTH_BYTES..])?;
    Ok(true)
}

/// The frame behind its length.
pub(super) fn body(framed: &[u8]) -> &[u8] {
    framed.get(LENGTH_BYTES..).unwrap_or_default()
}

/// A frame with its length in front.
pub(super) fn framed(frame: &[u8]) -> Vec<u8> {
    let length = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], frame].concat()
}
