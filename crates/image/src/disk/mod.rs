//! Builds root disks (raw ext4 files) from a folder, a docker archive, an OCI layout, an image of a
//! registry or Debian's archive.

mod blobs;
mod build;
mod choice;
mod debian;
mod descriptor;
mod error;
mod ext4;
mod folder;
pub(crate) mod fuzzing;
mod layer;
mod listing;
mod oci;
mod prepare;
mod read;
mod spool;
pub(crate) mod tree;
mod types;

pub(crate) mod pulled;

#[cfg(test)]
mod tests;

pub(crate) use build::plain;
pub use build::{DISK_NAME, build};
pub use error::BuildError;
pub use listing::{Listed, Listing};
pub use types::{BuildOptions, BuiltImage, Debian, Limits, Progress, Size, Source};
