use super::*;
use crate::fixture_pages::{file, flip, golden, page, ram};
use crate::inner::Store;
use std::fs;

#[test]
fn every_block_that_is_not_zero_is_found_and_no_other() {
    let disk = file(&ram((0..500).map(|n| n % 300)));
    let index = BlockIndex::of(&disk, Path::new("disk"), &crate::Meter::default()).unwrap();
    for n in 0..500_u64 {
        let found = index.find(&Digest::of(&page(n)));
        let expected =
            if n < 300 && !n.is_multiple_of(7) { Some(u32::try_from(n).unwrap()) } else { None };
        assert_eq!(found, expected, "{n}");
    }
}

#[test]
fn the_bytes_of_version_1_are_frozen() {
    let index = BlockIndex { prefixes: vec![1, 2, u64::MAX], blocks: vec![9, 0, u32::MAX] };
    let of = Digest([7; 32]);
    let frozen = golden("blocks-1", &index.encode(&of));
    assert!(frozen == index.encode(&of));
    assert_eq!(BlockIndex::decode(Path::new("x"), &of, &frozen).unwrap(), index);
}

#[test]
fn damage_is_refused_and_the_index_made_again() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let disk = file(&ram(0..40));
    let of = crate::sparse::digest(&disk).unwrap().digest;
    let good = store.0.block_index(&of, &disk, &crate::Meter::default()).unwrap();
    let path = root.path().join("blocks").join(of.to_string());
    let whole = fs::read(&path).unwrap();
    assert_eq!(BlockIndex::decode(&path, &of, &whole).unwrap(), good);
    for length in 0..whole.len() {
        BlockIndex::decode(&path, &of, &whole[..length]).unwrap_err();
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        BlockIndex::decode(&path, &of, &flipped).unwrap_err();
    }
    let other = BlockIndex::decode(&path, &Digest([1; 32]), &whole).unwrap_err().to_string();
    assert!(other.contains("digest of the file: expected 0101"), "{other}");
    let sealed = |payload: &[u8]| {
        let sealed = sealed::seal(&MAGIC, VERSION, payload);
        BlockIndex::decode(&path, &of, &sealed).unwrap_err().to_string()
    };
    let mut lying = whole[HEADER_BYTES..].to_vec();
    lying[32..40].fill(255);
    assert!(sealed(&lying).contains("blocks: expected 34, got 18446744073709551615"));
    assert!(sealed(&[0; 39]).contains("payload: expected at least 40 bytes, got 39"));
    let mut unordered = whole[HEADER_BYTES..].to_vec();
    unordered[47] = 255;
    assert!(sealed(&unordered).contains("prefixes: expected ascending"));
    for damaged in [&whole[..50], &[]] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, damaged).unwrap();
        assert_eq!(store.0.block_index(&of, &disk, &crate::Meter::default()).unwrap(), good);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
}

#[test]
fn a_damaged_index_is_made_again_before_another_process_gets_it() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let disk = file(&ram(0..40));
    let of = crate::sparse::digest(&disk).unwrap().digest;
    let path = root.path().join("blocks").join(of.to_string());
    let is_sound = || {
        let got = store.0.block_index_file(&of, &disk, &crate::Meter::default()).unwrap();
        read_index(&of, &got.unwrap()).is_some()
    };
    assert!(is_sound());
    while !Stamp::at(&path).unwrap().is_settled() {
        std::thread::yield_now();
    }
    // The second call takes the stamp, and the third relies on it.
    assert!(is_sound() && is_sound());
    assert_eq!(store.0.sound_indexes.lock().unwrap().len(), 1);
    flip(&path, 60);
    assert!(is_sound(), "the damaged index was not made again");
}
