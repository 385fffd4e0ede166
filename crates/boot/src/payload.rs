//! Decompresses the payload of a bzImage.

use crate::error::FormatError;
use std::io::Read;

/// Largest block of LZ4's legacy framing.
const LZ4_BLOCK_BYTES: usize = 8 << 20;

/// Decompresses the payload, whose first bytes select the format. The result has at most `cap` + 1
/// bytes, so the caller can detect an excess.
pub(crate) fn decompress(
    payload: &[u8],
    body: &[u8],
    at: u64,
    cap: u64,
) -> Result<Vec<u8>, FormatError> {
    let failed = |e: std::io::Error| FormatError::Payload { at, what: e.to_string() };
    let unsupported = |name: &str| FormatError::Compression { at, name: name.to_owned() };
    let reader: Box<dyn Read + '_> = match payload {
        // The decoder's default window limit of 128 MiB is also the limit of the kernel's own
        // decoder.
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(zstd::Decoder::with_buffer(body).map_err(failed)?.single_frame())
        }
        // gzip's own trailer holds the length.
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::GzDecoder::new(payload)),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Box::new(liblzma::bufread::XzDecoder::new(body)),
        [0x02, 0x21, 0x4c, 0x18, ..] => return lz4_legacy(&body[4..], at + 4, cap),
        [0x5d, 0, 0, ..] => return Err(unsupported("lzma")),
        [b'B', b'Z', b'h', ..] => return Err(unsupported("bzip2")),
        [0x89, b'L', b'Z', b'O', ..] => return Err(unsupported("lzo")),
        [0x7f, b'E', b'L', b'F', ..] => return Ok(payload.to_vec()),
        other => {
            return Err(unsupported(&format!(
                "starting with {}",
                hex::encode(&other[..other.len().min(6)])
            )));
        }
    };
    let mut out = Vec::new();
    reader.take(cap + 1).read_to_end(&mut out).map_err(failed)?;
    Ok(out)
}

/// Decompresses LZ4's legacy frame (lz4_Frame_format.md): blocks of at most 8 MiB unpacked, each
/// after its packed length.
fn lz4_legacy(mut rest: &[u8], mut at: u64, cap: u64) -> Result<Vec<u8>, FormatError> {
    let mut out = Vec::new();
    let mut block = vec![0; LZ4_BLOCK_BYTES];
    while let Some((length, data)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some(packed) = data.get(..length) else {
            let what = format!("LZ4 block: expected {length} bytes, got {}", data.len());
            return Err(FormatError::Payload { at, what });
        };
        let unpacked = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|e| FormatError::Payload { at, what: format!("LZ4 block: {e}") })?;
        out.extend_from_slice(&block[..unpacked]);
        if out.len() as u64 > cap {
            return Ok(out);
        }
        at += 4 + length as u64;
        rest = &data[length..];
    }
    if rest.is_empty() {
        return Ok(out);
    }
    Err(FormatError::Payload {
        at,
        what: format!("LZ4 block: expected 4 bytes of length, got {}", rest.len()),
    })
}
