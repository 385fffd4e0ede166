//! Stored objects that have a name or a content id: images, kernels and disk layers, and the
//! manifests that describe them.

pub(crate) mod images;
pub(crate) mod kernels;
pub(crate) mod layers;
pub(crate) mod manifest;
pub mod refs;
pub(crate) mod tree;
pub(crate) mod types;
pub(crate) mod upload;
