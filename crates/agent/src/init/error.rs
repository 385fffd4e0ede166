//! Why the machine did not boot.

use super::cmdline::OptionError;
use dayfly_api::agent::PORT;
use rustix::io::Errno;
use std::path::PathBuf;

/// Why the machine did not boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file system was not mounted.
    #[error("mount {kind} on {at}: {errno}")]
    Mount {
        /// The kind of file system.
        kind: String,
        /// The mount point.
        at: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
    /// A file operation failed.
    #[error("{path}: {what}: {errno}")]
    File {
        /// The file.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel command line is invalid.
    #[error("kernel command line: {0}")]
    Options(#[from] OptionError),
    /// A module was not loaded.
    #[error("module {path}: {errno}{hint}")]
    Module {
        /// The module's file.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
        /// The usual cause of this error.
        hint: &'static str,
    },
    /// The root device did not appear.
    #[error("root device {device}: expected it within {seconds} s, there are {there}")]
    NoRoot {
        /// The device.
        device: PathBuf,
        /// Seconds of waiting.
        seconds: u64,
        /// The existing block devices.
        there: String,
    },
    /// The root device does not hold the file system.
    #[error("root device {device}: {expected}, got {got}")]
    BadRoot {
        /// The device.
        device: PathBuf,
        /// A description of what is expected.
        expected: &'static str,
        /// The actual content.
        got: String,
    },
    /// The image's init cannot be run.
    #[error("init {program}: {errno}")]
    Init {
        /// The program.
        program: String,
        /// The kernel's error.
        errno: Errno,
    },
    /// The agent cannot listen.
    #[error("vsock port {PORT}: {source}")]
    Listen {
        /// The kernel's error.
        source: std::io::Error,
    },
}
