//! Stock Debian kernels, frozen under QEMU, against what they said of themselves and what makedumpfile says of them.

mod support;

use dayfly_introspect::memory::{Frame, Pfn};
use dayfly_introspect::{Colour, Levels, PhysMemory, RamFile, Report, introspect};
use std::collections::BTreeMap;
use support::fixture::{DISK_FILE_BYTES, DISK_FILES, Fixture, Spec};
use support::oracle::{self, Class};

const GUESTS: [Spec; 4] = [
    Spec { kernel: "6.1", five_levels: false, isolated: true, memory_mib: 512, low_mib: 512 },
    Spec { kernel: "6.1", five_levels: true, isolated: false, memory_mib: 512, low_mib: 512 },
    Spec { kernel: "6.12", five_levels: false, isolated: false, memory_mib: 512, low_mib: 256 },
    Spec { kernel: "6.12", five_levels: true, isolated: true, memory_mib: 512, low_mib: 512 },
];

/// The share of frames, in tenths of a per mille, whose class others agree with; prints where they differ.
fn agreement(name: &str, memory: &RamFile, report: &Report, other: impl Fn(u64) -> Option<Class>) -> usize {
    let mut pairs: BTreeMap<_, usize> = BTreeMap::new();
    for (n, colour) in report.colours.iter().enumerate() {
        let pfn = memory.layout().pfn(Frame(n)).unwrap().0;
        *pairs.entry((oracle::class(*colour), other(pfn))).or_default() += 1;
    }
    let same: usize = pairs.iter().filter(|((ours, theirs), _)| ours == theirs).map(|(_, n)| n).sum();
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
        let start = std::time::Instant::now();
        let report = introspect(&memory, hints);
        println!("{spec:?}: {:?}\n{}", start.elapsed(), report.census());
        assert_eq!(report.degraded, None);
        let kernel = report.kernel.as_ref().unwrap();
        assert!(kernel.release.starts_with(&format!("{}.", spec.kernel)), "{kernel:?}");
        assert_eq!(kernel.levels, if spec.five_levels { Levels::Five } else { Levels::Four });
        // init, seven sleeps, awk, and what it started: a shell may be replaced by its command.
        assert!((10..=14).contains(&report.processes), "{} processes", report.processes);

        let own = agreement("kpageflags", &memory, &report, |pfn| {
            guest.flags.get(usize::try_from(pfn).unwrap()).and_then(|flags| oracle::class_of_flags(*flags))
        });
        let dump = oracle::makedumpfile(&guest);
        let dumped = agreement("makedumpfile", &memory, &report, |pfn| Some(dump(pfn)));
        assert!(own >= 9_900, "kpageflags agrees on {own} of 10000 frames");
        assert!(dumped >= 9_990, "makedumpfile agrees on {dumped} of 10000 frames");
        details(&guest, &memory, &report);
    }
}

/// Finer than the classes: code, heap, files, the kernel's image.
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

    let pages = DISK_FILE_BYTES.div_ceil(4096);
    let whole = report.groups.iter().filter(|group| group.frames == pages).count();
    assert_eq!(whole, DISK_FILES, "files with {pages} pages: {:?}", report.groups);
    let frames: usize = report.groups.iter().map(|group| group.frames).sum();
    assert_eq!(frames, report.files.iter().filter(|&&file| file != 0).count());

    let line = guest.iomem.lines().find(|line| line.ends_with("Kernel code")).unwrap();
    let (start, end) = line.trim().split_once(' ').unwrap().0.split_once('-').unwrap();
    let page = |text| u64::from_str_radix(text, 16).unwrap() / 4096;
    let image: Vec<u64> = (page(start)..=page(end)).collect();
    let (same, all) = share(&image, Colour::KernelCode);
    assert!(all > 2000 && same * 100 >= all * 99);
}

#[test]
fn linux_6_1_with_four_levels_and_isolation() {
    check(GUESTS[0]);
}

#[test]
fn linux_6_1_with_five_levels() {
    check(GUESTS[1]);
}

#[test]
fn linux_6_12_with_four_levels_and_memory_above_the_hole() {
    check(GUESTS[2]);
}

#[test]
fn linux_6_12_with_five_levels_and_isolation() {
    check(GUESTS[3]);
}
