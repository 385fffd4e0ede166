//! The whole crate against a small Linux built by hand, in a correct and in a hostile version.

use super::*;
use crate::memory::PhysRead;
use crate::memory::image::RamImage;
use crate::paging::{LARGE, PRESENT, USER};
use crate::synthetic::{
    BALLOON, CACHE, FRAMES, FREE, Guest, KERNEL_CODE, Like, PROCESS, ROOT, SLAB, SPARE_TABLE, TEXT,
    USER_CODE, USER_DATA, all_large, image, loop_at,
};
use proptest::prelude::*;

const KINDS: [(Like, Levels); 4] = [
    (Like::Linux6_1, Levels::Four),
    (Like::Linux6_1, Levels::Five),
    (Like::Linux6_12, Levels::Four),
    (Like::Linux6_12, Levels::Five),
];

fn colour(report: &Report, frame: u64) -> Colour {
    report.colours[usize::try_from(frame).unwrap()]
}

fn rejection(guest: &Guest) -> Rejection {
    match introspect(&guest.ram, &[]).degraded {
        Some(Degraded::Rejected { first, .. }) => first,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_colour_in_either_encoding_and_number_of_levels() {
    for (like, levels) in KINDS {
        let guest = Guest::new(like, levels);
        let hint = RootHint { cr3: PROCESS * 4096, levels };
        let foreign = introspect(&guest.ram, &[RootHint { cr3: USER_DATA * 4096, levels }]);
        assert!(!foreign.kernel.unwrap().runs, "{like:?} {levels:?}");
        for hints in [&[][..], &[hint]] {
            let report = introspect(&guest.ram, hints);
            assert_eq!(report.degraded, None, "{like:?} {levels:?}");
            let (release, runs) = ("test-1.0".to_owned(), !hints.is_empty());
            let info = KernelInfo { release, levels, root: ROOT * 4096, runs };
            assert_eq!(report.kernel, Some(info));
            for (frame, expected) in [
                (0, Colour::Unknown),
                (ROOT, Colour::PageTable),
                (TEXT, Colour::KernelData),
                (PROCESS, Colour::PageTable),
                (PROCESS + 1, Colour::PageTable),
                (PROCESS + 2, Colour::PageTable),
                (USER_CODE, Colour::UserCode),
                (USER_DATA, Colour::UserData),
                (CACHE, Colour::PageCache),
                (CACHE + 3, Colour::PageCache),
                (SLAB, Colour::Slab),
                (BALLOON, Colour::Free),
                (SPARE_TABLE, Colour::PageTable),
                (KERNEL_CODE, Colour::KernelCode),
                (FREE, Colour::Free),
                (FREE + 63, Colour::Free),
                (FRAMES as u64 - 1, Colour::Free),
            ] {
                // The structure of frame 0 is all zero: its reference count is 0.
                let expected = if frame == 0 { Colour::KernelData } else { expected };
                assert_eq!(colour(&report, frame), expected, "{like:?} {levels:?} frame {frame}");
            }
            assert_eq!(report.processes, 1);
            let files: Vec<usize> = report.groups.iter().map(|group| group.frames).collect();
            assert_eq!(files, [1, 4]);
            assert_eq!(
                (report.files[50], report.files[52], report.files[55], report.files[56]),
                (1, 2, 2, 0)
            );
            assert_eq!(report.census().frames(Colour::PageCache), 4);
        }
    }
}

#[test]
fn a_copy_in_foreign_memory_is_not_believed_and_does_not_hide_the_kernel() {
    let guest = Guest::new(Like::Linux6_12, Levels::Four);
    // A false text in a process's memory lies before the true one, and frames are scanned from the
    // first.
    let guest = Guest { text: guest.text.replace("phys_base)=0", "phys_base)=8192"), ..guest };
    guest.write_text(0);
    assert_eq!(introspect(&guest.ram, &[]).degraded, None);

    let guest = Guest::new(Like::Linux6_12, Levels::Four);
    guest.write_text(USER_DATA);
    guest.ram.put(TEXT * 4096, 0);
    assert!(matches!(rejection(&guest), Rejection::Owner { pfn: USER_DATA, .. }));
    guest.write_text(FREE);
    guest.ram.put(USER_DATA * 4096, 0);
    assert!(matches!(rejection(&guest), Rejection::Owner { pfn: FREE, .. }));
}

#[test]
fn lies_in_the_text_are_named() {
    let reject = |from: &str, to: &str| {
        let mut guest = Guest::new(Like::Linux6_1, Levels::Four);
        guest.edit(from, to);
        rejection(&guest).to_string()
    };
    for (from, to, expected) in [
        ("PAGESIZE=4096", "PAGESIZE=65536", "PAGESIZE: expected 4096, got 65536"),
        (
            "OSRELEASE=test-1.0",
            "OSRELEASE=test-1.1",
            "expected release \"test-1.1\", got \"test-1.0\"",
        ),
        (
            "phys_base)=0",
            "phys_base)=4096",
            "swapper_pg_dir: expected to find itself at 0x2000, got None",
        ),
        ("phys_base)=0", "phys_base)=-1", "swapper_pg_dir"),
        ("l5_enabled)=0", "l5_enabled)=1", "swapper_pg_dir"),
        (
            "SIZE(page)=64",
            "SIZE(page)=0",
            "SIZE(page): expected a power of two from 32 to 256, got 0",
        ),
        ("SIZE(page)=64", "SIZE(page)=18446744073709551615", "SIZE(page)"),
        (
            "page.mapping)=24",
            "page.mapping)=64",
            "OFFSET(page.mapping): expected a multiple of 8 below 64, got 64",
        ),
        ("page.flags)=0", "page.flags)=4", "OFFSET(page.flags)"),
        ("PG_lru)=4", "PG_lru)=64", "NUMBER(PG_lru): expected 0 to 63, got 64"),
        ("VALUE)=-129", "VALUE)=-130", "expected -129 or -268435456, got -130"),
        ("PG_lru)=4", "PG_lru)=x", "NUMBER(PG_lru): expected a number, got \"x\""),
        ("NUMBER(phys_base)=0", "", "no NUMBER(phys_base)"),
        ("SECTION_SIZE_BITS)=27", "SECTION_SIZE_BITS)=0", "no struct page"),
        ("SIZE(mem_section)=16", "SIZE(mem_section)=0", "no struct page"),
        ("LENGTH(mem_section)=2048", "LENGTH(mem_section)=0", "no struct page"),
        ("SYMBOL(mem_section)=", "SYMBOL(mem_section)=fff", "SYMBOL(mem_section)"),
    ] {
        let said = reject(from, to);
        assert!(said.contains(expected), "{to}: {said}");
    }
}

#[test]
fn of_two_kernels_that_hold_together_a_vcpu_shows_the_running_one() {
    // The remains of an earlier kernel: the same tables except for the entry that maps the image,
    // with a separate text.
    let guest = Guest::new(Like::Linux6_12, Levels::Four);
    let (old_root, old_upper, old_text) = (33, 34, 35);
    for index in 0..512 {
        guest.put_entry(old_root, index, guest.entry(ROOT, index));
        guest.put_entry(old_upper, index, guest.entry(guest.entry(ROOT, 511) / 4096, index));
    }
    guest.put_entry(old_root, 511, (old_upper * 4096) | PRESENT);
    let text = guest.text.replace(&format!("{:x}", image(ROOT)), &format!("{:x}", image(old_root)));
    let guest = Guest { text, ..guest };
    guest.write_text(old_text);
    let root = |cr3| {
        let report = introspect(&guest.ram, &[RootHint { cr3, levels: Levels::Four }]);
        report.kernel.map(|kernel| kernel.root)
    };
    assert_eq!(root(old_root * 4096), Some(old_root * 4096));
    assert_eq!(root(PROCESS * 4096 + 0x18), Some(ROOT * 4096), "flags in CR3 are no address");
    assert_eq!(root((PROCESS + 1) * 4096), Some(ROOT * 4096), "a vCPU in a process, isolated");
    assert_eq!(root(u64::MAX), Some(ROOT * 4096), "nonsense leaves the first");
    assert_eq!(
        introspect(&guest.ram, &[]).kernel.map(|kernel| kernel.root),
        Some(ROOT * 4096),
        "so does nothing"
    );
}

#[test]
fn an_unknown_kernel_has_the_colours_of_its_page_tables() {
    for levels in [Levels::Four, Levels::Five] {
        let guest = Guest::new(Like::Linux6_12, levels);
        guest.ram.put(TEXT * 4096, 0);
        let hint = RootHint { cr3: ((PROCESS + 1) * 4096) | 0x802, levels };
        for hints in [&[][..], &[hint]] {
            let report = introspect(&guest.ram, hints);
            assert_eq!(report.degraded, Some(Degraded::NoNote { roots: 2 }), "{hints:?}");
            assert_eq!((report.kernel.clone(), report.files.len()), (None, FRAMES));
            for (frame, expected) in [
                (ROOT, Colour::PageTable),
                (PROCESS, Colour::PageTable),
                (PROCESS + 2, Colour::PageTable),
                (USER_CODE, Colour::UserCode),
                (USER_DATA, Colour::UserData),
                (KERNEL_CODE, Colour::KernelCode),
                (SLAB, Colour::KernelData),
                (600, Colour::Unknown),
            ] {
                assert_eq!(colour(&report, frame), expected, "{levels:?} {hints:?} frame {frame}");
            }
        }
    }
}

#[test]
fn nothing_at_all_is_unknown() {
    let report = introspect(&RamImage::new(16), &[]);
    assert_eq!(report.census().frames(Colour::Unknown), 16);
    assert_eq!(report.degraded, Some(Degraded::NoNote { roots: 0 }));
}

#[test]
fn structures_that_lie_end_where_they_are() {
    let guest = Guest::new(Like::Linux6_1, Levels::Four);
    let buddy = u64::from(!0x80_u32);
    let tail = |to: u64| [0, to | 1, 0, 0, 0, 0, 0, 0];
    // Free blocks above the largest order, one that is not aligned to its size, and compound pages
    // that lead in circles and nowhere.
    guest.page(FREE, [0, 0, 0, 0, 0, u64::MAX, buddy, 0]);
    guest.page(FREE + 1, [0, 0, 0, 0, 0, 64, buddy, 0]);
    guest.page(0, [0, 0, 0, 0, 0, 11, buddy, 0]);
    guest.page(CACHE + 1, [0, 0, 0, 0, 0, 3, buddy, 0]);
    let circle = 36;
    guest.page(circle, tail(guest.vmemmap() + (circle + 1) * 64));
    guest.page(circle + 1, tail(guest.vmemmap() + circle * 64));
    guest.page(circle + 2, tail(guest.vmemmap() + (circle + 2) * 64));
    guest.page(circle + 3, tail(0));
    guest.page(CACHE + 2, tail(guest.vmemmap() + 7));
    guest.page(CACHE + 3, tail(guest.vmemmap() + FREE * 64));
    // Frames that are on no list, with a mapping that is no address_space.
    guest.page(USER_CODE, [0, 0, 0, image(35), 0, 0, 1 << 32, 0]);
    guest.page(USER_DATA, [0, 0, 0, 0x1000, 0, 0, 1 << 32, 0]);
    let report = introspect(&guest.ram, &[]);
    assert_eq!(report.degraded, None);
    assert_eq!((colour(&report, 0), colour(&report, 36)), (Colour::Free, Colour::Unknown));
    assert_eq!(
        (colour(&report, FREE + 1), colour(&report, FREE + 2)),
        (Colour::Free, Colour::KernelData)
    );
    assert_eq!(colour(&report, CACHE + 1), Colour::Free);
    for frame in [circle, circle + 1, circle + 2, circle + 3, CACHE + 2, CACHE + 3] {
        assert_eq!(colour(&report, frame), Colour::Unknown, "{frame}");
    }
    for frame in [USER_CODE, USER_DATA] {
        assert_eq!(colour(&report, frame), Colour::KernelData, "{frame}");
    }
    assert_eq!(report.groups.len(), 1);
}

#[test]
fn up_to_5_10_another_bit_marks_page_tables() {
    let mut guest = Guest::new(Like::Linux6_1, Levels::Four);
    let kind = |kind: u32| u64::from(kind) | 1 << 32;
    guest.page(36, [0, 0, 0, 0, 0, 0, kind(!0x400), 0]);
    guest.page(37, [0, 0, 0, 0, 0, 0, kind(!0x200), 0]);
    let colours = |guest: &Guest| {
        let report = introspect(&guest.ram, &[]);
        assert_eq!(report.degraded, None);
        (colour(&report, 36), colour(&report, 37))
    };
    assert_eq!(colours(&guest), (Colour::KernelData, Colour::PageTable));
    guest.rename("5.10-6-x");
    assert_eq!(colours(&guest), (Colour::PageTable, Colour::KernelData));
    guest.rename("5.11.0-x");
    assert_eq!(colours(&guest), (Colour::KernelData, Colour::PageTable));
}

#[test]
fn a_free_block_ends_where_its_chunk_does() {
    let mut guest = Guest::new(Like::Linux6_12, Levels::Four);
    guest.edit("LENGTH(zone.free_area)=11", "LENGTH(zone.free_area)=18446744073709551615");
    guest.page(0, [0, 0, 0, 0, 0, 14, 0xf000_0000, 0]);
    let report = introspect(&guest.ram, &[]);
    assert_eq!(
        report.census().frames(Colour::Free) + report.census().frames(Colour::PageTable),
        FRAMES
    );
}

/// Memory in which every frame is the same kind of hostile table is processed, or the report says
/// that the limit on work was reached.
#[test]
fn hostile_tables_end() {
    for (like, levels) in KINDS {
        for hostile in [loop_at, all_large] {
            let guest = Guest::new(like, levels);
            for frame in FREE..FRAMES as u64 {
                hostile(&guest, frame);
            }
            // Every entry below a process leads to a hostile table.
            for index in 1..256 {
                let table = ((FREE + index) * 4096) | PRESENT | USER;
                guest.put_entry(PROCESS, index, table);
                guest.put_entry(PROCESS + 2, index, table);
                guest.put_entry(PROCESS + 3, index, table);
            }
            let hints =
                [RootHint { cr3: PROCESS * 4096, levels }, RootHint { cr3: FREE * 4096, levels }];
            assert_eq!(introspect(&guest.ram, &hints).degraded, None);
            guest.ram.put(TEXT * 4096, 0);
            for hints in [&hints[..], &[]] {
                assert!(introspect(&guest.ram, hints).degraded.is_some());
            }
        }
    }
}

#[test]
fn memory_full_of_claims_is_looked_at_only_so_long() {
    let guest = Guest::new(Like::Linux6_12, Levels::Four);
    for frame in FREE..FRAMES as u64 {
        guest.write_text(frame);
    }
    guest.ram.put(TEXT * 4096, 0);
    let report = introspect(&guest.ram, &[]);
    assert!(
        matches!(report.degraded, Some(Degraded::Rejected { rejected: 256, .. })),
        "{:?}",
        report.degraded
    );
}

#[test]
fn there_are_no_leaves_in_the_top_level() {
    let guest = Guest::new(Like::Linux6_12, Levels::Four);
    guest.put_entry(PROCESS, 0, guest.entry(PROCESS, 0) | LARGE);
    guest.put_entry(PROCESS, 1, PRESENT | USER | LARGE);
    let report = introspect(&guest.ram, &[]);
    assert_eq!(
        (colour(&report, USER_CODE), colour(&report, CACHE)),
        (Colour::PageCache, Colour::PageCache)
    );
}

fn check_shape(report: &Report, frames: usize) {
    assert_eq!((report.colours.len(), report.files.len()), (frames, frames));
    assert!(report.groups.len() <= frames);
    let in_files = report.files.iter().filter(|&&file| file != 0);
    assert!(in_files.clone().all(|&file| file as usize <= report.groups.len()));
    assert_eq!(in_files.count(), report.groups.iter().map(|group| group.frames).sum::<usize>());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn noise_in_a_kernel_harms_nothing_but_its_colours(
        kind in 0usize..4,
        noise in prop::collection::vec((0u64..64 * 512, any::<u64>(), 0u32..4), 1..64),
        hint in proptest::option::of(any::<u64>()),
    ) {
        let (like, levels) = KINDS[kind];
        let guest = Guest::new(like, levels);
        for (word, value, how) in noise {
            let old = guest.ram.word_at(word * 8).unwrap();
            // A word of noise, a flipped bit, or a plausible value: another frame or another
            // structure.
            let value = match how {
                0 => value,
                1 => old ^ 1 << (value % 64),
                2 => ((value % (FRAMES as u64)) * 4096) | (value >> 56),
                _ => guest.vmemmap() + value % (1 << 17),
            };
            guest.ram.put(word * 8, value);
        }
        let hints: Vec<RootHint> =
            hint.map(|cr3| RootHint { cr3: cr3 % (1 << 23), levels }).into_iter().collect();
        check_shape(&introspect(&guest.ram, &hints), FRAMES);
    }

    #[test]
    fn any_bytes_are_coloured(
        bytes in prop::collection::vec(any::<u8>(), 4096..8 * 4096),
        cr3 in any::<u64>(),
        cr4 in any::<u64>(),
    ) {
        let ram = RamImage::of_bytes(&bytes);
        let report = introspect(&ram, &[RootHint::from_registers(cr3 % (1 << 16), cr4)]);
        check_shape(&report, ram.layout().frames());
    }

    #[test]
    fn any_numbers_in_the_text_are_borne(
        line in 0usize..30,
        number in any::<u64>(),
        hex in any::<bool>(),
    ) {
        for (like, levels) in KINDS {
            let mut guest = Guest::new(like, levels);
            let lines: Vec<&str> = guest.text.lines().collect();
            let line = lines[line % lines.len()].to_owned();
            let key = line.split_once('=').unwrap().0;
            let number = if hex { format!("{number:x}") } else { number.cast_signed().to_string() };
            guest.edit(&line, &format!("{key}={number}"));
            check_shape(&introspect(&guest.ram, &[]), FRAMES);
        }
    }
}
