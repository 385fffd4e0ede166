//! The sealed envelope: a fixed header, which a reader verifies in full before it decodes a byte of
//! the payload.
//!
//! Everything that dayfly writes and later decodes (VM state, disk layer maps, manifests) is
//! sealed. All numbers are little-endian:
//!
//! | offset | size | field | checked |
//! |---|---|---|---|
//! | 0 | 8 | magic: what kind of payload | 1st |
//! | 8 | 32 | BLAKE3 of the header's bytes 0-8 and 40-96 | 2nd |
//! | 40 | 4 | version of the payload's encoding | 3rd |
//! | 44 | 4 | zero | 4th |
//! | 48 | 8 | payload length in bytes | 5th: at most the caller's cap, exactly what follows |
//! | 56 | 8 | zero | 4th |
//! | 64 | 32 | BLAKE3 of the payload | 6th |
//! | 96 | … | payload | decoded only after all of the above |
//!
//! The header's own digest is checked before version and length. So a flipped bit is reported as
//! damage, and an unknown version is reported as a version.

use std::ops::RangeInclusive;

/// Bytes of header before the payload.
pub const HEADER_BYTES: usize = 96;

/// The kind of a payload: eight ASCII bytes at the start of the file.
pub type Magic = [u8; 8];

/// Why sealed bytes were refused. Each variant names the field's byte offset, the expected value
/// and the value found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The bytes end before the header does.
    #[error("header at byte 0: expected {HEADER_BYTES} bytes, got {got}")]
    Short {
        /// Bytes that were given.
        got: usize,
    },
    /// The bytes are of another kind.
    #[error("magic at byte 0: expected {expected:?}, got {got:?}")]
    Magic {
        /// The kind asked for.
        expected: String,
        /// The kind found, unprintable bytes escaped.
        got: String,
    },
    /// A bit of the header changed.
    #[error("header digest at byte 8: expected {expected}, got {got}: the header is damaged")]
    HeaderDigest {
        /// The digest written in the header.
        expected: String,
        /// The digest of the header as it is now.
        got: String,
    },
    /// Written by a version of dayfly whose encoding this one does not read.
    #[error("version at byte 40: expected {min} to {max}, got {got}")]
    Version {
        /// Oldest version read here.
        min: u32,
        /// Newest version read here.
        max: u32,
        /// The version found.
        got: u32,
    },
    /// A reserved field is in use.
    #[error("reserved field at byte {at}: expected 0, got {got}")]
    Reserved {
        /// Byte offset of the field.
        at: usize,
        /// Value of the field.
        got: u64,
    },
    /// Truncated, extended, or longer than the caller allows.
    #[error(
        "payload length at byte 48: expected {stated} bytes as the header says, \
         of at most {cap}, got {present}"
    )]
    Length {
        /// Length in the header.
        stated: u64,
        /// Bytes after the header.
        present: u64,
        /// The caller's limit.
        cap: u64,
    },
    /// A bit of the payload changed.
    #[error("payload digest at byte 64: expected {expected}, got {got}: the payload is damaged")]
    PayloadDigest {
        /// The digest written in the header.
        expected: String,
        /// The digest of the payload as it is now.
        got: String,
    },
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn header_digest(header: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header[0..8]);
    hasher.update(&header[40..HEADER_BYTES]);
    hasher.finalize()
}

/// Returns `payload` behind a header of kind `magic` and version `version`.
#[must_use]
pub fn seal(magic: &Magic, version: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + payload.len());
    out.extend_from_slice(magic);
    out.extend_from_slice(&[0; 32]);
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(blake3::hash(payload).as_bytes());
    let digest = header_digest(&out);
    out[8..40].copy_from_slice(digest.as_bytes());
    out.extend_from_slice(payload);
    out
}

