use super::*;
use dayfly_units::PAGE_SIZE;
use proptest::prelude::*;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;

fn extent(guest: u64, offset: u64, pages: u64) -> Extent {
    Extent { guest, offset, bytes: pages * PAGE_SIZE }
}

#[test]
fn ram_around_a_hole() {
    let layout = Layout::new(&[extent(0, 0, 3), extent(4 << 30, 3 * 4096, 2)]).unwrap();
    assert_eq!((layout.frames(), layout.end()), (5, Pfn((1 << 20) + 2)));
    assert_eq!(layout.frame(Pfn(2)), Some(Frame(2)));
    assert_eq!(layout.frame(Pfn(3)), None);
    assert_eq!(layout.frame(Pfn(1 << 20)), Some(Frame(3)));
    assert_eq!(layout.pfn(Frame(4)), Some(Pfn((1 << 20) + 1)));
    assert_eq!((layout.pfn(Frame(5)), layout.offset(Frame(3))), (None, Some(3 * 4096)));
}

#[test]
fn what_is_no_layout_is_refused() {
    assert_eq!(Layout::new(&[]).unwrap_err(), LayoutError::Count(0));
    assert!(matches!(Layout::new(&vec![extent(0, 0, 1); 1025]), Err(LayoutError::Count(1025))));
    for (extents, at) in
        [(vec![extent(1, 0, 1)], 0), (vec![extent(0, 0, 1), extent(4096, 4096, 0)], 1)]
    {
        assert!(
            matches!(Layout::new(&extents), Err(LayoutError::Unaligned { at: a, .. }) if a == at)
        );
    }
    for bad in [extent(MAX_GUEST_BYTES, 0, 1), extent(0, MAX_GUEST_BYTES, 1), extent(!4095, 0, 1)] {
        assert!(matches!(Layout::new(&[bad]), Err(LayoutError::TooHigh { at: 0, .. })), "{bad:?}");
    }
    let overlap = Layout::new(&[extent(0, 0, 2), extent(4096, 8192, 1)]).unwrap_err();
    assert!(matches!(overlap, LayoutError::Order { at: 1, expected: 8192, .. }));
}

/// A file of eight pages, of which those in `data` have content.
fn sparse(folder: &std::path::Path, data: &[u64]) -> std::fs::File {
    let mut file = tempfile::tempfile_in(folder).unwrap();
    file.set_len(8 * PAGE_SIZE).unwrap();
    for page in data {
        file.seek(SeekFrom::Start(page * PAGE_SIZE)).unwrap();
        file.write_all(&[u8::try_from(page + 1).unwrap(); 4096]).unwrap();
    }
    file
}

#[test]
fn a_file_is_read_without_its_holes_being_filled() {
    let shared = std::path::Path::new("/dev/shm");
    let file = sparse(shared, &[1, 2, 6]);
    let before = file.metadata().unwrap().blocks();
    let layout = Layout::new(&[extent(0, 4096, 3), extent(1 << 30, 5 * 4096, 3)]).unwrap();
    let memory = RamFile::open(&file, layout).unwrap();
    let firsts: Vec<u64> = (0..7).map(|n| word(memory.page(Frame(n)), 7) & 0xff).collect();
    assert_eq!(firsts, [2, 3, 0, 0, 7, 0, 0]);
    let data: Vec<bool> = (0..7).map(|n| memory.may_hold_data(Frame(n))).collect();
    assert_eq!(data, [true, true, false, false, true, false, false]);
    assert_eq!(file.metadata().unwrap().blocks(), before);
}

#[test]
fn a_file_that_is_too_short_is_refused() {
    let file = sparse(&std::env::temp_dir(), &[]);
    let layout = Layout::new(&[extent(0, 4096, 8)]).unwrap();
    let refused = RamFile::open(&file, layout).unwrap_err();
    assert!(matches!(refused, OpenError::Short { expected: 36864, got: 32768 }), "{refused}");
}

proptest! {
    #[test]
    fn frames_and_page_numbers_are_each_others_inverse(
        pieces in prop::collection::vec((0u64..5, 1u64..5), 1..6),
    ) {
        let mut at = 0;
        let mut offset = 0;
        let extents: Vec<Extent> = pieces.iter().map(|(gap, pages)| {
            let this = extent((at + gap) * PAGE_SIZE, offset, *pages);
            at += gap + pages;
            offset += pages * PAGE_SIZE;
            this
        }).collect();
        let layout = Layout::new(&extents).unwrap();
        let frames: Vec<Frame> = (0..at + 3).filter_map(|pfn| layout.frame(Pfn(pfn))).collect();
        prop_assert_eq!(&frames, &(0..layout.frames()).map(Frame).collect::<Vec<_>>());
        for frame in frames {
            prop_assert_eq!(layout.frame(layout.pfn(frame).unwrap()), Some(frame));
            prop_assert_eq!(layout.offset(frame), Some(frame.0 as u64 * PAGE_SIZE));
        }
        let stretches: usize = layout.stretches().map(|(_, frames)| frames.len()).sum();
        prop_assert_eq!(stretches, layout.frames());
    }
}
