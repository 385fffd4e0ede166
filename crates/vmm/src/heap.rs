//! The allocator of `dayfly-vmm`: the system's, without mremap(2).
//!
//! mremap(2) would move a mapping of guest RAM out of its userfaultfd's registration, and a filter
//! cannot distinguish RAM from the heap. So the filters forbid it. glibc's realloc(3) calls it for
//! blocks that are mappings, which are 128 KiB or longer.

use std::alloc::{GlobalAlloc, Layout, System};

/// The shortest block that may be a mapping: glibc's M_MMAP_THRESHOLD is at least twice as long.
const MAY_BE_MAPPED: usize = 64 << 10;

/// The system's allocator; long blocks are copied when they grow or shrink.
#[derive(Debug)]
pub struct WithoutRemap;

// SAFETY: every method has the contract of the system's allocator. `realloc` of a long block is
// alloc, copy and dealloc of that allocator, as the default of GlobalAlloc.
unsafe impl GlobalAlloc for WithoutRemap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.size() < MAY_BE_MAPPED {
            // SAFETY: as the caller's.
            return unsafe { System.realloc(block, layout, size) };
        }
        // SAFETY: the caller states that `size`, rounded up to the alignment, does not overflow.
        let new = unsafe { System.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !new.is_null() {
            // SAFETY: `block` has `layout.size()` bytes, `new` has `size`, and they are different
            // blocks. `block` came from this allocator with `layout`.
            unsafe {
                std::ptr::copy_nonoverlapping(block, new, layout.size().min(size));
                System.dealloc(block, layout);
            }
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_their_bytes_when_they_grow_and_shrink_past_the_limit() {
        for sizes in [[100, 40 << 10, 1 << 20, 3 << 20], [3 << 20, 1 << 20, 40 << 10, 100]] {
            let mut layout = Layout::from_size_align(sizes[0], 16).unwrap();
            // SAFETY: blocks of the layouts with which they were made, within their sizes.
            unsafe {
                let mut block = WithoutRemap.alloc_zeroed(layout);
                for byte in 0..100 {
                    assert_eq!(block.add(byte).read(), 0);
                    block.add(byte).write(u8::try_from(byte).unwrap());
                }
                for size in sizes {
                    block = WithoutRemap.realloc(block, layout, size);
                    layout = Layout::from_size_align(size, 16).unwrap();
                    assert!((0..100).all(|byte| usize::from(block.add(byte).read()) == byte));
                }
                WithoutRemap.dealloc(block, layout);
            }
        }
    }
}
