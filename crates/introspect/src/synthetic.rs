//! A small Linux built by hand, for tests: 4 MiB of RAM with only the structures that this crate
//! reads.

#![allow(clippy::unwrap_used, reason = "support of tests and fuzzing")]

use crate::memory::image::RamImage;
use crate::paging::{LARGE, Levels, NO_EXECUTE, PRESENT, USER};
use std::fmt::Write;

pub const FRAMES: usize = 1024;
pub const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
const VMEMMAP_4: u64 = 0xffff_ea00_0000_0000;
const VMEMMAP_5: u64 = 0xffd4_0000_0000_0000;

/// Frames with a meaning; all other frames are free.
pub const ROOT: u64 = 1;
pub const TEXT: u64 = 12;
const UTS: u64 = 13;
const INODE: u64 = 14;
const SECTIONS: u64 = 15;
const MEMMAP: u64 = 16;
/// A process: its top-level table, the isolated twin, and the tables below.
pub const PROCESS: u64 = 40;
pub const USER_CODE: u64 = 50;
pub const USER_DATA: u64 = 51;
/// A compound page of four page cache frames, of another file than the code.
pub const CACHE: u64 = 52;
pub const SLAB: u64 = 56;
pub const BALLOON: u64 = 57;
/// A frame that is marked as a page table, and that no entry points to.
pub const SPARE_TABLE: u64 = 58;
pub const KERNEL_CODE: u64 = 60;
/// From here to the end, frames are free: a block of 64 frames and blocks of 128.
pub const FREE: u64 = 64;

/// The kernel version to imitate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Like {
    Linux6_1,
    Linux6_12,
}

/// The guest and its text, which a test may change and write again.
pub struct Guest {
    pub ram: RamImage,
    pub text: String,
    pub levels: Levels,
}

/// Virtual address of a frame in the kernel's image.
pub fn image(frame: u64) -> u64 {
    KERNEL_MAP + frame * 4096
}

impl Guest {
    pub fn new(like: Like, levels: Levels) -> Self {
        let ram = RamImage::new(FRAMES);
        let guest = Self { ram, text: text(like, levels), levels };
        guest.write_text(TEXT);
        guest.ram.put_bytes(UTS * 4096 + 128, b"\0\0test-1.0\0");
        let mut next = 2;
        // The image: frames 0 to 511, one of which holds code that can be executed.
        for frame in 0..512 {
            let no_execute = if frame == KERNEL_CODE { 0 } else { NO_EXECUTE };
            guest.map(ROOT, image(frame), frame, no_execute, &mut next);
        }
        for frame in 0..(FRAMES as u64 * 64).div_ceil(4096) {
            guest.map(ROOT, guest.vmemmap() + frame * 4096, MEMMAP + frame, NO_EXECUTE, &mut next);
        }
        assert!(next <= TEXT, "tables end at {next}");
        // mem_section: one root and one section, whose encoded address has flags in its lower bits.
        guest.ram.put(SECTIONS * 4096, image(SECTIONS) + 8);
        guest.ram.put(SECTIONS * 4096 + 8, guest.vmemmap() | 0xf);

        for n in ROOT..FREE {
            guest.page(n, [0, 0, 0, 0, 0, 0, u64::from(u32::MAX) | 1 << 32, 0]);
        }
        let (table, slab, offline, free) = match like {
            Like::Linux6_1 => (!0x200_u32, u32::MAX, !0x100, !0x80),
            Like::Linux6_12 => (0xf200_0000, 0xf500_0000, 0xf100_0000, 0xf000_0000),
        };
        let kind = |kind: u32, refcount: u64| u64::from(kind) | refcount << 32;
        let lru = 1 << 4;
        guest.page(
            SLAB,
            [if like == Like::Linux6_1 { 1 << 9 } else { 0 }, 0, 0, 1, 0, 0, kind(slab, 1), 0],
        );
        guest.page(BALLOON, [0, 0, 0, 2, 0, 0, kind(offline, 1), 0]);
        guest.page(SPARE_TABLE, [0, 0, 0, 0, 0, 0, kind(table, 1), 0]);
        guest.page(USER_DATA, [lru, 0, 0, 0xffff_8880_0000_0001, 0, 0, kind(0, 1), 0]);
        // The code is on no list yet, so its mapping is tested.
        guest.page(USER_CODE, [0, 0, 0, image(INODE) + 0x100, 0, 0, kind(0, 1), 0]);
        guest.ram.put(INODE * 4096 + 0x100, image(INODE));
        guest.page(CACHE, [lru | 1 << 16, 0, 0, image(INODE) + 0x900, 0, 0, kind(u32::MAX, 4), 0]);
        for tail in CACHE + 1..CACHE + 4 {
            guest.page(
                tail,
                [
                    0,
                    guest.vmemmap() + CACHE * 64 + 1,
                    0,
                    0xdead_0000_0000_0400,
                    0,
                    0,
                    u64::from(u32::MAX),
                    0,
                ],
            );
        }
        for block in (128..FRAMES as u64).step_by(128) {
            guest.page(block, [0, 0, 0, 0, 0, 7, kind(free, 0), 0]);
        }
        guest.page(FREE, [0, 0, 0, 0, 0, 6, kind(free, 0), 0]);

        let mut next = PROCESS + 2;
        guest.map(PROCESS, 0x40_0000, USER_CODE, USER, &mut next);
        guest.map(PROCESS, 0x40_1000, USER_DATA, USER | NO_EXECUTE, &mut next);
        guest.map(PROCESS, 0x40_2000, CACHE, USER | NO_EXECUTE, &mut next);
        assert!(next <= USER_CODE);
        for index in 0..512 {
            let kernel = guest.entry(ROOT, index);
            let process = guest.entry(PROCESS, index);
            guest.put_entry(
                PROCESS,
                index,
                if index < 256 { process | process.min(1) << 63 } else { kernel },
            );
            // The twin has the process's half, and a single entry of the kernel's half.
            let twin = if index < 256 { process } else { kernel * u64::from(index == 508) };
            guest.put_entry(PROCESS + 1, index, twin);
        }
        guest.put_entry(PROCESS + 1, 508, (SPARE_TABLE * 4096) | PRESENT);
        guest
    }

