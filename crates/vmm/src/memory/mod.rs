//! Guest RAM: anonymous for a boot, `MAP_PRIVATE` of a snapshot's file for a restore; and how it is written to a file.
//!
//! A memory file holds RAM without the hole below 4 GiB ([`crate::arch::layout::ram`]).

mod dump;
pub mod working_set;

pub use dump::{Dump, DumpError, MAX_HOLES, dump, large_holes};

use crate::arch::layout;
use dayfly_units::PAGE_SIZE;
use std::fs::File;
use std::sync::Arc;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{Address, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};

/// Why guest RAM could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A size that no VM may have.
    #[error(
        "guest memory: expected {min} to {max} bytes in steps of {step}, got {got}",
        min = layout::MIN_MEMORY_BYTES,
        max = layout::MAX_MEMORY_BYTES,
        step = layout::MEMORY_STEP_BYTES
    )]
    Size {
        /// What was asked for.
        got: u64,
    },
    /// The file's size could not be read.
    #[error("memory file")]
    Stat(#[source] std::io::Error),
    /// The file is not as long as RAM: truncated, or another VM's.
    #[error("memory file: expected {expected} bytes, the RAM of the saved state, got {got}")]
    FileLength {
        /// RAM in bytes.
        expected: u64,
        /// The file's length.
        got: u64,
    },
    /// mmap(2) failed.
    #[error("mapping {len:#x} bytes of RAM at guest address {at:#x}")]
    Map {
        /// Guest address.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// Why.
        #[source]
        source: MmapRegionError,
    },
    /// A hole that no memory file of this size has.
    #[error(
        "holes of the memory file: hole {number} at {offset:#x}, {len:#x} bytes: expected whole pages within RAM, in rising order"
    )]
    Hole {
        /// Its place in the list.
        number: usize,
        /// Where it starts in the file.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Too many of them.
    #[error("holes of the memory file: expected at most {MAX_HOLES}, got {0}")]
    Holes(usize),
    /// mmap(2) of a hole failed.
    #[error("mapping the hole at {offset:#x} of the memory file")]
    MapHole {
        /// Where it starts in the file.
        offset: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Regions that vm-memory refuses.
    #[error("guest memory regions")]
    Regions(#[source] vm_memory::GuestRegionCollectionError),
}

/// Whether a VM may have this much RAM.
///
/// # Errors
/// When it may not.
pub fn check_size(memory_bytes: u64) -> Result<(), MemoryError> {
    let fits = (layout::MIN_MEMORY_BYTES..=layout::MAX_MEMORY_BYTES).contains(&memory_bytes)
        && memory_bytes.is_multiple_of(layout::MEMORY_STEP_BYTES);
    if fits { Ok(()) } else { Err(MemoryError::Size { got: memory_bytes }) }
}

/// RAM for a boot: zero, reserved, not charged until touched.
///
/// # Errors
/// When the size is not allowed or mmap(2) fails.
pub fn anonymous(memory_bytes: u64) -> Result<GuestMemoryMmap, MemoryError> {
    map(memory_bytes, None)
}

/// RAM of a restore: `file`'s pages, shared with every other clone until written; the file never changes. `holes` are
/// what [`large_holes`] found in it when it was written; they are mapped anonymously.
///
/// # Errors
/// When the size is not allowed, the file has another length, a hole makes no sense, or mmap(2) fails.
pub fn from_file(
    file: Arc<File>,
    memory_bytes: u64,
    holes: &[(u64, u64)],
) -> Result<GuestMemoryMmap, MemoryError> {
    let got = file.metadata().map_err(MemoryError::Stat)?.len();
    if got != memory_bytes {
        return Err(MemoryError::FileLength { expected: memory_bytes, got });
    }
    let memory = map(memory_bytes, Some(file))?;
    if holes.len() > MAX_HOLES {
        return Err(MemoryError::Holes(holes.len()));
    }
    let ram = layout::ram(memory_bytes);
    let mut last_end = 0;
    for (number, &(offset, len)) in holes.iter().enumerate() {
        let refused = MemoryError::Hole { number, offset, len };
        let whole = len > 0 && offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE);
        let place = ram.iter().find(|(_, start, size)| {
            let end = offset.checked_add(len);
            offset >= *start && end.is_some_and(|end| end <= start + size)
        });
        let (Some((guest, start, _)), true, true) = (place, whole, offset >= last_end) else {
            return Err(refused);
        };
        last_end = offset + len;
        map_hole(&memory, guest.unchecked_add(offset - start), offset, len)?;
    }
    Ok(memory)
}

/// Replaces `len` bytes of the mapping by fresh zero pages. Small pages, because a clone is to cost what it touches.
fn map_hole(memory: &GuestMemoryMmap, at: GuestAddress, offset: u64, len: u64) -> Result<(), MemoryError> {
    let fails = |source| MemoryError::MapHole { offset, source };
    let size = usize::try_from(len).map_err(|_| fails(std::io::ErrorKind::InvalidInput.into()))?;
    let host = memory.get_slice(at, size).map_err(|e| fails(std::io::Error::other(e)))?;
    let host = host.ptr_guard_mut().as_ptr();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: `host` and the `size` bytes from it lie within one region of `memory`, as the slice shows; nothing refers to
    // their content yet, and the region's later munmap(2) covers whatever is mapped there.
    let mapped = unsafe { libc::mmap(host.cast(), size, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(fails(std::io::Error::last_os_error()));
    }
    // SAFETY: the pages just mapped. A kernel without huge pages refuses; it then does what is asked anyway.
    unsafe { libc::madvise(mapped, size, libc::MADV_NOHUGEPAGE) };
    Ok(())
}

fn map(memory_bytes: u64, file: Option<Arc<File>>) -> Result<GuestMemoryMmap, MemoryError> {
    check_size(memory_bytes)?;
    let mut regions = Vec::new();
    for (at, offset, len) in layout::ram(memory_bytes) {
        let size = usize::try_from(len).map_err(|_| MemoryError::Size { got: memory_bytes })?;
        let fails = |source| MemoryError::Map { at: at.0, len, source };
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        let builder = MmapRegionBuilder::new(size).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
        let region = match &file {
            Some(file) => builder
                .with_mmap_flags(flags)
                .with_file_offset(FileOffset::from_arc(Arc::clone(file), offset))
                .build(),
            None => builder.with_mmap_flags(flags | libc::MAP_ANONYMOUS).build(),
        };
        let region = region.map_err(fails)?;
        regions.extend(GuestRegionMmap::new(region, at));
    }
    GuestMemoryMmap::from_regions(regions).map_err(MemoryError::Regions)
}
