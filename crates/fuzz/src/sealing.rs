//! The envelope around inputs: without right digests no decoder looks at a payload, and no fuzzer
//! finds a digest.

use dayfly_units::sealed::{HEADER_BYTES, Magic};

/// `input` with length and digests of its header set right; `None` if it is shorter than a header.
#[must_use]
pub fn resealed(input: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = input.to_vec();
    let (header, payload) = bytes.split_at_mut_checked(HEADER_BYTES)?;
    header[48..56].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header[64..].copy_from_slice(blake3::hash(payload).as_bytes());
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header[..8]).update(&header[40..]);
    header[8..40].copy_from_slice(hasher.finalize().as_bytes());
    Some(bytes)
}

/// `input` as a file of this kind, sealed right: its first byte is the version, the rest the
/// payload. An input that begins with the magic is a file already.
#[must_use]
pub fn file(magic: &Magic, input: &[u8]) -> Option<Vec<u8>> {
    if input.starts_with(magic) {
        return resealed(input);
    }
    let (version, payload) = input.split_first()?;
    Some(dayfly_units::sealed::seal(magic, u32::from(*version), payload))
}

/// A sealed file as an input of [`file`], without the digests.
#[must_use]
pub fn unsealed(file: &[u8]) -> Vec<u8> {
    let version = file.get(40).copied().unwrap_or(1);
    std::iter::once(version).chain(file.iter().skip(HEADER_BYTES).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::sealed::{open, seal};

    #[test]
    fn any_payload_can_be_opened() {
        let magic = b"DFtest\r\n";
        let mut bytes = seal(magic, 7, b"payload");
        assert_eq!(file(magic, &unsealed(&bytes)).unwrap(), bytes);
        bytes.extend_from_slice(b" and more");
        assert!(open(magic, 7..=7, 100, &bytes).is_err());
        let right = resealed(&bytes).unwrap();
        assert_eq!(open(magic, 7..=7, 100, &right).unwrap(), (7, &b"payload and more"[..]));
        assert_eq!(file(magic, &bytes).unwrap(), right);
        assert_eq!(resealed(&bytes[..95]), None);
    }
}
