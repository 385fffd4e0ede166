//! Writing guest RAM to a sparse file. Zero pages become holes. Every page is read through the
//! guest's mapping, because a VMM closes the snapshot's files before its guest runs
//! ([`crate::vm`]): a guest that took over its VMM could read all of a file, of which its RAM may
//! have only parts.
//!
//! `/proc/self/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`) shows which pages were
//! written: bit 63 present, bit 62 swapped, bit 61 page of a file. In a private mapping of a file,
//! a page that is present or swapped, and not of the file, was written. In anonymous memory, a page
//! that is neither present nor swapped was never written and reads as zero. Such a page is not
//! read. Without a pagemap every page is read.

use super::backing::{self, Row};
use super::length::file_bytes;
use super::pages::Pages;
use super::working_set::{self, Run};
use super::yield_points::YieldPoints;
use crate::arch::layout;
use dayfly_sys::pagemap::{self, Entry};
use dayfly_units::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use vm_memory::{
    Bytes, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress,
};

/// The shortest hole that is worth a mapping, in bytes.
pub const MIN_HOLE_BYTES: u64 = 1 << 20;
/// The most holes that get a mapping each; the kernel allows a process 65,530 mappings.
pub const MAX_HOLES: usize = 8192;
pub(super) const PAGE: usize = 4096;
const CHUNK_PAGES: usize = 2048; // 8 MiB
const BUFFER_PAGES: usize = 64;

/// Why RAM could not be written.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The target is neither empty nor a hole as long as RAM.
    #[error(
        "memory file to write: expected an empty file, or a hole as long as RAM, got {0} bytes"
    )]
    NotEmpty(u64),
    /// A read or write failed.
    #[error("memory file: {what} at byte {at:#x}")]
    Io {
        /// The failed operation.
        what: &'static str,
        /// The offset in the memory file, in bytes.
        at: u64,
        /// The error of the host.
        #[source]
        source: io::Error,
    },
}

/// How much was written, for the log and for tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Dump {
    /// Bytes written from the guest's own pages.
    pub own_bytes: u64,
    /// Bytes read from pages of the snapshot that the guest has not written.
    pub parent_bytes: u64,
}

/// Writes the RAM of a VM to `target`, an empty file or a hole as long as RAM. A page that is
/// written meanwhile may be old in any part. `pagemap` is this process's `/proc/self/pagemap`.
/// `yields` is called on the way.
///
/// # Errors
/// When a file cannot be read or written; the target is then incomplete.
pub fn dump(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    pagemap: Option<&File>,
    unwritten: Unwritten<'_>,
    target: &File,
    yields: &mut YieldPoints<'_>,
) -> Result<Dump, DumpError> {
    prepare(target, memory_bytes)?;
    let mut dump = Dump::default();
    let (mut entries, mut buffer) = (vec![Entry::default(); CHUNK_PAGES], PageBuffer::new());
    for (guest, offset, len) in layout::ram(memory_bytes) {
        let Some(region) = memory.find_region(guest) else { continue };
        let Ok(host) = region.get_host_address(MemoryRegionAddress(0)) else { continue };
        let pages = usize::try_from(len).unwrap_or(0) / PAGE;
        for first in (0..pages).step_by(CHUNK_PAGES) {
            let count = CHUNK_PAGES.min(pages - first);
            let at = offset + first as u64 * PAGE_SIZE;
            let entries = &mut entries[..count];
            let known = pagemap.is_some_and(|map| {
                pagemap::read_at(map, host.wrapping_add(first * PAGE), entries).is_ok()
            });
            let kind = |n: usize| match entries.get(n) {
                Some(entry) if known => Kind::of(*entry, unwritten, at + (n * PAGE) as u64),
                _ => Kind::Own,
            };
            let mut start = 0;
            while start < count {
                let now = kind(start);
                let end = (start + 1..count).find(|&n| kind(n) != now).unwrap_or(count);
                let run = at + (start * PAGE) as u64..at + (end * PAGE) as u64;
                match now {
                    Kind::Zero => {}
                    Kind::Own => dump.own_bytes += buffer.copy_all(target, region, offset, run)?,
                    Kind::Parent => {
                        for part in unwritten.data(run) {
                            dump.parent_bytes += buffer.copy_all(target, region, offset, part)?;
                        }
                    }
                }
                start = end;
            }
            yields.after((count * PAGE) as u64);
        }
    }
    Ok(dump)
}

