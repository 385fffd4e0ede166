//! Stock Debian kernels, frozen under QEMU, compared with the kernels' own reports and with
//! makedumpfile.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use dayfly_introspect::memory::{Frame, Page, Pfn};
use dayfly_introspect::{
    Colour, Degraded, Layout, Levels, PhysMemory, RamFile, Report, introspect,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use support::class::{Class, class};
use support::fixture::{DISK_FILE_BYTES, DISK_FILES, Fixture, HUGE_PAGES, Spec};
use support::kpageflags::{ANON, HUGE, PGTABLE, SLAB, THP};
use support::makedumpfile::Dumps;

/// Each kernel, each depth of page tables, page tables of users apart from the kernel's and not,
/// memory with and without a hole.
const GUESTS: [Spec; 2] = [
    Spec { kernel: "6.1", five_levels: true, isolated: true, memory_mib: 512, low_mib: 512 },
    Spec { kernel: "6.12", five_levels: false, isolated: false, memory_mib: 512, low_mib: 256 },
];
/// The other combinations, for `make long`.
const FURTHER: [Spec; 2] = [
    Spec { kernel: "6.1", five_levels: false, isolated: false, memory_mib: 512, low_mib: 512 },
    Spec { kernel: "6.12", five_levels: true, isolated: true, memory_mib: 512, low_mib: 512 },
];

/// The share of frames, in tenths of a per mille, whose class agrees with the other source. Prints
/// the differences.
fn agreement(
    name: &str,
    memory: &RamFile,
    report: &Report,
    other: impl Fn(u64) -> Option<Class>,
) -> usize {
    let mut pairs: BTreeMap<_, usize> = BTreeMap::new();
    for (n, colour) in report.colours.iter().enumerate() {
        let pfn = memory.layout().pfn(Frame(n)).unwrap().0;
        *pairs.entry((class(*colour), other(pfn))).or_default() += 1;
    }
    let same: usize =
        pairs.iter().filter(|((ours, theirs), _)| ours == theirs).map(|(_, n)| n).sum();
    let share = same * 10_000 / report.colours.len();
    println!("{name}: {}.{:02} % of {} frames", share / 100, share % 100, report.colours.len());
    for ((ours, theirs), n) in pairs.iter().filter(|((ours, theirs), _)| ours != theirs) {
        println!("    ours {ours:?}, theirs {theirs:?}: {n}");
    }
    share
}

fn check(spec: Spec) {
    let guest = spec.fixture();
    let memory = RamFile::open(&guest.ram(), guest.layout()).unwrap();
    for hints in [&guest.hints[..], &[]] {
        let start = Instant::now();
        let report = introspect(&memory, hints);
        println!("{spec:?}: {:?}\n{}", start.elapsed(), report.census());
        assert_eq!(report.degraded, None);
        let kernel = report.kernel.as_ref().unwrap();
        assert!(kernel.release.starts_with(&format!("{}.", spec.kernel)), "{kernel:?}");
        assert_eq!(kernel.levels, if spec.five_levels { Levels::Five } else { Levels::Four });
        // init, nine sleeps, awk, dd, and awk's children: a shell may be replaced by its command.
        // Linux frees the tables of a process some time after its end, and many end while the
        // guest reports. No table is counted twice.
        assert!((12..24).contains(&report.processes), "{} processes", report.processes);

        let own = agreement("kpageflags", &memory, &report, |pfn| guest.flags.class(pfn));
        let dumps = Dumps::of(&guest);
        let mut dumped = agreement("makedumpfile", &memory, &report, |pfn| Some(dumps.class(pfn)));
        if spec.kernel == "6.12" {
            let corrected = |pfn| Some(dumps.class_of_6_12(&guest, pfn));
            dumped = agreement("makedumpfile, if it knew 6.12", &memory, &report, corrected);
        }
        assert!(own >= 9_900, "kpageflags agrees on {own} of 10000 frames");
        assert!(dumped >= 9_990, "makedumpfile agrees on {dumped} of 10000 frames");
        details(&guest, &memory, &report);
    }
}

/// Checks details that the classes do not distinguish: code, heap, files, the kernel's image.
fn details(guest: &Fixture, memory: &RamFile, report: &Report) {
    let frame = |pfn: u64| memory.layout().frame(Pfn(pfn)).unwrap().0;
    let share = |pfns: &[u64], colour: Colour| {
        let same = pfns.iter().filter(|&&pfn| report.colours[frame(pfn)] == colour).count();
        println!("{colour}: {same} of {}", pfns.len());
        (same, pfns.len())
    };
    let (same, all) = share(&guest.code, Colour::UserCode);
    assert!(all > 50 && same == all);
    let mut files: Vec<u32> = guest.code.iter().map(|&pfn| report.files[frame(pfn)]).collect();
    files.dedup();
    assert!(files.len() == 1 && files[0] != 0, "one process' code is of one file: {files:?}");
    let (same, all) = share(&guest.heap, Colour::UserData);
    assert!(all > 1000 && same * 1000 >= all * 999);
    for (huge, colour) in [
        (guest.flags.pages(THP | ANON, 0), Colour::UserData),
        (guest.flags.pages(THP, ANON), Colour::PageCache),
    ] {
        let (same, all) = share(&huge, colour);
        assert!(all >= 5 * 512 && same == all);
    }
    assert_eq!(
        share(&guest.flags.pages(HUGE, 0), Colour::UserData),
        (HUGE_PAGES * 512, HUGE_PAGES * 512)
    );

    let pages = DISK_FILE_BYTES.div_ceil(4096);
    let whole = report.groups.iter().filter(|group| group.frames == pages).count();
    assert_eq!(whole, DISK_FILES, "files with {pages} pages: {:?}", report.groups);
    let frames: usize = report.groups.iter().map(|group| group.frames).sum();
    assert_eq!(frames, report.files.iter().filter(|&&file| file != 0).count());

    // The process that reported the flags has ended, and its pages are free on a CPU's own list.
    for (flag, colour) in [(SLAB, Colour::Slab), (PGTABLE, Colour::PageTable)] {
        let (same, all) = share(&guest.flags.pages(flag, 0), colour);
        assert!(all > 50 && same + 12 >= all);
    }

    let (same, all) = share(&guest.kernel_code(), Colour::KernelCode);
    assert!(all > 2000 && same * 100 >= all * 99);
}

#[test]
fn linux_6_1_with_five_levels_and_isolation() {
    check(GUESTS[0]);
}

#[test]
fn linux_6_12_with_four_levels_and_memory_above_the_hole() {
    check(GUESTS[1]);
}

#[test]
#[ignore = "minutes: two more kernels under QEMU"]
fn kernels_with_four_levels_without_and_five_levels_with_isolation() {
    FURTHER.into_iter().for_each(check);
    FURTHER.into_iter().for_each(degrades);
}

/// A guest's memory without any copy of the kernel's VMCOREINFO.
struct Nameless {
    memory: RamFile,
    blank: Page,
    named: Vec<Frame>,
}

impl Nameless {
    fn new(memory: RamFile) -> Self {
        let named = |frame: &Frame| {
            let bytes: Vec<u8> =
                memory.page(*frame).iter().flat_map(|w| w.load(Relaxed).to_ne_bytes()).collect();
            bytes.windows(10).any(|w| w == b"OSRELEASE=")
        };
        let data =
            (0..memory.layout().frames()).map(Frame).filter(|&frame| memory.may_hold_data(frame));
        let named = data.filter(named).collect();
        Self { memory, blank: [const { AtomicU64::new(0) }; 512], named }
    }
}

impl PhysMemory for Nameless {
    fn layout(&self) -> &Layout {
        self.memory.layout()
    }

    fn page(&self, frame: Frame) -> &Page {
        if self.named.contains(&frame) { &self.blank } else { self.memory.page(frame) }
    }

    fn may_hold_data(&self, frame: Frame) -> bool {
        self.memory.may_hold_data(frame)
    }
}

#[test]
fn an_unknown_kernel_degrades_to_its_page_tables_and_says_so() {
    GUESTS.into_iter().for_each(degrades);
}

fn degrades(spec: Spec) {
    let guest = spec.fixture();
    let memory = Nameless::new(RamFile::open(&guest.ram(), guest.layout()).unwrap());
    assert!(memory.named.len() >= 2, "{:?}", memory.named);
    for hints in [&guest.hints[..], &[]] {
        let start = Instant::now();
        let report = introspect(&memory, hints);
        println!("{spec:?}, {} hints: {:?}\n{}", hints.len(), start.elapsed(), report.census());
        let said = report.degraded.as_ref().unwrap();
        assert!(matches!(said, Degraded::NoNote { roots: 10.. }), "{said}");
        assert_eq!((&report.kernel, report.groups.len()), (&None, 0));
        let colours = |pfns: &[u64], colour: Colour| {
            let frames = pfns.iter().map(|&pfn| memory.layout().frame(Pfn(pfn)).unwrap());
            let same = frames.filter(|frame| report.colours[frame.0] == colour).count();
            assert!(same * 100 >= pfns.len() * 99, "{colour}: {same} of {}", pfns.len());
        };
        colours(&guest.code, Colour::UserCode);
        colours(&guest.heap, Colour::UserData);
        colours(&guest.kernel_code(), Colour::KernelCode);
        assert_eq!(report.census().frames(Colour::Free), 0, "nothing shows what is free");
        let reported = guest.flags.pages(PGTABLE, 0).len();
        assert!(report.census().frames(Colour::PageTable) >= reported * 8 / 10, "of {reported}");
    }
}
