//! Checking and opening the files of a disk.

use super::error::{OpenDiskError, host};
use super::layer::LayerMap;
use super::span::span;
use super::spec::LayerSpec;
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The size of a regular file, in bytes.
pub(super) fn regular_size(file: BorrowedFd<'_>, what: &str) -> Result<u64, OpenDiskError> {
    let stat = rustix::fs::fstat(file).map_err(host(format!("fstat of {what}")))?;
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    if kind != rustix::fs::FileType::RegularFile {
        let (expected, got) = ("a regular file".into(), format!("{kind:?}"));
        return Err(OpenDiskError::File { what: what.into(), expected, got });
    }
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Checks that a file is empty and open for reading and writing (without `read`, also for writing
/// only).
pub(super) fn check_empty(
    file: BorrowedFd<'_>,
    what: &str,
    read: bool,
) -> Result<(), OpenDiskError> {
    let refuse = |expected: &str, got: String| {
        Err(OpenDiskError::File { what: what.into(), expected: expected.into(), got })
    };
    let size = regular_size(file, what)?;
    if size != 0 {
        return refuse("an empty file", format!("{size} bytes"));
    }
    check_mode(file, what, read)
}

/// Checks that a file has the length of the disk and is open for reading and writing: a writable
/// layer that a VM has used.
pub(super) fn check_used(
    file: BorrowedFd<'_>,
    size_bytes: u64,
    what: &str,
) -> Result<(), OpenDiskError> {
    let size = regular_size(file, what)?;
    if size != size_bytes {
        let (expected, got) = (format!("{size_bytes} bytes"), format!("{size} bytes"));
        return Err(OpenDiskError::File { what: what.into(), expected, got });
    }
    check_mode(file, what, true)
}

/// Checks how a file is open, as [`check_empty`].
fn check_mode(file: BorrowedFd<'_>, what: &str, read: bool) -> Result<(), OpenDiskError> {
    use rustix::fs::OFlags;
    let refuse = |expected: &str, got: String| {
        Err(OpenDiskError::File { what: what.into(), expected: expected.into(), got })
    };
    let flags = rustix::fs::fcntl_getfl(file).map_err(host(format!("flags of {what}")))?;
    if flags.contains(OFlags::APPEND) {
        return refuse("a file not opened for appending", "O_APPEND".into());
    }
    match flags & OFlags::RWMODE {
        OFlags::RDWR => Ok(()),
        OFlags::WRONLY if !read => Ok(()),
        mode => refuse("a file opened read-write", format!("{mode:?}")),
    }
}

/// Checks that a file is empty and extends it, sparse, to the disk's length: a writable layer.
pub(super) fn make_writable(
    file: BorrowedFd<'_>,
    size_bytes: u64,
    what: &str,
) -> Result<(), OpenDiskError> {
    check_empty(file, what, true)?;
    rustix::fs::ftruncate(file, size_bytes)
        .map_err(host(format!("extending {what} to {size_bytes} bytes")))
}

/// Opens and verifies the frozen layers of a disk. Returns their data files and the index of their
/// blocks.
pub(super) fn open_layers(
    size_bytes: u64,
    layers: Vec<LayerSpec>,
) -> Result<(Vec<OwnedFd>, Vec<u8>), OpenDiskError> {
    if layers.len() > MAX_LAYERS {
        return Err(OpenDiskError::Layers(layers.len()));
    }
    let blocks = size_bytes / DISK_BLOCK_BYTES;
    let mut index = vec![0; usize::try_from(blocks).map_err(|_| OpenDiskError::Size(size_bytes))?];
    let mut frozen = Vec::with_capacity(layers.len());
    for (layer, number) in layers.into_iter().zip(1_u8..) {
        let place = usize::from(number);
        let what = format!("data of layer {number}");
        let data_bytes = regular_size(layer.data.as_fd(), &what)?;
        if data_bytes != size_bytes {
            let (expected, got) = (format!("{size_bytes} bytes"), format!("{data_bytes} bytes"));
            return Err(OpenDiskError::File { what, expected, got });
        }
        let map = LayerMap::read(layer.map.as_fd())
            .map_err(|source| OpenDiskError::Map { number: place, source })?;
        if map.blocks() != blocks {
            return Err(OpenDiskError::Blocks {
                number: place,
                expected: blocks,
                got: map.blocks(),
            });
        }
        for run in map.runs() {
            index[span(&run)].fill(number);
        }
        frozen.push(layer.data);
    }
    Ok((frozen, index))
}
