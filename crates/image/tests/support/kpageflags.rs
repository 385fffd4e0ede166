//! The frames as the guest's kernel reports them: /proc/kpageflags
//! (Documentation/admin-guide/mm/pagemap.rst).

use super::class::Class;

/// Flag bits (include/uapi/linux/kernel-page-flags.h).
pub const LRU: u64 = 1 << 5;
pub const SLAB: u64 = 1 << 7;
pub const BUDDY: u64 = 1 << 10;
pub const ANON: u64 = 1 << 12;
pub const TAIL: u64 = 1 << 16;
pub const HUGE: u64 = 1 << 17;
pub const NOPAGE: u64 = 1 << 20;
pub const THP: u64 = 1 << 22;
pub const OFFLINE: u64 = 1 << 23;
pub const PGTABLE: u64 = 1 << 26;

/// Flags by page number.
#[derive(Debug, Clone)]
pub struct PageFlags(pub Vec<u64>);

impl PageFlags {
    /// A page's flags; `NOPAGE` if there is no page.
    pub fn of(&self, pfn: u64) -> u64 {
        usize::try_from(pfn).ok().and_then(|at| self.0.get(at)).copied().unwrap_or(NOPAGE)
    }

    /// The first page of the compound page that contains a page, or the page itself.
    pub fn head(&self, pfn: u64) -> u64 {
        (0..=pfn).rev().find(|&pfn| self.of(pfn) & TAIL == 0).unwrap_or(pfn)
    }

    /// Pages that have all flags of `all` and none of `none`.
    pub fn pages(&self, all: u64, none: u64) -> Vec<u64> {
        let fits = |flags: u64| flags & all == all && flags & none == 0;
        (0..).zip(&self.0).filter(|(_, flags)| fits(**flags)).map(|(pfn, _)| pfn).collect()
    }

    /// The class of a page; `None` if the page has no `struct page`.
    pub fn class(&self, pfn: u64) -> Option<Class> {
        let flags = self.of(pfn);
        if flags & NOPAGE != 0 {
            None
        } else if flags & (BUDDY | OFFLINE) != 0 {
            Some(Class::Free)
        } else if flags & SLAB != 0 {
            // Tested before ANON, which 6.12 also sets for some slab, because slab uses that field
            // for another purpose.
            Some(Class::Kernel)
        } else if flags & (ANON | HUGE) != 0 {
            Some(Class::User)
        } else if self.of(self.head(pfn)) & LRU != 0 {
            // 6.1 sets this bit only for the first page of a huge page.
            Some(Class::Cache)
        } else {
            Some(Class::Kernel)
        }
    }
}
