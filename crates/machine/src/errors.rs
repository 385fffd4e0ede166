//! Why making, starting or stopping a machine failed: one enum per operation.

use crate::files::FileError;
use crate::initramfs::BuildError;
use crate::layout::MAX_SOCKET_PATH_BYTES;
use std::io;
use std::path::PathBuf;

/// Why a machine could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Nothing was made here yet.
    #[error("{0}: no machine there; make one first (machine init)")]
    None(PathBuf),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel and the initramfs.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A number that cannot be.
    #[error("{what}: expected {expected}, got {got}")]
    Option {
        /// Which option.
        what: &'static str,
        /// The range.
        expected: String,
        /// The value.
        got: u64,
    },
    /// A path that a unix socket cannot have.
    #[error(
        "{path}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes, this has {length}; use a shorter home"
    )]
    Path {
        /// The socket.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// The disk could not be made.
    #[error("mke2fs {path}: {why} (Debian package e2fsprogs)")]
    Disk {
        /// The disk.
        path: PathBuf,
        /// What it said.
        why: String,
    },
}

/// Why a machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A file or lock.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel and the initramfs.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A program that is not there.
    #[error("{program}: not found (Debian package {package})")]
    Missing {
        /// Which.
        program: &'static str,
        /// Where it comes from.
        package: &'static str,
    },
    /// The supervisor could not be started.
    #[error("starting the supervisor {program}: {source}")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The machine ended before it was ready.
    #[error("the machine did not start: {cause}{tail}")]
    Failed {
        /// What is known.
        cause: String,
        /// The last lines of the console's and the daemon's logs, with their names.
        tail: String,
    },
    /// The disk is damaged.
    #[error(
        "{path}: damaged, e2fsck said: {said}\nrepair it with e2fsck -y, or remove the machine with all that is on it"
    )]
    Disk {
        /// The disk.
        path: PathBuf,
        /// Its words.
        said: String,
    },
    /// The running machine could not be stopped for a restart.
    #[error(transparent)]
    Stop(#[from] StopError),
}

/// Why a machine could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// A file or lock.
    #[error(transparent)]
    File(#[from] FileError),
    /// A signal could not be sent.
    #[error("process {pid}: {source}")]
    Signal {
        /// The supervisor.
        pid: i32,
        /// The system's answer.
        source: io::Error,
    },
    /// Something survived SIGKILL.
    #[error("{0}: still held after the supervisor was killed; a process of the machine cannot be ended")]
    Stuck(PathBuf),
}
