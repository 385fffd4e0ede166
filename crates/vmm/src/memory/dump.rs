//! Writing guest RAM to a sparse file: zero pages become holes, pages nobody wrote since the restore are copied from
//! the snapshot's file without touching the guest's mapping.
//!
//! `/proc/self/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`) says which pages the guest or a device wrote: bit 63
//! present, bit 62 swapped, bit 61 page of a file. In a private mapping of a file, a page that is present or swapped and not
//! of the file was written; every other one still reads as the file does. In anonymous memory, a page that is neither
//! present nor swapped was never written and reads as zero. Without a pagemap every page is read.

use super::backing::Backing;
use super::pages::Pages;
use super::working_set::{self, Run};
use crate::arch::layout;
use dayfly_units::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, seek};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The shortest hole that is worth a mapping.
pub const MIN_HOLE_BYTES: u64 = 1 << 20;
/// The most holes that get a mapping of their own; the kernel allows 65,530 mappings.
pub const MAX_HOLES: usize = 8192;
pub(super) const PAGE: usize = 4096;
const CHUNK_PAGES: usize = 2048; // 8 MiB
const BUFFER_PAGES: usize = 64;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;

/// Why RAM could not be written.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The target holds something, or has a length of its own that is not RAM's.
    #[error("memory file to write: expected an empty file, or a hole as long as RAM, got {0} bytes")]
    NotEmpty(u64),
    /// A read or write failed.
    #[error("memory file: {what} at byte {at:#x}")]
    Io {
        /// What failed.
        what: &'static str,
        /// Where.
        at: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What was written, for the log and for tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Dump {
    /// Bytes written from the guest's own pages.
    pub own_bytes: u64,
    /// Bytes copied from the file this VM was restored from.
    pub parent_bytes: u64,
}

/// Writes the RAM of a VM to `target`, an empty file or a hole as long as RAM. Of pages that are written meanwhile, any part may be what it was. `pagemap` is this process's `/proc/self/pagemap`, `parent` what was laid over the memory.
///
/// # Errors
/// When a file cannot be read or written; the target then holds a part.
pub fn dump(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    pagemap: Option<&File>,
    parent: Option<&Backing>,
    target: &File,
) -> Result<Dump, DumpError> {
    let io_at = |what, at| move |source| DumpError::Io { what, at, source };
    let got = target.metadata().map_err(io_at("reading the length", 0))?.len();
    let empty = match got {
        0 => true,
        got if got == memory_bytes => seek(target, SeekFrom::Data(0)) == Err(rustix::io::Errno::NXIO),
        _ => false,
    };
    if !empty {
        return Err(DumpError::NotEmpty(got));
    }
    target.set_len(memory_bytes).map_err(io_at("setting the length", 0))?;
    let mut dump = Dump::default();
    let (mut entries, mut buffer) = (vec![0u64; CHUNK_PAGES], PageBuffer::new());
    for (guest, offset, len) in layout::ram(memory_bytes) {
        let Some(region) = memory.find_region(guest) else { continue };
        let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
        let pages = usize::try_from(len).unwrap_or(0) / PAGE;
        for first in (0..pages).step_by(CHUNK_PAGES) {
            let count = CHUNK_PAGES.min(pages - first);
            let at = offset + first as u64 * PAGE_SIZE;
            let entries = &mut entries[..count];
            let own: &dyn Fn(usize) -> bool = if pagemap
                .is_some_and(|map| read_pagemap(map, host.wrapping_add(first * PAGE), entries).is_ok())
            {
                let entries = &*entries;
                match parent {
                    Some(_) => &move |n| entries[n] & (PRESENT | SWAPPED) != 0 && entries[n] & OF_FILE == 0,
                    None => &move |n| entries[n] & (PRESENT | SWAPPED) != 0,
                }
            } else {
                &|_| true
            };
            let read = |from: usize, bytes: &mut [u8]| {
                let place = vm_memory::MemoryRegionAddress(((first + from) * PAGE) as u64);
                region.read_slice(bytes, place)
            };
            let mut start = 0;
            while start < count {
                let mine = own(start);
                let end = (start + 1..count).find(|&n| own(n) != mine).unwrap_or(count);
                let (from, to) = (at + (start * PAGE) as u64, at + (end * PAGE) as u64);
                if mine {
                    for some in (start..end).step_by(BUFFER_PAGES) {
                        let (size, to) =
                            ((BUFFER_PAGES.min(end - some) * PAGE) as u64, at + (some * PAGE) as u64);
                        dump.own_bytes += buffer.copy(target, to, size, false, |bytes| read(some, bytes))?;
                    }
                } else if let Some(parent) = parent {
                    for piece in parent.pieces(from..to) {
                        dump.parent_bytes +=
                            copy_data(piece.file, piece.at, target, piece.offset, piece.len)?;
                    }
                }
                start = end;
            }
        }
    }
    Ok(dump)
}

/// Pages on their way from guest memory, which may change at any moment, to a file.
#[derive(Debug)]
pub(super) struct PageBuffer(Vec<u8>);

impl PageBuffer {
    pub(super) fn new() -> Self {
        Self(vec![0; BUFFER_PAGES * PAGE])
    }

    /// The most bytes at once.
    pub(super) const fn capacity(&self) -> u64 {
        (BUFFER_PAGES * PAGE) as u64
    }

    /// Copies what `read` gives, `size` bytes, whole pages, to `at` in `target`; says how many were not zero. Zeroes become holes; where there is none yet,
    /// it is to be made (`punch`).
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
                fallocate(target, hole, to, len).map_err(|e| fails("making a hole", to)(e.into()))?;
            }
            start += run.len();
        }
        Ok(written)
    }
}

