//! The places of RAM in guest-physical memory and in its file.

use dayfly_units::PAGE_SIZE;
use std::ops::Range;

/// Upper limit for guest-physical addresses of RAM, in bytes: 16 TiB. It limits allocations per
/// address.
pub const MAX_GUEST_BYTES: u64 = 1 << 44;
/// Upper limit for the extents of a layout.
pub const MAX_EXTENTS: usize = 1024;

/// A guest-physical page number: a guest-physical address divided by 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pfn(pub u64);

/// Index of a frame among the frames of RAM, in rising guest-physical order; holes of the address
/// space do not count. For a memory file of dayfly this is the page number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame(pub usize);

/// A contiguous range of RAM in a memory file. All values are in bytes and multiples of 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Start address in guest-physical memory.
    pub guest: u64,
    /// Start offset in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// Why extents do not form a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// There are no extents, or too many.
    #[error("layout: expected 1 to {MAX_EXTENTS} extents, got {0}")]
    Count(usize),
    /// An extent does not consist of whole pages.
    #[error(
        "layout: extent {at}: expected multiples of {PAGE_SIZE} bytes, not empty, got {extent:?}"
    )]
    Unaligned {
        /// Index of the extent.
        at: usize,
        /// The given extent.
        extent: Extent,
    },
    /// An extent ends beyond the supported range, in guest-physical memory or in the file.
    #[error("layout: extent {at}: expected to end below {MAX_GUEST_BYTES:#x}, got {extent:?}")]
    TooHigh {
        /// Index of the extent.
        at: usize,
        /// The given extent.
        extent: Extent,
    },
    /// An extent starts before the end of the previous one.
    #[error(
        "layout: extent {at}: expected a guest address of {expected:#x} or above, got {extent:?}"
    )]
    Order {
        /// Index of the extent.
        at: usize,
        /// End of the previous extent.
        expected: u64,
        /// The given extent.
        extent: Extent,
    },
}

/// An extent with its first frame. `pfn`, `frame` and `frames` count pages, `offset` counts bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) pfn: u64,
    pub(super) frame: usize,
    pub(super) frames: usize,
    pub(super) offset: u64,
}

/// The places of RAM in guest-physical memory and in its file: one to [`MAX_EXTENTS`] extents in
/// rising order.
#[derive(Debug, Clone)]
pub struct Layout {
    pub(super) placed: Vec<Placed>,
    frames: usize,
}

impl Layout {
    /// Makes a layout of these extents.
    ///
    /// # Errors
    /// [`LayoutError`] if the extents are not whole pages, not in rising order, or overlap in
    /// guest-physical memory.
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
            let fits =
                |start: u64| start.checked_add(bytes).is_some_and(|end| end <= MAX_GUEST_BYTES);
            if !fits(guest) || !fits(offset) {
                return Err(LayoutError::TooHigh { at, extent });
            }
            if guest < expected {
                return Err(LayoutError::Order { at, expected, extent });
            }
            let count = usize::try_from(bytes / PAGE_SIZE)
                .map_err(|_| LayoutError::TooHigh { at, extent })?;
            placed.push(Placed { pfn: guest / PAGE_SIZE, frame: frames, frames: count, offset });
            frames += count;
            expected = guest + bytes;
        }
        Ok(Self { placed, frames })
    }

    /// Number of frames of RAM.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// The first page number after all RAM.
    pub(crate) fn end(&self) -> Pfn {
        Pfn(self.placed.last().map_or(0, |p| p.pfn + p.frames as u64))
    }

    /// The frame at a page number; `None` if there is no RAM.
    #[must_use]
    pub fn frame(&self, pfn: Pfn) -> Option<Frame> {
        let after = self.placed.partition_point(|p| p.pfn <= pfn.0);
        let placed = self.placed.get(after.checked_sub(1)?)?;
        let within = usize::try_from(pfn.0 - placed.pfn).ok().filter(|&n| n < placed.frames)?;
        Some(Frame(placed.frame + within))
    }

    /// The page number of a frame; `None` beyond RAM.
    #[must_use]
    pub fn pfn(&self, frame: Frame) -> Option<Pfn> {
        let (placed, within) = self.find(frame)?;
        Some(Pfn(placed.pfn + within as u64))
    }

    /// Offset of a frame's page in the file, in bytes; `None` beyond RAM.
    #[must_use]
    pub fn offset(&self, frame: Frame) -> Option<u64> {
        let (placed, within) = self.find(frame)?;
        Some(placed.offset + within as u64 * PAGE_SIZE)
    }

    /// The contiguous ranges of RAM in rising order, each with its first page number and its
    /// frames.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (Pfn, Range<usize>)> + '_ {
        self.placed.iter().map(|p| (Pfn(p.pfn), p.frame..p.frame + p.frames))
    }

    /// Smallest length in bytes of a file that holds all extents.
    pub(super) fn file_bytes(&self) -> u64 {
        self.placed.iter().map(|p| p.offset + p.frames as u64 * PAGE_SIZE).max().unwrap_or(0)
    }

    fn find(&self, frame: Frame) -> Option<(&Placed, usize)> {
        let after = self.placed.partition_point(|p| p.frame <= frame.0);
        let placed = self.placed.get(after.checked_sub(1)?)?;
        let within = frame.0 - placed.frame;
        (within < placed.frames).then_some((placed, within))
    }
}
