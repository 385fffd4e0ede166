//! Copying RAM under a running guest, as live migration does (pre-copy), so that the guest is
//! paused only for the pages that it wrote last.
//!
//! All of RAM is copied once. Then each round copies the pages written during the round before.
//! Rounds get shorter, because a shorter round leaves less time to write. When rounds get no
//! shorter, the pages left are copied while the guest is paused.
//!
//! Two other ways lose (`examples/freeze_cost.rs`): fork(2) of the VMM, and write-protection of all
//! written pages (userfaultfd(2), UFFDIO_WRITEPROTECT). Both walk the page tables of all mapped RAM
//! while the guest is paused, and every page that it writes afterwards faults.

use super::dump::{DumpError, PageBuffer};
use super::pages::Pages;
use super::yield_points::YieldPoints;
use crate::arch::layout;
use dayfly_units::PAGE_SIZE;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// The number of pages that may be left for the pause: 1 MiB.
const FEW: u64 = 256;
/// The most extra mappings of a clone of a forked VM, before the pause. Beyond it, the pages
/// between two runs are copied too, which joins the runs.
pub const FORK_ROWS: usize = 512;
/// The most extra mappings, with the pages written last.
pub const MOST_FORK_ROWS: usize = 1024;
/// The most rounds.
const MOST_ROUNDS: u32 = 12;

/// The result of copying in rounds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Rounds {
    /// Rounds in which pages written meanwhile were copied again.
    pub rounds: u32,
    /// Pages copied in all these rounds.
    pub pages: u64,
}

/// Copies the pages that `written` returns, round by round, while their number falls. Returns the
/// last set, which is not copied. `yields` is called on the way.
///
/// # Errors
/// When a page cannot be read or written, or `written` fails.
pub fn rounds<E: From<DumpError>>(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    target: &File,
    yields: &mut YieldPoints<'_>,
    mut written: impl FnMut() -> Result<Pages, E>,
) -> Result<(Pages, Rounds), E> {
    let mut done = Rounds::default();
    let mut before = u64::MAX;
    loop {
        let pages = written()?;
        let count = pages.count();
        // If a round is not shorter by a quarter, the next one will not be much shorter.
        if count <= FEW || count > before / 4 * 3 || done.rounds >= MOST_ROUNDS {
            return Ok((pages, done));
        }
        copy(memory, memory_bytes, &pages, target, yields)?;
        done = Rounds { rounds: done.rounds + 1, pages: done.pages + count };
        before = count;
    }
}

/// Copies `pages` over their old content in `target`; zero pages become holes. `yields` is called
/// on the way.
///
/// # Errors
/// When a page cannot be read or written.
pub fn copy(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    pages: &Pages,
    target: &File,
    yields: &mut YieldPoints<'_>,
) -> Result<(), DumpError> {
    let mut buffer = PageBuffer::new();
    let ram = layout::ram(memory_bytes);
    for (guest, from, len) in pages.runs().flat_map(|run| parts(run, &ram, memory_bytes)) {
        let mut done = 0;
        while done < len {
            let size = (len - done).min(buffer.capacity());
            let here = GuestAddress(guest.0 + done);
            buffer.copy(target, from + done, size, true, |bytes| memory.read_slice(bytes, here))?;
            done += size;
            yields.after(size);
        }
    }
    Ok(())
}

