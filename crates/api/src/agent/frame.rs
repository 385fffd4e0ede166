//! The format of a frame: length, kind, body.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | length of the body in bytes, little-endian, at most [`MAX_FRAME_BYTES`] |
//! | 4 | 1 | kind |
//! | 5 | … | body |

/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 5;
/// Longest body in bytes that either side accepts.
pub const MAX_FRAME_BYTES: usize = 256 << 10;

/// The kind of a frame, which determines its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// JSON of a [`super::Request`].
    Request = 1,
    /// JSON of a [`super::Reply`].
    Reply = 2,
    /// Bytes for the program's standard input.
    Stdin = 3,
    /// End of standard input; no body.
    StdinEnd = 4,
    /// Bytes of the program's standard output.
    Stdout = 5,
    /// Bytes of the program's standard error.
    Stderr = 6,
    /// JSON of a [`super::WindowSize`].
    Resize = 7,
    /// A signal's number, 4 bytes little-endian, for the program's process group.
    Signal = 8,
    /// JSON of a [`super::Exit`]; the last frame.
    Exit = 9,
    /// Bytes of an archive.
    Data = 10,
    /// End of a complete archive; no body.
    End = 11,
    /// Arguments and environment of the `Request` before (protocol 3).
    Strings = 12,
}

/// A complete frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The kind, which determines the body.
    pub kind: FrameKind,
    /// The body, at most [`MAX_FRAME_BYTES`] bytes.
    pub body: Vec<u8>,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The body would be longer than allowed.
    #[error("frame length at byte 0: expected at most {MAX_FRAME_BYTES}, got {0}")]
    TooLong(u32),
    /// The kind is unknown.
    #[error("frame kind at byte 4: expected 1 to 12, got {0}")]
    Kind(u8),
}

/// Decodes a header. Returns the kind and the length of the body in bytes.
///
/// # Errors
/// [`FrameError`]. The caller must not allocate the body before this function succeeds.
pub fn decode_header(header: [u8; HEADER_BYTES]) -> Result<(FrameKind, usize), FrameError> {
    use FrameKind::{
        Data, End, Exit, Reply, Request, Resize, Signal, Stderr, Stdin, StdinEnd, Stdout, Strings,
    };
    let [a, b, c, d, kind] = header;
    let length = u32::from_le_bytes([a, b, c, d]);
    if length as usize > MAX_FRAME_BYTES {
        return Err(FrameError::TooLong(length));
    }
    [Request, Reply, Stdin, StdinEnd, Stdout, Stderr, Resize, Signal, Exit, Data, End, Strings]
        .into_iter()
        .find(|k| *k as u8 == kind)
        .map(|k| (k, length as usize))
        .ok_or(FrameError::Kind(kind))
}

/// Encodes a frame.
///
/// # Panics
/// If `body` is longer than [`MAX_FRAME_BYTES`]: senders split streams into pieces.
#[must_use]
pub fn encode(kind: FrameKind, body: &[u8]) -> Vec<u8> {
    assert!(body.len() <= MAX_FRAME_BYTES, "a frame's body of {} bytes", body.len());
    let length = u32::try_from(body.len()).expect("MAX_FRAME_BYTES fits in 32 bits");
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend_from_slice(&length.to_le_bytes());
    out.push(kind as u8);
    out.extend_from_slice(body);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_header_is_read_or_refused_within_the_cap(header in any::<[u8; HEADER_BYTES]>()) {
            if let Ok((kind, length)) = decode_header(header) {
                prop_assert!(length <= MAX_FRAME_BYTES);
                prop_assert_eq!(kind as u8, header[4]);
            }
        }

        #[test]
        fn what_is_encoded_decodes(body in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let bytes = encode(FrameKind::Stdout, &body);
            let header = bytes[..HEADER_BYTES].try_into().expect("five bytes");
            prop_assert_eq!(decode_header(header), Ok((FrameKind::Stdout, body.len())));
            prop_assert_eq!(&bytes[HEADER_BYTES..], &body[..]);
        }
    }
}
