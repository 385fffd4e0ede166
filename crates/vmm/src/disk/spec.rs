//! The files of a disk, and its largest size.

use dayfly_units::Digest;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

/// The largest disk: 1 TiB, whose index takes 256 MiB of address space.
pub const MAX_DISK_BYTES: u64 = 1 << 40;

/// The identity of an open file: no other file of the host has it while the file is open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileId {
    /// The device (`st_dev` of fstat(2)).
    pub dev: u64,
    /// The inode (`st_ino`).
    pub ino: u64,
}

/// The files of a disk, with owned descriptors; the fields mean what those of
/// [`crate::config::DiskConfig`] mean.
#[derive(Debug)]
pub struct DiskSpec {
    /// The size that the guest sees: a multiple of [`crate::config::DISK_BLOCK_BYTES`], at most
    /// [`MAX_DISK_BYTES`].
    pub size_bytes: u64,
    /// The raw base image; bytes past its end read as zero.
    pub base: OwnedFd,
    /// Frozen layers, the lowest first.
    pub layers: Vec<LayerSpec>,
    /// An empty file for writes; `None`: the disk is read-only.
    pub writable: Option<OwnedFd>,
    /// The hash trees of the base and of the layers, in this order. What is read of a file with a
    /// tree is checked. Missing entries count as `None`.
    pub trees: Vec<Option<TreeSpec>>,
}

/// The hash tree of a published disk file ([`dayfly_units::tree`]).
#[derive(Debug)]
pub struct TreeSpec {
    /// The tree.
    pub file: OwnedFd,
    /// Its root.
    pub root: Digest,
}

/// The files with which the writable layer of a disk is frozen.
#[derive(Debug)]
pub struct FreezeFiles {
    /// An empty file for the map of the layer.
    pub map: OwnedFd,
    /// An empty file, open for reading and writing: the next writable layer.
    pub next: OwnedFd,
    /// The data of the layer, opened read-only. It takes the place of the writable descriptor,
    /// which is closed. `None`: the writable descriptor stays.
    pub frozen: Option<OwnedFd>,
}

/// The files of a frozen layer.
#[derive(Debug)]
pub struct LayerSpec {
    /// Sparse data, as long as the disk.
    pub data: OwnedFd,
    /// The sealed map ([`super::layer`]).
    pub map: OwnedFd,
}
