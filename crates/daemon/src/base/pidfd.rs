//! Waiting for the end of a process by its pidfd.

use dayfly_host::process::Process;
use std::io;
use std::os::fd::AsFd;
use tokio::io::unix::AsyncFd;

/// Resolves when `process` has ended, because its pidfd is readable then (`pidfd_open(2)`).
///
/// # Errors
/// The pidfd cannot be duplicated or registered with the runtime.
pub async fn readable(process: &Process) -> io::Result<()> {
    let fd = process.as_fd().try_clone_to_owned()?;
    // SAFETY: `OwnedFd` gives the same open descriptor as long as it lives, and the `AsyncFd` owns
    // the `OwnedFd`.
    let fd = unsafe { AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) }?;
    fd.readable().await.map(|_| ())
}