    pub fn vmemmap(&self) -> u64 {
        if self.levels == Levels::Four { VMEMMAP_4 } else { VMEMMAP_5 }
    }

    /// Writes the text to the start of a frame.
    pub fn write_text(&self, frame: u64) {
        self.ram.put_bytes(frame * 4096, self.text.as_bytes());
    }

    /// Changes the text, also in guest memory.
    pub fn edit(&mut self, from: &str, to: &str) {
        assert!(self.text.contains(from), "{from}");
        let padded = format!("{}{}", self.text.replace(from, to), "\0".repeat(from.len()));
        self.text = padded;
        self.write_text(TEXT);
    }

    /// Writes a `struct page`.
    pub fn page(&self, frame: u64, words: [u64; 8]) {
        for (n, word) in (0..).zip(words) {
            self.ram.put(MEMMAP * 4096 + frame * 64 + n * 8, word);
        }
    }

    /// Changes the kernel's release, which must have eight characters.
    pub fn rename(&mut self, release: &str) {
        let old = self.text.lines().next().unwrap().to_owned();
        self.edit(&old, &format!("OSRELEASE={release}"));
        self.ram.put_bytes(UTS * 4096 + 128, &[b"\0\0", release.as_bytes(), b"\0"].concat());
    }

    pub fn entry(&self, table: u64, index: u64) -> u64 {
        use crate::memory::PhysRead;
        self.ram.word_at(table * 4096 + index * 8).unwrap()
    }

    pub fn put_entry(&self, table: u64, index: u64, entry: u64) {
        self.ram.put(table * 4096 + index * 8, entry);
    }

    /// Maps a page. Missing tables are made from frame `next` on.
    fn map(&self, root: u64, address: u64, frame: u64, flags: u64, next: &mut u64) {
        let mut table = root;
        for level in (2..=self.levels.count()).rev() {
            let index = address >> (12 + 9 * (level - 1)) & 511;
            if self.entry(table, index) == 0 {
                self.put_entry(table, index, (*next * 4096) | PRESENT | (flags & USER));
                *next += 1;
            }
            table = (self.entry(table, index) & crate::paging::ADDRESS) / 4096;
        }
        self.put_entry(table, address >> 12 & 511, (frame * 4096) | PRESENT | flags);
    }
}

fn text(like: Like, levels: Levels) -> String {
    let swapper = image(ROOT);
    let five = u8::from(levels == Levels::Five);
    let mut text = format!(
        "OSRELEASE=test-1.0\nPAGESIZE=4096\nSYMBOL(init_uts_ns)={:x}\n\
         OFFSET(uts_namespace.name)=0\n\
         SYMBOL(swapper_pg_dir)={swapper:x}\nSIZE(page)=64\nOFFSET(page.flags)=0\n\
         OFFSET(page._refcount)=52\n\
         OFFSET(page.mapping)=24\nOFFSET(page._mapcount)=48\nOFFSET(page.private)=40\n\
         OFFSET(page.compound_head)=8\n\
         LENGTH(zone.free_area)=11\nNUMBER(PG_lru)=4\nNUMBER(PG_head_mask)=65536\n\
         NUMBER(phys_base)=0\n\
         NUMBER(pgtable_l5_enabled)={five}\n",
        image(UTS)
    );
    let vmemmap = if levels == Levels::Four { VMEMMAP_4 } else { VMEMMAP_5 };
    match like {
        Like::Linux6_1 => write!(
            text,
            "SYMBOL(mem_section)={:x}\nLENGTH(mem_section)=2048\nSIZE(mem_section)=16\n\
             OFFSET(mem_section.section_mem_map)=0\nNUMBER(SECTION_SIZE_BITS)=27\n\
             OFFSET(page.compound_dtor)=16\n\
             NUMBER(PG_slab)=9\nNUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-129\n\
             NUMBER(HUGETLB_PAGE_DTOR)=2\n\
             NUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-257\n",
            image(SECTIONS)
        ),
        Like::Linux6_12 => write!(
            text,
            "SYMBOL(vmemmap)={vmemmap:x}\nNUMBER(PAGE_SLAB_MAPCOUNT_VALUE)=-184549376\n\
             NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-268435456\n\
             NUMBER(PAGE_HUGETLB_MAPCOUNT_VALUE)=-201326592\n\
             NUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-251658240\n"
        ),
    }
    .unwrap();
    text
}

/// A table whose entries all point to the table itself.
pub fn loop_at(guest: &Guest, frame: u64) {
    for index in 0..512 {
        guest.put_entry(frame, index, (frame * 4096) | PRESENT | USER);
    }
}

/// A table whose entries are all leaves of 1 GiB or 2 MiB from address 0.
pub fn all_large(guest: &Guest, frame: u64) {
    for index in 0..512 {
        guest.put_entry(frame, index, PRESENT | USER | LARGE);
    }
}
