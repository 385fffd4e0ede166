use super::layer::{BITMAP, LayerMap, LayerMapError, MAGIC, RUNS};
use crate::golden::golden;
use dayfly_units::sealed;
use proptest::prelude::*;
use std::os::fd::AsFd as _;

const BLOCKS: u64 = 40;

proptest! {
    #[test]
    fn a_map_reads_back(
        blocks in 0..3000_u64,
        picks in proptest::collection::btree_set(0..3000_u64, 0..200),
    ) {
        let mut map = LayerMap::empty(blocks).unwrap();
        for pick in &picks {
            map.insert(*pick);
        }
        let expected: Vec<u64> = picks.into_iter().filter(|b| *b < blocks).collect();
        let again = LayerMap::decode(&map.encode()).unwrap();
        prop_assert_eq!(&again, &map);
        prop_assert_eq!(again.present(), expected.len() as u64);
        prop_assert_eq!(again.runs().flatten().collect::<Vec<_>>(), expected.clone());
        for block in 0..blocks {
            prop_assert_eq!(again.has(block), expected.binary_search(&block).is_ok());
        }
        let runs: Vec<_> = again.runs().collect();
        prop_assert!(runs.windows(2).all(|w| w[0].end < w[1].start));
    }
}

fn sample_map() -> Vec<u8> {
    let mut map = LayerMap::empty(BLOCKS).unwrap();
    for block in [0, 7, 8, 39] {
        map.insert(block);
    }
    map.encode()
}

#[test]
fn every_truncation_and_every_flipped_bit_of_a_map_is_refused() {
    let whole = sample_map();
    assert_eq!(LayerMap::decode(&whole).unwrap().present(), 4);
    for len in 0..whole.len() {
        assert!(LayerMap::decode(&whole[..len]).is_err(), "truncated to {len}");
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(LayerMap::decode(&flipped).is_err(), "flipped bit {bit}");
    }
}

#[test]
fn a_sealed_payload_that_lies_is_refused() {
    let with = |size: u32, blocks: u64, bits: &[u8]| {
        let payload = [&size.to_le_bytes()[..], &blocks.to_le_bytes(), bits].concat();
        LayerMap::decode(&sealed::seal(&MAGIC, BITMAP, &payload))
    };
    assert!(with(4096, 12, &[0xff, 0x0f]).is_ok());
    assert!(matches!(with(512, 12, &[0, 0]), Err(LayerMapError::BlockBytes(512))));
    assert!(matches!(with(4096, u64::MAX, &[0, 0]), Err(LayerMapError::Blocks(u64::MAX))));
    assert!(matches!(
        with(4096, 17, &[0, 0]),
        Err(LayerMapError::Bitmap { expected: 3, got: 2, .. })
    ));
    assert!(matches!(
        with(4096, 8, &[0, 0]),
        Err(LayerMapError::Bitmap { expected: 1, got: 2, .. })
    ));
    assert!(matches!(with(4096, 12, &[0, 0x10]), Err(LayerMapError::Stray(12))));
    let short = LayerMap::decode(&sealed::seal(&MAGIC, BITMAP, &[0; 11]));
    assert!(matches!(short, Err(LayerMapError::Short(11))));
    assert!(matches!(LayerMap::decode(&sealed::seal(&MAGIC, 3, b"")), Err(LayerMapError::Seal(_))));
}

#[test]
fn maps_of_both_versions_are_read() {
    let mut map = LayerMap::empty(1021).unwrap();
    map.insert_run(&(3..900));
    let runs = golden("layer-map-2", &map.encode());
    assert!(runs == map.encode());
    assert_eq!(LayerMap::decode(&runs).unwrap(), map);
    (0..60).for_each(|n| map.insert(901 + 2 * n));
    let bitmap = golden("layer-map-1", &map.encode());
    assert!(bitmap == map.encode());
    assert_eq!(LayerMap::decode(&bitmap).unwrap(), map);
    let version = |bytes: &[u8]| sealed::open(&MAGIC, BITMAP..=RUNS, 1 << 20, bytes).unwrap().0;
    assert_eq!((version(&bitmap), version(&runs)), (BITMAP, RUNS));
}

#[test]
fn a_map_is_written_in_the_shorter_way_and_read_in_both() {
    let mut map = LayerMap::empty(1024).unwrap();
    let version = |map: &LayerMap| {
        let bytes = map.encode();
        assert_eq!(&LayerMap::decode(&bytes).unwrap(), map);
        (sealed::open(&MAGIC, BITMAP..=RUNS, 1 << 20, &bytes).unwrap().0, bytes.len())
    };
    assert_eq!(version(&map), (RUNS, sealed::HEADER_BYTES + 12));
    map.insert_run(&(3..900));
    assert_eq!(version(&map), (RUNS, sealed::HEADER_BYTES + 12 + 8));
    (0..14).for_each(|n| map.insert(902 + 2 * n));
    assert_eq!(version(&map), (RUNS, sealed::HEADER_BYTES + 12 + 8 * 15));
    map.insert(1023);
    assert_eq!(version(&map), (BITMAP, sealed::HEADER_BYTES + 12 + 128));
    let mut whole = LayerMap::empty(1021).unwrap();
    whole.insert_run(&(0..5000));
    assert_eq!(
        (whole.present(), whole.runs().next(), whole.runs().count()),
        (1021, Some(0..1021), 1)
    );
}

#[test]
fn runs_that_lie_are_refused() {
    let with = |blocks: u64, runs: &[[u32; 2]]| {
        let runs: Vec<u8> = runs.iter().flatten().flat_map(|n| n.to_le_bytes()).collect();
        let payload = [&4096_u32.to_le_bytes()[..], &blocks.to_le_bytes(), &runs].concat();
        LayerMap::decode(&sealed::seal(&MAGIC, RUNS, &payload))
    };
    assert_eq!(with(12, &[[0, 3], [4, 8]]).unwrap().present(), 11);
    for (runs, number) in [
        (&[[0, 13]][..], 0),
        (&[[12, 1]], 0),
        (&[[0, 0]], 0),
        (&[[0, 3], [3, 1]], 1),
        (&[[4, 1], [0, 1]], 1),
        (&[[0, 1], [u32::MAX, u32::MAX]], 1),
    ] {
        let error = with(12, runs).unwrap_err();
        assert!(
            matches!(error, LayerMapError::Run { number: n, .. } if n == number),
            "{runs:?}: {error}"
        );
    }
    let odd = [&4096_u32.to_le_bytes()[..], &12_u64.to_le_bytes(), &[0; 9]].concat();
    assert!(matches!(
        LayerMap::decode(&sealed::seal(&MAGIC, RUNS, &odd)),
        Err(LayerMapError::Runs(9))
    ));
    assert!(matches!(with(u64::MAX, &[]), Err(LayerMapError::Blocks(u64::MAX))));
}

#[test]
fn a_map_file_larger_than_any_map_is_not_read() {
    let huge = tempfile::tempfile().unwrap();
    huge.set_len(1 << 40).unwrap();
    assert!(matches!(LayerMap::read(huge.as_fd()), Err(LayerMapError::TooLarge { .. })));
}
