//! Which pages of a file a process has in memory, and whether each page is the file's own or a
//! private copy. Read from `/proc/<pid>/maps` and `/proc/<pid>/pagemap` (proc(5);
//! Documentation/admin-guide/mm/pagemap.rst).

use dayfly_sys::pagemap::{Entry, read, read_at};
use std::fs::File;
use std::io;
use std::ops::Range;

const PAGE: u64 = 4096;
/// Entries per read.
const CHUNK: u64 = 64 << 10;

/// The kind of memory behind a page of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// The file's page, which every mapping of the file shares.
    Shared,
    /// The process's own page: a private copy, anonymous memory, or a swapped page.
    Own,
    /// The kernel's zero page, which uses no memory.
    Zero,
}

/// Calls `visit` for each resident or swapped page that process `pid` maps of the file whose path
/// in `/proc/<pid>/maps` is `path`. `visit` gets the page's number in the file and its kind.
///
/// Each of `parts` is a range of pages of the file. The process maps each part contiguously;
/// anonymous mappings inside the part (holes) count too. A part that is not mapped at all is
/// skipped. The huge zero page counts as [`Held::Own`].
///
/// # Errors
/// The files cannot be read: `NotFound` if there is no such process, `PermissionDenied` if it
/// belongs to another user.
pub fn held(
    pid: u32,
    path: &str,
    parts: &[Range<u64>],
    mut visit: impl FnMut(u64, Held),
) -> io::Result<()> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let zero = zero_page()?;
    let all: Vec<Mapping> = maps.lines().filter_map(mapping).collect();
    let mut entries = Vec::new();
    for part in parts {
        let Some(base) = base(&all, path, part) else { continue };
        for pages in all.iter().filter_map(|one| one.within(path, base, part)) {
            for from in pages.clone().step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX)) {
                let count = CHUNK.min(pages.end - from);
                let count = usize::try_from(count).map_err(io::Error::other)?;
                entries.resize(count, Entry::default());
                read(&pagemap, from, &mut entries)?;
                for (entry, page) in entries.iter().zip(from..) {
                    if let Some(held) = classify(*entry, zero) {
                        visit(page - base + part.start, held);
                    }
                }
            }
        }
    }
    Ok(())
}

/// The page of the process at which `part` begins.
fn base(all: &[Mapping], path: &str, part: &Range<u64>) -> Option<u64> {
    let one = all.iter().find(|one| one.path == path && part.contains(&one.in_file))?;
    one.pages.start.checked_sub(one.in_file - part.start)
}

/// One line of `/proc/<pid>/maps`, in pages of the process and of its file.
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    pages: Range<u64>,
    in_file: u64,
    /// Empty if the mapping is anonymous.
    path: &'a str,
}

impl Mapping<'_> {
    /// The pages of this mapping that lie in `part`, which begins at page `base` of the process.
    fn within(&self, path: &str, base: u64, part: &Range<u64>) -> Option<Range<u64>> {
        if !(self.path.is_empty() || self.path == path) {
            return None;
        }
        let end = base.checked_add(part.end - part.start)?;
        let pages = self.pages.start.max(base)..self.pages.end.min(end);
        (!pages.is_empty()).then_some(pages)
    }
}

/// Parses `start-end perms offset dev inode path`.
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let offset = words.nth(1)?;
    let path = words.nth(2).unwrap_or("").trim_start();
    let number = |text| u64::from_str_radix(text, 16).ok().map(|at| at / PAGE);
    Some(Mapping { pages: number(start)?..number(end)?, in_file: number(offset)?, path })
}

fn classify(entry: Entry, zero: Option<u64>) -> Option<Held> {
    if !entry.is_touched() {
        return None;
    }
    Some(match entry {
        _ if entry.is_swapped() => Held::Own,
        _ if entry.is_of_a_file() => Held::Shared,
        _ if zero == Some(entry.frame()) => Held::Zero,
        _ => Held::Own,
    })
}

/// The frame number of the kernel's zero page, read from this process's own pagemap for a page that
/// was read and never written. `None` if the kernel hides frame numbers from this process.
fn zero_page() -> io::Result<Option<u64>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    let length = usize::try_from(PAGE).map_err(io::Error::other)?;
    let mut entry = [Entry::default()];
    // SAFETY: a new mapping, at an address of the kernel's choice, which is only read from and is
    // unmapped before this block ends.
    unsafe {
        let at = mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE)?;
        at.cast::<u8>().read_volatile();
        let read = File::open("/proc/self/pagemap").and_then(|own| read_at(&own, at, &mut entry));
        munmap(at, length)?;
        read?;
    }
    let number = entry[0].frame();
    Ok((number != 0).then_some(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_sys::pagemap::{OF_A_FILE, PRESENT, SWAPPED};
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
        // The mapping has pages 2 to 5 of the file; the anonymous hole after it has the part's last
        // two.
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
        let classify = |bits, zero| classify(Entry::from_bits(bits), zero);
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
        let file =
            File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let pages = 8;
        file.set_len(pages * PAGE).unwrap();
        let length = usize::try_from(pages * PAGE).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, its page 6 made anonymous,
        // and pages inside it.
        let at = unsafe {
            let at = mmap(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE, &file, 0)
                .unwrap();
            let byte = |page: usize| at.cast::<u8>().add(page * 4096);
            mmap_anonymous(byte(6).cast(), 4096, protection, MapFlags::PRIVATE | MapFlags::FIXED)
                .unwrap();
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
        // A read fault may map neighbouring pages too (fault-around).
        assert!(found.contains(&(2, Held::Shared)), "{found:?}");
        let own: Vec<u64> =
            found.iter().filter(|(_, held)| *held == Held::Own).map(|(page, _)| *page).collect();
        assert_eq!(own, [5, 6], "{found:?}");
        assert!(look(0..5).iter().all(|(page, _)| *page < 5), "no more than asked for");
        // SAFETY: nothing refers to the mapping any more.
        unsafe { munmap(at, length).unwrap() };
        assert_eq!(look(0..pages), [], "it is not mapped any more");
        assert_eq!(
            held(u32::MAX, "x", &[], |_, _| ()).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
