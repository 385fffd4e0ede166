//! Page faults taken ahead (MADV_POPULATE_READ and MADV_POPULATE_WRITE of madvise(2)). A new
//! process has to fault in the pages that it reads, and a fork copies those that it writes: some
//! hundred pages in a VMM's first millisecond. Processes that wait for their first request do this
//! while they are idle.

use std::io;

/// The largest mapping that is touched ahead, in bytes.
const MOST: usize = 16 << 20;

/// The mappings of this process that are touched ahead: programs, their data, heap and stack. Each
/// entry is address, bytes and the advice for madvise(2).
#[derive(Debug, Default)]
pub struct Mapped(Vec<(usize, usize, libc::c_int)>);

impl Mapped {
    /// The mappings that `/proc/self/maps` lists (proc(5)); none if the file cannot be read.
    #[must_use]
    pub fn find() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default())
    }

    fn parse(maps: &str) -> Self {
        let one = |line: &str| {
            let mut fields = line.split_ascii_whitespace();
            let (start, end) = fields.next()?.split_once('-')?;
            let (start, end) =
                (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
            let rights = fields.next()?;
            let name = fields.nth(3)?;
            let length = end.checked_sub(start).filter(|length| *length <= MOST)?;
            // The stack's mapping is as long as the stack has been used so far.
            let ours = name.starts_with('/') || matches!(name, "[heap]" | "[stack]");
            let advice = match rights.get(..2)? {
                "rw" => libc::MADV_POPULATE_WRITE,
                "r-" => libc::MADV_POPULATE_READ,
                _ => return None,
            };
            ours.then_some((start, length, advice))
        };
        Self(maps.lines().filter_map(one).collect())
    }

    /// Touches all mappings. A mapping that cannot be touched ahead (none can before Linux 5.14) is
    /// touched when it is needed.
    pub fn touch(&self) {
        for &(start, length, advice) in &self.0 {
            // SAFETY: MADV_POPULATE_* (madvise(2)) reads pages of a mapping of this process, or
            // writes them back unchanged. It fails if the mapping no longer exists.
            let result = unsafe {
                libc::madvise(std::ptr::with_exposed_provenance_mut(start), length, advice)
            };
            if result != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_heap_and_stack_are_touched_and_nothing_large_or_foreign() {
        let maps = "\
55550000-55551000 r--p 00000000 fe:00 12 /usr/bin/dayfly-vmm
55551000-55553000 r-xp 00001000 fe:00 12 /usr/bin/dayfly-vmm
55553000-55554000 rw-p 00003000 fe:00 12 /usr/bin/dayfly-vmm
55560000-55570000 rw-p 00000000 00:00 0 [heap]
70000000-80000000 rw-p 00000000 00:00 0 [heap]
7ff00000-7ff10000 rw-p 00000000 00:00 0
7ff20000-7ff30000 ---p 00000000 fe:00 13 /lib/libc.so
7ffe0000-7ffe1000 r-xp 00000000 00:00 0 [vdso]
nonsense
";
        let (read, write) = (libc::MADV_POPULATE_READ, libc::MADV_POPULATE_WRITE);
        let expected = [
            (0x5555_0000, 0x1000, read),
            (0x5555_1000, 0x2000, read),
            (0x5555_3000, 0x1000, write),
            (0x5556_0000, 0x1_0000, write),
        ];
        assert_eq!(Mapped::parse(maps).0, expected);
        assert!(Mapped::find().0.len() > 4);
        // Not all of this process: other tests watch which pages are touched.
        Mapped(vec![(expected.as_ptr().addr() & !4095, 4096, write)]).touch();
    }
}
