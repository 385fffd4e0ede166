//! Names of entries.

use crate::error::{Refusal, refuse};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Longest name of an entry or target of a link, in bytes (Linux: `PATH_MAX` including NUL).
pub const MAX_PATH_BYTES: usize = 4095;
/// Longest component in bytes (`NAME_MAX`; ext4: `EXT4_NAME_LEN`).
pub const MAX_NAME_BYTES: usize = 255;
/// Upper limit for the components of a name.
pub const MAX_DEPTH: usize = 512;

/// The components of a path. Empty components and `.` are left out; `..` is kept.
pub fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".")
}

/// An entry's name: its components below the folder that the archive is unpacked into. The name of
/// that folder itself has no components.
///
/// A leading `/` and `.` components are ignored, as in container runtimes. No component is `..`,
/// empty, or contains `/` or NUL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryPath {
    /// The components joined by `/`, without a `/` at either end.
    joined: Vec<u8>,
}

impl EntryPath {
    /// Parses a name from an archive.
    ///
    /// # Errors
    /// [`Refusal`] if the name is empty, contains NUL or `..`, or exceeds a limit for length or
    /// depth.
    pub fn parse(name: &[u8]) -> Result<Self, Refusal> {
        if name.is_empty() || name.contains(&0) {
            return refuse("a path", "an empty name or one with a NUL byte");
        }
        if name.len() > MAX_PATH_BYTES {
            let got = format!("{} bytes", name.len());
            return refuse(format!("a path of at most {MAX_PATH_BYTES} bytes"), got);
        }
        let parts: Vec<&[u8]> = components(name).collect();
        if parts.contains(&b"..".as_slice()) {
            return refuse("a path without '..'", "a path that may leave its folder");
        }
        if let Some(long) = parts.iter().find(|p| p.len() > MAX_NAME_BYTES) {
            let expected = format!("names of at most {MAX_NAME_BYTES} bytes");
            return refuse(expected, format!("one of {} bytes", long.len()));
        }
        if parts.len() > MAX_DEPTH {
            return refuse(
                format!("at most {MAX_DEPTH} folders deep"),
                format!("{} deep", parts.len()),
            );
        }
        Ok(Self { joined: parts.join(&b'/') })
    }

    /// Whether this is the folder that the archive is unpacked into.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.joined.is_empty()
    }

    /// The components; none for the root.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        components(&self.joined)
    }

    /// The folder and the last component; `None` for the root.
    #[must_use]
    pub fn split_last(&self) -> Option<(Self, &OsStr)> {
        if self.is_root() {
            return None;
        }
        let cut = self.joined.iter().rposition(|b| *b == b'/');
        let name = &self.joined[cut.map_or(0, |i| i + 1)..];
        let folder = Self { joined: self.joined[..cut.unwrap_or(0)].to_vec() };
        Some((folder, OsStr::from_bytes(name)))
    }

    /// The path in bytes; empty for the root.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.joined
    }

    /// The path for a system call; `.` for the root.
    #[must_use]
    pub fn to_path(&self) -> PathBuf {
        if self.is_root() {
            PathBuf::from(".")
        } else {
            PathBuf::from(OsStr::from_bytes(&self.joined))
        }
    }
}
