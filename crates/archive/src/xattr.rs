//! Extended attributes that are copied with a file.

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, flistxattr_query, fsetxattr};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// Upper limit in bytes for the list of names (Linux: `XATTR_LIST_MAX`) and for a value
/// (`XATTR_SIZE_MAX`).
const MAX_BYTES: usize = 64 << 10;

/// Selects attributes with a meaning on another system: file capabilities, access lists, and those
/// of users and of root. Attributes of overlayfs are excluded, because overlayfs would read the
/// folder as a layer.
#[must_use]
pub fn portable(name: &[u8]) -> bool {
    let starts = |prefix: &[u8]| name.starts_with(prefix);
    let ours = starts(b"user.") || starts(b"security.") || starts(b"trusted.");
    let acl = matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default");
    (ours || acl) && !starts(b"trusted.overlay.") && !starts(b"user.overlay.")
}

/// Selects attributes that do not depend on the system's users: file capabilities, and attributes
/// of users.
#[must_use]
pub fn without_owners(name: &[u8]) -> bool {
    name == b"security.capability" || of_users(name)
}

/// Selects attributes that give a program no further rights: those of users.
#[must_use]
pub fn of_users(name: &[u8]) -> bool {
    name.starts_with(b"user.") && !name.starts_with(b"user.overlay.")
}

/// The attributes of an open file or folder that `keep` selects. The result is empty if the file
/// system has no attributes.
///
/// # Errors
/// The kernel's error.
pub fn read(file: impl AsFd, keep: fn(&[u8]) -> bool) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Errno> {
    let file = file.as_fd();
    let mut found = BTreeMap::new();
    // Most files have no attributes, so the buffer is allocated only if there are some.
    let bytes = match flistxattr_query(file) {
        Ok(0) | Err(Errno::NOTSUP) => return Ok(found),
        Ok(bytes) => bytes,
        Err(errno) => return Err(errno),
    };
    let mut names = vec![0; bytes.min(MAX_BYTES)];
    let have = flistxattr(file, names.as_mut_slice())?;
    names.truncate(have);
    let mut value = vec![0; MAX_BYTES];
    for name in names.split(|b| *b == 0).filter(|name| keep(name)) {
        match fgetxattr(file, name, value.as_mut_slice()) {
            Ok(length) => drop(found.insert(name.to_vec(), value[..length].to_vec())),
            // The attribute was removed meanwhile.
            Err(Errno::NODATA) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(found)
}

/// Sets attributes of an open file or folder. As in container tools, attributes are skipped if the
/// file system lacks them or if this process may not set them.
///
/// # Errors
/// The kernel's error, for instance lack of space.
pub fn write(
    file: impl AsFd,
    xattrs: &BTreeMap<Vec<u8>, Vec<u8>>,
    keep: fn(&[u8]) -> bool,
) -> Result<(), Errno> {
    for (name, value) in xattrs.iter().filter(|(name, _)| keep(name)) {
        match fsetxattr(file.as_fd(), name.as_slice(), value, XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP | Errno::PERM) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
