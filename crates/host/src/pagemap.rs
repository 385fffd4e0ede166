//! Which pages of a file a process holds, and whether as the file has them or as its own: `/proc/<pid>/maps` and `/proc/<pid>/pagemap`
//! (proc(5); Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::ops::Range;
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

/// Tells of each page that process `pid` holds of a file whose path in its maps is `path`: the page's number in the file, and how it is held. Each of `parts`, in pages
/// of the file, lies in one row in the process, apart from what it has mapped anonymously instead (holes), which counts; a part of which nothing is
/// mapped is nowhere. Zeroes in huge pages count as its own.
///
/// # Errors
/// The files cannot be read: `NotFound` when there is no such process, `PermissionDenied` when it is another user's.
pub fn held(pid: u32, path: &str, parts: &[Range<u64>], mut tell: impl FnMut(u64, Held)) -> io::Result<()> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let zero = zero_page()?;
    let all: Vec<Mapping> = maps.lines().filter_map(mapping).collect();
    let mut bytes = Vec::new();
    for part in parts {
        let Some(base) = base(&all, path, part) else { continue };
        for pages in all.iter().filter_map(|one| one.within(path, base, part)) {
            for from in pages.clone().step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX)) {
                let count = CHUNK.min(pages.end - from);
                bytes.resize(usize::try_from(count * ENTRY).map_err(io::Error::other)?, 0);
                pagemap.read_exact_at(&mut bytes, from * ENTRY)?;
                for (entry, page) in bytes.as_chunks().0.iter().zip(from..) {
                    if let Some(held) = classify(u64::from_le_bytes(*entry), zero) {
                        tell(page - base + part.start, held);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Where in the process a part begins.
fn base(all: &[Mapping], path: &str, part: &Range<u64>) -> Option<u64> {
    let one = all.iter().find(|one| one.path == path && part.contains(&one.in_file))?;
    one.pages.start.checked_sub(one.in_file - part.start)
}

/// A mapping, in pages of the process and of its file.
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    pages: Range<u64>,
    in_file: u64,
    /// Empty where it is anonymous.
    path: &'a str,
}

impl Mapping<'_> {
    /// Its pages of a part that begins at `base`.
    fn within(&self, path: &str, base: u64, part: &Range<u64>) -> Option<Range<u64>> {
        if !(self.path.is_empty() || self.path == path) {
            return None;
        }
        let end = base.checked_add(part.end - part.start)?;
        let pages = self.pages.start.max(base)..self.pages.end.min(end);
        (!pages.is_empty()).then_some(pages)
    }
}

/// `start-end perms offset dev inode path`
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let offset = words.nth(1)?;
    let path = words.nth(2).unwrap_or("").trim_start();
    let number = |text| u64::from_str_radix(text, 16).ok().map(|at| at / PAGE);
    Some(Mapping { pages: number(start)?..number(end)?, in_file: number(offset)?, path })
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
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

    #[test]
    fn lines_of_maps_are_read() {
        let line = "7f00000000-7f00004000 rw-p 00002000 00:01 1027   /memfd:ram (deleted)";
        let ram = "/memfd:ram (deleted)";
        let pages = 0x7f0_0000..0x7f0_0004;
        assert_eq!(mapping(line), Some(Mapping { pages: pages.clone(), in_file: 2, path: ram }));
        let anonymous = mapping("7f00004000-7f00010000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.pages.clone(), anonymous.path), (0x7f0_0004..0x7f0_0010, ""));
        for bad in ["", "x", "1-2", "7f-x r 0 0 0 /a", "g-8 r 0 0 0 /a", "1-2 r x 0 0 /a"] {
            assert_eq!(mapping(bad), None, "{bad}");
        }
        // Pages 2 to 5 of the file, and a hole behind them, of which the part has two.
        let all = [mapping(line).unwrap(), anonymous];
        let part = 0..8;
        assert_eq!(base(&all, ram, &part), Some(0x7ef_fffe));
        assert_eq!((base(&all, "/other", &part), base(&all, ram, &(3..9))), (None, None));
        let within = all.each_ref().map(|one| one.within(ram, 0x7ef_fffe, &part));
        assert_eq!(within, [Some(pages), Some(0x7f0_0004..0x7f0_0006)]);
        assert_eq!(all[0].within("/other", 0x7ef_fffe, &part), None);
        assert_eq!(all[1].within(ram, 0x7e0_0000, &part), None);
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
        // SAFETY: a new mapping, at an address of the kernel's choice, its page 6 made anonymous, and pages inside it.
        let at = unsafe {
            let at = mmap(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE, &file, 0).unwrap();
            let byte = |page: usize| at.cast::<u8>().add(page * 4096);
            mmap_anonymous(byte(6).cast(), 4096, protection, MapFlags::PRIVATE | MapFlags::FIXED).unwrap();
            byte(2).read_volatile();
            byte(5).write_volatile(1);
            byte(6).write_volatile(1);
            at
        };
        let path = format!("/memfd:{name} (deleted)");
        let look = |part: Range<u64>| {
            let mut all = Vec::new();
            held(std::process::id(), &path, &[part], |page, held| all.push((page, held))).unwrap();
            all
        };
        let found = look(0..pages);
        // Neighbours of what was read may be mapped with it.
        assert!(found.contains(&(2, Held::Shared)), "{found:?}");
        let own: Vec<u64> =
            found.iter().filter(|(_, held)| *held == Held::Own).map(|(page, _)| *page).collect();
        assert_eq!(own, [5, 6], "{found:?}");
        assert!(look(0..5).iter().all(|(page, _)| *page < 5), "no more than asked for");
        // SAFETY: nobody refers to it.
        unsafe { munmap(at, length).unwrap() };
        assert_eq!(look(0..pages), [], "it is not mapped any more");
        assert_eq!(held(u32::MAX, "x", &[], |_, _| ()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
