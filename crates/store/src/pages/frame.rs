//! The frame of a group (RFC 8878, section 3.1.1), checked before libzstd decodes it.
//!
//! A guest may have made the frame ([`super::work`]). libzstd would also take frames of its formats
//! before 1.0, skippable frames, several frames, and a dictionary's number. No pack has them, so
//! they only add code that a guest could reach. The compressed blocks stay libzstd's work.

/// The first bytes of a frame.
const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
/// The most bytes of a block, compressed or not.
const MAX_BLOCK_BYTES: usize = 128 << 10;

/// Whether `stored` is one frame without a dictionary, whose header names `length` bytes, and whose
/// blocks end with it.
pub(super) fn is_plain(stored: &[u8], length: usize) -> bool {
    blocks_of(stored, length).is_some_and(are_whole)
}

/// The bytes behind the header, and whether a checksum follows the last block.
fn blocks_of(stored: &[u8], length: usize) -> Option<(&[u8], bool)> {
    let (&descriptor, rest) = stored.strip_prefix(&MAGIC)?.split_first()?;
    let is_single_segment = descriptor & 1 << 5 != 0;
    let has_checksum = descriptor & 1 << 2 != 0;
    // The number of a dictionary, and a bit that is reserved.
    if descriptor & 0b1011 != 0 {
        return None;
    }
    let window_bytes = usize::from(!is_single_segment);
    let (count, add) = match (descriptor >> 6, is_single_segment) {
        (0, true) => (1, 0),
        (1, _) => (2, 256),
        (2, _) => (4, 0),
        (3, _) => (8, 0),
        // The length is not named.
        _ => return None,
    };
    let (named, blocks) = rest.get(window_bytes..)?.split_at_checked(count)?;
    let mut bytes = [0; 8];
    bytes[..count].copy_from_slice(named);
    let named = u64::from_le_bytes(bytes).checked_add(add)?;
    (named == length as u64).then_some((blocks, has_checksum))
}

/// Whether the blocks, and the checksum if there is one, end with the bytes.
fn are_whole((mut rest, has_checksum): (&[u8], bool)) -> bool {
    loop {
        let Some((header, after)) = rest.split_first_chunk::<3>() else { return false };
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let bytes = (header >> 3) as usize;
        let stored = match header >> 1 & 3 {
            0 | 2 => bytes,
            // One byte, repeated.
            1 => 1,
            _ => return false,
        };
        let Some(after) = after.get(stored..).filter(|_| bytes <= MAX_BLOCK_BYTES) else {
            return false;
        };
        if header & 1 == 1 {
            return after.len() == if has_checksum { 4 } else { 0 };
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture_pages::{PAGE, ram};

    /// As packs are written.
    const LEVEL: i32 = 3;

    fn compressed(raw: &[u8]) -> Vec<u8> {
        zstd::bulk::Compressor::new(LEVEL).unwrap().compress(raw).unwrap()
    }

    #[test]
    fn what_packs_have_is_plain_whatever_the_pages_are() {
        for pages in [1, 2, 15, 16, 17, 64] {
            let zeroes = vec![0; usize::try_from(pages).unwrap() * PAGE];
            // Some pages compress well, and some not at all.
            for raw in [ram(1..=pages), ram((1..=pages).map(|n| n * 3)), zeroes] {
                let stored = compressed(&raw);
                assert!(is_plain(&stored, raw.len()), "{pages} pages");
                assert!(!is_plain(&stored, raw.len() + 1) && !is_plain(&stored, raw.len() - 1));
                assert!((0..stored.len()).all(|length| !is_plain(&stored[..length], raw.len())));
            }
        }
    }

    #[test]
    fn other_frames_are_not_plain_although_libzstd_decodes_them() {
        let raw = ram(1..4);
        let stored = compressed(&raw);
        let decoded = |bytes: &[u8]| zstd::bulk::decompress(bytes, raw.len()).ok();
        let empty = compressed(&[]);
        let skippable = [&0x184d_2a50_u32.to_le_bytes()[..], &3_u32.to_le_bytes(), b"abc"].concat();
        // Written as a stream, so without the length.
        let unnamed = zstd::encode_all(&raw[..], LEVEL).unwrap();
        for (what, frames) in [
            ("two frames", [&stored[..], &empty].concat()),
            ("a skippable frame before", [&skippable[..], &stored].concat()),
            ("a skippable frame behind", [&stored[..], &skippable].concat()),
            ("no length", unnamed),
        ] {
            assert!(decoded(&frames).as_deref() == Some(&raw[..]), "{what}: not decoded");
            assert!(!is_plain(&frames, raw.len()), "{what}");
        }
        let legacy = [&0xfd2f_b527_u32.to_le_bytes()[..], &stored[4..]].concat();
        assert!(!is_plain(&legacy, raw.len()), "the magic of version 0.7");
        let mut dictionary = stored;
        dictionary[4] |= 1;
        assert!(!is_plain(&dictionary, raw.len()), "the number of a dictionary");
    }
}
