//! The program's code and constants in huge pages.
//!
//! A request that comes after a pause finds the CPU's caches cold. Its path runs through some
//! hundreds of pages of code, and for each of them the CPU has to walk the page tables; in a
//! virtual machine each step of a walk is a walk of the host's tables. In huge pages all of the
//! code needs a few entries of the CPU's table of translations.
//!
//! The daemon is linked so that code and constants begin on the boundary of a huge page (its
//! `build.rs`). Linux 6.18 also loads them so. Older kernels may load a static program anywhere;
//! then only those huge pages are used that lie within its code.
//!
//! VMMs and pagers stay in the pages of their files: their anonymous memory is what a VM is charged
//! with, and they would have 4 MiB more of it.

use std::io;
use std::ops::Range;
use std::ptr;

/// Bytes of a huge page of the x86-64.
const HUGE: usize = 2 << 20;
/// At least this part of each run of huge pages must be content; the rest is lost memory.
const CONTENT: usize = 4;
/// What follows the content in the last huge page: `int3`, if it is executed.
const FILLING: u8 = 0xcc;

/// A mapping of the own program that nothing writes to.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    /// Addresses of the content that is moved.
    content: Range<usize>,
    /// Bytes of huge pages, from the start of the content on.
    bytes: usize,
    is_code: bool,
}

/// Copies code and constants into huge pages, which take the place of the pages of the file.
/// Returns the bytes of huge pages.
///
/// If the kernel has no memory for page tables in the middle of a move, the process ends.
///
/// # Errors
/// The host has no huge page to give (MADV_COLLAPSE of madvise(2), Linux 6.1), or forbids to
/// execute memory that was written to. What was not moved stays in pages of the file.
///
/// # Safety
/// The process has one thread: what another one maps right behind code or constants would be lost.
pub unsafe fn to_huge_pages() -> io::Result<usize> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let own = find as fn(&str, usize) -> Vec<Mapping> as *const () as usize;
    find(&maps, own).iter().try_fold(0, |sum, mapping| {
        // SAFETY: `find` saw nothing behind the content, and there is no other thread.
        unsafe { move_to_huge_pages(mapping) }?;
        Ok(sum + mapping.bytes)
    })
}

