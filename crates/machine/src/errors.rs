//! Errors of making, starting and stopping a machine: one enum per operation.

use crate::files::FileError;
use crate::initramfs::BuildError;
use crate::layout::MAX_SOCKET_PATH_BYTES;
use crate::share::ShareError;
use std::io;
use std::path::PathBuf;

/// Why a machine could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// No machine was made in this home.
    #[error("{0}: no machine there; make one first (machine init)")]
    None(PathBuf),
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Kernel or initramfs could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A folder cannot be shared.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// A number is out of its range.
    #[error("{what}: expected {expected}, got {got}")]
    Option {
        /// Name of the option.
        what: &'static str,
        /// The allowed range.
        expected: String,
        /// The given value.
        got: u64,
    },
    /// The path is too long for a unix socket.
    #[error(
        "{path}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes, this has {length}; \
         use a shorter home"
    )]
    Path {
        /// Path of the socket.
        path: PathBuf,
        /// Length of the path in bytes.
        length: usize,
    },
    /// The disk could not be made.
    #[error("mke2fs {path}: {why} (Debian package e2fsprogs)")]
    Disk {
        /// Path of the disk.
        path: PathBuf,
        /// The message of mke2fs.
        why: String,
    },
}

/// Why a machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An operation on a file or lock failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Kernel or initramfs could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A shared folder is gone, or may not be shared.
    #[error("{0} (or make the machine without it: dayfly machine init)")]
    Share(#[from] ShareError),
    /// A program is not installed.
    #[error("{program}: not found (Debian package {package})")]
    Missing {
        /// Name of the program.
        program: &'static str,
        /// The Debian package that contains the program.
        package: &'static str,
    },
    /// The supervisor could not be started.
    #[error("starting the supervisor {program}: {source}")]
    Spawn {
        /// Path of the program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The machine ended before it was ready.
    #[error("the machine did not start: {cause}{tail}")]
    Failed {
        /// The known cause.
        cause: String,
        /// The last lines of the console's and the daemon's logs, with the names of the logs.
        tail: String,
    },
    /// The disk is damaged.
    #[error(
        "{path}: damaged, e2fsck said: {said}\n\
         repair it with e2fsck -y, or remove the machine with all that is on it"
    )]
    Disk {
        /// Path of the disk.
        path: PathBuf,
        /// The output of e2fsck.
        said: String,
    },
    /// The running machine may hold VMs, so no command ends it unasked.
    #[error("{why}; {next}{tail}")]
    Kept {
        /// What was found.
        why: String,
        /// What the user can do.
        next: String,
        /// The last lines of the logs, if they may explain it.
        tail: String,
    },
    /// The running machine could not be stopped for a restart.
    #[error(transparent)]
    Stop(#[from] StopError),
}

/// Why a machine could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// An operation on a file or lock failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A signal could not be sent.
    #[error("process {pid}: {source}")]
    Signal {
        /// Process id of the supervisor.
        pid: i32,
        /// The system's error.
        source: io::Error,
    },
    /// A process of the machine survived SIGKILL.
    #[error(
        "{0}: still held after the supervisor was killed; a process of the machine cannot be ended"
    )]
    Stuck(PathBuf),
}
