//! Guest memory built by hand, for tests.

#![allow(clippy::unwrap_used, reason = "support of tests and fuzzing")]

use super::access::ZERO_PAGE;
use super::{Extent, Frame, Layout, PAGE_WORDS, Page, PhysMemory};
use dayfly_units::PAGE_SIZE;
use std::sync::atomic::{AtomicU64, Ordering};

/// RAM in a vector.
pub struct RamImage {
    layout: Layout,
    pages: Vec<Page>,
}

impl RamImage {
    /// A RAM of `frames` zero frames from address 0.
    pub fn new(frames: usize) -> Self {
        Self::with_layout(
            Layout::new(&[Extent { guest: 0, offset: 0, bytes: frames as u64 * PAGE_SIZE }])
                .unwrap(),
        )
    }

    /// A RAM of zeroes with this layout.
    pub fn with_layout(layout: Layout) -> Self {
        let pages =
            (0..layout.frames()).map(|_| [const { AtomicU64::new(0) }; PAGE_WORDS]).collect();
        Self { layout, pages }
    }

    /// A RAM from address 0 with these bytes, in whole pages.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let ram = Self::new((bytes.len() / 4096).max(1));
        for (n, word) in
            bytes.as_chunks::<8>().0.iter().take(ram.pages.len() * PAGE_WORDS).enumerate()
        {
            ram.pages[n / PAGE_WORDS][n % PAGE_WORDS]
                .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        ram
    }

    /// Writes a word at a guest-physical address, which must be a multiple of 8.
    pub fn put(&self, phys: u64, value: u64) {
        assert_eq!(phys % 8, 0);
        let frame = self.layout.frame(super::Pfn(phys / PAGE_SIZE)).unwrap();
        self.pages[frame.0][super::word_index(phys)].store(value, Ordering::Relaxed);
    }

    /// Writes bytes at a guest-physical address, which must be a multiple of 8. The last word is
    /// padded with zeroes.
    pub fn put_bytes(&self, phys: u64, bytes: &[u8]) {
        for (n, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.put(phys + 8 * n as u64, u64::from_ne_bytes(word));
        }
    }
}

impl PhysMemory for RamImage {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn page(&self, frame: Frame) -> &Page {
        self.pages.get(frame.0).unwrap_or(&ZERO_PAGE)
    }
}
