//! Read-only access to the pages of guest-physical memory.

use super::layout::{Frame, Layout, Pfn};
use dayfly_units::PAGE_SIZE;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of 8-byte words in a page.
pub const PAGE_WORDS: usize = 512;
const _: () = assert!(PAGE_WORDS as u64 * 8 == PAGE_SIZE);

/// A page of guest memory, as little-endian words. The words are atomic because a mapped file may
/// change under the reader. Relaxed loads are sound then, and this crate stores nothing.
pub type Page = [AtomicU64; PAGE_WORDS];

/// A zero page, which stands for every page that is a hole of the file.
pub(crate) static ZERO_PAGE: Page = [const { AtomicU64::new(0) }; PAGE_WORDS];

/// Guest memory that does not change, addressed by guest-physical address.
pub trait PhysMemory: Sync {
    /// The places of RAM.
    fn layout(&self) -> &Layout;

    /// The page of a frame; beyond RAM, a zero page.
    fn page(&self, frame: Frame) -> &Page;

    /// Whether the frame may hold anything but zeroes. `true` is always a correct answer.
    fn may_hold_data(&self, frame: Frame) -> bool {
        let _ = frame;
        true
    }
}

/// Reads single words by guest-physical address, from any [`PhysMemory`].
pub(crate) trait PhysRead {
    /// The page at a guest-physical address; `None` if there is no RAM.
    fn page_at(&self, phys: u64) -> Option<&Page>;

    /// The aligned word at or before a guest-physical address; `None` if there is no RAM.
    fn word_at(&self, phys: u64) -> Option<u64> {
        Some(word(self.page_at(phys)?, word_index(phys)))
    }
}

impl<M: PhysMemory + ?Sized> PhysRead for M {
    fn page_at(&self, phys: u64) -> Option<&Page> {
        self.layout().frame(Pfn(phys / PAGE_SIZE)).map(|frame| self.page(frame))
    }
}

/// Index of an address's word in its page, 0 to 511.
pub(crate) fn word_index(address: u64) -> usize {
    // Nine bits are left, so nothing is truncated.
    usize::from(u16::try_from((address % PAGE_SIZE) / 8).unwrap_or(0))
}

/// A word of a page; zero beyond the page's end.
pub(crate) fn word(page: &Page, index: usize) -> u64 {
    page.get(index).map_or(0, |word| u64::from_le(word.load(Ordering::Relaxed)))
}

/// A page as bytes.
pub(crate) fn bytes(page: &Page) -> Vec<u8> {
    page.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
}
