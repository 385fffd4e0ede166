//! Mounting and unmounting.

use dayfly_api::agent::{Failure, FailureCode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The file with all mounts of this thread's namespace (proc_pid_mountinfo(5)).
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// Why a file system was not mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The path is not one on which a file system can be mounted.
    #[error("mount {path:?}: expected an absolute path without .. below /")]
    Path {
        /// The path of the request.
        path: String,
    },
    /// The name has a byte that mount(2) does not take.
    #[error("mount: name {0:?}: expected one without NUL")]
    Name(String),
    /// Too many were mounted under this identity.
    #[error("mount: expected fewer than {0} volumes, those included that have ended, got {0}")]
    Full(usize),
    /// The folder cannot be made or entered.
    #[error("mount {}: making the folder: {source}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel has FUSE, and its device cannot be opened.
    #[error("mount: /dev/fuse: {errno}")]
    Device {
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel has no FUSE.
    #[error(
        "mount: the guest's kernel has no FUSE: expected it built in (CONFIG_FUSE_FS=y) or as a \
         module in {folder}/kernel/fs/fuse, got: {errno}; use another kernel, such as \
         `dayfly kernel fetch 6.12`"
    )]
    Module {
        /// Where the kernel's modules are.
        folder: String,
        /// The kernel's error.
        errno: Errno,
    },
    /// mount(2) failed.
    #[error("mount {}: {errno}", path.display())]
    Mount {
        /// The folder.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
}

impl From<&MountError> for Failure {
    fn from(error: &MountError) -> Self {
        let code = match error {
            MountError::Path { .. } | MountError::Name(_) | MountError::Full(_) => {
                FailureCode::Invalid
            }
            MountError::Folder { source, .. } => match source.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => FailureCode::NoSpace,
                _ => FailureCode::Io,
            },
            MountError::Device { .. } | MountError::Module { .. } | MountError::Mount { .. } => {
                FailureCode::Io
            }
        };
        Self { code, message: error.to_string() }
    }
}

/// A file system that this agent has mounted.
#[derive(Debug)]
pub(super) struct Mounted {
    /// Where, without links.
    pub(super) path: PathBuf,
    /// The mount's id in [`MOUNTS`]; `None` if the list does not have it.
    id: Option<u64>,
}

/// Whether a path can be a mount point: absolute, below the root, and the same whether or not the
/// kernel resolves it.
fn is_place(path: &str) -> bool {
    let mut names = path.split('/').filter(|name| !name.is_empty() && *name != ".").peekable();
    path.starts_with('/')
        && path.len() < 4096
        && !path.contains('\0')
        && names.peek().is_some()
        && names.all(|name| name != "..")
}

/// Mounts the file system of `device` on the folder `path`, which is made if it is missing.
pub(super) fn mount(
    device: &OwnedFd,
    path: &str,
    name: &str,
    read_only: bool,
) -> Result<Mounted, MountError> {
    if !is_place(path) {
        return Err(MountError::Path { path: path.chars().take(200).collect() });
    }
    let source = CString::new(name).map_err(|_| MountError::Name(name.to_owned()))?;
    let folder = |source| MountError::Folder { path: path.into(), source };
    std::fs::create_dir_all(path).map_err(folder)?;
    // The list of mounts has paths without links.
    let path = std::fs::canonicalize(path).map_err(folder)?;
    // The server answers with files of one user, to whom the kernel applies their modes.
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    let failed = |errno| MountError::Mount { path: path.clone(), errno };
    let options = CString::new(options).map_err(|_| failed(Errno::INVAL))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, read_only);
    rustix::mount::mount(source.as_c_str(), &path, c"fuse", flags, options.as_c_str())
        .map_err(failed)?;
    let id = mounts().ok().and_then(|list| top(&list, &path));
    Ok(Mounted { path, id })
}

impl Mounted {
    /// Unmounts it lazily, unless something else is mounted there now.
    pub(super) fn unmount(&self) -> Result<(), String> {
        let list = mounts().map_err(|e| format!("{MOUNTS}: {e}"))?;
        match (top(&list, &self.path), self.id) {
            (Some(top), Some(id)) if top == id => {}
            // The guest has unmounted or moved it.
            (_, Some(id)) if !list.iter().any(|mount| mount.id == id) => return Ok(()),
            _ => return Err("not unmounted: something else is mounted over it".to_owned()),
        }
        rustix::mount::unmount(&self.path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(|errno| format!("unmounting: {errno}"))
    }
}

/// An entry of the list of mounts.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    place: PathBuf,
}

fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read(MOUNTS)?))
}

/// Reads the ids and mount points of a list of mounts, which has a later mount after an earlier
/// one at the same place.
fn parse(list: &[u8]) -> Vec<Mount> {
    let entry = |line: &[u8]| {
        let mut words = line.split(|byte| *byte == b' ');
        let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
        Some(Mount { id, place: unescaped(words.nth(3)?) })
    };
    list.split(|byte| *byte == b'\n').filter_map(entry).collect()
}

/// The path of a word in which the kernel has written some bytes as `\ooo`.
fn unescaped(word: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let digit = |byte: u8| (b'0'..=b'7').contains(&byte).then(|| u32::from(byte - b'0'));
        let code = match (first, after) {
            (b'\\', [a, b, c, ..]) => {
                let digits = digit(*a).zip(digit(*b)).zip(digit(*c));
                digits.and_then(|((a, b), c)| u8::try_from(a * 64 + b * 8 + c).ok())
            }
            _ => None,
        };
        match code {
            Some(code) => {
                bytes.push(code);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsStr::from_bytes(&bytes))
}

/// The id of the mount that a path leads to, if a file system is mounted on the path itself.
fn top(list: &[Mount], path: &Path) -> Option<u64> {
    list.iter().rev().find(|mount| mount.place == path).map(|mount| mount.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::device;

    #[test]
    fn only_places_below_the_root_are_mount_points() {
        for place in ["/data", "/a/b/c", "/a//b/", "/a/./b", "/a..b/..c"] {
            assert!(is_place(place), "{place}");
        }
        let long = format!("/{}", "a".repeat(4096));
        for place in ["", "/", "//", "/.", "data", "./data", "/a/../b", "/..", "/a\0b", &long] {
            assert!(!is_place(place), "{place:?}");
        }
    }

    #[test]
    fn the_last_mount_at_a_place_is_on_top() {
        let list = b"22 1 0:21 / /a rw - tmpfs none rw\n\
                     31 22 0:30 / /a\\040b\\134c rw shared:1 - fuse x rw\n\
                     40 22 0:31 / /a rw - fuse x rw\n\
                     x y\n\n7\n\xff\xff \\4";
        let list = parse(list);
        assert_eq!(top(&list, Path::new("/a")), Some(40));
        assert_eq!(top(&list, Path::new("/a b\\c")), Some(31));
        assert_eq!(top(&list, Path::new("/b")), None);
        assert_eq!(unescaped(b"\\777\\08\\"), Path::new("\\777\\08\\"));
    }

    #[test]
    fn a_device_that_is_missing_is_explained() {
        let error = MountError::Module { folder: "/lib/modules/1".into(), errno: Errno::NOENT };
        let text = Failure::from(&error).message;
        assert!(text.contains("CONFIG_FUSE_FS") && text.contains("kernel fetch"), "{text}");
        assert!(device::open().is_ok(), "these tests need /dev/fuse");
    }
}
