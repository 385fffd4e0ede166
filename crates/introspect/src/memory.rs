//! Guest-physical memory as this room sees it: where RAM lies ([`Layout`]) and its pages, read-only ([`PhysMemory`]).

mod file;

pub use file::{OpenError, RamFile};

use dayfly_units::PAGE_SIZE;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words in a page.
pub const PAGE_WORDS: usize = 512;
const _: () = assert!(PAGE_WORDS as u64 * 8 == PAGE_SIZE);

/// A page of guest memory, as little-endian words. They are atomic because a mapping of a file may change under the
/// reader; relaxed loads of them are sound then, and nothing here stores.
pub type Page = [AtomicU64; PAGE_WORDS];

/// A page of zeroes, which stands for every page that a file has only as a hole.
pub(crate) static ZERO_PAGE: Page = [const { AtomicU64::new(0) }; PAGE_WORDS];

/// Guest-physical addresses, in bytes, below which RAM may lie: 16 TiB. Bounds what is allocated per address.
pub const MAX_GUEST_BYTES: u64 = 1 << 44;
/// Most extents in a layout.
pub const MAX_EXTENTS: usize = 1024;

/// A guest-physical page number: a guest-physical address divided by 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pfn(pub u64);

/// A frame by its place among the frames of RAM, in rising guest-physical order, holes of the address space not counted.
/// For a memory file of dayfly that is the page number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame(pub usize);

/// A stretch of RAM in a memory file. All in bytes, all multiples of 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where it starts in guest-physical memory.
    pub guest: u64,
    /// Where it starts in the file.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

/// Why extents are no layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// None, or too many.
    #[error("layout: expected 1 to {MAX_EXTENTS} extents, got {0}")]
    Count(usize),
    /// Not whole pages.
    #[error("layout: extent {at}: expected multiples of {PAGE_SIZE} bytes, not empty, got {extent:?}")]
    Unaligned {
        /// Which.
        at: usize,
        /// As it was given.
        extent: Extent,
    },
    /// Beyond what is supported, in guest-physical memory or in the file.
    #[error("layout: extent {at}: expected to end below {MAX_GUEST_BYTES:#x}, got {extent:?}")]
    TooHigh {
        /// Which.
        at: usize,
        /// As it was given.
        extent: Extent,
    },
    /// It starts before the one before it ends.
    #[error("layout: extent {at}: expected a guest address of {expected:#x} or above, got {extent:?}")]
    Order {
        /// Which.
        at: usize,
        /// The end of the one before.
        expected: u64,
        /// As it was given.
        extent: Extent,
    },
}

#[derive(Debug, Clone, Copy)]
struct Placed {
    pfn: u64,
    frame: usize,
    frames: usize,
    offset: u64,
}

/// Where RAM lies in guest-physical memory and in its file: one to [`MAX_EXTENTS`] extents in rising order.
#[derive(Debug, Clone)]
pub struct Layout {
    placed: Vec<Placed>,
    frames: usize,
}

impl Layout {
    /// A layout of these extents.
    ///
    /// # Errors
    /// [`LayoutError`], when they are not whole pages, not in rising order, or overlap in guest-physical memory.
    pub fn new(extents: &[Extent]) -> Result<Self, LayoutError> {
        if !(1..=MAX_EXTENTS).contains(&extents.len()) {
            return Err(LayoutError::Count(extents.len()));
        }
        let mut placed: Vec<Placed> = Vec::with_capacity(extents.len());
        let (mut frames, mut expected) = (0, 0);
        for (at, &extent) in extents.iter().enumerate() {
            let Extent { guest, offset, bytes } = extent;
            if bytes == 0 || [guest, offset, bytes].iter().any(|n| n % PAGE_SIZE != 0) {
                return Err(LayoutError::Unaligned { at, extent });
            }
            let fits = |start: u64| start.checked_add(bytes).is_some_and(|end| end <= MAX_GUEST_BYTES);
            if !fits(guest) || !fits(offset) {
                return Err(LayoutError::TooHigh { at, extent });
            }
            if guest < expected {
                return Err(LayoutError::Order { at, expected, extent });
            }
            let count =
                usize::try_from(bytes / PAGE_SIZE).map_err(|_| LayoutError::TooHigh { at, extent })?;
            placed.push(Placed { pfn: guest / PAGE_SIZE, frame: frames, frames: count, offset });
            frames += count;
            expected = guest + bytes;
        }
        Ok(Self { placed, frames })
    }

