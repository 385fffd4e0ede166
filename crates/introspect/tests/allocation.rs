//! The number of frames limits what introspection allocates, whatever the frames hold. The test is
//! alone in its process because it counts all allocations.
#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_introspect::memory::{Frame, Page};
use dayfly_introspect::{Extent, Layout, Levels, PhysMemory, RootHint, introspect};
use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// The system's allocator, with a counter.
struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed to `System` unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        let live = LIVE_BYTES.fetch_add(block.size(), Relaxed) + block.size();
        PEAK_BYTES.fetch_max(live, Relaxed);
        // SAFETY: the caller's duties are those of `System`.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, at: *mut u8, block: Block) {
        LIVE_BYTES.fetch_sub(block.size(), Relaxed);
        // SAFETY: as above; `at` came from `System.alloc`.
        unsafe { System.dealloc(at, block) }
    }
}

const FRAMES: usize = 1 << 14;
/// Per frame: two colours, a file and its mapping, an entry for a root of page tables found by
/// several threads, and marks.
const BYTES_PER_FRAME: usize = 64;
/// For threads, texts, and everything else that does not depend on RAM.
const BYTES_ONCE: usize = 4 << 20;

/// Far above the need; what takes time for each pair of frames takes hours.
const MOST_CPU_TIME: Duration = Duration::from_secs(5);

/// The time that the CPUs have spent on this process: on a busy host it waits for them.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap())
}

/// The word `n` of frame `f`, as a function of `(f, n)`.
type Words = Box<dyn Fn(u64, u64) -> u64>;

struct Hostile {
    layout: Layout,
    pages: Vec<Page>,
}

impl Hostile {
    fn new(word: &Words) -> Self {
        let layout =
            Layout::new(&[Extent { guest: 0, offset: 0, bytes: FRAMES as u64 * 4096 }]).unwrap();
        let page = |f: u64| std::array::from_fn(|n| AtomicU64::new(word(f, n as u64)));
        Self { layout, pages: (0..FRAMES as u64).map(page).collect() }
    }
}

impl PhysMemory for Hostile {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn page(&self, frame: Frame) -> &Page {
        &self.pages[frame.0.min(FRAMES - 1)]
    }
}

#[test]
fn hostile_memory_costs_a_bound_for_each_frame_and_ends() {
    const TABLE: u64 = 0x67;
    const LARGE: u64 = 0xe7;
    let frames = FRAMES as u64;
    let text = b"OSRELEASE=9.9.9\nPAGESIZE=4096\nA=1\nB=2\nC=3\nD=4\n";
    let text_word = |n: u64| {
        let at = usize::try_from(n).unwrap() * 8 % text.len();
        u64::from_le_bytes(std::array::from_fn(|byte| text[(at + byte) % text.len()]))
    };
    let random = |f: u64, n: u64| {
        let x = (f << 20 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    let hostiles: [(&str, Words); 6] = [
        ("texts", Box::new(move |_, n| text_word(n))),
        ("tables of tables", Box::new(move |f, n| ((f * 512 + n) % frames * 4096) | TABLE)),
        ("tables of themselves", Box::new(move |f, _| (f * 4096) | TABLE)),
        ("tables of one table", Box::new(move |_, n| (n * 4096) | TABLE)),
        ("large leaves", Box::new(move |f, n| if n < 511 { LARGE } else { (f * 4096) | TABLE })),
        ("noise", Box::new(random)),
    ];
    for (name, word) in hostiles {
        let memory = Hostile::new(&word);
        let hints = [0, 4096, 1 << 20].map(|cr3| RootHint { cr3, levels: Levels::Five });
        for hints in [&hints[..], &[]] {
            let (before, start) = (LIVE_BYTES.load(Relaxed), cpu_time());
            PEAK_BYTES.store(before, Relaxed);
            let report = introspect(&memory, hints);
            let (bytes, took) = (PEAK_BYTES.load(Relaxed) - before, cpu_time() - start);
            println!("{name}, {} hints: {} bytes a frame, {took:?}", hints.len(), bytes / FRAMES);
            assert_eq!(report.colours.len(), FRAMES);
            assert!(bytes <= FRAMES * BYTES_PER_FRAME + BYTES_ONCE, "{name}: {bytes} bytes");
            assert!(took < MOST_CPU_TIME, "{name}: {took:?} for 64 MiB");
        }
    }
}
