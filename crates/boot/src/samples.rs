//! Small kernels packed with every compression.

use crate::fuzzing::{small_image, small_kernel};
use std::io::Write;

/// A kernel whose packed form has several blocks.
pub(crate) fn elf() -> Vec<u8> {
    small_kernel(3000)
}

/// A bzImage with this payload.
pub(crate) fn image(payload: &[u8]) -> Vec<u8> {
    small_image(payload)
}

pub(crate) fn length_of(data: &[u8]) -> [u8; 4] {
    u32::try_from(data.len()).unwrap().to_le_bytes()
}

/// The payload packed with each compression, without the trailing length.
pub(crate) fn packed(data: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(data).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 6);
    xz.write_all(data).unwrap();
    let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
    for block in data.chunks(1000) {
        let block = lz4_flex::block::compress(block);
        lz4.extend_from_slice(&length_of(&block));
        lz4.extend_from_slice(&block);
    }
    vec![
        ("zstd", zstd::encode_all(data, 19).unwrap()),
        ("gzip", gzip.finish().unwrap()),
        ("xz", xz.finish().unwrap()),
        ("lz4", lz4),
    ]
}

pub(crate) fn images() -> Vec<(&'static str, Vec<u8>)> {
    let elf = elf();
    let whole = |(name, mut payload): (&'static str, Vec<u8>)| {
        if name != "gzip" {
            payload.extend_from_slice(&length_of(&elf));
        }
        (name, image(&payload))
    };
    packed(&elf).into_iter().map(whole).collect()
}
