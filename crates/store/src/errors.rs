//! The two causes of every operation's error: an I/O error of the host, and stored bytes that are
//! not as expected.

use dayfly_units::sealed::SealError;
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) type IoResult<T> = Result<T, IoError>;

/// The host reported an error for a file operation.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {}", path.display())]
pub struct IoError {
    /// The operation, such as `writing`.
    pub doing: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

impl IoError {
    /// Makes a closure for `map_err`.
    pub(crate) fn new(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { doing, path: path.to_owned(), source }
    }

    /// Whether the file does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }

    /// Whether the store is open for reading only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.source.kind() == io::ErrorKind::ReadOnlyFilesystem
    }

    /// Whether the error comes from damage: the disk failed to read the file, the file ends early,
    /// or an entry is of a kind that the store does not create. Any other error is the host's.
    pub(crate) fn is_damage(&self) -> bool {
        let errno = self.source.raw_os_error().map(Errno::from_raw_os_error);
        let of_the_disk = matches!(
            errno,
            Some(
                Errno::IO
                    | Errno::UCLEAN
                    | Errno::BADMSG
                    | Errno::NODATA
                    | Errno::LOOP
                    | Errno::NOTDIR
            )
        );
        let ends_or_differs =
            matches!(self.source.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof);
        of_the_disk || ends_or_differs
    }

    /// Whether the disk is full or a quota is used up.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// Stored bytes are damaged, of another format, or incomplete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// A sealed file's envelope is invalid.
    #[error("{}: {error}", file.display())]
    Seal {
        /// The file.
        file: PathBuf,
        /// The byte offset, the expected value and the value found.
        error: SealError,
    },
    /// A field, a size or a digest is wrong.
    #[error("{}: {place}: expected {expected}, got {got}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// The place in the file.
        place: String,
        /// The expected value.
        expected: String,
        /// The value found.
        got: String,
    },
    /// A referenced file or folder does not exist.
    #[error("{}: {what}, which {by} needs, is missing", file.display())]
    Missing {
        /// The path where it should be.
        file: PathBuf,
        /// What is missing, such as `layer 1f…`.
        what: String,
        /// The object that refers to it, such as `snapshot base`.
        by: String,
    },
}

impl Damage {
    /// Whether another version of dayfly wrote the file, in an encoding that this one does not
    /// read.
    pub(crate) const fn is_version(&self) -> bool {
        matches!(self, Self::Seal { error: SealError::Version { .. }, .. })
    }

    /// The damaged or missing file.
    #[must_use]
    pub fn file(&self) -> &Path {
        match self {
            Self::Seal { file, .. } | Self::Content { file, .. } | Self::Missing { file, .. } => {
                file
            }
        }
    }
}
