//! Small kernels packed with every compression.

use std::io::Write;

/// The smallest file that passes for a kernel: one segment and a banner.
pub(crate) fn elf() -> Vec<u8> {
    let mut elf = vec![0; 64 + 56];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[16] = 2;
    elf[18] = 62;
    elf[32] = 64;
    elf[54] = 56;
    elf[56] = 1;
    elf[64] = 1;
    elf.extend_from_slice(
        b"Linux version %s (fmt)\0Linux version 6.12.1+deb12-cloud-amd64 (someone) #1\0",
    );
    elf.extend((0..3000u32).map(|i| (i * i % 251).to_le_bytes()[0]));
    let length = u64::try_from(elf.len()).unwrap();
    elf[64 + 32..64 + 40].copy_from_slice(&length.to_le_bytes());
    elf
}

/// A bzImage with this payload.
pub(crate) fn image(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 3 * 512];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&512_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image.extend_from_slice(payload);
    image
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
