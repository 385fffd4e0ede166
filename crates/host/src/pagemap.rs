//! Which pages of a file a process holds, and whether as the file has them or as its own: `/proc/<pid>/maps` and `/proc/<pid>/pagemap`
//! (proc(5); Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
const ENTRY: u64 = 8;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// Of a file, or shared.
const OF_A_FILE: u64 = 1 << 61;
/// The number of the page of memory, which only root is told.
const NUMBER: u64 = (1 << 55) - 1;
/// Entries that are read at once.
const CHUNK: u64 = 64 << 10;

/// How a page is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// The file's: everybody who maps it holds the same.
    Shared,
    /// Its own.
    Own,
    /// Zeroes that take no memory.
    Zero,
}

/// Tells of each page that process `pid` holds of its mappings of files whose path in its maps is `path`: the page's number in the file, and how it is held. No more
/// than `most` pages are looked at.
///
/// # Errors
/// The files cannot be read: `NotFound` when there is no such process, `PermissionDenied` when it is another user's.
pub fn held(pid: u32, path: &str, most: u64, mut tell: impl FnMut(u64, Held)) -> io::Result<()> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let zero = zero_page()?;
    let mut left = most;
    let mut bytes = Vec::new();
    for mapping in maps.lines().filter_map(|line| mapping(line, path)) {
        let pages = mapping.pages.min(left);
        left -= pages;
        for from in (0..pages).step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX)) {
            let count = CHUNK.min(pages - from);
            bytes.resize(usize::try_from(count * ENTRY).map_err(io::Error::other)?, 0);
            pagemap.read_exact_at(&mut bytes, (mapping.page + from) * ENTRY)?;
            for (entry, number) in bytes.as_chunks().0.iter().zip(mapping.in_file + from..) {
                if let Some(held) = classify(u64::from_le_bytes(*entry), zero) {
                    tell(number, held);
                }
            }
        }
    }
    Ok(())
}

/// A mapping, in pages.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    page: u64,
    pages: u64,
    in_file: u64,
}

/// `start-end perms offset dev inode path`
fn mapping(line: &str, path: &str) -> Option<Mapping> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let offset = words.nth(1)?;
    if words.nth(2)?.trim_start() != path {
        return None;
    }
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end, offset) = (number(start)?, number(end)?, number(offset)?);
    Some(Mapping { page: start / PAGE, pages: end.checked_sub(start)? / PAGE, in_file: offset / PAGE })
}

fn classify(entry: u64, zero: Option<u64>) -> Option<Held> {
    if entry & (PRESENT | SWAPPED) == 0 {
        return None;
    }
    Some(match entry {
        _ if entry & SWAPPED != 0 => Held::Own,
        _ if entry & OF_A_FILE != 0 => Held::Shared,
        _ if zero == Some(entry & NUMBER) => Held::Zero,
        _ => Held::Own,
    })
}

/// The number of the page that everybody's zeroes are read from, as our own pagemap has it where we have read and never written; nothing where we are not told.
fn zero_page() -> io::Result<Option<u64>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    let length = usize::try_from(PAGE).map_err(io::Error::other)?;
    let mut entry = [0; 8];
    // SAFETY: a new mapping, at an address of the kernel's choice, which is read from and goes with this block.
    unsafe {
        let at = mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE)?;
        at.cast::<u8>().read_volatile();
        let read = File::open("/proc/self/pagemap")
            .and_then(|own| own.read_exact_at(&mut entry, at.addr() as u64 / PAGE * ENTRY));
        munmap(at, length)?;
        read?;
    }
    let number = u64::from_le_bytes(entry) & NUMBER;
    Ok((number != 0).then_some(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    #[test]
    fn lines_of_maps_are_read() {
        let line = "7f00000000-7f00004000 rw-p 00002000 00:01 1027   /memfd:ram (deleted)";
        let expected = Mapping { page: 0x7f0_0000, pages: 4, in_file: 2 };
        assert_eq!(mapping(line, "/memfd:ram (deleted)"), Some(expected));
        assert_eq!(mapping(line, "/memfd:ram"), None);
        for bad in ["", "x", "1-2", "7f-x r 0 0 0 /a", "9-8 r 0 0 0 /a", "1-2 r 0 0 0"] {
            assert_eq!(mapping(bad, "/a"), None, "{bad}");
        }
    }

    #[test]
    fn an_entry_says_how_a_page_is_held() {
        let zero = Some(77);
        assert_eq!(classify(0, zero), None);
        assert_eq!(classify(OF_A_FILE, zero), None, "a mapping of a file that was not touched");
        assert_eq!(classify(PRESENT | OF_A_FILE | 5, zero), Some(Held::Shared));
        assert_eq!(classify(PRESENT | 5, zero), Some(Held::Own));
        assert_eq!(classify(PRESENT | 77, zero), Some(Held::Zero));
        assert_eq!(classify(PRESENT, None), Some(Held::Own));
        assert_eq!(classify(SWAPPED | 77, zero), Some(Held::Own));
    }

    #[test]
    fn our_own_pages_are_told_apart() {
        let name = "dayfly-pagemap-test";
        let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let pages = 8;
        file.set_len(pages * PAGE).unwrap();
        let length = usize::try_from(pages * PAGE).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, and pages inside it.
        let at = unsafe {
            let at = mmap(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE, &file, 0).unwrap();
            at.cast::<u8>().add(2 * 4096).read_volatile();
            at.cast::<u8>().add(5 * 4096).write_volatile(1);
            at
        };
        let path = format!("/memfd:{name} (deleted)");
        let mut all = Vec::new();
        let mut look = |most| {
            all.clear();
            held(std::process::id(), &path, most, |page, held| all.push((page, held))).unwrap();
            all.clone()
        };
        let found = look(pages);
        // Neighbours of what was read may be mapped with it.
        assert!(found.contains(&(2, Held::Shared)) && found.contains(&(5, Held::Own)), "{found:?}");
        assert_eq!(found.iter().filter(|(_, held)| *held == Held::Own).count(), 1, "{found:?}");
        assert!(look(5).iter().all(|(page, _)| *page < 5), "no more than asked for");
        // SAFETY: nobody refers to it.
        unsafe { munmap(at, length).unwrap() };
        assert_eq!(look(pages), [], "it is not mapped any more");
        assert_eq!(held(u32::MAX, "x", 1, |_, _| ()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