/// As [`copy`], for a paused guest: writes straight from guest memory, zero pages too.
///
/// # Errors
/// When a page cannot be read or written.
pub fn copy_last(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    pages: &Pages,
    target: &File,
) -> Result<(), DumpError> {
    let ram = layout::ram(memory_bytes);
    for (guest, at, size) in pages.runs().flat_map(|run| parts(run, &ram, memory_bytes)) {
        let fails = |source| DumpError::Io { what: "writing", at, source };
        let slice = memory.get_slice(guest, usize::try_from(size).unwrap_or(0));
        let slice = slice.map_err(|e| fails(io::Error::other(e)))?;
        let guard = slice.ptr_guard();
        let mut done = 0;
        while done < slice.len() {
            let to = i64::try_from(at + done as u64).unwrap_or(i64::MAX);
            // SAFETY: `slice` is guest memory of that length, mapped as long as `memory` is. The
            // kernel reads the part behind `done`; no Rust reference to it is made.
            let wrote = unsafe {
                libc::pwrite(
                    target.as_raw_fd(),
                    guard.as_ptr().add(done).cast(),
                    slice.len() - done,
                    to,
                )
            };
            match usize::try_from(wrote) {
                Ok(0) => return Err(fails(io::ErrorKind::WriteZero.into())),
                Ok(wrote) => done += wrote,
                Err(_) => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(fails(e)),
                },
            }
        }
    }
    Ok(())
}

/// Splits a run of pages into parts that are consecutive for the guest too: address, offset in a
/// memory file, bytes.
fn parts(
    run: Range<u64>,
    ram: &[(GuestAddress, u64, u64)],
    memory_bytes: u64,
) -> impl Iterator<Item = (GuestAddress, u64, u64)> {
    let (mut at, end) = (run.start * PAGE_SIZE, (run.end * PAGE_SIZE).min(memory_bytes));
    std::iter::from_fn(move || {
        let (guest, offset, len) = ram.iter().rfind(|(_, offset, _)| at < end && at >= *offset)?;
        let part = (GuestAddress(guest.0 + (at - offset)), at, end.min(offset + len) - at);
        at += part.2;
        Some(part)
    })
}