/// The pages of RAM that are this process's own, where a file was laid over it: copied because something wrote to them. Nothing
/// where the pagemap cannot be read.
#[must_use]
pub fn written(memory: &GuestMemoryMmap, memory_bytes: u64, pagemap: &File) -> Vec<Run> {
    let own = own(memory, memory_bytes, pagemap).unwrap_or_default();
    let pages = own.runs().flatten().filter_map(|page| Some((u32::try_from(page).ok()?, true)));
    working_set::runs(&pages.collect(), memory_bytes)
}

/// The pages of RAM that are this process's own.
///
/// # Errors
/// The pagemap cannot be read.
pub fn own(memory: &GuestMemoryMmap, memory_bytes: u64, pagemap: &File) -> io::Result<Pages> {
    let mut pages = Pages::none(memory_bytes);
    let mut entries = vec![0u64; CHUNK_PAGES];
    for (guest, offset, len) in layout::ram(memory_bytes) {
        let Some(region) = memory.find_region(guest) else { continue };
        let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
        for at in (0..len).step_by(CHUNK_PAGES * PAGE) {
            let count = CHUNK_PAGES.min(usize::try_from((len - at) / PAGE_SIZE).unwrap_or(CHUNK_PAGES));
            let start = host.wrapping_add(usize::try_from(at).unwrap_or(0));
            read_pagemap(pagemap, start, &mut entries[..count])?;
            let own = |entry: &u64| entry & (PRESENT | SWAPPED) != 0 && entry & OF_FILE == 0;
            for (n, _) in entries[..count].iter().enumerate().filter(|(_, entry)| own(entry)) {
                pages.insert((offset + at) / PAGE_SIZE + n as u64);
            }
        }
    }
    Ok(pages)
}

/// Fills `entries` for the pages from `start`.
fn read_pagemap(pagemap: &File, start: *const u8, entries: &mut [u64]) -> io::Result<()> {
    let mut bytes = vec![0; entries.len() * 8];
    pagemap.read_exact_at(&mut bytes, (start.addr() / PAGE * 8) as u64)?;
    for (entry, bytes) in entries.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *entry = u64::from_le_bytes(*bytes);
    }
    Ok(())
}

fn is_zero(page: &[u8; PAGE]) -> bool {
    page.as_chunks::<64>().0.iter().all(|line| line == &[0; 64])
}

/// Copies the `len` bytes that `source` has from `at` on to `to` of `target`, leaving its holes holes; shares blocks where the file system can.
fn copy_data(source: &File, at: u64, target: &File, to: u64, len: u64) -> Result<u64, DumpError> {
    let (start, end) = (at, at + len);
    let (mut copied, mut at) = (0, start);
    while at < end {
        let data = match seek(source, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break, // only a hole follows
            Err(_) => at,                          // a file system that cannot tell
        };
        if data >= end {
            break;
        }
        let hole = seek(source, SeekFrom::Hole(data)).unwrap_or(end).clamp(data, end);
        let hole = if hole == data { end } else { hole };
        copy_exactly(source, data, target, to + (data - start), hole - data)?;
        copied += hole - data;
        at = hole;
    }
    Ok(copied)
}

fn copy_exactly(source: &File, at: u64, target: &File, to: u64, len: u64) -> Result<(), DumpError> {
    let (mut read_at, mut write_at, end) = (at, to, at + len);
    while read_at < end {
        let left = usize::try_from(end - read_at).unwrap_or(usize::MAX);
        match copy_file_range(source, Some(&mut read_at), target, Some(&mut write_at), left) {
            Ok(0) => break,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break, // across file systems, old kernels: by hand
        }
    }
    let mut buffer = vec![0; 1 << 20];
    while read_at < end {
        let len = usize::try_from(end - read_at).unwrap_or(usize::MAX).min(buffer.len());
        let fails = |what| move |source| DumpError::Io { what, at: read_at, source };
        source.read_exact_at(&mut buffer[..len], read_at).map_err(fails("reading the parent's file"))?;
        target.write_all_at(&buffer[..len], write_at).map_err(fails("writing"))?;
        read_at += len as u64;
        write_at += len as u64;
    }
    Ok(())
}

