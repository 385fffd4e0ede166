//! Why a VMCOREINFO text in guest memory is not believed.

use crate::shape::ShapeError;
use crate::vmcoreinfo::NoteError;
use dayfly_units::PAGE_SIZE;

/// Why a claim was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The text lacks a line or has an invalid number.
    #[error(transparent)]
    Note(#[from] NoteError),
    /// The layout of `struct page` is unknown.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The kernel does not use 4 KiB pages.
    #[error("PAGESIZE: expected {PAGE_SIZE}, got {0}")]
    PageSize(u64),
    /// The kernel's page tables do not map themselves.
    #[error("swapper_pg_dir: expected to find itself at {expected:#x}, got {got:#x?}")]
    Tables {
        /// Guest-physical address computed from `phys_base`.
        expected: u64,
        /// Guest-physical address computed from the tables.
        got: Option<u64>,
    },
    /// The kernel at that place has another release.
    #[error("init_uts_ns: expected release {expected:?}, got {got:?}")]
    Release {
        /// The release in the text.
        expected: String,
        /// The release in `init_uts_ns`.
        got: String,
    },
    /// No `struct page` was found.
    #[error("no struct page is mapped: neither vmemmap nor mem_section leads to one")]
    Memmap,
    /// The text lies in memory that does not belong to the kernel.
    #[error("VMCOREINFO at page {pfn:#x} is in memory that is not the kernel's ({owner})")]
    Owner {
        /// Page number of the text.
        pfn: u64,
        /// Owner of that page.
        owner: String,
    },
}