/// What RAM holds where the guest has not written.
#[derive(Debug, Clone, Copy)]
pub enum Unwritten<'a> {
    /// Zeroes: all of RAM is anonymous.
    Zero,
    /// The pages of files that are mapped.
    Mapped {
        /// The parts of RAM that are anonymous, as offsets and lengths in a memory file, in rising
        /// order.
        anonymous: &'a [(u64, u64)],
        /// The snapshot's own memory file, and the rows that other files are mapped to. Holes of
        /// the file are then not read: reading a hole of a memfd through a mapping makes a page of
        /// zeroes in it.
        own: Option<(&'a File, &'a [Row])>,
    },
}

impl Unwritten<'_> {
    fn is_anonymous(self, offset: u64) -> bool {
        let Self::Mapped { anonymous, .. } = self else { return true };
        let before = anonymous.partition_point(|(at, _)| *at <= offset);
        let part = before.checked_sub(1).and_then(|n| anonymous.get(n));
        part.is_some_and(|(at, len)| offset - at < *len)
    }

    /// The parts of `within` that may hold anything but zeroes.
    fn data(self, within: Range<u64>) -> Vec<Range<u64>> {
        match self {
            Self::Mapped { own: Some((file, rows)), .. } => backing::data(file, rows, within),
            _ => std::iter::once(within).collect(),
        }
    }
}

/// What a page of RAM holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The VM's own content.
    Own,
    /// The content of a mapped file.
    Parent,
    /// Zeroes: it was never touched.
    Zero,
}

impl Kind {
    /// The kind of the page at `offset` in a memory file.
    fn of(entry: Entry, unwritten: Unwritten<'_>, offset: u64) -> Self {
        match () {
            () if entry.is_own() => Self::Own,
            () if !unwritten.is_anonymous(offset) => Self::Parent,
            // A page that was only read may be the kernel's page of zeroes.
            () if entry.is_touched() => Self::Own,
            () => Self::Zero,
        }
    }
}

/// Checks that `target` is empty or a hole, and makes it as long as RAM.
fn prepare(target: &File, memory_bytes: u64) -> Result<(), DumpError> {
    let io_at = |what, at| move |source| DumpError::Io { what, at, source };
    let got = file_bytes(target).map_err(io_at("reading the length", 0))?;
    let empty = match got {
        0 => true,
        got if got == memory_bytes => {
            seek(target, SeekFrom::Data(0)) == Err(rustix::io::Errno::NXIO)
        }
        _ => false,
    };
    if !empty {
        return Err(DumpError::NotEmpty(got));
    }
    target.set_len(memory_bytes).map_err(io_at("setting the length", 0))
}

/// A buffer for pages on their way from guest memory, which may change at any moment, to a file.
#[derive(Debug)]
pub(super) struct PageBuffer(Vec<u8>);

impl PageBuffer {
    pub(super) fn new() -> Self {
        Self(vec![0; BUFFER_PAGES * PAGE])
    }

    /// The most bytes of one copy.
    pub(super) const fn capacity(&self) -> u64 {
        (BUFFER_PAGES * PAGE) as u64
    }

    /// Copies the part `part` of RAM, whole pages of `region`, to the same place in `target`, where
    /// there is a hole; returns the bytes that were not zero. `first` is the region's offset in a
    /// memory file.
    fn copy_all(
        &mut self,
        target: &File,
        region: &GuestRegionMmap,
        first: u64,
        part: Range<u64>,
    ) -> Result<u64, DumpError> {
        let mut written = 0;
        for at in part.clone().step_by(BUFFER_PAGES * PAGE) {
            let size = self.capacity().min(part.end - at);
            let place = MemoryRegionAddress(at - first);
            let read = |bytes: &mut [u8]| region.read_slice(bytes, place);
            written += self.copy(target, at, size, false, read)?;
        }
        Ok(written)
    }

