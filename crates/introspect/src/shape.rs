//! The layout of a kernel's `struct page`, and the owner that a `struct page` shows.
//!
//! Offsets and flag numbers come from VMCOREINFO. Two further things follow from the encoding of
//! page types, which `PAGE_BUDDY_MAPCOUNT_VALUE` identifies. A type is either a bit cleared in a
//! field of ones (to 6.10; free is `!0x80`) or the field's upper byte (from 6.12; free is 0xf0).
//! Another encoding is unknown and is refused.

use crate::memory::{Page, word};
use crate::vmcoreinfo::{NoteError, VmcoreInfo};

/// Flag bits of `page.mapping`: bit 0 marks anonymous memory, bit 1 memory that a driver can move.
const MAPPING_ANONYMOUS: u64 = 1;
const MAPPING_MOVABLE: u64 = 2;
/// Bit of `page.compound_head` in all pages of a compound page except the first.
const TAIL: u64 = 1;
/// Upper bits of the older page types: set in every field that holds a type.
const TYPE_BASE: u32 = 0xf000_0000;
/// The field of a page table, which VMCOREINFO lacks (include/linux/page-flags.h): until 5.10,
/// until 6.10, from 6.12.
const TABLE_TO_5_10: u32 = !0x400;
const TABLE_TO_6_10: u32 = !0x200;
const TABLE_FROM_6_12: u32 = 0xf200_0000;
/// Largest accepted order of a free block: 64 MiB. Linux itself uses at most 10.
pub(crate) const MAX_ORDER: u32 = 14;

/// Why a kernel's `struct page` cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// VMCOREINFO lacks a line or has an invalid number.
    #[error(transparent)]
    Note(#[from] NoteError),
    /// The size is not that of a `struct page`.
    #[error("SIZE(page): expected a power of two from 32 to 256, got {0}")]
    Size(u64),
    /// A field lies outside the structure, or is not aligned.
    #[error("OFFSET(page.{field}): expected a multiple of {align} below {size}, got {got}")]
    Offset {
        /// Name of the field.
        field: &'static str,
        /// The required alignment in bytes.
        align: u64,
        /// Size of the structure in bytes.
        size: u64,
        /// Offset of the field in bytes.
        got: u64,
    },
    /// A flag's number does not fit into a word.
    #[error("NUMBER({flag}): expected 0 to 63, got {got}")]
    Flag {
        /// Name of the flag.
        flag: &'static str,
        /// Number of the flag.
        got: u64,
    },
    /// The encoding of page types is unknown.
    #[error("NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE): expected -129 or -268435456, got {0}")]
    Types(i64),
}

/// The encoding of `page_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Types {
    /// A cleared bit in a field whose upper four bits are ones.
    Cleared,
    /// The upper byte of the field.
    Byte,
}

/// The places of the fields in a `struct page`.
#[derive(Debug, Clone)]
pub(crate) struct PageShape {
    /// Size of the structure in bytes; a page of memory holds a whole number of structures.
    pub(crate) size: usize,
    flags: Field,
    refcount: Field,
    page_type: Field,
    mapping: Field,
    private: Field,
    compound_head: Field,
    lru: u64,
    types: Types,
    buddy_type: u32,
    table_type: u32,
    /// Slab is a flag up to 6.9 and a type later.
    slab_flag: Option<u64>,
    slab_type: Option<u32>,
    offline_type: Option<u32>,
    hugetlb_type: Option<u32>,
    /// Up to 6.6: the flag of first pages, and the byte in the second page that identifies a huge
    /// page's destructor, with its value.
    hugetlb_destructor: Option<(u64, Field, u8)>,
    max_order: u32,
}

/// A field of a structure: its word, and its first bit in the word.
#[derive(Debug, Clone, Copy)]
struct Field {
    word: usize,
    shift: u32,
}

/// The owner of a frame, by its `struct page`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The first page of a free block of 2^order pages.
    Free {
        /// The order, at most [`MAX_ORDER`].
        order: u32,
    },
    /// The guest gave the frame back to the host: ballooned or unplugged.
    Offline,
    /// Small objects of the kernel.
    Slab,
    /// A page table.
    Table,
    /// Anonymous memory of processes, or huge pages.
    User,
    /// Page cache. `mapping` is the virtual address of the file's `address_space`, or zero if the
    /// file was truncated.
    File {
        /// The address, which identifies the file.
        mapping: u64,
    },
    /// Page cache on its way to the LRU lists, if `mapping` is an `address_space`.
    MaybeFile {
        /// The address, which would identify the file.
        mapping: u64,
    },
    /// The owner is that of the `struct page` at this virtual address.
    Tail {
        /// Virtual address of the head.
        head: u64,
    },
    /// In use for another purpose.
    Kernel,
    /// The reference count is 0: the frame is inside a block whose first page is in use, or on a
    /// CPU's list of free pages. No field distinguishes the two.
    Unheld,
    /// The structure was never initialised.
    Unknown,
}

