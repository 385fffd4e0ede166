//! The disks of the host, and on which of them a folder is.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A whole disk, by the number of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Disk {
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// Why the disk of a folder is not known.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The folder or sysfs cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// The file system has no disk, or several.
    #[error(
        "{}: expected a file system on one disk, got device {disk}, which is none, as of tmpfs, \
         overlayfs, btrfs or a network",
        path.display()
    )]
    None {
        /// The folder.
        path: PathBuf,
        /// The number of its device.
        disk: Disk,
    },
}

/// The disk on which `folder` is: for a partition, that of which it is a part.
///
/// # Errors
/// [`DiskError`].
pub fn disk_of(folder: &Path) -> Result<Disk, DiskError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| DiskError::Io { path, source }
    };
    let device = std::fs::metadata(folder).map_err(io(folder))?.dev();
    let disk = Disk { major: libc::major(device), minor: libc::minor(device) };
    whole(Path::new("/sys/dev/block"), folder, disk)
}

/// The whole disk of `disk`, which may be a partition. `devices` has a link for each number.
fn whole(devices: &Path, folder: &Path, disk: Disk) -> Result<Disk, DiskError> {
    let none = || DiskError::None { path: folder.to_owned(), disk };
    let link = devices.join(disk.to_string());
    // The link of a partition leads into the folder of its disk.
    let own = match link.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(none()),
        own => own.map_err(|source| DiskError::Io { path: link, source })?,
    };
    if !own.join("partition").exists() {
        return Ok(disk);
    }
    let path = own.parent().ok_or_else(none)?.join("dev");
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|source| DiskError::Io { path, source })?;
    let (major, minor) = text.trim().split_once(':').ok_or_else(none)?;
    match (major.parse(), minor.parse()) {
        (Ok(major), Ok(minor)) => Ok(Disk { major, minor }),
        _ => Err(none()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_partition_is_a_part_of_its_disk_and_a_tmpfs_has_none() {
        let sys = tempfile::tempdir().unwrap();
        let (disk, links) = (sys.path().join("devices/sda"), sys.path().join("block"));
        std::fs::create_dir_all(disk.join("sda1")).unwrap();
        std::fs::create_dir(&links).unwrap();
        std::fs::write(disk.join("dev"), "8:0\n").unwrap();
        std::fs::write(disk.join("sda1/partition"), "1\n").unwrap();
        symlink("../devices/sda", links.join("8:0")).unwrap();
        symlink("../devices/sda/sda1", links.join("8:1")).unwrap();
        let of = |major, minor| whole(&links, Path::new("/x"), Disk { major, minor });
        assert_eq!(of(8, 0).unwrap(), Disk { major: 8, minor: 0 });
        assert_eq!(of(8, 1).unwrap(), Disk { major: 8, minor: 0 });
        let refused = of(0, 40).unwrap_err().to_string();
        assert!(refused.contains("/x") && refused.contains("0:40"), "{refused}");
        // Each Linux has one of these.
        let refused = disk_of(Path::new("/proc")).unwrap_err();
        assert!(matches!(refused, DiskError::None { .. }), "{refused}");
        assert!(matches!(disk_of(Path::new("/no/such")), Err(DiskError::Io { .. })));
    }
}
