//! Dumps read back what the guest had, and take no more of the host than they must.

use super::*;
use crate::memory::backing::{self, Backing, Row};
use crate::memory::{MemoryError, anonymous, lay_over};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

const SIZE: u64 = 64 << 20;

fn laid(file: &File, bytes: u64, holes: &[(u64, u64)]) -> Result<GuestMemoryMmap, MemoryError> {
    let memory = anonymous(bytes)?;
    lay_over(&memory, &Backing::of(file.try_clone().unwrap()), bytes, holes, true).map(|_| memory)
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn blocks(file: &File) -> u64 {
    use std::os::unix::fs::MetadataExt;
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn a_dump_reads_back_with_and_without_a_pagemap_across_two_generations() {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    for pagemap in [Some(&pagemap), None] {
        let memory = anonymous(SIZE).unwrap();
        memory.write_slice(&[7; 3 * PAGE], GuestAddress(0x1000)).unwrap();
        memory.write_slice(&[9; 10], GuestAddress(40 << 20)).unwrap();
        memory.write_slice(&[0; PAGE], GuestAddress(50 << 20)).unwrap();
        let first = tempfile::tempfile().unwrap();
        let dumped =
            dump(&memory, SIZE, pagemap, Unwritten::Zero, &first, &mut YieldPoints::none())
                .unwrap();
        assert_eq!(dumped, Dump { own_bytes: 4 * PAGE_SIZE, parent_bytes: 0 });
        let mut expected = vec![0; usize::try_from(SIZE).unwrap()];
        expected[0x1000..0x4000].fill(7);
        expected[40 << 20..(40 << 20) + 10].fill(9);
        assert!(content(&first) == expected);
        assert!(blocks(&first) < 1 << 20, "zero pages are holes");

        let holes = large_holes(&first, SIZE).unwrap();
        assert_eq!(
            holes,
            [(0x4000, (40 << 20) - 0x4000), ((40 << 20) + 0x1000, (24 << 20) - 0x1000)]
        );

        // A clone overwrites one page, zeroes another, reads a third and dumps again.
        let clone = laid(&first, SIZE, &holes).unwrap();
        assert_eq!(clone.read_obj::<u8>(GuestAddress(60 << 20)).unwrap(), 0);
        clone.write_slice(&[1; PAGE], GuestAddress(0x2000)).unwrap();
        clone.write_slice(&[0; PAGE], GuestAddress(0x3000)).unwrap();
        clone.write_slice(&[5; PAGE], GuestAddress(20 << 20)).unwrap(); // in a hole
        assert_eq!(clone.read_obj::<u8>(GuestAddress(40 << 20)).unwrap(), 9);
        let second = tempfile::tempfile().unwrap();
        let dumped =
            dump(&clone, SIZE, pagemap, over(&holes, None), &second, &mut YieldPoints::none())
                .unwrap();
        if pagemap.is_some() {
            assert_eq!(dumped, Dump { own_bytes: 2 * PAGE_SIZE, parent_bytes: 2 * PAGE_SIZE });
        }
        assert!(content(&first) == expected, "the parent's file never changes");
        expected[0x2000..0x3000].fill(1);
        expected[0x3000..0x4000].fill(0);
        expected[20 << 20..(20 << 20) + PAGE].fill(5);
        assert!(content(&second) == expected);
        assert!(blocks(&second) < 1 << 20);
    }
}

const fn over<'a>(
    anonymous: &'a [(u64, u64)],
    own: Option<(&'a File, &'a [Row])>,
) -> Unwritten<'a> {
    Unwritten::Mapped { anonymous, own }
}

#[test]
fn a_dump_makes_no_pages_in_the_holes_of_a_template() {
    let template = memfd_create("template", MemfdFlags::CLOEXEC).unwrap();
    let template = File::from(template);
    template.set_len(SIZE).unwrap();
    for page in (0..SIZE / PAGE_SIZE).step_by(3) {
        template.write_all_at(&[1; PAGE], page * PAGE_SIZE).unwrap();
    }
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let dumped = |own: Option<(&File, &[Row])>| {
        let clone = laid(&template, SIZE, &[]).unwrap();
        clone.write_slice(&[5; PAGE], GuestAddress(PAGE_SIZE)).unwrap();
        let (target, before) = (tempfile::tempfile().unwrap(), blocks(&template));
        dump(&clone, SIZE, Some(&pagemap), over(&[], own), &target, &mut YieldPoints::none())
            .unwrap();
        let mut expected = content(&template);
        expected[PAGE..2 * PAGE].fill(5);
        assert!(content(&target) == expected);
        blocks(&template) - before
    };
    assert_eq!(dumped(Some((&template, &[]))), 0);
    assert!(dumped(None) > SIZE / 2, "what is avoided with the file does happen without it");
}

