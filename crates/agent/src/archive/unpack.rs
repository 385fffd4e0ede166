//! Writing a tar stream into one folder, atomically.
//!
//! The stream is untrusted; [`dayfly_archive::unpack`] documents how it is confined to the folder.

use super::codes::code_of;
use dayfly_api::agent::{Failure, FailureCode};
use dayfly_archive::unpack::{self, Links, Policy, Stage};
use dayfly_archive::{ArchiveError, EntryPath, Limits, Reader, xattr};
use rustix::io::Errno;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

pub(super) use dayfly_archive::unpack::Target;

const POLICY: Policy = Policy {
    links: Links::Within,
    owners: true,
    mode_mask: 0o7777,
    special: true,
    xattrs: xattr::portable,
};

/// Why a stream was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The target path is not absolute.
    #[error("write archive: folder {0:?}: expected an absolute path")]
    Relative(PathBuf),
    /// The archive is invalid or refused, or a system call failed.
    #[error("write archive: {0}")]
    Unpack(#[from] unpack::UnpackError),
    /// The stream failed after the archive's end.
    #[error("write archive: stream: {0}")]
    Stream(io::Error),
}

impl From<ArchiveError> for UnpackError {
    fn from(error: ArchiveError) -> Self {
        Self::Unpack(error.into())
    }
}

impl From<&UnpackError> for Failure {
    fn from(error: &UnpackError) -> Self {
        let code = match error {
            UnpackError::Unpack(
                unpack::UnpackError::Target { errno, .. }
                | unpack::UnpackError::Write { errno, .. },
            ) => code_of(*errno),
            UnpackError::Unpack(unpack::UnpackError::Archive(ArchiveError::Write {
                cause,
                ..
            })) => code_of(Errno::from_io_error(cause).unwrap_or(Errno::IO)),
            UnpackError::Relative(_) | UnpackError::Unpack(_) | UnpackError::Stream(_) => {
                FailureCode::Invalid
            }
        };
        Self { code, message: error.to_string() }
    }
}

/// Opens the target folder.
pub(super) fn target(path: &Path) -> Result<Target, UnpackError> {
    if !path.is_absolute() {
        return Err(UnpackError::Relative(path.to_owned()));
    }
    Ok(Target::open(path)?)
}

/// Unpacks `stream` into the folder `path`.
///
/// # Errors
/// [`UnpackError`]; nothing was changed, unless a system call failed while entries were moved into
/// place.
pub fn unpack(path: &Path, stream: &mut dyn Read) -> Result<(), UnpackError> {
    unpack_into(&target(path)?, stream)
}

/// Unpacks `stream` into a stage, and moves everything into place at the stream's end.
pub(super) fn unpack_into(target: &Target, stream: &mut dyn Read) -> Result<(), UnpackError> {
    let mut reader = Reader::new(BufReader::with_capacity(64 << 10, stream), Limits::NONE);
    let mut stage = Stage::new(target, POLICY)?;
    while let Some(entry) = reader.next_entry()? {
        let path = EntryPath::parse(&entry.head.path).map_err(|why| entry.refused(why))?;
        stage.add(&mut reader, &entry, &path)?;
    }
    // Reads the padding after the archive's end, up to the frame that ends the stream.
    io::copy(&mut reader.into_inner(), &mut io::sink()).map_err(UnpackError::Stream)?;
    stage.commit()?;
    Ok(())
}
