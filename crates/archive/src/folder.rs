//! Opening folders below a folder.

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Flags that open a folder as a base of `*at` calls.
pub(crate) const FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Flags that resolve a path without symbolic links and without leaving the base.
pub(crate) const INSIDE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// Opens a folder below `base`. `AGAIN` means that a folder was renamed during the walk.
pub(crate) fn open_folder(
    base: impl AsFd,
    path: &Path,
    how: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let flags =
        if how.contains(ResolveFlags::NO_SYMLINKS) { FOLDER } else { FOLDER - OFlags::NOFOLLOW };
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    loop {
        match openat2(&base, path, flags, Mode::empty(), how) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}
