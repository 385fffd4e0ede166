//! Guest-physical memory: the places of RAM ([`Layout`]) and read-only access to its pages
//! ([`PhysMemory`]).

mod access;
mod file;
mod layout;

pub use access::{PAGE_WORDS, Page, PhysMemory};
pub(crate) use access::{PhysRead, bytes, word, word_index};
pub use file::{OpenError, RamFile};
pub use layout::{Extent, Frame, Layout, LayoutError, MAX_EXTENTS, MAX_GUEST_BYTES, Pfn};

#[doc(hidden)]
pub mod image;

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
