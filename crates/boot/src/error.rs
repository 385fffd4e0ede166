//! Why a file cannot be booted from.

use std::io;
use std::path::{Path, PathBuf};

/// Why a kernel, its modules or an initramfs cannot be read or built.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file could not be read.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A kernel or program is damaged or has an unsupported format.
    #[error("{path}: {source}", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: FormatError,
    },
    /// A folder does not look like an unpacked kernel package.
    #[error("{path}: expected {expected}, got {got}", path = path.display())]
    Tree {
        /// The file or folder.
        path: PathBuf,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A required module is neither a file nor built into the kernel.
    #[error(
        "{path}: module {module}: expected a file or an entry in modules.builtin, got neither",
        path = path.display()
    )]
    MissingModule {
        /// The folder of the modules.
        path: PathBuf,
        /// The module's name.
        module: String,
    },
    /// A path or its content does not fit into an entry of an initramfs.
    #[error("{path}: too long for a newc archive: expected less than 4 GiB, got {bytes} bytes")]
    TooLong {
        /// The path in the archive.
        path: String,
        /// Length of the path or of the content.
        bytes: usize,
    },
}

/// Why a file is neither a kernel nor a program that can be booted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A field has a value that no supported file has.
    #[error("{field} at byte {at}: expected {expected}, got {got}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Byte offset in the file.
        at: u64,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// The payload's compression is not supported.
    #[error(
        "payload at byte {at}: compression {name} is not supported; expected zstd, lz4, gzip, xz \
         or none. Unpack it with the kernel's scripts/extract-vmlinux and give the vmlinux"
    )]
    Compression {
        /// Byte offset in the file.
        at: u64,
        /// Name of the compression.
        name: String,
    },
    /// The payload is damaged.
    #[error("payload at byte {at}: {what}")]
    Payload {
        /// Byte offset in the file.
        at: u64,
        /// The decoder's message.
        what: String,
    },
}

/// Makes a [`BootError::Io`] from the error of the operation `what` on `path`.
pub(crate) fn on<'p>(what: &'static str, path: &'p Path) -> impl Fn(io::Error) -> BootError + 'p {
    move |source| BootError::Io { what, path: path.to_owned(), source }
}
