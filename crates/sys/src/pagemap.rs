//! Entries of `/proc/<pid>/pagemap` (Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const PAGE_BYTES: usize = 4096;
const ENTRY_BYTES: u64 = 8;
/// The page is in memory.
pub const PRESENT: u64 = 1 << 63;
/// The page is in swap.
pub const SWAPPED: u64 = 1 << 62;
/// The page belongs to a file or is shared anonymous memory.
pub const OF_A_FILE: u64 = 1 << 61;
/// No other process maps the page.
pub const EXCLUSIVE: u64 = 1 << 56;
/// Bits 0 to 54: the page frame number.
const FRAME: u64 = (1 << 55) - 1;

/// What the kernel reports of one page of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Entry(u64);

impl Entry {
    /// An entry with these bits.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Whether the process has the page in memory or in swap.
    #[must_use]
    #[inline]
    pub const fn is_touched(self) -> bool {
        self.0 & (PRESENT | SWAPPED) != 0
    }

    /// Whether the page is in swap.
    #[must_use]
    #[inline]
    pub const fn is_swapped(self) -> bool {
        self.0 & SWAPPED != 0
    }

    /// Whether the page belongs to a file or is shared anonymous memory.
    #[must_use]
    #[inline]
    pub const fn is_of_a_file(self) -> bool {
        self.0 & OF_A_FILE != 0
    }

    /// Whether the page is the process's own: a private copy of a file's page, or private anonymous
    /// memory.
    #[must_use]
    #[inline]
    pub const fn is_own(self) -> bool {
        self.is_touched() && !self.is_of_a_file()
    }

    /// Whether no other process maps the page.
    #[must_use]
    #[inline]
    pub const fn is_exclusive(self) -> bool {
        self.0 & EXCLUSIVE != 0
    }

    /// The page frame number; 0 if the kernel hides it, which it does from all but root.
    #[must_use]
    #[inline]
    pub const fn frame(self) -> u64 {
        self.0 & FRAME
    }
}

/// Reads the entries of the pages from number `first` on: addresses divided by 4096.
///
/// # Errors
/// `pagemap` cannot be read; the content of `entries` is undefined then.
pub fn read(pagemap: &File, first: u64, entries: &mut [Entry]) -> io::Result<()> {
    // SAFETY: an Entry is a u64, and any eight bytes are one. The slice has the same memory and the
    // same length in bytes, and borrows `entries`. The kernel's entries are native-endian.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(entries.as_mut_ptr().cast::<u8>(), size_of_val(entries))
    };
    pagemap.read_exact_at(bytes, first * ENTRY_BYTES)
}

/// As [`read`], from the page at `address` on.
///
/// # Errors
/// As [`read`].
pub fn read_at<T>(pagemap: &File, address: *const T, entries: &mut [Entry]) -> io::Result<()> {
    read(pagemap, (address.addr() / PAGE_BYTES) as u64, entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    #[test]
    fn an_entry_differs_between_a_page_that_was_written_and_one_that_was_not() {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut entries = [Entry::default(); 2];
        // SAFETY: a new mapping of two pages, of which one byte is written; it is unmapped at the
        // end.
        unsafe {
            let at =
                mmap_anonymous(std::ptr::null_mut(), 2 * PAGE_BYTES, protection, MapFlags::PRIVATE)
                    .unwrap();
            at.cast::<u8>().add(PAGE_BYTES).write_volatile(1);
            read_at(&pagemap, at, &mut entries).unwrap();
            munmap(at, 2 * PAGE_BYTES).unwrap();
        }
        let [untouched, written] = entries;
        assert!(!untouched.is_touched() && !untouched.is_own());
        assert!(written.is_touched() && written.is_own() && !written.is_of_a_file());
        assert!(Entry::from_bits(PRESENT | OF_A_FILE).is_of_a_file());
        let entry = Entry::from_bits(PRESENT | 77);
        assert!(!entry.is_exclusive() && Entry::from_bits(PRESENT | EXCLUSIVE).is_exclusive());
        assert_eq!(entry.frame(), 77);
    }
}
