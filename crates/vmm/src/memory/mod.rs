//! Guest RAM: anonymous memory for a boot, `MAP_PRIVATE` of a snapshot's file for a restore; and
//! how RAM is written to a file.
//!
//! A memory file holds RAM without the address hole below 4 GiB ([`crate::arch::layout::ram`]).

pub mod backing;
mod discard;
mod dump;
pub mod lazy;
mod length;
pub mod live;
pub mod pages;
pub mod pre_fault;
pub mod recorder;
pub mod working_set;
pub mod writes;
mod yield_points;

pub use discard::discard;
pub use dump::{
    Dump, DumpError, MAX_HOLES, MIN_HOLE_BYTES, Unwritten, dump, large_holes, own, written,
};
pub use length::file_bytes;
pub use yield_points::YieldPoints;

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
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap,
};

/// Why guest RAM could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is not allowed.
    #[error(
        "guest memory: expected {min} to {max} bytes in steps of {step}, got {got}",
        min = layout::MIN_MEMORY_BYTES,
        max = layout::MAX_MEMORY_BYTES,
        step = layout::MEMORY_STEP_BYTES
    )]
    Size {
        /// The requested size in bytes.
        got: u64,
    },
    /// The file's size could not be read.
    #[error("memory file")]
    Stat(#[source] io::Error),
    /// The file is not as long as RAM: it is truncated, or of another VM.
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
        /// The error of mmap(2).
        #[source]
        source: io::Error,
    },
    /// Pages of another memory file could not be copied.
    #[error("copying {len:#x} bytes of another memory file to RAM at guest address {at:#x}")]
    Copy {
        /// Guest address.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// The failed read or write.
        #[source]
        source: io::Error,
    },
    /// A hole that no memory file of this size can have.
    #[error(
        "holes of the memory file: hole {number} at {offset:#x}, {len:#x} bytes: \
         expected whole pages within RAM, in rising order"
    )]
    Hole {
        /// Its place in the list, from 0.
        number: usize,
        /// Its offset in the file, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// More than [`MAX_HOLES`] holes.
    #[error("holes of the memory file: expected at most {MAX_HOLES}, got {0}")]
    Holes(usize),
    /// vm-memory refuses the regions.
    #[error("guest memory regions")]
    Regions(#[source] vm_memory::GuestRegionCollectionError),
}

/// Checks that a VM may have this much RAM.
///
/// # Errors
/// [`MemoryError::Size`].
pub fn check_size(memory_bytes: u64) -> Result<(), MemoryError> {
    let fits = (layout::MIN_MEMORY_BYTES..=layout::MAX_MEMORY_BYTES).contains(&memory_bytes)
        && memory_bytes.is_multiple_of(layout::MEMORY_STEP_BYTES);
    if fits { Ok(()) } else { Err(MemoryError::Size { got: memory_bytes }) }
}

/// Maps zeroed RAM for a boot. The host reserves nothing and charges a page when it is touched.
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

/// Checks that `file` is as long as RAM.
///
/// # Errors
/// [`MemoryError::FileLength`], or the length cannot be read.
pub fn check_file(file: &File, memory_bytes: u64) -> Result<(), MemoryError> {
    let got = file_bytes(file).map_err(MemoryError::Stat)?;
    if got == memory_bytes {
        Ok(())
    } else {
        Err(MemoryError::FileLength { expected: memory_bytes, got })
    }
}

/// Maps `backing` over RAM that [`anonymous`] made and that is untouched. Clones share its pages
/// until they write them; the backing's files never change. `holes` come from [`large_holes`] when
/// the file was written, and stay anonymous. If the file is `whole`, a few pages are copied at once
/// (`Backing::parted`). Returns the parts that are mapped from the snapshot's own file.
///
/// # Errors
/// When the file has another length, a hole is invalid, a page cannot be read, or mmap(2) fails.
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
    // In a file that is not whole, no page is copied: a write to a page that is missing in the
    // memfd would create a page of zeroes for every process that maps it.
    let (mapped, copied) =
        if whole { backing.parted() } else { (backing.rows().to_vec(), Vec::new()) };
    let mut parts = Vec::with_capacity(holes.len() + ram.len());
    for (guest, start, size) in ram {
        pages(memory, guest, size, libc::MADV_NOHUGEPAGE)?;
        let end = start + size;
        let mut at = start;
        let inside = holes.iter().filter(|(offset, _)| (start..end).contains(offset));
        // The part before each hole, then the part after the last one.
        for (offset, len) in inside.copied().chain([(end, 0)]) {
            for piece in backing.pieces_with(&mapped, at..offset) {
                let part = map_part(memory, guest.unchecked_add(piece.offset - start), &piece)?;
                parts.extend(piece.own.then_some(part));
            }
            for row in within(&copied, at..offset) {
                let from = u64::from(row.first) * PAGE_SIZE;
                let until = from + u64::from(row.pages) * PAGE_SIZE;
                for piece in
                    backing.pieces_with(std::slice::from_ref(row), from.max(at)..until.min(offset))
                {
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

/// A part of RAM that is a mapping of the memory file.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Its address in this process.
    pub host: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// The size from which a hole gets pages of 2 MiB, in bytes. RAM that nothing had touched when the
/// snapshot was taken is there to be filled. Freeing 512 MiB of it takes 2.7 ms in large pages,
/// 15.7 ms in small ones (`make bench BENCH=death`, a loaded host).
const LARGE_BYTES: u64 = 256 << 20;

/// Sets the page size with `advice`: small pages, because a clone should cost what it touches; huge
/// pages for large holes.
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
    // SAFETY: the `size` bytes from `host` are guest memory, as the slice shows. The result is
    // ignored: a kernel without huge pages refuses, and then uses small pages anyway.
    unsafe { libc::madvise(host.cast(), size, advice) };
    Ok(())
}

/// The rows of `rows` that have a page in `place`, a range of bytes in a memory file.
fn within(rows: &[Row], place: Range<u64>) -> impl Iterator<Item = &Row> {
    let page = |number: u32| u64::from(number) * PAGE_SIZE;
    let from = rows.partition_point(|row| page(row.first) + page(row.pages) <= place.start);
    rows[from..].iter().take_while(move |row| page(row.first) < place.end)
}

/// Copies the bytes of `piece` to RAM at `at`.
fn copy_piece(
    memory: &GuestMemoryMmap,
    at: GuestAddress,
    piece: &Piece<'_>,
) -> Result<(), MemoryError> {
    let fails = |source| MemoryError::Copy { at: at.0, len: piece.len, source };
    let mut bytes = [0; PAGE];
    for done in (0..piece.len).step_by(PAGE) {
        piece.file.read_exact_at(&mut bytes, piece.at + done).map_err(fails)?;
        memory
            .write_slice(&bytes, at.unchecked_add(done))
            .map_err(|e| fails(io::Error::other(e)))?;
    }
    Ok(())
}

/// Maps `piece` over RAM at `at`.
fn map_part(
    memory: &GuestMemoryMmap,
    at: GuestAddress,
    piece: &Piece<'_>,
) -> Result<Part, MemoryError> {
    let len = piece.len;
    let fails = |source| MemoryError::Map { at: at.0, len, source };
    let size = usize::try_from(len).map_err(|_| fails(io::ErrorKind::InvalidInput.into()))?;
    let place = i64::try_from(piece.at).map_err(|_| fails(io::ErrorKind::InvalidInput.into()))?;
    let host = memory.get_slice(at, size).map_err(|e| fails(io::Error::other(e)))?;
    let host = host.ptr_guard_mut().as_ptr();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: `host` and the `size` bytes from it lie within one region of `memory`, as the slice
    // shows. Nothing refers to their content yet. The later munmap(2) of the region covers every
    // mapping in it.
    let mapped =
        unsafe { libc::mmap(host.cast(), size, protection, flags, piece.file.as_raw_fd(), place) };
    if mapped == libc::MAP_FAILED {
        return Err(fails(io::Error::last_os_error()));
    }
    Ok(Part { host: host.addr() as u64, len })
}
