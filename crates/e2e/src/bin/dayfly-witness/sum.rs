//! A checksum of 256 bits without vector instructions, because those are slow under emulation: with
//! BLAKE3, five minutes were not enough for 4 GB of files.
//!
//! Four lanes of 64 bits take a word each of every 32 bytes. A step is a bijection of the lane for
//! a given word, and of the word for a given lane. So a change of a single word always changes the
//! checksum; other changes go undetected once in 2^64. The checksum does not prevent forgery.

const BLOCK: usize = 32;
/// Odd, so that multiplying is a bijection; digits of the golden ratio and of square roots.
const FACTORS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0x6a09_e667_f3bc_c909, 0xbb67_ae85_84ca_a73b, 0x3c6e_f372_fe94_f82b];

/// The checksum of the bytes so far.
#[derive(Debug, Clone)]
pub struct Sum {
    lanes: [u64; 4],
    /// Bytes that do not fill a block yet.
    rest: Vec<u8>,
    bytes: u64,
}

impl Sum {
    pub fn new() -> Self {
        Self { lanes: FACTORS, rest: Vec::with_capacity(BLOCK), bytes: 0 }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if !self.rest.is_empty() {
            let (head, tail) = bytes.split_at(bytes.len().min(BLOCK - self.rest.len()));
            self.rest.extend_from_slice(head);
            bytes = tail;
            if self.rest.len() < BLOCK {
                return;
            }
            step(&mut self.lanes, &self.rest);
            self.rest.clear();
        }
        let whole = bytes.len() / BLOCK * BLOCK;
        step(&mut self.lanes, &bytes[..whole]);
        self.rest.extend_from_slice(&bytes[whole..]);
    }

    /// The checksum in hexadecimal.
    pub fn finish(mut self) -> String {
        self.rest.resize(BLOCK, 0);
        step(&mut self.lanes, &self.rest);
        step(&mut self.lanes, &[self.bytes.to_le_bytes(); BLOCK / 8].concat());
        self.lanes.map(|lane| format!("{lane:016x}")).concat()
    }
}

/// Mixes `blocks`, a multiple of [`BLOCK`] bytes, into the lanes.
fn step(lanes: &mut [u64; 4], blocks: &[u8]) {
    let [mut a, mut b, mut c, mut d] = *lanes;
    let mix = |lane: u64, word: &[u8], factor: u64| {
        let word = u64::from_le_bytes(std::array::from_fn(|n| word[n]));
        (lane ^ word).wrapping_mul(factor).rotate_left(29)
    };
    for block in blocks.chunks_exact(BLOCK) {
        a = mix(a, &block[..8], FACTORS[0]);
        b = mix(b, &block[8..16], FACTORS[1]);
        c = mix(c, &block[16..24], FACTORS[2]);
        d = mix(d, &block[24..], FACTORS[3]);
    }
    *lanes = [a, b, c, d];
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(pieces: &[&[u8]]) -> String {
        let mut sum = Sum::new();
        pieces.iter().for_each(|piece| sum.update(piece));
        sum.finish()
    }

    #[test]
    fn pieces_do_not_matter_and_every_bit_does() {
        let bytes: Vec<u8> = (0..1000_u32).map(|n| (n * 7 % 251) as u8).collect();
        let whole = sum(&[&bytes]);
        for at in [0, 1, 31, 32, 33, 500, 999, 1000] {
            let (head, tail) = bytes.split_at(at);
            assert_eq!(sum(&[head, tail]), whole, "cut at {at}");
            assert_eq!(
                sum(&[&head[..at / 2], &head[at / 2..], tail]),
                whole,
                "cut at {at} and before"
            );
        }
        for bit in 0..8000 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum(&[&other]), whole, "bit {bit}");
        }
    }

    #[test]
    fn zeroes_at_the_end_count() {
        assert_ne!(sum(&[&[0; 3]]), sum(&[&[0; 4]]));
        assert_ne!(sum(&[]), sum(&[&[0; 32]]));
    }
}