    /// Frames of RAM.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// The first page number behind all RAM.
    pub(crate) fn end(&self) -> Pfn {
        Pfn(self.placed.last().map_or(0, |p| p.pfn + p.frames as u64))
    }

    /// The frame at a page number; none where there is no RAM.
    #[must_use]
    pub fn frame(&self, pfn: Pfn) -> Option<Frame> {
        let after = self.placed.partition_point(|p| p.pfn <= pfn.0);
        let placed = self.placed.get(after.checked_sub(1)?)?;
        let within = usize::try_from(pfn.0 - placed.pfn).ok().filter(|&n| n < placed.frames)?;
        Some(Frame(placed.frame + within))
    }

    /// The page number of a frame; none beyond RAM.
    #[must_use]
    pub fn pfn(&self, frame: Frame) -> Option<Pfn> {
        let (placed, within) = self.find(frame)?;
        Some(Pfn(placed.pfn + within as u64))
    }

    /// Where a frame's page starts in the file, in bytes; none beyond RAM.
    #[must_use]
    pub fn offset(&self, frame: Frame) -> Option<u64> {
        let (placed, within) = self.find(frame)?;
        Some(placed.offset + within as u64 * PAGE_SIZE)
    }

    /// RAM without gaps, in rising order: the first page number and the frames from there.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (Pfn, Range<usize>)> + '_ {
        self.placed.iter().map(|p| (Pfn(p.pfn), p.frame..p.frame + p.frames))
    }

    /// The least length of a file that holds all extents, in bytes.
    fn file_bytes(&self) -> u64 {
        self.placed.iter().map(|p| p.offset + p.frames as u64 * PAGE_SIZE).max().unwrap_or(0)
    }

    fn find(&self, frame: Frame) -> Option<(&Placed, usize)> {
        let after = self.placed.partition_point(|p| p.frame <= frame.0);
        let placed = self.placed.get(after.checked_sub(1)?)?;
        let within = frame.0 - placed.frame;
        (within < placed.frames).then_some((placed, within))
    }
}

/// Guest memory that does not change, to be read by guest-physical address.
pub trait PhysMemory: Sync {
    /// Where RAM lies.
    fn layout(&self) -> &Layout;

    /// The page of a frame. Beyond RAM, a page of zeroes.
    fn page(&self, frame: Frame) -> &Page;

    /// Whether the frame may hold anything but zeroes. `true` is always right.
    fn may_hold_data(&self, frame: Frame) -> bool {
        let _ = frame;
        true
    }
}

/// Reading of single words by guest-physical address, on top of any [`PhysMemory`].
pub(crate) trait PhysRead {
    /// The page at a guest-physical address; none where there is no RAM.
    fn page_at(&self, phys: u64) -> Option<&Page>;

    /// The aligned word at or before a guest-physical address; none where there is no RAM.
    fn word_at(&self, phys: u64) -> Option<u64> {
        Some(word(self.page_at(phys)?, word_index(phys)))
    }
}

impl<M: PhysMemory + ?Sized> PhysRead for M {
    fn page_at(&self, phys: u64) -> Option<&Page> {
        self.layout().frame(Pfn(phys / PAGE_SIZE)).map(|frame| self.page(frame))
    }
}

/// Which word of its page an address is in: 0 to 511.
pub(crate) fn word_index(address: u64) -> usize {
    // Nine bits are left: no address is truncated.
    usize::from(u16::try_from((address % PAGE_SIZE) / 8).unwrap_or(0))
}

/// A word of a page; zero beyond its end.
pub(crate) fn word(page: &Page, index: usize) -> u64 {
    page.get(index).map_or(0, |word| u64::from_le(word.load(Ordering::Relaxed)))
}

/// A page as bytes.
pub(crate) fn bytes(page: &Page) -> Vec<u8> {
    page.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
}

#[cfg(test)]
pub(crate) mod image;

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
