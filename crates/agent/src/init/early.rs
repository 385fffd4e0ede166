//! The initramfs's file systems, and what they show of the kernel.

use super::cmdline::{self, Options};
use super::error::BootError;
use super::mount::{PSEUDO, mount_new};
use rustix::io::Errno;
use rustix::mount::MountFlags;

/// Shows that /proc, /sys and /dev are mounted.
pub(super) struct Early(());

/// Mounts /proc, /sys and /dev in the initramfs.
pub(super) fn mount() -> Result<Early, BootError> {
    mount_new("proc", "/proc", "proc", PSEUDO, c"")?;
    mount_new("sysfs", "/sys", "sysfs", PSEUDO, c"")?;
    mount_new("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, c"mode=0755")?;
    Ok(Early(()))
}

impl Early {
    /// The kernel command line's options.
    #[expect(clippy::unused_self, reason = "/proc is there only in this stage")]
    pub(super) fn options(&self) -> Result<Options, BootError> {
        let path = "/proc/cmdline";
        let line = std::fs::read_to_string(path).map_err(|error| BootError::File {
            path: path.into(),
            what: "read",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        })?;
        Ok(cmdline::parse(&line)?)
    }
}