/// Moves one mapping.
///
/// # Safety
/// The content is mapped for reading and nothing writes to it. What follows it, up to the end of
/// the huge pages, is not mapped, or may be lost.
unsafe fn move_to_huge_pages(mapping: &Mapping) -> io::Result<()> {
    let &Mapping { ref content, bytes, is_code } = mapping;
    let target = content.start..content.start + bytes;
    let mut room = Room::of(bytes + HUGE)?;
    if room.start < target.end && target.start < room.end {
        return Err(io::Error::from(io::ErrorKind::AddrInUse));
    }
    let to = room.start.next_multiple_of(HUGE);
    let address = ptr::with_exposed_provenance_mut::<libc::c_void>;
    let rights = libc::PROT_READ | if is_code { libc::PROT_EXEC } else { 0 };
    // SAFETY: all of `to..to + bytes` is within `room`, which is memory of this process that
    // nothing else uses. The caller states that the content is mapped for reading; it is not in
    // `room`, as was compared.
    unsafe {
        called(libc::madvise(address(to), bytes, libc::MADV_HUGEPAGE))?;
        let (from, content_to) =
            (ptr::with_exposed_provenance::<u8>(content.start), address(to).cast::<u8>());
        ptr::copy_nonoverlapping(from, content_to, content.len());
        ptr::write_bytes(content_to.add(content.len()), FILLING, bytes - content.len());
        // Small pages would be worse than those of the file, which processes share.
        called(libc::madvise(address(to), bytes, libc::MADV_COLLAPSE))?;
        called(libc::mprotect(address(to), bytes, rights))?;
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the new pages have the content and the rights of those whose place they take. Where
    // the target is longer than the content, the caller states that nothing is lost, and `room` is
    // not there. The kernel takes away the old pages and puts the new ones there in one call
    // (mremap(2)); a thread that needs one of them meanwhile waits for its end.
    let moved = unsafe { libc::mremap(address(to), bytes, bytes, flags, address(target.start)) };
    if moved == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    room.moved_away(to..to + bytes);
    Ok(())
}

fn called(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What can be moved, of a text of `/proc/self/maps` (proc(5)): mappings of the program whose code
/// has the address `own`.
fn find(maps: &str, own: usize) -> Vec<Mapping> {
    let parsed: Vec<_> = maps.lines().filter_map(parse).collect();
    let name = parsed.iter().find(|(range, _, name)| range.contains(&own) && !name.is_empty());
    let Some(&(_, _, name)) = name else { return Vec::new() };
    let one = |(n, (range, rights, of)): (usize, &(Range<usize>, &str, &str))| {
        let is_code = match *rights {
            "r-xp" => true,
            "r--p" => false,
            _ => return None,
        };
        let start = range.start.next_multiple_of(HUGE);
        let above = range.end.next_multiple_of(HUGE);
        let free = parsed.get(n + 1).is_none_or(|(next, ..)| next.start >= above);
        let end = if free { above } else { above - HUGE };
        let content = start..range.end.min(end);
        let bytes = end.saturating_sub(start);
        let worth = !content.is_empty() && content.len() >= bytes / CONTENT;
        (*of == name && worth).then_some(Mapping { content, bytes, is_code })
    };
    parsed.iter().enumerate().filter_map(one).collect()
}

/// Addresses, rights and name of a mapping.
fn parse(line: &str) -> Option<(Range<usize>, &str, &str)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let rights = fields.next()?;
    Some((number(start)?..number(end)?, rights, fields.nth(3).unwrap_or_default()))
}

/// New memory, which is given back when it is dropped, except for what was moved away.
struct Room {
    start: usize,
    end: usize,
    moved: Option<Range<usize>>,
}

impl Room {
    fn of(bytes: usize) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, in a place that the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, rights, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.expose_provenance();
        Ok(Self { start, end: start + bytes, moved: None })
    }

    /// Notes that a part of the memory has another place now.
    fn moved_away(&mut self, moved: Range<usize>) {
        self.moved = Some(moved);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let moved = self.moved.take().unwrap_or(self.end..self.end);
        for left in [self.start..moved.start, moved.end..self.end] {
            if !left.is_empty() {
                // SAFETY: this part of the mapping is where it was, and nothing else uses it.
                let _ = unsafe {
                    libc::munmap(ptr::with_exposed_provenance_mut(left.start), left.len())
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    const MAPS: &str = "\
200000-360000 r--p 00000000 fe:00 12 /usr/bin/dayflyd
400000-1234000 r-xp 00200000 fe:00 12 /usr/bin/dayflyd
1400000-1410000 r--p 01200000 fe:00 12 /usr/bin/dayflyd
1600000-1610000 rw-p 01400000 fe:00 12 /usr/bin/dayflyd
1800000-1900000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000800000 r-xp 00000000 fe:00 13 /lib/libc.so
nonsense
7ffe00000000-7ffe00001000 r-xp 00000000 00:00 0 [vdso]
";

    fn mapping(start: usize, end: usize, bytes: usize, is_code: bool) -> Mapping {
        Mapping { content: start..end, bytes, is_code }
    }

    #[test]
    fn code_and_constants_of_the_own_program_are_found_if_they_fill_huge_pages() {
        let found = find(MAPS, 0x40_1000);
        let constants = mapping(0x20_0000, 0x36_0000, 0x20_0000, false);
        assert_eq!(found, [constants, mapping(0x40_0000, 0x123_4000, 0x100_0000, true)]);
        // Loaded elsewhere: only whole huge pages, because other mappings follow at once.
        let elsewhere = "\
201000-a61000 r-xp 0 fe:00 12 /usr/bin/dayflyd
a61000-a70000 r--p 0 fe:00 12 /usr/bin/dayflyd";
        let whole = mapping(0x40_0000, 0xa0_0000, 0x60_0000, true);
        assert_eq!(find(elsewhere, 0x20_1000), [whole]);
        assert_eq!(find("201000-5ff000 r-xp 0 0 0 /a\n5ff000-600000 rw-p 0 0 0 /a", 0x30_0000), []);
        assert_eq!(find(MAPS, 0x1000), []);
        assert_eq!(find("400000-800000 r-xp 0 0 0", 0x40_0000), [], "moved already");
        assert_eq!(find("", 0), []);
    }

    /// Kibibytes of huge pages of the mapping that begins at `start` (proc(5), smaps).
    fn huge_kib(start: usize) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = smaps.split_once(&format!("{start:x}-")).unwrap().1;
        let line = own.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap()
    }

    #[test]
    fn code_goes_on_in_huge_pages() {
        // mov eax, 42; ret
        const CODE: [u8; 6] = [0xb8, 42, 0, 0, 0, 0xc3];
        let length = HUGE + HUGE / 2;
        let mut bytes = CODE.repeat(length / CODE.len());
        bytes.resize(length, 0x90);
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        for is_code in [true, false] {
            let room = Room::of(4 * HUGE).unwrap();
            let start = room.start.next_multiple_of(HUGE);
            let rights = libc::PROT_READ | if is_code { libc::PROT_EXEC } else { 0 };
            let (flags, fd) = (libc::MAP_PRIVATE | libc::MAP_FIXED, file.as_raw_fd());
            let address = ptr::with_exposed_provenance_mut::<libc::c_void>(start);
            // SAFETY: the place is within `room`, which nothing else uses.
            let mapped = unsafe { libc::mmap(address, length, rights, flags, fd, 0) };
            assert_eq!(mapped, address);
            let called = |offset: usize| {
                // SAFETY: a function that takes nothing and returns an `i32` is there, and its
                // mapping may be executed.
                let function: extern "C" fn() -> i32 =
                    unsafe { std::mem::transmute(address.wrapping_byte_add(offset)) };
                function()
            };
            assert!(!is_code || called(0) == 42);
            let content = start..start + length;
            let content_is = || {
                // SAFETY: the mapping is there until `room` is dropped.
                let got = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) };
                got == bytes
            };
            let mapping = Mapping { content, bytes: 2 * HUGE, is_code };
            // SAFETY: the content was mapped above, and what follows it is of `room`.
            unsafe { move_to_huge_pages(&mapping) }.unwrap();
            assert!(content_is());
            assert!(!is_code || called(HUGE / 6 * 6) == 42);
            assert_eq!(huge_kib(start), (2 * HUGE) >> 10);
        }
    }
}
