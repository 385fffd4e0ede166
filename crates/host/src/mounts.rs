//! Listing and detaching the mounts of this mount namespace, from `/proc/self/mountinfo` (proc(5)).

use rustix::mount::{UnmountFlags, unmount};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Mount points at or below `folder`, in mount order. A point with a second mount on top appears
/// twice.
///
/// # Errors
/// The table cannot be read.
pub fn below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(points(&table).filter(|p| p.starts_with(folder)).collect())
}

fn points(table: &[u8]) -> impl Iterator<Item = PathBuf> + '_ {
    table
        .split(|&b| b == b'\n')
        .filter_map(|line| line.split(|&b| b == b' ').nth(4))
        .map(|field| PathBuf::from(OsString::from_vec(unescape(field))))
}

/// Decodes the kernel's escapes: space, tab, newline and backslash are `\` and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| first == b'\\').and_then(|digits| {
            digits.iter().try_fold(0_u32, |n, &d| {
                matches!(d, b'0'..=b'7').then(|| n * 8 + u32::from(d - b'0'))
            })
        });
        if let Some(byte) = octal.and_then(|n| u8::try_from(n).ok()) {
            out.push(byte);
            rest = &tail[3..];
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

/// Detaches every mount at or below `folder`, the last one first, busy mounts included
/// (`MNT_DETACH`).
///
/// # Errors
/// The table cannot be read, or a mount cannot be detached: the first such error, after all were
/// tried.
pub fn detach_below(folder: &Path) -> io::Result<()> {
    let mut result = Ok(());
    for point in below(folder)?.iter().rev() {
        let error = match unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // EINVAL: not a mount point any more, for instance because its parent mount was
            // detached.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => continue,
            Err(e) => io::Error::new(
                io::Error::from(e).kind(),
                format!("unmounting {}: {e}", point.display()),
            ),
        };
        result = result.and(Err(error));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_fifth_field_is_the_mount_point() {
        let table = b"22 1 0:5 / / rw - ext4 /dev/vda rw\n23 22 0:6 /x /a\\040b\\134c rw shared:1 \
                      - tmpfs t rw\n\ngarbage\n";
        assert_eq!(
            points(table).collect::<Vec<_>>(),
            [PathBuf::from("/"), PathBuf::from("/a b\\c")]
        );
    }

    #[test]
    fn the_root_is_mounted_and_a_fresh_folder_is_not() {
        assert!(below(Path::new("/")).unwrap().contains(&PathBuf::from("/proc")));
        let folder = tempfile::tempdir().unwrap();
        assert!(below(folder.path()).unwrap().is_empty());
        detach_below(folder.path()).unwrap();
    }

    #[test]
    fn mounts_below_a_folder_are_taken_away_the_last_first() {
        use rustix::mount::{MountFlags, mount};
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for name in ["a b", "a b/c"] {
            let point = folder.path().join(name);
            std::fs::create_dir(&point).unwrap();
            mount("none", &point, "tmpfs", MountFlags::empty(), None).unwrap();
        }
        assert_eq!(below(folder.path()).unwrap().len(), 2);
        detach_below(folder.path()).unwrap();
        assert!(below(folder.path()).unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn any_table_is_read_without_panic(table in prop::collection::vec(any::<u8>(), 0..200)) {
            let _count = points(&table).count();
        }
    }
}
