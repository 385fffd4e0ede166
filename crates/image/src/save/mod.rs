//! Writes images as an archive that `docker load`, skopeo and `dayfly load` read.
//!
//! ```text
//! root disk ─▶ ext4: inodes, folders, extents ─▶ layer: one tar ─▶ archive: OCI layout + manifest
//! ```
//! A disk has no layers any more, so an image is saved as one layer with its whole tree. The disk
//! is read twice: once for the layer's digest and length, which precede it in the archive, and once
//! for its bytes. So nothing is stored in between.
//!
//! Disks come from others. The reader mounts nothing, checks every number before it is used, and
//! its work is bounded by the size of the disk, and by limits for names and attributes.

mod archive;
mod dir;
mod error;
mod ext4;
mod extents;
pub(crate) mod fuzzing;
mod inode;
mod layer;
mod xattrs;

#[cfg(test)]
mod tests;

pub use archive::{SavedImage, write};
pub use error::SaveError;
pub use layer::write as write_layer;
