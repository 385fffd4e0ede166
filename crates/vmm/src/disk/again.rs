//! Opens the disk of a VM that has ended.
//!
//! No map says which blocks its writable layer has, because the VM may have been killed. The file
//! says it: the layer has the blocks with data (SEEK_DATA, SEEK_HOLE of lseek(2)). The layer's file
//! system must report data in blocks of at most 4 KiB; the owner of the file checks that. The
//! module [`super::zero`] has the other half: a hole reads as the layers below.

use super::cow::{BLOCK, Disk};
use super::error::OpenDiskError;
use super::files::{check_used, make_writable, regular_size};
use super::iolist::IoList;
use super::span::length;
use super::spec::DiskSpec;
use crate::config::DISK_BLOCK_BYTES;
use dayfly_units::sparse::next_data;
use std::io;
use std::ops::Range;

impl Disk {
    /// As [`Self::open`], but the writable layer may have been used by a VM that has ended, which
    /// must have had the same layers below it. An empty file is a new layer.
    ///
    /// The time depends on the number of runs of data in the layer.
    ///
    /// # Errors
    /// [`OpenDiskError`].
    pub fn open_again(spec: DiskSpec) -> Result<Self, OpenDiskError> {
        let mut disk = Self::open_any(spec)?;
        let size_bytes = disk.size_bytes();
        let Ok(file) = disk.writable() else { return Ok(disk) };
        if regular_size(file, LAYER)? == 0 {
            make_writable(file, size_bytes, LAYER)?;
            return Ok(disk);
        }
        check_used(file, size_bytes, LAYER)?;
        disk.find_written().map_err(|source| OpenDiskError::Host {
            what: "looking for the blocks of the used writable layer".into(),
            source,
        })?;
        Ok(disk)
    }

    /// Notes the blocks of the writable layer that its file has.
    fn find_written(&mut self) -> io::Result<()> {
        let mut at = 0;
        while let Some((start, end)) = next_data(self.writable()?, at, self.size_bytes())? {
            let blocks = start / DISK_BLOCK_BYTES..end.div_ceil(DISK_BLOCK_BYTES);
            // A write that ended in the middle of a block, because the host was full.
            self.copy_up(blocks.start * DISK_BLOCK_BYTES..start)?;
            self.copy_up(end..blocks.end * DISK_BLOCK_BYTES)?;
            at = blocks.end * DISK_BLOCK_BYTES;
            self.note_written(&blocks);
        }
        Ok(())
    }

    /// Copies bytes of a block that is not noted yet from the layers below to the writable one.
    pub(super) fn copy_up(&self, bytes: Range<u64>) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut buffer = [0; BLOCK];
        let list = IoList::of(&mut buffer[..length(bytes.end - bytes.start)]);
        self.read(bytes.start, &list)?;
        list.write_at(self.writable()?, bytes.start)
    }
}

const LAYER: &str = "used writable layer";
