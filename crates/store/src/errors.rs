//! The two causes that every operation's error is made of: the host's I/O, and bytes that are not what they should be.

use dayfly_units::sealed::SealError;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) type IoResult<T> = Result<T, IoError>;

/// The host could not do something with a file.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {}", path.display())]
pub struct IoError {
    /// Such as `writing`.
    pub doing: &'static str,
    /// Which file.
    pub path: PathBuf,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

impl IoError {
    /// For `map_err`.
    pub(crate) fn new(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { doing, path: path.to_owned(), source }
    }

    /// Whether the file is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }

    /// Whether the host has no room left for it.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// An error of the host with its cause, in one line.
pub(crate) fn told(e: &IoError) -> String {
    format!("{e}: {}", e.source)
}

/// Stored bytes are damaged, foreign or incomplete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The envelope of a sealed file.
    #[error("{}: {error}", file.display())]
    Seal {
        /// Which file.
        file: PathBuf,
        /// Where in it, expected and got.
        error: SealError,
    },
    /// A field, a size or a digest.
    #[error("{}: {place}: expected {expected}, got {got}", file.display())]
    Content {
        /// Which file.
        file: PathBuf,
        /// Where in it.
        place: String,
        /// What should be there.
        expected: String,
        /// What is.
        got: String,
    },
    /// Something that is referred to is not there.
    #[error("{}: {what}, which {by} needs, is missing", file.display())]
    Missing {
        /// Where it should be.
        file: PathBuf,
        /// What it is, such as `layer 1f…`.
        what: String,
        /// Who refers to it, such as `snapshot base`.
        by: String,
    },
}

impl Damage {
    /// Which file.
    #[must_use]
    pub fn file(&self) -> &Path {
        match self {
            Self::Seal { file, .. } | Self::Content { file, .. } | Self::Missing { file, .. } => file,
        }
    }
}
