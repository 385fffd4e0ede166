//! The packet that a VMM sends to the pager with its userfaultfd: where guest RAM is mapped in the
//! VMM's address space.

use crate::PAGE_SIZE;

const REGION_BYTES: usize = 24;
/// The most regions in one packet.
pub const MAX_REGIONS: usize = 512;
/// The longest packet, in bytes.
pub const MAX_PACKET_BYTES: usize = MAX_REGIONS * REGION_BYTES;
/// The pager's answer once it serves the regions.
pub const SERVED: &[u8] = b"served";

/// A part of guest RAM that the VMM maps in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Address in the VMM's address space, a multiple of 4096, not 0.
    pub host: u64,
    /// Length in bytes: whole pages, not 0.
    pub bytes: u64,
    /// Offset in the memory file, a multiple of 4096.
    pub offset: u64,
}

/// Encodes the packet: for each region its address, length and offset, each a u64 in little-endian
/// order.
#[must_use]
pub fn encode(regions: &[Region]) -> Vec<u8> {
    let words = regions.iter().flat_map(|r| [r.host, r.bytes, r.offset]);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Decodes a packet about a memory file of `file_bytes`; the regions are sorted by address.
///
/// `None` if the packet is invalid: no region, more than [`MAX_REGIONS`], a partial page, a region
/// outside the file, or two regions that overlap in the address space.
#[must_use]
pub fn decode(packet: &[u8], file_bytes: u64) -> Option<Vec<Region>> {
    let (chunks, rest) = packet.as_chunks::<REGION_BYTES>();
    if chunks.is_empty() || chunks.len() > MAX_REGIONS || !rest.is_empty() {
        return None;
    }
    let word = |chunk: &[u8; REGION_BYTES], n: usize| {
        u64::from_le_bytes(std::array::from_fn(|i| chunk[8 * n + i]))
    };
    let region =
        |chunk| Region { host: word(chunk, 0), bytes: word(chunk, 1), offset: word(chunk, 2) };
    let mut regions: Vec<Region> = chunks.iter().map(region).collect();
    regions.sort_unstable_by_key(|r| r.host);
    let fits = |r: &Region| {
        let whole = [r.host, r.bytes, r.offset].iter().all(|n| n.is_multiple_of(PAGE_SIZE));
        let inside = r.offset.checked_add(r.bytes).is_some_and(|end| end <= file_bytes);
        whole && inside && r.bytes > 0 && r.host > 0 && r.host.checked_add(r.bytes).is_some()
    };
    // `all(fits)` runs first, so that the addition in `apart` cannot overflow.
    let apart = |two: &[Region]| two[0].host + two[0].bytes <= two[1].host;
    (regions.iter().all(fits) && regions.windows(2).all(apart)).then_some(regions)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn region(host: u64, bytes: u64, offset: u64) -> Region {
        Region { host, bytes, offset }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let regions = [region(0x7000, 0x2000, 0), region(0x4000, 0x1000, 0x3000)];
        let got = decode(&encode(&regions), 0x4000).expect("regions");
        assert_eq!(got, [regions[1], regions[0]]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused =
            |regions: &[Region]| assert_eq!(decode(&encode(regions), 0x4000), None, "{regions:?}");
        refused(&[]);
        refused(&[region(0, 0x1000, 0)]);
        refused(&[region(0x1000, 0, 0)]);
        refused(&[region(0x1001, 0x1000, 0)]);
        refused(&[region(0x1000, 0x800, 0)]);
        refused(&[region(0x1000, 0x1000, 0x4000)]);
        refused(&[region(0x1000, u64::MAX - 0xfff, 0x1000)]);
        refused(&[region(u64::MAX - 0xfff, 0x1000, 0)]);
        refused(&[region(0x1000, u64::MAX - 0xfff, 0), region(0x2000, 0x1000, 0)]);
        refused(&[region(0x1000, 0x2000, 0), region(0x2000, 0x1000, 0x2000)]);
        refused(&vec![region(0x1000, 0x1000, 0); MAX_REGIONS + 1]);
        assert_eq!(decode(&encode(&[region(0x1000, 0x1000, 0)])[1..], 0x4000), None);
    }
}
