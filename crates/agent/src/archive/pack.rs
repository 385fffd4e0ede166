//! Reading a file or a folder into a tar stream.

use super::codes::{code_of, errno_of};
use super::frames::CHUNK_BYTES;
use dayfly_api::agent::{Failure, FailureCode};
use dayfly_archive::pack::{self, Options};
use dayfly_archive::{Writer, xattr};
use dayfly_units::text::{SHORT, escaped};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, statat};
use rustix::io::Errno;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Why a path could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The path is not absolute.
    #[error("read archive: path: expected an absolute one, got {0:?}")]
    Path(String),
    /// The path cannot be opened.
    #[error("read archive: {}: {what}: {errno}", escaped(path, SHORT))]
    Open {
        /// The path.
        path: String,
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// An entry cannot be packed.
    #[error("read archive: {0}")]
    Pack(#[from] pack::PackError),
    /// The archive's end cannot be written.
    #[error("read archive: write: {0}")]
    Write(io::Error),
}

impl From<&PackError> for Failure {
    fn from(error: &PackError) -> Self {
        let code = match error {
            PackError::Path(_) => FailureCode::Invalid,
            PackError::Open { errno, .. }
            | PackError::Pack(pack::PackError::Read { errno, .. }) => code_of(*errno),
            PackError::Pack(pack::PackError::Write { .. }) | PackError::Write(_) => FailureCode::Io,
            PackError::Pack(_) => FailureCode::Invalid,
        };
        Self { code, message: error.to_string() }
    }
}

/// The file or folder to read. Its parent folder is open, so that it cannot be replaced by another.
pub(super) struct Source {
    parent: OwnedFd,
    /// Name below `parent`.
    name: OsString,
    /// First component of the names in the archive.
    shown: Vec<u8>,
}

impl Source {
    /// Opens the parent folder of `path`. Follows links in the path, but not a link at its end,
    /// unless the path ends in `/` or `/.`.
    pub(super) fn open(path: &str) -> Result<Self, PackError> {
        let failed = |what| move |errno| PackError::Open { path: path.to_owned(), what, errno };
        let mut whole = Path::new(path).to_owned();
        if !whole.is_absolute() || path.contains('\0') {
            return Err(PackError::Path(path.chars().take(200).collect()));
        }
        // `/a/b/..` has no last component, so the name is that of the resolved path.
        if whole.file_name().is_none() {
            whole = std::fs::canonicalize(&whole).map_err(|e| failed("open")(errno_of(&e)))?;
        }
        let shown = whole.file_name().map_or(b".".to_vec(), |name| name.as_bytes().to_vec());
        let through = path.ends_with('/') || path.ends_with("/.");
        let (folder, name) = match (whole.parent(), whole.file_name()) {
            (Some(folder), Some(name)) if !through => (folder, name.to_owned()),
            _ => (whole.as_path(), OsString::from(".")),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent =
            rustix::fs::openat(CWD, folder, flags, Mode::empty()).map_err(failed("open"))?;
        statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("look at it"))?;
        Ok(Self { parent, name, shown })
    }
}

/// Writes `path` to `out` as a complete tar stream.
///
/// # Errors
/// [`PackError`]; the bytes written so far are then no archive.
pub fn pack(path: &str, out: &mut dyn Write) -> Result<(), PackError> {
    pack_source(&Source::open(path)?, out)
}

pub(super) fn pack_source(source: &Source, out: &mut dyn Write) -> Result<(), PackError> {
    let options =
        Options { owner: None, special: true, one_file_system: true, xattrs: xattr::portable };
    let mut writer = Writer::new(BufWriter::with_capacity(CHUNK_BYTES, out));
    pack::pack(&mut writer, source.parent.as_fd(), &source.name, &source.shown, options)?;
    writer.finish().map(drop).map_err(PackError::Write)
}
