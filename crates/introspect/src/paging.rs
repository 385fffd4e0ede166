//! Reads x86-64 page tables of four or five levels (Intel SDM volume 3A, chapter 4) from outside.
//!
//! The guest writes the tables, so they may point to themselves, to tables of another level, or to
//! nothing. A [`Walk`] enters each frame as a table once. So its work is at most 512 entries for
//! each frame of RAM, and its depth is the number of levels.

use crate::frame_set::FrameSet;
use crate::memory::{Frame, PAGE_WORDS, Pfn, PhysMemory, PhysRead, word};
use dayfly_units::PAGE_SIZE;

/// Entry flag: the entry maps something.
pub(crate) const PRESENT: u64 = 1;
/// Entry flag: user code may use the memory.
pub(crate) const USER: u64 = 1 << 2;
/// Entry flag: the entry is a leaf of 2 MiB or 1 GiB, not a table.
pub(crate) const LARGE: u64 = 1 << 7;
/// Entry flag: nothing below the entry can be executed.
pub(crate) const NO_EXECUTE: u64 = 1 << 63;
/// Mask of the guest-physical address in an entry. A large leaf has flags in the lower bits of this
/// mask.
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// First entry of a top-level table's upper half, which is the kernel's half.
pub(crate) const UPPER_HALF: usize = PAGE_WORDS / 2;

/// The number of levels of a page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// 48-bit virtual addresses.
    Four,
    /// 57-bit virtual addresses (CR4.LA57).
    Five,
}

impl Levels {
    /// The number of levels.
    #[must_use]
    pub fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Five => 5,
        }
    }
}

/// A top-level table and its number of levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) root: Frame,
    pub(crate) levels: Levels,
}

/// Number of address bits below an entry of `level`; the lowest level is 1.
fn shift(level: u32) -> u32 {
    12 + 9 * (level - 1)
}

/// The frame that an entry points to; `None` if the entry maps nothing or points outside RAM.
pub(crate) fn target(memory: &dyn PhysMemory, entry: u64) -> Option<Frame> {
    if entry & PRESENT == 0 {
        return None;
    }
    memory.layout().frame(Pfn((entry & ADDRESS) / PAGE_SIZE))
}

/// Bit 12 of a large leaf is a memory type, not a part of the address.
const LARGE_PAT: u64 = 1 << 12;

/// Whether an entry at `level` is a leaf; `None` if reserved bits make it invalid.
fn is_leaf(entry: u64, level: u32) -> Option<bool> {
    let within = (1 << shift(level)) - 1;
    match (level, entry & LARGE != 0) {
        (1, _) => Some(true),
        (2 | 3, true) => (entry & ADDRESS & within & !LARGE_PAT == 0).then_some(true),
        (_, false) => Some(false),
        (_, true) => None,
    }
}

impl Tables {
    /// The guest-physical address to which a virtual address is mapped.
    pub(crate) fn translate(&self, memory: &dyn PhysMemory, address: u64) -> Option<u64> {
        let mut table = self.root;
        for level in (1..=self.levels.count()).rev() {
            let index = usize::try_from(address >> shift(level)).ok()? % PAGE_WORDS;
            let entry = word(memory.page(table), index);
            if entry & PRESENT == 0 {
                return None;
            }
            if is_leaf(entry, level)? {
                let within = (1 << shift(level)) - 1;
                return Some(entry & ADDRESS & !within | address & within);
            }
            table = target(memory, entry)?;
        }
        None
    }

    /// The word at a virtual address, which must be a multiple of 8.
    pub(crate) fn word(&self, memory: &dyn PhysMemory, address: u64) -> Option<u64> {
        memory.word_at(self.translate(memory, address).filter(|_| address.is_multiple_of(8))?)
    }

    /// Up to `len` bytes from a virtual address; fewer if the mapping ends earlier.
    pub(crate) fn bytes(&self, memory: &dyn PhysMemory, address: u64, len: usize) -> Vec<u8> {
        let byte = |n: usize| {
            let at = address.checked_add(n as u64)?;
            let value = self.word(memory, at - at % 8)?;
            value.to_le_bytes().get(usize::try_from(at % 8).ok()?).copied()
        };
        (0..len).map_while(byte).collect()
    }
}

/// One half of a top-level table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// The lower half, of a process.
    User,
    /// The upper half, of the kernel.
    Kernel,
}

/// The memory that a leaf maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leaf {
    /// First virtual address, sign-extended.
    pub(crate) address: u64,
    /// First page number, which may lie outside RAM.
    pub(crate) pfn: Pfn,
    /// Number of pages: 1, 512 or 262144.
    pub(crate) pages: u64,
    /// Whether user code may use it.
    pub(crate) user: bool,
    /// Whether the memory can be executed.
    pub(crate) executable: bool,
}

