//! Finds the top-level tables of processes, which share their upper halves with the kernel.

use crate::memory::{Frame, PAGE_WORDS, Page, Pfn, PhysMemory, word};
use crate::paging::{ADDRESS, PRESENT, UPPER_HALF};
use crate::parallel;

/// Frames that a thread scans at a time: 64 MiB.
const SCAN_FRAMES: usize = 1 << 14;
/// Index of the entry that maps the image of an x86-64 Linux.
const LAST: usize = PAGE_WORDS - 1;

/// The upper half of a top-level table: address and presence of each entry, without the flags that
/// the CPU sets.
pub(crate) type UpperHalf = [u64; PAGE_WORDS - UPPER_HALF];

/// Reads the upper half of a top-level table.
pub(crate) fn upper_half(page: &Page) -> UpperHalf {
    std::array::from_fn(|n| word(page, UPPER_HALF + n) & (ADDRESS | PRESENT))
}

/// The `eligible` frames that have every entry of this upper half. They may have further entries,
/// because each process has its own local descriptor table.
pub(crate) fn sharing(
    memory: &dyn PhysMemory,
    upper: &UpperHalf,
    eligible: impl Fn(Frame) -> bool + Sync,
) -> Vec<Frame> {
    let last = upper[LAST - UPPER_HALF];
    if last & PRESENT == 0 {
        return Vec::new();
    }
    let shares = |frame: Frame| {
        let page = memory.page(frame);
        // This one word rejects nearly every frame.
        word(page, LAST) & (ADDRESS | PRESENT) == last
            && upper_half(page)
                .iter()
                .zip(upper)
                .all(|(have, want)| *want & PRESENT == 0 || have == want)
    };
    let found = parallel::chunks(memory.layout().frames(), SCAN_FRAMES, |frames| {
        let eligible =
            frames.map(Frame).filter(|&frame| eligible(frame) && memory.may_hold_data(frame));
        eligible.filter(|&frame| shares(frame)).collect::<Vec<_>>()
    });
    found.concat()
}

/// The table that a process runs on while page-table isolation hides the kernel. It is the second
/// page of a pair, and its lower half maps the same memory as that of the first page, `root`.
pub(crate) fn isolated_twin(memory: &dyn PhysMemory, root: Frame) -> Option<Frame> {
    let pfn = memory.layout().pfn(root)?.0;
    let twin = memory.layout().frame(Pfn(pfn | 1)).filter(|_| pfn.is_multiple_of(2))?;
    is_twin(memory, root, twin).then_some(twin)
}

/// The inverse of [`isolated_twin`]: the kernel's table whose isolated twin is `twin`.
pub(crate) fn whole_of_twin(memory: &dyn PhysMemory, twin: Frame) -> Option<Frame> {
    let pfn = memory.layout().pfn(twin)?.0;
    let root = memory.layout().frame(Pfn(pfn & !1)).filter(|_| !pfn.is_multiple_of(2))?;
    is_twin(memory, root, twin).then_some(root)
}

fn is_twin(memory: &dyn PhysMemory, root: Frame, twin: Frame) -> bool {
    let (root, twin) = (memory.page(root), memory.page(twin));
    let entry = |page: &Page, n| word(page, n) & (ADDRESS | PRESENT);
    let used =
        |range: std::ops::Range<usize>| range.into_iter().any(|n| entry(twin, n) & PRESENT != 0);
    used(0..UPPER_HALF)
        && used(UPPER_HALF..PAGE_WORDS)
        && (0..UPPER_HALF).all(|n| entry(root, n) == entry(twin, n))
}

/// Finds top-level tables by their looks alone. Every entry in use points to RAM and is no leaf,
/// and the last entry is in use. If tables of several kernels are found, the result is the group
/// with the most frames.
pub(crate) fn by_looks(memory: &dyn PhysMemory) -> Vec<Frame> {
    let looks = |frame: &Frame| {
        let page = memory.page(*frame);
        crate::paging::target(memory, word(page, LAST)).is_some()
            && (0..PAGE_WORDS).all(|n| {
                let entry = word(page, n);
                entry == 0
                    || entry & crate::paging::LARGE == 0
                        && crate::paging::target(memory, entry).is_some()
            })
    };
    let found = parallel::chunks(memory.layout().frames(), SCAN_FRAMES, |frames| {
        let data = frames.map(Frame).filter(|&frame| memory.may_hold_data(frame));
        data.filter(looks)
            .map(|frame| (word(memory.page(frame), LAST) & ADDRESS, frame))
            .collect::<Vec<_>>()
    });
    let mut found = found.concat();
    found.sort_unstable();
    let best = found.chunk_by(|a, b| a.0 == b.0).max_by_key(|same| same.len());
    best.map_or_else(Vec::new, |same| same.iter().map(|(_, frame)| *frame).collect())
}
