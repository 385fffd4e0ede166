//! Removing a folder that a guest has filled.

use crate::base::random::random;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Removes `folder` with everything in it, which no process may change meanwhile.
///
/// A guest makes as many levels as it likes, and [`std::fs::remove_dir_all`] needs a stack frame
/// and a descriptor for each. Here what is in a subfolder is moved up into `folder`, so two
/// descriptors do.
///
/// # Errors
/// The file system's.
pub fn all(folder: &Path) -> io::Result<()> {
    let root = open(rustix::fs::CWD, folder)?;
    // Unlike all names that a guest could have chosen.
    let (prefix, mut moved) = (hex::encode(random::<16>()), 0_u64);
    let mut found = true;
    while found {
        found = false;
        each(&root, |name| {
            if !file_is_removed(&root, name)? {
                found = true;
                let inner = open(&root, name)?;
                each(&inner, |below| {
                    if !file_is_removed(&inner, below)? && !is_removed(&inner, below)? {
                        moved += 1;
                        renameat(&inner, below, &root, format!("{prefix}-{moved}"))?;
                    }
                    Ok(())
                })?;
                unlinkat(&root, name, AtFlags::REMOVEDIR)?;
            }
            Ok(())
        })?;
    }
    std::fs::remove_dir(folder)
}

fn open(at: impl AsFd, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, path, flags, Mode::empty())
}

/// Calls `work` with each name in a folder. Names that appear meanwhile may be left out.
fn each(folder: &OwnedFd, mut work: impl FnMut(&CStr) -> io::Result<()>) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            work(entry.file_name())?;
        }
    }
    Ok(())
}

/// Removes what is no folder; `false` for a folder.
fn file_is_removed(at: &OwnedFd, name: &CStr) -> Result<bool, Errno> {
    match unlinkat(at, name, AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Removes an empty folder; `false` if it is not empty.
fn is_removed(at: &OwnedFd, name: &CStr) -> Result<bool, Errno> {
    match unlinkat(at, name, AtFlags::REMOVEDIR) {
        Ok(()) => Ok(true),
        Err(Errno::NOTEMPTY) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mkdirat;

    #[test]
    fn a_folder_of_any_depth_is_removed() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("old");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(outer.path().join("kept"), "").unwrap();
        let mut at = open(rustix::fs::CWD, &folder).unwrap();
        // More levels than a process may have descriptors, and more than a stack has room for.
        for level in 0..30_000 {
            mkdirat(&at, "x", Mode::RWXU).unwrap();
            if level % 5_000 == 0 {
                mkdirat(&at, "empty", Mode::RWXU).unwrap();
                rustix::fs::symlinkat("../../kept", &at, "link").unwrap();
                openat(&at, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap();
            }
            at = open(&at, "x").unwrap();
        }
        drop(at);
        all(&folder).unwrap();
        assert!(!folder.exists());
        assert!(outer.path().join("kept").exists());
    }
}
