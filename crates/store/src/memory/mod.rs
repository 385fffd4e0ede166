//! # memory
//!
//! A snapshot's RAM: the table of frames ([`table`]), how each frame is classified ([`classify`]),
//! and writing RAM from a table ([`materialise`]).
//!
//! Prebaked uVMs, section IV-A, keeps memory raw and apart from device state, so that equal pages
//! are equal. Efficiently Restoring VMs, section 2.1, leaves out what is on disk already. This
//! module does both:
//!
//! - the table lies in the snapshot's folder;
//! - page bodies lie in the tenant's namespace ([`crate::pages`]);
//! - disk frames refer to the files of the snapshot's own disks.

mod alike;
mod blocks;
mod classify;
mod materialise;
mod put;
mod ram_source;
pub(crate) mod table;
mod types;
mod work;

pub use alike::{Alike, Comparable, alike};
pub use materialise::Materialised;
pub use ram_source::{GiveFrames, RamSource};
pub use table::{FramesDigest, Kind, MAX_FRAMES, Run, Table};
pub use types::{BlockHint, DiskLayer, Known, MemorySpec, PutMemory};
pub use work::{Classified, FoundFrame, RamDisk, RamJob, RamWork, TakeFrame};

pub(crate) use blocks::{BLOCKS, BlockIndex};

#[cfg(test)]
mod tests;
