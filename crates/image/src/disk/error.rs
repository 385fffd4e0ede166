//! Why a root disk was not built.

use crate::tool::ToolError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a root disk was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A file could not be read or written.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// An external program failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// An archive holds something that would escape, does not make sense, or is too much.
    #[error("{layer}: entry {entry:?} at byte {at}: expected {expected}, got {got}")]
    Refused {
        /// The layer's or archive's name.
        layer: String,
        /// The entry's name as it is in the archive.
        entry: String,
        /// Where the entry's header begins in the (uncompressed) archive.
        at: u64,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A layer or archive cannot be read: truncated, damaged, or not an archive.
    #[error("{layer} at byte {at}: {source}")]
    Stream {
        /// The layer's or archive's name.
        layer: String,
        /// Bytes read of the (uncompressed) archive so far.
        at: u64,
        /// Why.
        source: io::Error,
    },
    /// A document of an image (manifest, index, config) is not what it should be.
    #[error("{file}: {place}: expected {expected}, got {got}")]
    Document {
        /// The document.
        file: String,
        /// Where in it.
        place: String,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Content does not have the digest or length by which it was asked for.
    #[error("{file}: expected {expected}, got {got}: the image is damaged or was changed")]
    Digest {
        /// The blob.
        file: String,
        /// Digest or length asked for.
        expected: String,
        /// Digest or length found.
        got: String,
    },
    /// The archive holds several images and none was named.
    #[error("{path}: expected one image, got {count}: choose one of {choices}", path = path.display())]
    Ambiguous {
        /// The archive.
        path: PathBuf,
        /// How many it holds.
        count: usize,
        /// Their names.
        choices: String,
    },
    /// The source is neither a folder, nor a docker archive, nor an OCI layout.
    #[error("{path}: expected a folder, a `docker save` archive, or an OCI layout, got {got}", path = path.display())]
    UnknownSource {
        /// The path given.
        path: PathBuf,
        /// What it is.
        got: String,
    },
    /// The content does not fit into the size asked for.
    #[error("disk size: expected at least {needed_bytes} bytes for this content, got {asked_bytes}")]
    TooSmall {
        /// What the content needs.
        needed_bytes: u64,
        /// What was asked for.
        asked_bytes: u64,
    },
    /// A name of a suite or package that apt would read as something else.
    #[error(
        "{what} {got:?}: expected lower-case letters, digits, '+', '.', '-', starting with a letter or digit"
    )]
    Word {
        /// Suite or package.
        what: &'static str,
        /// What was given.
        got: String,
    },
    /// The finished disk is not what was asked for; a fault of this program or of e2fsprogs.
    #[error("the finished disk: expected {expected}, got {got}")]
    Verify {
        /// What was put in.
        expected: String,
        /// What is in it.
        got: String,
    },
}

/// Turns an I/O error on `path` into a [`BuildError`].
pub(crate) fn on<'p>(what: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> BuildError + 'p {
    move |source| BuildError::Io { what, path: path.to_owned(), source }
}
