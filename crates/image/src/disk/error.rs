//! Errors of a root disk's build.

use crate::tool::ToolError;
use std::io;
use std::path::{Path, PathBuf};

/// Characters of a name that an error shows.
const MAX_SHOWN: usize = 256;

/// Why a root disk was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A file could not be read or written.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// An external program failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// An archive entry would escape the root, makes no sense, or exceeds a limit.
    #[error("{layer}: entry {entry:?} at byte {at}: expected {expected}, got {got}")]
    Refused {
        /// Name of the layer or archive.
        layer: String,
        /// The entry's name as written in the archive.
        entry: String,
        /// Byte offset of the entry's header in the uncompressed archive.
        at: u64,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A layer or archive cannot be read: truncated, damaged, or not an archive.
    #[error("{layer} at byte {at}: {source}")]
    Stream {
        /// Name of the layer or archive.
        layer: String,
        /// Bytes of the uncompressed archive that were read before the error.
        at: u64,
        /// The cause.
        source: io::Error,
    },
    /// A document of an image (manifest, index, config) has an unexpected value.
    #[error("{file}: {place}: expected {expected}, got {got}")]
    Document {
        /// The document's file or member.
        file: String,
        /// The place in the document.
        place: String,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Content does not match the digest or length in its descriptor.
    #[error("{file}: expected {expected}, got {got}: the image is damaged or was changed")]
    Digest {
        /// The blob's file or member.
        file: String,
        /// Digest or length in the descriptor.
        expected: String,
        /// Digest or length of the content.
        got: String,
    },
    /// The archive holds several images, and the caller selected none.
    #[error(
        "{path}: expected one image, got {count}: choose one of {choices}",
        path = path.display()
    )]
    Ambiguous {
        /// The archive.
        path: PathBuf,
        /// Number of images in the archive.
        count: usize,
        /// Names of the images, for the error message.
        choices: String,
    },
    /// The source is neither a folder, nor a docker archive, nor an OCI layout.
    #[error(
        "{path}: expected a folder, a `docker save` archive, or an OCI layout, got {got}",
        path = path.display()
    )]
    UnknownSource {
        /// The path given.
        path: PathBuf,
        /// Kind of the file that was found.
        got: String,
    },
    /// The content does not fit into the requested size.
    #[error(
        "disk size: expected at least {needed_bytes} bytes for this content, got {asked_bytes}"
    )]
    TooSmall {
        /// Bytes that the content needs.
        needed_bytes: u64,
        /// Bytes that were requested.
        asked_bytes: u64,
    },
    /// The name of a suite or package is one that apt would take for an option or a pattern.
    #[error(
        "{what} {got:?}: expected lower-case letters, digits, '+', '.', '-', starting with a \
         letter or digit"
    )]
    Word {
        /// `suite` or `package`.
        what: &'static str,
        /// The refused name.
        got: String,
    },
    /// The finished disk differs from its source. This is a bug of this crate or of e2fsprogs.
    #[error("the finished disk: expected {expected}, got {got}")]
    Verify {
        /// What was written.
        expected: String,
        /// What was read back.
        got: String,
    },
}

impl BuildError {
    /// An error for an archive with `count` images that could be meant; `names` are to choose from.
    pub(super) fn ambiguous(
        path: &Path,
        count: usize,
        names: impl Iterator<Item = String>,
    ) -> Self {
        let choices: Vec<String> =
            names.take(64).map(|name| name.chars().take(MAX_SHOWN).collect()).collect();
        Self::Ambiguous { path: path.to_owned(), count, choices: choices.join(", ") }
    }
}

/// Makes a function that turns an I/O error on `path` into a [`BuildError`].
pub(crate) fn on<'p>(
    what: &'static str,
    path: &'p Path,
) -> impl FnOnce(io::Error) -> BuildError + 'p {
    move |source| BuildError::Io { what, path: path.to_owned(), source }
}
