//! # image
//!
//! Builds what VMs are made from: root disks ([`build`]), and kernels with their initramfs
//! ([`kernel`]). [`Pull`] fetches an image from a registry, and [`save`] writes images for docker.
//! The CLI calls this crate on the user's
//! host and uploads the results to the daemon.
//!
//! This crate does not mount file systems, use loop devices, or need root unless an external tool
//! does. It does not know VMs, snapshots or the daemon. It treats all input (archives, layers,
//! kernels, manifests) as hostile.

pub mod cache;
mod disk;
#[doc(hidden)]
pub mod fuzzing;
pub mod kernel;
mod manifest;
mod pull;
pub mod save;
mod staging;
mod tool;

pub use dayfly_units::ImageConfig;
pub use disk::{
    BuildError, BuildOptions, BuiltImage, DISK_NAME, Debian, Limits, Listed, Listing, Progress,
    Size, Source, build,
};
pub use manifest::{
    FileDigest, ImageManifest, KernelManifest, MANIFEST_NAME, MAX_MANIFEST_BYTES, ManifestError,
    Sealed,
};
pub use pull::{Pull, PullError};
pub use staging::sweep;
pub use tool::ToolError;
