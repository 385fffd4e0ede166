//! A global allocator that counts what each thread allocates, so that a target can bound the memory
//! and the work that an input costs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// What a function allocated on its thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// The most bytes allocated at one time.
    pub peak_bytes: usize,
    /// All bytes ever allocated: a measure of work that does not depend on the clock.
    pub total_bytes: usize,
}

thread_local! {
    // Constant and without a destructor, so that reading them allocates nothing.
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static TOTAL: Cell<usize> = const { Cell::new(0) };
}

/// Runs `act`, and returns its result with what this thread allocated meanwhile.
pub fn measured<T>(act: impl FnOnce() -> T) -> (T, Usage) {
    let (before, total) = (NOW.get(), TOTAL.get());
    PEAK.set(before);
    let result = act();
    let peak_bytes = usize::try_from(PEAK.get() - before).unwrap_or(0);
    (result, Usage { peak_bytes, total_bytes: TOTAL.get() - total })
}

fn add(bytes: usize) {
    NOW.set(NOW.get().saturating_add_unsigned(bytes));
    PEAK.set(PEAK.get().max(NOW.get()));
    TOTAL.set(TOTAL.get().saturating_add(bytes));
}

fn subtract(bytes: usize) {
    NOW.set(NOW.get().saturating_sub_unsigned(bytes));
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller of this function promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller of this function promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        subtract(layout.size());
        // SAFETY: as the caller of this function promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        subtract(layout.size());
        add(new_size);
        // SAFETY: as the caller of this function promises.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_and_total_are_counted() {
        let (_, usage) = measured(|| {
            for _ in 0..10 {
                std::hint::black_box(vec![1_u8; 1000]);
            }
        });
        assert_eq!(usage, Usage { peak_bytes: 1000, total_bytes: 10_000 });
        let (kept, usage) = measured(|| vec![0_u8; 1 << 20]);
        assert_eq!(usage, Usage { peak_bytes: kept.len(), total_bytes: kept.len() });
    }
}
