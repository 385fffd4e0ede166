//! Errors of kernels' builds.

use crate::disk::BuildError;
use crate::manifest::ManifestError;
use crate::tool::ToolError;
use dayfly_boot::BootError;
use std::io;
use std::path::{Path, PathBuf};

/// Errors of fetching or building a kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
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
    /// The kernel, a module or the agent is missing, damaged or has an unsupported format.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// apt knows no matching kernel package.
    #[error(
        "no package for kernel {version}: expected {expected} in apt's lists, got none; run \
         apt-get update, or add a Debian mirror that has it to /etc/apt/sources.list"
    )]
    NoPackage {
        /// The requested version.
        version: String,
        /// The package name that was looked for.
        expected: String,
    },
    /// The text is not a kernel version.
    #[error("kernel version {0:?}: expected two or three numbers with dots, such as 6.12")]
    Version(String),
    /// The disk of the modules cannot be built.
    #[error("the disk of the kernel's modules")]
    Disk(#[from] BuildError),
    /// The manifest cannot be written.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

pub(crate) fn on<'p>(
    what: &'static str,
    path: &'p Path,
) -> impl FnOnce(io::Error) -> KernelError + 'p {
    move |source| KernelError::Io { what, path: path.to_owned(), source }
}
