//! Guest RAM: anonymous for a boot, `MAP_PRIVATE` of a snapshot's file for a restore; and how it is written to a file.
//!
//! A memory file holds RAM without the hole below 4 GiB ([`crate::arch::layout::ram`]).

pub mod backing;
mod dump;
pub mod lazy;
pub mod live;
pub mod pages;
pub mod pre_fault;
pub mod recorder;
mod uffd;
pub mod working_set;
pub mod writes;

pub use dump::{Dump, DumpError, MAX_HOLES, MIN_HOLE_BYTES, dump, large_holes, own, written};

use crate::arch::layout;
use backing::{Backing, Piece, Row};
use dayfly_units::PAGE_SIZE;
use dump::PAGE;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};

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
    Stat(#[source] io::Error),
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
        source: io::Error,
    },
    /// Pages of another file could not be copied.
    #[error("copying {len:#x} bytes of another memory file to RAM at guest address {at:#x}")]
    Copy {
        /// Guest address.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// Why.
        #[source]
        source: io::Error,
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
    check_size(memory_bytes)?;
    let mut regions = Vec::new();
    for (at, _, len) in layout::ram(memory_bytes) {
        let size = usize::try_from(len).map_err(|_| MemoryError::Size { got: memory_bytes })?;
        let fails = |source| MemoryError::Map { at: at.0, len, source: io::Error::other(source) };
        let region = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS)
            .build()
            .map_err(fails)?;
        regions.extend(GuestRegionMmap::new(region, at));
    }
    GuestMemoryMmap::from_regions(regions).map_err(MemoryError::Regions)
}

/// Whether `file` is as long as RAM.
///
/// # Errors
/// When it is not.
pub fn check_file(file: &File, memory_bytes: u64) -> Result<(), MemoryError> {
    let got = file.metadata().map_err(MemoryError::Stat)?.len();
    if got == memory_bytes { Ok(()) } else { Err(MemoryError::FileLength { expected: memory_bytes, got }) }
}

/// Lays `backing` over RAM that [`anonymous`] made and nobody has touched: its pages are shared with every other clone until
/// written, and its files never change. `holes` are what [`large_holes`] found in it when it was written; they stay anonymous. Where it is
/// `whole`, a few pages are copied at once ([`Backing::parted`]). Gives what was mapped from the snapshot's own file.
///
/// # Errors
/// When the file has another length, a hole makes no sense, a page cannot be read, or mmap(2) fails.
pub fn lay_over(
    memory: &GuestMemoryMmap,
    backing: &Backing,
    memory_bytes: u64,
    holes: &[(u64, u64)],
    whole: bool,
) -> Result<Vec<Part>, MemoryError> {
    check_file(backing.file(), memory_bytes)?;
    if holes.len() > MAX_HOLES {
        return Err(MemoryError::Holes(holes.len()));
    }
    let ram = layout::ram(memory_bytes);
    let mut last_end = 0;
    for (number, &(offset, len)) in holes.iter().enumerate() {
        let whole = len > 0 && offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE);
        let fits = ram.iter().any(|(_, start, size)| {
            let end = offset.checked_add(len);
            offset >= *start && end.is_some_and(|end| end <= start + size)
        });
        if !(fits && whole && offset >= last_end) {
            return Err(MemoryError::Hole { number, offset, len });
        }
        last_end = offset + len;
    }
    // Writing to a page beneath which something is missing would make it one of zeroes for all who map it.
    let (mapped, copied) = if whole { backing.parted() } else { (backing.rows().to_vec(), Vec::new()) };
    let mut parts = Vec::with_capacity(holes.len() + ram.len());
    for (guest, start, size) in ram {
        pages(memory, guest, size, libc::MADV_NOHUGEPAGE)?;
        let end = start + size;
        let mut at = start;
        let inside = holes.iter().filter(|(offset, _)| (start..end).contains(offset));
        // What lies before each hole, then what lies after the last.
        for (offset, len) in inside.copied().chain([(end, 0)]) {
            for piece in backing.pieces_with(&mapped, at..offset) {
                let part = map_part(memory, guest.unchecked_add(piece.offset - start), &piece)?;
                parts.extend(piece.own.then_some(part));
            }
            for row in within(&copied, at..offset) {
                let from = u64::from(row.first) * PAGE_SIZE;
                let until = from + u64::from(row.pages) * PAGE_SIZE;
                for piece in backing.pieces_with(std::slice::from_ref(row), from.max(at)..until.min(offset)) {
                    copy_piece(memory, guest.unchecked_add(piece.offset - start), &piece)?;
                }
            }
            if len >= LARGE_BYTES {
                pages(memory, guest.unchecked_add(offset - start), len, libc::MADV_HUGEPAGE)?;
            }
            at = offset + len;
        }
    }
    Ok(parts)
}

