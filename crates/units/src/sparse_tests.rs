use super::*;
use proptest::prelude::*;

/// The definition in the module's doc, implemented literally.
fn by_definition(bytes: &[u8]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    for (index, page) in bytes.chunks(4096).enumerate() {
        if page.iter().any(|&b| b != 0) {
            hasher.update(&(index as u64).to_le_bytes());
            hasher.update(page);
        }
    }
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.finalize().into()
}

/// Pages of zeroes (0), pages of ones, pages with one byte set in the middle, and a partial page.
fn content() -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec(0_u8..3, 0..400), 0_usize..4096).prop_map(|(pages, tail)| {
        let mut bytes = Vec::new();
        for kind in pages {
            let mut page = [u8::from(kind == 1); 4096];
            page[1234] = u8::from(kind != 0);
            bytes.extend_from_slice(&page);
        }
        bytes.extend(std::iter::repeat_n(7, tail));
        bytes
    })
}

fn written_in_full(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn copies_hash_as_defined_wherever_the_holes_are(bytes in content()) {
        let expected = by_definition(&bytes);
        let full = written_in_full(&bytes);
        prop_assert_eq!(digest(&full).unwrap().digest, expected);
        let holes = tempfile::tempfile().unwrap();
        let copied = copy(&mut bytes.as_slice(), &holes, bytes.len() as u64).unwrap();
        prop_assert_eq!(copied.digest, expected);
        punch_zeroes(&full).unwrap();
        for file in [&holes, &full] {
            prop_assert_eq!(digest(file).unwrap(), copied);
            let mut back = vec![1; bytes.len()];
            file.read_exact_at(&mut back, 0).unwrap();
            prop_assert_eq!(&back, &bytes);
        }
    }

    #[test]
    fn every_changed_byte_changes_the_digest(
        bytes in content(), at in any::<prop::sample::Index>(), with in 1_u8..,
    ) {
        prop_assume!(!bytes.is_empty());
        let mut other = bytes.clone();
        other[at.index(bytes.len())] ^= with;
        prop_assert_ne!(digest(&written_in_full(&other)).unwrap().digest, by_definition(&bytes));
    }
}

#[test]
fn length_and_place_count() {
    let zeroes = |len| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file
    };
    assert_ne!(digest(&zeroes(4096)).unwrap().digest, digest(&zeroes(8192)).unwrap().digest);
    let page_at = |offset| {
        let file = zeroes(16384);
        file.write_all_at(&[1; 4096], offset).unwrap();
        digest(&file).unwrap()
    };
    assert_ne!(page_at(0).digest, page_at(4096).digest);
    assert_eq!(page_at(8192).data_bytes, 4096);
}

#[test]
fn pages_of_zeroes_take_no_disk() {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = vec![0; 8 << 20];
    bytes[5 << 20] = 1;
    let file = tempfile::tempfile().unwrap();
    let copied = copy(&mut bytes.as_slice(), &file, bytes.len() as u64).unwrap();
    assert_eq!((copied.bytes, copied.data_bytes), (8 << 20, 4096));
    assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10);
    let written = written_in_full(&bytes);
    punch_zeroes(&written).unwrap();
    assert!(written.metadata().unwrap().blocks() * 512 <= 64 << 10);
}

#[test]
fn a_huge_hole_is_not_read() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(b"x", 1 << 39).unwrap();
    assert_eq!(digest(&file).unwrap().data_bytes, 4096);
}

#[test]
fn a_stream_that_ends_early_is_reported_by_numbers() {
    let file = tempfile::tempfile().unwrap();
    match copy(&mut [1; 100].as_slice(), &file, 4096) {
        Err(CopyError::Short { expected: 4096, got: 100 }) => {}
        other => panic!("{other:?}"),
    }
    // Bytes after `len` stay unread.
    let mut longer = [2; 5000].as_slice();
    copy(&mut longer, &file, 4096).unwrap();
    assert_eq!(longer.len(), 904);
}

#[test]
fn a_copy_of_a_file_has_its_bytes_and_its_holes() {
    let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    from.write_all_at(&[7; 5000], 40 << 20).unwrap();
    from.write_all_at(&[0; 8192], 80 << 20).unwrap();
    from.set_len((90 << 20) + 5).unwrap();
    copy_file(&from, &to).unwrap();
    assert_eq!(digest(&to).unwrap(), digest(&from).unwrap());
    let taken = std::os::unix::fs::MetadataExt::blocks(&to.metadata().unwrap()) * 512;
    assert!(taken <= 64 << 10, "{taken} bytes");
}

/// A fixed vector: client and daemon name images by this digest, and stored snapshots contain it.
#[test]
fn the_digest_is_frozen() {
    let mut bytes = vec![0; 3 * 4096 + 5];
    bytes[4096] = 1;
    bytes[3 * 4096 + 1] = 2;
    assert_eq!(
        digest(&written_in_full(&bytes)).unwrap().digest.to_string(),
        "0b85eeab3a928aead23df40e1d711d86cce8babb7e39ed9d9872867cfbe54636"
    );
}
