//! Disks: a read-only base image, frozen layers over it, and at most one writable layer on top.
//!
//! The room for where a disk's bytes are and how they get into and out of memory. What may not enter: virtio, queues,
//! requests' wire formats ([`crate::virtio`] has them), and paths: every file arrives as a descriptor.
//!
//! A disk is cut into blocks of [`DISK_BLOCK_BYTES`](crate::config::DISK_BLOCK_BYTES). A layer holds whole blocks, each
//! at its own place in a sparse file; which ones it holds is its map ([`layer`]). A block is read from the highest
//! layer that has it, else from the base. An index with one byte a block ([`Disk`]) answers this at once, however deep
//! the chain is; its pages are touched only where some layer has a block.
//!
//! ```text
//! index:      0 0 3 3 1 0 …        3 = the writable layer while two are frozen
//! writable        ■ ■              freeze: its map is written, it becomes the frozen layer 3, a new file becomes
//! layer 2         ■                        the writable layer 4; the index stays as it is
//! layer 1         ■   ■
//! base        ■ ■ ■ ■ ■ ■
//! ```
//!
//! Layers may become fewer while the VM runs: [`Merge`] says what several are as one, who has the files makes it, and
//! [`Disk::rebase`] puts it in their place.

mod cow;
mod held;
mod iolist;
pub mod layer;
mod merge;
pub mod page_map;

pub use cow::{Disk, DiskSpec, FreezeError, LayerSpec, MAX_DISK_BYTES, OpenDiskError};
pub use iolist::IoList;
pub use merge::{Merge, MergeError};

#[cfg(test)]
mod tests;