/// A part of RAM that is a mapping of the memory file, by its address in this process.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Its address.
    pub host: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// A hole from which on its pages are 2 MiB: memory by the hundreds of megabytes that nothing had touched when the snapshot was taken is
/// there to be filled. Freeing 512 MiB of it took 2.7 ms, munmap(2) of as much in small ones 15.7 (`make bench BENCH=death`, a loaded host).
const LARGE_BYTES: u64 = 256 << 20;

/// The size of pages: small ones, because a clone is to cost what it touches, but for large holes.
fn pages(
    memory: &GuestMemoryMmap,
    at: GuestAddress,
    len: u64,
    advice: libc::c_int,
) -> Result<(), MemoryError> {
    let fails = |source| MemoryError::Map { at: at.0, len, source };
    let size = usize::try_from(len).map_err(|_| fails(io::ErrorKind::InvalidInput.into()))?;
    let host = memory.get_slice(at, size).map_err(|e| fails(io::Error::other(e)))?;
    let host = host.ptr_guard_mut().as_ptr();
    // SAFETY: the `size` bytes from `host` are guest memory, as the slice shows. A kernel without huge pages refuses; it then
    // does what is asked anyway.
    unsafe { libc::madvise(host.cast(), size, advice) };
    Ok(())
}

/// Those of `rows` that have a page between two places, given in bytes.
fn within(rows: &[Row], place: Range<u64>) -> impl Iterator<Item = &Row> {
    let page = |number: u32| u64::from(number) * PAGE_SIZE;
    let from = rows.partition_point(|row| page(row.first) + page(row.pages) <= place.start);
    rows[from..].iter().take_while(move |row| page(row.first) < place.end)
}

/// Copies `piece` to RAM at `at`.
fn copy_piece(memory: &GuestMemoryMmap, at: GuestAddress, piece: &Piece<'_>) -> Result<(), MemoryError> {
    let fails = |source| MemoryError::Copy { at: at.0, len: piece.len, source };
    let mut bytes = [0; PAGE];
    for done in (0..piece.len).step_by(PAGE) {
        piece.file.read_exact_at(&mut bytes, piece.at + done).map_err(fails)?;
        memory.write_slice(&bytes, at.unchecked_add(done)).map_err(|e| fails(io::Error::other(e)))?;
    }
    Ok(())
}

/// Maps `piece` over RAM at `at`.
fn map_part(memory: &GuestMemoryMmap, at: GuestAddress, piece: &Piece<'_>) -> Result<Part, MemoryError> {
    let len = piece.len;
    let fails = |source| MemoryError::Map { at: at.0, len, source };
    let size = usize::try_from(len).map_err(|_| fails(io::ErrorKind::InvalidInput.into()))?;
    let place = i64::try_from(piece.at).map_err(|_| fails(io::ErrorKind::InvalidInput.into()))?;
    let host = memory.get_slice(at, size).map_err(|e| fails(io::Error::other(e)))?;
    let host = host.ptr_guard_mut().as_ptr();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: `host` and the `size` bytes from it lie within one region of `memory`, as the slice shows; nothing refers to
    // their content yet, and the region's later munmap(2) covers whatever is mapped there.
    let mapped = unsafe { libc::mmap(host.cast(), size, protection, flags, piece.file.as_raw_fd(), place) };
    if mapped == libc::MAP_FAILED {
        return Err(fails(io::Error::last_os_error()));
    }
    Ok(Part { host: host.addr() as u64, len })
}
