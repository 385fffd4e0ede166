//! Functions for the crate `fuzz`, and for tests of other crates: lists of modules, small kernels.

use crate::modules::needs;

/// The paths of `modules.dep`, each with the paths that it needs.
#[must_use]
pub fn modules_dep(text: &str) -> Vec<(String, Vec<String>)> {
    needs::parse(text).into_iter().collect()
}

/// The names of modules that a module says it needs.
#[must_use]
pub fn stated_needs(module: &[u8]) -> Vec<String> {
    needs::stated(module)
}

/// The smallest file that passes for a kernel: one segment, a banner, and `words` (at most
/// 65,536) that compress badly.
#[must_use]
pub fn small_kernel(words: u32) -> Vec<u8> {
    let mut elf = vec![0; 64 + 56];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (elf[16], elf[18], elf[32], elf[54], elf[56], elf[64]) = (2, 62, 64, 56, 1, 1);
    elf.extend_from_slice(
        b"Linux version %s (fmt)\0Linux version 6.12.1+deb12-cloud-amd64 (someone) #1\0",
    );
    elf.extend((0..words).map(|word| (word * word % 251).to_le_bytes()[0]));
    let length = elf.len() as u64;
    elf[64 + 32..64 + 40].copy_from_slice(&length.to_le_bytes());
    elf
}

/// A bzImage with this payload, of at most 4 GiB.
#[must_use]
pub fn small_image(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 3 * 512];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&512_u32.to_le_bytes());
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    image[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
    image.extend_from_slice(payload);
    image
}