#[test]
fn a_dump_reads_back_what_was_mapped_from_several_files() {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let file = |salt: u8| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        for page in 0..100 {
            file.write_all_at(&[salt + page; PAGE], u64::from(page) * PAGE_SIZE).unwrap();
        }
        file
    };
    let (own, other) = (file(1), file(101));
    own.write_all_at(&[0; 20 * PAGE], 40 * PAGE_SIZE).unwrap();
    let rows = [
        Row { first: 10, pages: 5, file: 0, from: 60 },
        Row { first: 40, pages: 10, file: 0, from: 30 },
        // Across the end of the other file's data.
        Row { first: 5000, pages: 4, file: 0, from: 98 },
    ];
    let list = tempfile::tempfile().unwrap();
    list.write_all_at(&backing::encode(&rows), 0).unwrap();
    let backing =
        Backing::sharing(own.try_clone().unwrap(), &list, vec![other.try_clone().unwrap()]);
    let backing = backing.unwrap();
    let mut expected = content(&own);
    for row in &rows {
        let (to, from, len) =
            (row.first as usize * PAGE, row.from as usize * PAGE, row.pages as usize * PAGE);
        expected[to..to + len].copy_from_slice(&content(&other)[from..from + len]);
    }
    for (pagemap, whole) in [(Some(&pagemap), false), (Some(&pagemap), true), (None, false)] {
        let memory = anonymous(SIZE).unwrap();
        let parts = lay_over(&memory, &backing, SIZE, &[], whole).unwrap();
        // The row of four pages is copied if copying is allowed.
        let mapped = if whole { 15 } else { 19 };
        let (all, apart) = (parts.iter().map(|part| part.len).sum::<u64>(), mapped * PAGE_SIZE);
        assert_eq!(all + apart, SIZE, "pages of another file are not in its own parts");
        let copied = super::own(
            &memory,
            SIZE,
            &File::open("/proc/self/pagemap").unwrap(),
            &mut YieldPoints::none(),
        )
        .unwrap();
        assert_eq!(
            copied.runs().flatten().collect::<Vec<_>>(),
            if whole { (5000..5004).collect() } else { vec![] }
        );
        memory.write_slice(&[200; PAGE], GuestAddress(11 * PAGE_SIZE)).unwrap();
        let mut expected = expected.clone();
        expected[11 * PAGE..12 * PAGE].fill(200);
        for own in [None, Some((&own, rows.as_slice()))] {
            let dumped = tempfile::tempfile().unwrap();
            dump(&memory, SIZE, pagemap, over(&[], own), &dumped, &mut YieldPoints::none())
                .unwrap();
            assert!(content(&dumped) == expected);
        }
    }
}

#[test]
fn a_target_that_holds_something_is_refused() {
    let memory = anonymous(SIZE).unwrap();
    let target = tempfile::tempfile().unwrap();
    target.set_len(5).unwrap();
    assert!(matches!(
        dump(&memory, SIZE, None, Unwritten::Zero, &target, &mut YieldPoints::none()),
        Err(DumpError::NotEmpty(5))
    ));
    target.set_len(SIZE).unwrap();
    assert!(matches!(
        dump(&memory, SIZE, None, Unwritten::Zero, &target, &mut YieldPoints::none()),
        Ok(Dump { own_bytes: 0, .. })
    ));
    target.write_all_at(b"x", SIZE - 1).unwrap();
    assert!(matches!(
        dump(&memory, SIZE, None, Unwritten::Zero, &target, &mut YieldPoints::none()),
        Err(DumpError::NotEmpty(SIZE))
    ));
}

#[test]
fn a_file_of_another_length_is_not_mapped() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE - PAGE_SIZE).unwrap();
    let error = laid(&file, SIZE, &[]).unwrap_err().to_string();
    assert!(error.contains("67108864") && error.contains("67104768"), "{error}");
}

#[test]
fn holes_that_make_no_sense_are_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE).unwrap();
    let page = PAGE_SIZE;
    for bad in [
        vec![(1, page)],
        vec![(0, page + 1)],
        vec![(0, 0)],
        vec![(SIZE, page)],
        vec![(SIZE - page, 2 * page)],
        vec![(u64::MAX - page + 1, page)],
        vec![(page, page), (page, page)],
        vec![(4 * page, page), (0, page)],
    ] {
        let result = laid(&file, SIZE, &bad);
        assert!(matches!(result, Err(MemoryError::Hole { .. })), "{bad:?}");
    }
}

#[test]
fn a_hole_never_reaches_across_the_gap_in_guest_addresses() {
    let bytes = layout::HOLE_START + (64 << 20);
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    let holes = large_holes(&file, bytes).unwrap();
    assert_eq!(holes, [(0, layout::HOLE_START), (layout::HOLE_START, 64 << 20)]);
    let memory = laid(&file, bytes, &holes).unwrap();
    memory.write_obj(7u8, GuestAddress(layout::HOLE_END)).unwrap();
    memory.write_obj(8u8, GuestAddress(layout::HOLE_START - 1)).unwrap();
    let across = [(layout::HOLE_START - PAGE_SIZE, 2 * PAGE_SIZE)];
    assert!(laid(&file, bytes, &across).is_err());
}
