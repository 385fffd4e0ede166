//! Errors of saving an image.

use std::io;

/// Why an image was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The disk could not be read.
    #[error("reading the disk at byte {at}: {source}")]
    Disk {
        /// The place of the disk.
        at: u64,
        /// The cause.
        source: io::Error,
    },
    /// The disk is no file system that this crate writes, or it is damaged.
    #[error("the disk, {place}: expected {expected}, got {got}")]
    Format {
        /// The structure of the file system.
        place: String,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// The archive could not be written.
    #[error("writing the archive: {0}")]
    Write(#[from] io::Error),
}

/// A [`SaveError::Format`].
pub(super) fn format<T>(
    place: impl std::fmt::Display,
    expected: impl std::fmt::Display,
    got: impl std::fmt::Display,
) -> Result<T, SaveError> {
    let (place, expected, got) = (place.to_string(), expected.to_string(), got.to_string());
    Err(SaveError::Format { place, expected, got })
}