/// The holes of a memory file that are worth a mapping of their own, as `(offset, length)` in bytes, in rising order: a clone
/// maps them anonymously, so that a fresh page costs one page and not one in the file's cache and a copy.
///
/// # Errors
/// When the file cannot be searched.
pub fn large_holes(file: &File, memory_bytes: u64) -> Result<Vec<(u64, u64)>, DumpError> {
    let io_at =
        |at| move |e: rustix::io::Errno| DumpError::Io { what: "looking for holes", at, source: e.into() };
    let mut holes = Vec::new();
    for (_, start, len) in layout::ram(memory_bytes) {
        let end = start + len;
        let mut at = start;
        while at < end && holes.len() < MAX_HOLES {
            // The end of a file counts as a hole.
            let hole = seek(file, SeekFrom::Hole(at)).map_err(io_at(at))?.next_multiple_of(PAGE_SIZE);
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
mod tests {
    use super::*;
    use crate::memory::backing::{self, Row};
    use crate::memory::{MemoryError, anonymous, lay_over};
    use vm_memory::{Bytes, GuestAddress};

    const SIZE: u64 = 64 << 20;

    fn laid(file: &File, bytes: u64, holes: &[(u64, u64)]) -> Result<GuestMemoryMmap, MemoryError> {
        let memory = anonymous(bytes)?;
        lay_over(&memory, &Backing::of(file.try_clone().unwrap()), bytes, holes, true).map(|_| memory)
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn blocks(file: &File) -> u64 {
        use std::os::unix::fs::MetadataExt;
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn a_dump_reads_back_with_and_without_a_pagemap_across_two_generations() {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        for pagemap in [Some(&pagemap), None] {
            let memory = anonymous(SIZE).unwrap();
            memory.write_slice(&[7; 3 * PAGE], GuestAddress(0x1000)).unwrap();
            memory.write_slice(&[9; 10], GuestAddress(40 << 20)).unwrap();
            memory.write_slice(&[0; PAGE], GuestAddress(50 << 20)).unwrap();
            let first = tempfile::tempfile().unwrap();
            let dumped = dump(&memory, SIZE, pagemap, None, &first).unwrap();
            assert_eq!(dumped, Dump { own_bytes: 4 * PAGE_SIZE, parent_bytes: 0 });
            let mut expected = vec![0; usize::try_from(SIZE).unwrap()];
            expected[0x1000..0x4000].fill(7);
            expected[40 << 20..(40 << 20) + 10].fill(9);
            assert!(content(&first) == expected);
            assert!(blocks(&first) < 1 << 20, "zero pages are holes");

            let holes = large_holes(&first, SIZE).unwrap();
            assert_eq!(holes, [(0x4000, (40 << 20) - 0x4000), ((40 << 20) + 0x1000, (24 << 20) - 0x1000)]);

            // A clone overwrites one page, zeroes another, reads a third and dumps again.
            let clone = laid(&first, SIZE, &holes).unwrap();
            assert_eq!(clone.read_obj::<u8>(GuestAddress(60 << 20)).unwrap(), 0);
            clone.write_slice(&[1; PAGE], GuestAddress(0x2000)).unwrap();
            clone.write_slice(&[0; PAGE], GuestAddress(0x3000)).unwrap();
            clone.write_slice(&[5; PAGE], GuestAddress(20 << 20)).unwrap(); // in a hole
            assert_eq!(clone.read_obj::<u8>(GuestAddress(40 << 20)).unwrap(), 9);
            let second = tempfile::tempfile().unwrap();
            let parent = Backing::of(first.try_clone().unwrap());
            let dumped = dump(&clone, SIZE, pagemap, Some(&parent), &second).unwrap();
            if pagemap.is_some() {
                assert_eq!(dumped, Dump { own_bytes: 2 * PAGE_SIZE, parent_bytes: 2 * PAGE_SIZE });
            }
            assert!(content(&first) == expected, "the parent's file never changes");
            expected[0x2000..0x3000].fill(1);
            expected[0x3000..0x4000].fill(0);
            expected[20 << 20..(20 << 20) + PAGE].fill(5);
            assert!(content(&second) == expected);
            assert!(blocks(&second) < 1 << 20);
        }
    }

    #[test]
    fn a_dump_reads_back_what_was_mapped_from_several_files() {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let file = |salt: u8| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(SIZE).unwrap();
            for page in 0..100 {
                file.write_all_at(&[salt + page; PAGE], u64::from(page) * PAGE_SIZE).unwrap();
            }
            file
        };
        let (own, other) = (file(1), file(101));
        own.write_all_at(&[0; 20 * PAGE], 40 * PAGE_SIZE).unwrap();
        let rows = [
            Row { first: 10, pages: 5, file: 0, from: 60 },
            Row { first: 40, pages: 10, file: 0, from: 30 },
            // Across the end of what the other file has.
            Row { first: 5000, pages: 4, file: 0, from: 98 },
        ];
        let list = tempfile::tempfile().unwrap();
        list.write_all_at(&backing::encode(&rows), 0).unwrap();
        let backing = Backing::sharing(own.try_clone().unwrap(), &list, vec![other.try_clone().unwrap()]);
        let backing = backing.unwrap();
        let mut expected = content(&own);
        for row in &rows {
            let (to, from, len) =
                (row.first as usize * PAGE, row.from as usize * PAGE, row.pages as usize * PAGE);
            expected[to..to + len].copy_from_slice(&content(&other)[from..from + len]);
        }
        for (pagemap, whole) in [(Some(&pagemap), false), (Some(&pagemap), true), (None, false)] {
            let memory = anonymous(SIZE).unwrap();
            let parts = lay_over(&memory, &backing, SIZE, &[], whole).unwrap();
            // The row of four pages is copied where that may be.
            let mapped = if whole { 15 } else { 19 };
            let (all, apart) = (parts.iter().map(|part| part.len).sum::<u64>(), mapped * PAGE_SIZE);
            assert_eq!(all + apart, SIZE, "what another file has is no part of its own");
            let copied = super::own(&memory, SIZE, &File::open("/proc/self/pagemap").unwrap()).unwrap();
            assert_eq!(
                copied.runs().flatten().collect::<Vec<_>>(),
                if whole { (5000..5004).collect() } else { vec![] }
            );
            memory.write_slice(&[200; PAGE], GuestAddress(11 * PAGE_SIZE)).unwrap();
            let mut expected = expected.clone();
            expected[11 * PAGE..12 * PAGE].fill(200);
            let dumped = tempfile::tempfile().unwrap();
            dump(&memory, SIZE, pagemap, Some(&backing), &dumped).unwrap();
            assert!(content(&dumped) == expected);
        }
    }

    #[test]
    fn a_target_that_holds_something_is_refused() {
        let memory = anonymous(SIZE).unwrap();
        let target = tempfile::tempfile().unwrap();
        target.set_len(5).unwrap();
        assert!(matches!(dump(&memory, SIZE, None, None, &target), Err(DumpError::NotEmpty(5))));
        target.set_len(SIZE).unwrap();
        assert!(matches!(dump(&memory, SIZE, None, None, &target), Ok(Dump { own_bytes: 0, .. })));
        target.write_all_at(b"x", SIZE - 1).unwrap();
        assert!(matches!(dump(&memory, SIZE, None, None, &target), Err(DumpError::NotEmpty(SIZE))));
    }

    #[test]
    fn a_file_of_another_length_is_not_mapped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE - PAGE_SIZE).unwrap();
        let error = laid(&file, SIZE, &[]).unwrap_err().to_string();
        assert!(error.contains("67108864") && error.contains("67104768"), "{error}");
    }

    #[test]
    fn holes_that_make_no_sense_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        let page = PAGE_SIZE;
        for bad in [
            vec![(1, page)],
            vec![(0, page + 1)],
            vec![(0, 0)],
            vec![(SIZE, page)],
            vec![(SIZE - page, 2 * page)],
            vec![(u64::MAX - page + 1, page)],
            vec![(page, page), (page, page)],
            vec![(4 * page, page), (0, page)],
        ] {
            let result = laid(&file, SIZE, &bad);
            assert!(matches!(result, Err(MemoryError::Hole { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_hole_never_reaches_across_the_gap_in_guest_addresses() {
        let bytes = layout::HOLE_START + (64 << 20);
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        let holes = large_holes(&file, bytes).unwrap();
        assert_eq!(holes, [(0, layout::HOLE_START), (layout::HOLE_START, 64 << 20)]);
        let memory = laid(&file, bytes, &holes).unwrap();
        memory.write_obj(7u8, GuestAddress(layout::HOLE_END)).unwrap();
        memory.write_obj(8u8, GuestAddress(layout::HOLE_START - 1)).unwrap();
        let across = [(layout::HOLE_START - PAGE_SIZE, 2 * PAGE_SIZE)];
        assert!(laid(&file, bytes, &across).is_err());
    }
}
