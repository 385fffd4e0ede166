//! Opens the writable layer of a VM that has ended, to be used again.
//!
//! Its blocks are those with data in its file, so the file system must report data in blocks of at
//! most 4 KiB. A tmpfs with huge pages reports 2 MiB for a block that was written; ext2 reports
//! whole files.

use crate::blob::probe::number;
use crate::errors::{IoError, IoResult};
use crate::inner::Store;
use crate::objects::types::VmLayer;
use rustix::fs::{SeekFrom, fstat, seek};
use std::fs::File;
use std::path::PathBuf;

/// Bytes of a block of a layer.
const BLOCK: u64 = 4096;
/// The first byte of the block of the test's file that gets data.
const TESTED: u64 = 5 * BLOCK;
/// A further block with data, so that the file is longer than a huge page.
const LAST: u64 = 8 << 20;
/// File systems by their number in statfs(2) (linux/magic.h).
const KNOWN: [(u32, &str); 4] =
    [(0xef53, "ext4"), (0x5846_5342, "xfs"), (0x9123_683e, "btrfs"), (0x0102_1994, "tmpfs")];

/// Why a used layer cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum UsedLayerError {
    /// The host's error.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The file system does not say exactly which blocks a file has.
    #[error(
        "{}: expected ext4, xfs, btrfs or a tmpfs that reports data in blocks of 4 KiB, got {got}",
        path.display()
    )]
    FileSystem {
        /// The layer.
        path: PathBuf,
        /// What it is.
        got: String,
    },
}

impl Store {
    /// Opens the writable layer of a VM that has ended for reading and writing.
    ///
    /// # Errors
    /// [`UsedLayerError`].
    pub fn open_used_vm_layer(&self, layer: &VmLayer) -> Result<File, UsedLayerError> {
        let dir = self.0.vms.sub(&layer.vm.to_string())?;
        let file = dir.open_rw(&layer.data_name())?;
        let path = dir.path().join(layer.data_name());
        let looked = |e: rustix::io::Errno| IoError::new("looking at", &path)(e.into());
        let refused = |got| Err(UsedLayerError::FileSystem { path: path.clone(), got });
        let number = number(&dir);
        let known = KNOWN.iter().find(|(of, _)| Some(*of) == number);
        let Some((_, name)) = known else {
            return refused(format!("the file system with the number {:#x}", number.unwrap_or(0)));
        };
        let block = u64::try_from(fstat(&file).map_err(looked)?.st_blksize).unwrap_or(u64::MAX);
        if block > BLOCK {
            return refused(format!("{name} with blocks of {block} bytes"));
        }
        let (start, end) = self.reported()?;
        if (start, end) != (TESTED, TESTED + BLOCK) {
            return refused(format!(
                "{name} that reports bytes {start} to {end} after a write of {TESTED} to {}",
                TESTED + BLOCK
            ));
        }
        Ok(file)
    }

    /// The first range of data that the store's file system reports of a file with two blocks.
    fn reported(&self) -> IoResult<(u64, u64)> {
        let stage = self.0.stage()?;
        let file = stage.create("blocks")?;
        let path = stage.path().join("blocks");
        let failed = || IoError::new("looking for data in", &path);
        for at in [TESTED, LAST] {
            stage.write_at("blocks", &file, &[1; 4096], at)?;
        }
        let start = seek(&file, SeekFrom::Data(0)).map_err(|e| failed()(e.into()))?;
        let end = seek(&file, SeekFrom::Hole(start)).map_err(|e| failed()(e.into()))?;
        Ok((start, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::VmId;
    use dayfly_units::needs;
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
    use std::io::{Read as _, Write as _};

    #[test]
    fn a_used_layer_is_opened_where_blocks_are_reported_exactly() {
        for folder in ["/var/tmp", "/dev/shm"] {
            let root = tempfile::tempdir_in(folder).unwrap();
            let store = Store::open(root.path()).unwrap();
            let (layer, mut file) = store.create_vm_layer(VmId::random(), 0).unwrap();
            file.write_all(b"x").unwrap();
            store.open_used_vm_layer(&layer).unwrap().write_all(b"y").unwrap();
            let mut content = String::new();
            store.open_vm_layer(&layer, false).unwrap().read_to_string(&mut content).unwrap();
            assert_eq!(content, "y");
            let gone = VmLayer { number: 7, ..layer };
            let refused = store.open_used_vm_layer(&gone).unwrap_err();
            assert!(matches!(refused, UsedLayerError::Io(e) if e.is_not_found()));
        }
    }

    #[test]
    fn a_tmpfs_with_huge_pages_is_refused() {
        if !needs::root() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let huge = Some(c"huge=always");
        mount("tmpfs", root.path(), "tmpfs", MountFlags::empty(), huge).unwrap();
        let opened = || {
            let store = Store::open(root.path()).unwrap();
            let (layer, _) = store.create_vm_layer(VmId::random(), 0).unwrap();
            store.open_used_vm_layer(&layer)
        };
        let refused = opened().map(drop);
        unmount(root.path(), UnmountFlags::DETACH).unwrap();
        let Err(UsedLayerError::FileSystem { got, .. }) = refused else { panic!("{refused:?}") };
        assert!(got.contains("tmpfs"), "{got}");
    }
}