impl PageShape {
    /// Makes the layout from VMCOREINFO.
    pub(crate) fn new(info: &VmcoreInfo) -> Result<Self, ShapeError> {
        let bytes = info.size("page")?;
        let size =
            usize::try_from(bytes).ok().filter(|n| n.is_power_of_two() && (32..=256).contains(n));
        let size = size.ok_or(ShapeError::Size(bytes))?;
        let field = |field: &'static str, align: u64| {
            let got = info.offset(&format!("page.{field}"))?;
            let place = usize::try_from(got / 8).ok().zip(u32::try_from(got % 8 * 8).ok());
            match place.filter(|_| got < bytes && got.is_multiple_of(align)) {
                Some((word, shift)) => Ok(Field { word, shift }),
                None => Err(ShapeError::Offset { field, align, size: bytes, got }),
            }
        };
        let flag = |flag: &'static str| {
            let got = info.number(flag)?;
            u32::try_from(got)
                .ok()
                .and_then(|n| 1u64.checked_shl(n))
                .ok_or(ShapeError::Flag { flag, got })
        };
        let buddy = low(info.number("PAGE_BUDDY_MAPCOUNT_VALUE")?);
        let (types, table_type) = match buddy {
            0xffff_ff7f if info.version().is_some_and(|version| version <= (5, 10)) => {
                (Types::Cleared, TABLE_TO_5_10)
            }
            0xffff_ff7f => (Types::Cleared, TABLE_TO_6_10),
            0xf000_0000 => (Types::Byte, TABLE_FROM_6_12),
            other => return Err(ShapeError::Types(i64::from(other.cast_signed()))),
        };
        let kind = |name| info.number(name).ok().map(low);
        let destructor = || {
            let value = u8::try_from(info.number("HUGETLB_PAGE_DTOR").ok()?).ok()?;
            Some((info.number("PG_head_mask").ok()?, field("compound_dtor", 1).ok()?, value))
        };
        let orders = info.length("zone.free_area")?;
        Ok(Self {
            size,
            flags: field("flags", 8)?,
            refcount: field("_refcount", 4)?,
            page_type: field("_mapcount", 4)?,
            mapping: field("mapping", 8)?,
            private: field("private", 8)?,
            compound_head: field("compound_head", 8)?,
            lru: flag("PG_lru")?,
            types,
            buddy_type: buddy,
            table_type,
            slab_flag: flag("PG_slab").ok(),
            slab_type: kind("PAGE_SLAB_MAPCOUNT_VALUE"),
            offline_type: kind("PAGE_OFFLINE_MAPCOUNT_VALUE"),
            hugetlb_type: kind("PAGE_HUGETLB_MAPCOUNT_VALUE"),
            hugetlb_destructor: destructor(),
            max_order: u32::try_from(orders.saturating_sub(1)).unwrap_or(MAX_ORDER).min(MAX_ORDER),
        })
    }

    /// The owner in the structure that starts at word `at` of a page of structures.
    pub(crate) fn owner(&self, page: &Page, at: usize) -> Owner {
        let read = |field: Field| word(page, at + field.word) >> field.shift;
        let flags = read(self.flags);
        if flags == u64::MAX {
            return Owner::Unknown;
        }
        let head = read(self.compound_head);
        if head & TAIL != 0 {
            return Owner::Tail { head: head - TAIL };
        }
        let kind = low(read(self.page_type));
        if self.is(kind, Some(self.buddy_type)) {
            let order = u32::try_from(read(self.private)).unwrap_or(0);
            return Owner::Free { order: if order > self.max_order { 0 } else { order } };
        }
        if self.slab_flag.is_some_and(|slab| flags & slab != 0) || self.is(kind, self.slab_type) {
            return Owner::Slab;
        }
        if self.is(kind, self.offline_type) {
            return Owner::Offline;
        }
        if self.is(kind, Some(self.table_type)) {
            return Owner::Table;
        }
        if self.is(kind, self.hugetlb_type) || self.is_hugetlb(flags, page, at) {
            return Owner::User;
        }
        let mapping = read(self.mapping);
        if low(read(self.refcount)) == 0 {
            return Owner::Unheld;
        }
        if mapping & MAPPING_ANONYMOUS != 0 {
            Owner::User
        } else if flags & self.lru != 0 {
            Owner::File { mapping }
        } else if mapping != 0 && mapping & MAPPING_MOVABLE == 0 {
            Owner::MaybeFile { mapping }
        } else {
            Owner::Kernel
        }
    }

    /// Whether `kind` is the type whose whole field is `value` in VMCOREINFO.
    fn is(&self, kind: u32, value: Option<u32>) -> bool {
        value.is_some_and(|value| match self.types {
            Types::Cleared => kind & (TYPE_BASE | !value) == TYPE_BASE,
            Types::Byte => kind >> 24 == value >> 24,
        })
    }

    fn is_hugetlb(&self, flags: u64, page: &Page, at: usize) -> bool {
        self.hugetlb_destructor.is_some_and(|(first, field, value)| {
            let second = at + self.size / 8;
            flags & first != 0
                && word(page, second + field.word) >> field.shift & 0xff == u64::from(value)
        })
    }
}

/// The lower half of a word.
fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
