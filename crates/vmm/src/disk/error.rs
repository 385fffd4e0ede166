//! Why a disk was not opened, and why a layer was not frozen.

use super::layer::LayerMapError;
use super::spec::MAX_DISK_BYTES;
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use std::{fmt, io};

/// Why a disk was refused.
#[derive(Debug, thiserror::Error)]
pub enum OpenDiskError {
    /// The size is 0, too large, or not a multiple of the block size.
    #[error(
        "disk size: expected 1 to {MAX_DISK_BYTES} bytes, a multiple of {DISK_BLOCK_BYTES}, got {0}"
    )]
    Size(u64),
    /// More than [`MAX_LAYERS`] frozen layers.
    #[error("disk layers: expected at most {MAX_LAYERS}, got {0}")]
    Layers(usize),
    /// A file has the wrong type, length or access mode.
    #[error("{what}: expected {expected}, got {got}")]
    File {
        /// The file.
        what: String,
        /// The expected property.
        expected: String,
        /// The property it has.
        got: String,
    },
    /// A layer's map was refused.
    #[error("layer {number}: {source}")]
    Map {
        /// The layer's number, the lowest being 1.
        number: usize,
        /// Why the map was refused.
        source: LayerMapError,
    },
    /// A layer's map is for a disk of another size.
    #[error("layer {number}: expected a map of {expected} blocks, got {got}")]
    Blocks {
        /// The layer's number, the lowest being 1.
        number: usize,
        /// Blocks of this disk.
        expected: u64,
        /// Blocks of the layer's disk.
        got: u64,
    },
    /// Layers that should replace others hold other blocks.
    #[error(
        "block {block}: expected from layer {was} or one that took its place, \
         0 being the base, got {now}"
    )]
    Differs {
        /// The block.
        block: usize,
        /// The layer that has it now.
        was: u8,
        /// The new layer that would have it.
        now: u8,
    },
    /// The host refused an operation.
    #[error("{what}")]
    Host {
        /// The operation and the file.
        what: String,
        /// The host's error.
        source: io::Error,
    },
}

/// Why a writable layer was not frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// There is no writable layer.
    #[error("freeze: the disk is read-only")]
    ReadOnly,
    /// The chain would become too deep to be opened again.
    #[error("freeze: expected at most {MAX_LAYERS} frozen layers, this would be number {0}")]
    Layers(usize),
    /// A file of the freeze cannot be used.
    #[error("freeze: {0}")]
    File(#[from] OpenDiskError),
    /// The map could not be written.
    #[error("freeze: writing the layer's map")]
    WriteMap(#[source] io::Error),
}

pub(super) fn host(what: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> OpenDiskError {
    let what = what.into();
    move |errno| OpenDiskError::Host { what, source: errno.into() }
}

/// A published disk file that is not what its hash tree says.
#[derive(Debug)]
pub struct DamagedFile {
    /// The layer's number; 0 is the base image.
    pub layer: u8,
    /// The file's inode; 0 if the host does not report it.
    pub inode: u64,
    /// The bytes, the expected hash and the hash found.
    pub source: io::Error,
}

impl fmt::Display for DamagedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            0 => write!(f, "base image (inode {})", self.inode),
            layer => write!(f, "layer {layer} (inode {})", self.inode),
        }
    }
}

impl std::error::Error for DamagedFile {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
