//! Real mounts of FUSE.

#[path = "../common/mod.rs"]
mod common;
mod many;
mod mounts;