/// A visitor of page tables, which visits each frame once in its whole life.
pub(crate) struct Walk<'m> {
    memory: &'m dyn PhysMemory,
    tables: FrameSet,
}

/// The permissions and the address of the levels above an entry.
#[derive(Clone, Copy)]
struct Above {
    user: bool,
    executable: bool,
    address: u64,
}

impl<'m> Walk<'m> {
    /// A walk that has visited nothing.
    pub(crate) fn new(memory: &'m dyn PhysMemory) -> Self {
        Self { memory, tables: FrameSet::new(memory.layout().frames()) }
    }

    /// The frames that were entered as tables.
    pub(crate) fn tables(&self) -> &FrameSet {
        &self.tables
    }

    /// Calls `see` for every leaf below one half of a top-level table, except below tables that
    /// were visited before.
    pub(crate) fn half(&mut self, tables: Tables, half: Half, see: &mut dyn FnMut(Leaf)) {
        self.tables.insert(tables.root.0);
        let level = tables.levels.count();
        let sign = u64::MAX << (shift(level) + 9);
        let (entries, address) = match half {
            Half::User => (0..UPPER_HALF, 0),
            Half::Kernel => (UPPER_HALF..PAGE_WORDS, sign),
        };
        let above = Above { user: true, executable: true, address };
        for index in entries {
            let mut entry = word(self.memory.page(tables.root), index);
            if half == Half::User {
                // With page-table isolation, Linux forbids execution in the kernel's copy of a
                // process's top-level table.
                entry &= !NO_EXECUTE;
            }
            self.entry(entry, index, level, above, see);
        }
    }

    fn entry(
        &mut self,
        entry: u64,
        index: usize,
        level: u32,
        above: Above,
        see: &mut dyn FnMut(Leaf),
    ) {
        if entry & PRESENT == 0 {
            return;
        }
        let here = Above {
            user: above.user && entry & USER != 0,
            executable: above.executable && entry & NO_EXECUTE == 0,
            address: above.address | (index as u64) << shift(level),
        };
        match is_leaf(entry, level) {
            Some(true) => {
                let pages = 1 << (shift(level) - 12);
                let pfn = Pfn((entry & ADDRESS) / PAGE_SIZE / pages * pages);
                let Above { user, executable, address } = here;
                see(Leaf { address, pfn, pages, user, executable });
            }
            Some(false) => {
                let Some(table) = target(self.memory, entry) else { return };
                if self.tables.insert(table.0) {
                    let memory = self.memory;
                    for (index, word) in memory.page(table).iter().enumerate() {
                        let entry = u64::from_le(word.load(std::sync::atomic::Ordering::Relaxed));
                        self.entry(entry, index, level - 1, here, see);
                    }
                }
            }
            None => {}
        }
    }
}

/// The frames that leaves map. Large leaves are recorded as 2 MiB blocks of guest-physical memory.
/// So each leaf costs at most eight steps, however often a hostile table maps all of RAM.
pub(crate) struct Mapped {
    small: FrameSet,
    blocks: FrameSet,
}

/// Number of pages in a 2 MiB block.
const BLOCK_PAGES: u64 = 512;

impl Mapped {
    /// An empty set, for the layout of `memory`.
    pub(crate) fn new(memory: &dyn PhysMemory) -> Self {
        let layout = memory.layout();
        let blocks = usize::try_from(layout.end().0.div_ceil(BLOCK_PAGES)).unwrap_or(0);
        Self { small: FrameSet::new(layout.frames()), blocks: FrameSet::new(blocks) }
    }

    /// Adds the memory that a leaf maps.
    pub(crate) fn insert(&mut self, memory: &dyn PhysMemory, leaf: Leaf) {
        if leaf.pages < BLOCK_PAGES {
            if let Some(frame) = memory.layout().frame(leaf.pfn) {
                self.small.insert(frame.0);
            }
        } else if let (Ok(first), Ok(count)) =
            (usize::try_from(leaf.pfn.0 / BLOCK_PAGES), usize::try_from(leaf.pages / BLOCK_PAGES))
        {
            self.blocks.insert_range(first..first.saturating_add(count));
        }
    }

    /// Whether any leaf maps the frame.
    pub(crate) fn contains(&self, frame: Frame, pfn: Pfn) -> bool {
        self.small.contains(frame.0)
            || usize::try_from(pfn.0 / BLOCK_PAGES).is_ok_and(|block| self.blocks.contains(block))
    }
}

#[cfg(test)]
#[path = "paging_tests.rs"]
mod tests;
