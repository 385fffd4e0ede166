//! The entries with which every initramfs begins.

use crate::cpio::Archive;

/// An archive with `folders` and the console device, which the kernel opens for init before
/// anything is mounted.
#[must_use]
pub fn initramfs(folders: &[&str]) -> Archive {
    let mut archive = Archive::default();
    for folder in folders {
        archive.folder(folder);
    }
    archive.char_device("dev/console", 0o600, 5, 1);
    archive
}
