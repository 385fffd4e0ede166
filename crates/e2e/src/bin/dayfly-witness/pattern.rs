//! Memory and a file of which every byte is known.

use crate::error::{Result, at};
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// Pages of noise, of a repeated word, and of zeroes, in turn.
fn pattern(mib: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; mib * MIB];
    let mut noise = blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof();
    for (n, page) in bytes.chunks_exact_mut(PAGE).enumerate() {
        match n % 3 {
            0 => noise.fill(page),
            1 => page
                .chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&(!(n as u64 ^ seed)).to_le_bytes())),
            _ => {}
        }
    }
    bytes
}

/// Fills `mib` MiB of memory and half as much of `file`, which appears under its name when both are
/// complete, and never returns.
pub fn hold(mib: &str, seed: &str, file: &Path) -> Result<String> {
    let (mib, seed): (usize, u64) = (mib.parse()?, seed.parse()?);
    if !(2..=65_536).contains(&mib) {
        return Err(format!("expected 2 to 65536 MiB, got {mib}").into());
    }
    let held = pattern(mib, seed);
    let partial = file.with_extension("partial");
    at(fs::write(&partial, pattern(mib / 2, seed + 1)), &partial.display())?;
    at(fs::rename(&partial, file), &file.display())?;
    loop {
        std::thread::sleep(Duration::from_secs(3600));
        black_box(&held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_follows_from_its_seed() {
        let one = pattern(2, 1);
        assert_eq!(one, pattern(2, 1));
        assert_ne!(one, pattern(2, 2));
        let zero = one.chunks(PAGE).filter(|page| page.iter().all(|b| *b == 0)).count();
        assert_eq!(zero, 512 / 3);
    }
}