    /// Copies the `size` bytes (whole pages) that `read` gives to `at` in `target`; returns the
    /// bytes that were not zero. Zero pages become holes: with `punch` a hole is made, without it
    /// the target must have one.
    pub(super) fn copy<E>(
        &mut self,
        target: &File,
        at: u64,
        size: u64,
        punch: bool,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<u64, DumpError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let fails = |what, at| move |source| DumpError::Io { what, at, source };
        let bytes = &mut self.0[..usize::try_from(size).unwrap_or(0)];
        read(bytes).map_err(|e| fails("reading guest memory", at)(io::Error::other(e)))?;
        let (pages, _) = bytes.as_chunks::<PAGE>();
        let (mut start, mut written) = (0, 0);
        for run in pages.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
            let (to, len) = (at + (start * PAGE) as u64, (run.len() * PAGE) as u64);
            if !is_zero(&run[0]) {
                target.write_all_at(run.as_flattened(), to).map_err(fails("writing", to))?;
                written += len;
            } else if punch {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(target, hole, to, len)
                    .map_err(|e| fails("making a hole", to)(e.into()))?;
            }
            start += run.len();
        }
        Ok(written)
    }
}

/// The pages of RAM that this process owns because it wrote them, over a mapped file. Empty if the
/// pagemap cannot be read.
#[must_use]
pub fn written(memory: &GuestMemoryMmap, memory_bytes: u64, pagemap: &File) -> Vec<Run> {
    let own = own(memory, memory_bytes, pagemap, &mut YieldPoints::none()).unwrap_or_default();
    let pages = own.runs().flatten().filter_map(|page| Some((u32::try_from(page).ok()?, true)));
    working_set::runs(&pages.collect(), memory_bytes)
}

/// The pages of RAM that this process owns: written, or anonymous and touched. `yields` is called
/// on the way.
///
/// # Errors
/// When the pagemap cannot be read.
pub fn own(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    pagemap: &File,
    yields: &mut YieldPoints<'_>,
) -> io::Result<Pages> {
    let mut pages = Pages::none(memory_bytes);
    let mut entries = vec![Entry::default(); CHUNK_PAGES];
    for (guest, offset, len) in layout::ram(memory_bytes) {
        let Some(region) = memory.find_region(guest) else { continue };
        let Ok(host) = region.get_host_address(MemoryRegionAddress(0)) else { continue };
        for at in (0..len).step_by(CHUNK_PAGES * PAGE) {
            let count =
                CHUNK_PAGES.min(usize::try_from((len - at) / PAGE_SIZE).unwrap_or(CHUNK_PAGES));
            let start = host.wrapping_add(usize::try_from(at).unwrap_or(0));
            pagemap::read_at(pagemap, start, &mut entries[..count])?;
            for (n, _) in entries[..count].iter().enumerate().filter(|(_, entry)| entry.is_own()) {
                pages.insert((offset + at) / PAGE_SIZE + n as u64);
            }
            yields.after((count * PAGE) as u64);
        }
    }
    Ok(pages)
}

fn is_zero(page: &[u8; PAGE]) -> bool {
    page.as_chunks::<64>().0.iter().all(|line| line == &[0; 64])
}

/// The holes of a memory file that are worth a mapping, as `(offset, length)` in bytes, ascending.
/// A clone maps them anonymously, so a fresh page costs one page, not one in the page cache and a
/// copy.
///
/// # Errors
/// When the file cannot be searched for holes.
pub fn large_holes(file: &File, memory_bytes: u64) -> Result<Vec<(u64, u64)>, DumpError> {
    let io_at = |at| {
        move |e: rustix::io::Errno| DumpError::Io {
            what: "looking for holes",
            at,
            source: e.into(),
        }
    };
    let mut holes = Vec::new();
    for (_, start, len) in layout::ram(memory_bytes) {
        let end = start + len;
        let mut at = start;
        while at < end && holes.len() < MAX_HOLES {
            // The end of a file counts as a hole.
            let hole =
                seek(file, SeekFrom::Hole(at)).map_err(io_at(at))?.next_multiple_of(PAGE_SIZE);
            let data = match seek(file, SeekFrom::Data(hole)) {
                Ok(data) => data.min(end) & !(PAGE_SIZE - 1),
                Err(rustix::io::Errno::NXIO) => end,
                Err(error) => return Err(io_at(hole)(error)),
            };
            if hole < data && data - hole >= MIN_HOLE_BYTES {
                holes.push((hole, data - hole));
            }
            at = data.max(hole + PAGE_SIZE);
        }
    }
    Ok(holes)
}

#[cfg(test)]
#[path = "dump_tests.rs"]
mod tests;
