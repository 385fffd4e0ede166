//! Errors of reading an archive.

use dayfly_units::text::{SHORT, escaped};
use std::io;

/// Expected and found values, for an error about the content of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What is accepted.
    pub expected: String,
    /// What was found. Bytes from the archive are escaped.
    pub got: String,
}

/// Returns a [`Refusal`] as an error.
///
/// # Errors
/// Always.
pub fn refuse<T>(expected: impl Into<String>, got: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { expected: expected.into(), got: got.into() })
}

/// Bytes of an archive as text for an error: escaped and cut.
#[must_use]
pub fn show(bytes: &[u8]) -> String {
    escaped(bytes, SHORT).to_string()
}

/// Why an archive cannot be read further; the message names the cause. The reader must not be used
/// after such an error.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The stream failed, or ended too early.
    #[error("byte {at} of the archive: {cause}")]
    Stream {
        /// Number of bytes of the archive that were read before the error.
        at: u64,
        /// The cause.
        cause: io::Error,
    },
    /// An entry is refused.
    #[error(
        "entry \"{}\" at byte {at} of the archive: expected {}, got {}",
        show(entry), why.expected, why.got
    )]
    Refused {
        /// The entry's name as written, or the part of it that is known.
        entry: Vec<u8>,
        /// Byte offset of the entry's header in the archive.
        at: u64,
        /// The reason.
        why: Refusal,
    },
    /// The file that takes an entry's data cannot be written.
    #[error("entry \"{}\": write: {cause}", show(entry))]
    Write {
        /// The entry's name as written.
        entry: Vec<u8>,
        /// The cause.
        cause: io::Error,
    },
}
