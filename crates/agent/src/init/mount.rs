//! One mount.

use super::error::BootError;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use std::ffi::CStr;

/// The mount point of the image's root until it becomes `/`.
pub(super) const NEW_ROOT: &str = "/sysroot";

/// Flags of file systems that hold no programs and no devices.
pub(super) const PSEUDO: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Creates the folder and mounts on it. An existing mount stays.
pub(super) fn mount_new(
    source: &str,
    at: &str,
    kind: &str,
    flags: MountFlags,
    data: &CStr,
) -> Result<(), BootError> {
    let failed = |errno| BootError::Mount { kind: kind.to_owned(), at: at.into(), errno };
    // On a read-only root, a missing folder makes the mount fail.
    let _ = rustix::fs::mkdir(at, Mode::from_raw_mode(0o755));
    match mount(source, at, kind, flags, data) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}
