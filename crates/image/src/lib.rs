//! # image
//!
//! The room for what machines are made from: root disks ([`build`]) and kernels with their initramfs ([`kernel`]).
//! The CLI calls it on the user's host; the results are uploaded to the daemon.
//!
//! What may not enter: mounting, loop devices, needing root where a tool does not; knowing of VMs, snapshots or the
//! daemon. Everything read here (archives, layers, kernels, manifests) is taken as hostile.

pub mod cache;
mod disk;
pub mod kernel;
mod manifest;
mod sparse;
mod staging;
mod tool;

pub use disk::{
    BuildError, BuildOptions, BuiltImage, DISK_NAME, Debian, Limits, MANIFEST_NAME, Progress, Size, Source,
    build,
};
pub use manifest::{
    FileDigest, ImageManifest, KernelManifest, MAX_MANIFEST_BYTES, ManifestError, RunConfig, Sealed,
};
pub use sparse::{SparseSummary, sparse_digest, summarise};
pub use staging::sweep;
pub use tool::ToolError;