/// `holes` without `pages`. Parts shorter than `least` bytes are not worth a mapping and are
/// dropped.
#[must_use]
pub fn without(holes: &[(u64, u64)], pages: &Pages, least: u64) -> Vec<(u64, u64)> {
    let mut left = Vec::with_capacity(holes.len());
    let mut runs = pages.runs().map(|run| (run.start * PAGE_SIZE, run.end * PAGE_SIZE)).peekable();
    for &(offset, len) in holes {
        let (mut at, end) = (offset, offset + len);
        let mut keep = |from: u64, to: u64| {
            if to.saturating_sub(from) >= least {
                left.push((from, to - from));
            }
        };
        while let Some(&(start, stop)) = runs.peek().filter(|(start, _)| *start < end) {
            keep(at, start.max(at));
            at = at.max(stop);
            if stop > end {
                // The run may reach into the next hole.
                break;
            }
            runs.next();
        }
        keep(at, end.max(at));
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::anonymous;
    use std::os::unix::fs::{FileExt, MetadataExt};

    const RAM: u64 = 64 << 20;

    fn pages(of: &[u64]) -> Pages {
        let mut pages = Pages::none(RAM);
        of.iter().for_each(|page| pages.insert(*page));
        pages
    }

    fn page(file: &File, page: u64) -> Vec<u8> {
        let mut bytes = vec![1; 4096];
        file.read_exact_at(&mut bytes, page * PAGE_SIZE).unwrap();
        bytes
    }

    #[test]
    fn pages_are_copied_over_and_zeroes_become_holes() {
        let (memory, target) = (anonymous(RAM).unwrap(), tempfile::tempfile().unwrap());
        target.set_len(RAM).unwrap();
        target.write_all_at(&[9; 5 * 4096], 4 * PAGE_SIZE).unwrap();
        let at = |page: u64| GuestAddress(page * PAGE_SIZE);
        memory.write_slice(&[7; 4096], at(5)).unwrap();
        memory.write_slice(&[8; 4096], at(7)).unwrap();
        memory.write_slice(&[6; 300 * 4096], at(1000)).unwrap();
        let written: Vec<u64> = [5, 6].into_iter().chain(1000..1300).collect();
        copy(&memory, RAM, &pages(&written), &target, &mut YieldPoints::none()).unwrap();
        for (number, expected) in
            [(4, 9), (5, 7), (6, 0), (7, 9), (8, 9), (1000, 6), (1299, 6), (1300, 0)]
        {
            assert!(page(&target, number) == [expected; 4096], "page {number}");
        }
        assert_eq!(target.metadata().unwrap().blocks() * 512, 304 * PAGE_SIZE);
    }

    #[test]
    fn what_is_left_is_copied_as_it_is_on_both_sides_of_the_hole() {
        const LARGE: u64 = 5 << 30;
        let (memory, target) = (anonymous(LARGE).unwrap(), tempfile::tempfile().unwrap());
        target.set_len(LARGE).unwrap();
        target.write_all_at(&[9; 3 * 4096], 4 * PAGE_SIZE).unwrap();
        let below = layout::ram(LARGE)[0].2 / PAGE_SIZE;
        let mut left = Pages::none(LARGE);
        [4, 5, below - 1, below, below + 1].into_iter().for_each(|page| left.insert(page));
        memory.write_slice(&[7; 4096], GuestAddress(5 * PAGE_SIZE)).unwrap();
        memory.write_slice(&[8; 4096], GuestAddress((below - 1) * PAGE_SIZE)).unwrap();
        memory.write_slice(&[6; 2 * 4096], layout::ram(LARGE)[1].0).unwrap();
        copy_last(&memory, LARGE, &left, &target).unwrap();
        for (number, expected) in
            [(4, 0), (5, 7), (6, 9), (below - 1, 8), (below, 6), (below + 1, 6), (below + 2, 0)]
        {
            assert!(page(&target, number) == [expected; 4096], "page {number}");
        }
    }

    #[test]
    fn rounds_end_when_they_get_no_shorter() {
        let (memory, target) = (anonymous(RAM).unwrap(), tempfile::tempfile().unwrap());
        target.set_len(RAM).unwrap();
        let result_of = |counts: &[u64]| {
            let mut counts = counts.iter();
            let written =
                || Ok::<_, DumpError>(pages(&(0..*counts.next().unwrap()).collect::<Vec<_>>()));
            let mut yields = YieldPoints::none();
            let (left, done) = rounds(&memory, RAM, &target, &mut yields, written).unwrap();
            (left.count(), done.rounds, done.pages)
        };
        assert_eq!(result_of(&[0]), (0, 0, 0));
        assert_eq!(result_of(&[256]), (256, 0, 0));
        assert_eq!(result_of(&[9000, 4000, 2000, 10]), (10, 3, 15_000));
        assert_eq!(
            result_of(&[9000, 7000]),
            (7000, 1, 9000),
            "the writer is as fast as the copier"
        );
        let slowly: Vec<u64> = (0..13).map(|n| 16_000 * 7_u64.pow(n) / 10_u64.pow(n)).collect();
        assert_eq!(result_of(&slowly).1, 12);
    }

    #[test]
    fn holes_lose_what_was_written() {
        let page = PAGE_SIZE;
        let holes = [(10 * page, 10 * page), (30 * page, 2 * page), (40 * page, 8 * page)];
        let remaining = |of: &[u64], least| {
            let left = without(&holes, &pages(of), least * page);
            left.iter().map(|(at, len)| (at / page, len / page)).collect::<Vec<_>>()
        };
        assert_eq!(remaining(&[], 1), [(10, 10), (30, 2), (40, 8)]);
        assert_eq!(remaining(&[9, 20, 48], 1), [(10, 10), (30, 2), (40, 8)]);
        assert_eq!(remaining(&[12, 13, 19], 1), [(10, 2), (14, 5), (30, 2), (40, 8)]);
        assert_eq!(remaining(&[12, 13, 19], 3), [(14, 5), (40, 8)]);
        let across: Vec<u64> = (18..44).collect();
        assert_eq!(remaining(&across, 1), [(10, 8), (44, 4)]);
        let all: Vec<u64> = (0..64).collect();
        assert_eq!(remaining(&all, 1), []);
    }
}
