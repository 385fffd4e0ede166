//! Disks: a read-only base image, frozen layers over it, and at most one writable layer on top.
//!
//! This module holds where a disk's bytes are, and how they get into and out of memory. What may
//! not enter: virtio, queues and wire formats of requests ([`crate::virtio`] has them), and paths.
//! Every file arrives as a descriptor.
//!
//! A disk consists of blocks of [`DISK_BLOCK_BYTES`](crate::config::DISK_BLOCK_BYTES). A layer
//! holds whole blocks, each at its own offset in a sparse file; the layer's map names them
//! ([`layer`]). A block is read from the highest layer that has it, else from the base. An index
//! with one byte for each block ([`Disk`]) gives that layer in constant time, for a chain of any
//! depth. The index's pages are touched only if some layer has one of their blocks. The blocks of
//! the writable layer are also in a set ([`block_set`]), so that a freeze does not read the index.
//!
//! ```text
//! index:      0 0 3 3 1 0 …        3 = the writable layer while two are frozen
//! writable        ■ ■              freeze: the map of layer 3 is written and it becomes
//! layer 2         ■                        frozen, open only for reading; a new file becomes the
//! layer 1         ■   ■                    writable layer 4; the index stays as it is
//! base        ■ ■ ■ ■ ■ ■
//! ```
//!
//! What is read of the base and of published layers is checked against their hash trees
//! (`checked`).
//!
//! Layers may be merged while the VM runs. [`Merge`] plans one layer from several, the owner of the
//! files writes it, and [`Disk::rebase`] puts it in their place.

mod again;
mod block_set;
mod checked;
mod cow;
mod error;
mod files;
mod flight;
mod held;
mod iolist;
pub mod layer;
mod merge;
pub mod page_map;
mod reads;
pub mod room;
mod span;
mod spec;
mod traffic;
mod uring;
mod zero;

pub use block_set::{CHUNK_BYTES, MAX_BYTES_PER_CHUNK};
pub use cow::Disk;
pub use error::{DamagedFile, FreezeError, OpenDiskError};
pub use flight::{Flight, Started};
pub use iolist::IoList;
pub use merge::{Merge, MergeError};
pub use reads::{DiskReads, Reads};
pub use room::{NoSpace, Room};
pub use spec::{DiskSpec, FileId, FreezeFiles, LayerSpec, MAX_DISK_BYTES, TreeSpec};
pub use traffic::DiskTraffic;
pub use zero::ZeroError;

#[cfg(test)]
mod again_tests;
#[cfg(test)]
mod checked_tests;
#[cfg(test)]
mod flight_tests;
#[cfg(test)]
mod freeze_tests;
#[cfg(test)]
mod layer_tests;
#[cfg(test)]
mod tests;