/// Verifies `bytes` and returns the version and the payload.
///
/// `cap` bounds the payload's length; callers that read a file check its size against `cap` +
/// [`HEADER_BYTES`] before they read it.
///
/// # Errors
/// [`SealError`], in the order of the table above. Nothing is decoded before everything has been
/// verified.
pub fn open<'a>(
    magic: &Magic,
    versions: RangeInclusive<u32>,
    cap: u64,
    bytes: &'a [u8],
) -> Result<(u32, &'a [u8]), SealError> {
    if bytes.len() < HEADER_BYTES {
        return Err(SealError::Short { got: bytes.len() });
    }
    let (header, payload) = bytes.split_at(HEADER_BYTES);
    if &array::<8>(header, 0) != magic {
        let show = |m: &[u8]| m.escape_ascii().to_string();
        return Err(SealError::Magic { expected: show(magic), got: show(&header[..8]) });
    }
    let (stated, now) = (blake3::Hash::from_bytes(array(header, 8)), header_digest(header));
    if stated != now {
        let (expected, got) = (stated.to_string(), now.to_string());
        return Err(SealError::HeaderDigest { expected, got });
    }
    let version = u32::from_le_bytes(array(header, 40));
    if !versions.contains(&version) {
        return Err(SealError::Version {
            min: *versions.start(),
            max: *versions.end(),
            got: version,
        });
    }
    for (at, got) in [
        (44, u64::from(u32::from_le_bytes(array(header, 44)))),
        (56, u64::from_le_bytes(array(header, 56))),
    ] {
        if got != 0 {
            return Err(SealError::Reserved { at, got });
        }
    }
    let stated_len = u64::from_le_bytes(array(header, 48));
    let present = payload.len() as u64;
    if stated_len > cap || stated_len != present {
        return Err(SealError::Length { stated: stated_len, present, cap });
    }
    let (stated, now) = (blake3::Hash::from_bytes(array(header, 64)), blake3::hash(payload));
    if stated != now {
        let (expected, got) = (stated.to_string(), now.to_string());
        return Err(SealError::PayloadDigest { expected, got });
    }
    Ok((version, payload))
}

/// Verifies `bytes` of any kind and version, for callers that keep sealed bytes without decoding
/// them.
///
/// # Errors
/// [`SealError`].
pub fn verify(cap: u64, bytes: &[u8]) -> Result<(), SealError> {
    let magic = bytes.first_chunk().ok_or(SealError::Short { got: bytes.len() })?;
    open(magic, 0..=u32::MAX, cap, bytes).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: Magic = *b"DFtest\r\n";

    fn sample() -> Vec<u8> {
        seal(&MAGIC, 3, b"a payload of some bytes")
    }

    #[test]
    fn what_was_sealed_opens() {
        assert_eq!(
            open(&MAGIC, 1..=3, 64, &sample()),
            Ok((3, b"a payload of some bytes".as_slice()))
        );
    }

    #[test]
    fn every_truncation_is_refused() {
        let whole = sample();
        for len in 0..whole.len() {
            assert!(open(&MAGIC, 1..=3, 64, &whole[..len]).is_err(), "truncated to {len} bytes");
            assert!(verify(64, &whole[..len]).is_err(), "truncated to {len} bytes");
        }
        let mut longer = whole;
        longer.push(0);
        assert!(matches!(open(&MAGIC, 1..=3, 64, &longer), Err(SealError::Length { .. })));
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let whole = sample();
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&MAGIC, 1..=3, 64, &flipped).is_err(), "flipped bit {bit}");
        }
    }

    #[test]
    fn a_foreign_version_is_named_as_one() {
        let foreign = seal(&MAGIC, 9, b"x");
        assert_eq!(
            open(&MAGIC, 1..=3, 64, &foreign),
            Err(SealError::Version { min: 1, max: 3, got: 9 })
        );
    }

    #[test]
    fn a_payload_over_the_cap_is_refused() {
        assert!(matches!(open(&MAGIC, 1..=3, 4, &sample()), Err(SealError::Length { cap: 4, .. })));
    }
}
