//! Waiting for the end of a process by its pidfd.

use dayfly_host::process::Process;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
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

/// Returns when `process` has ended; `what` names it in the log. If its pidfd cannot be watched,
/// the process is killed.
pub async fn ended(process: &Arc<Process>, what: &str) {
    let Err(e) = readable(process).await else { return };
    tracing::error!("waiting for {what} {}: {e}; ending it", process.id().pid);
    kill(process, what);
    // A descriptor may be missing; this needs none.
    let process = process.clone();
    let _ = tokio::task::spawn_blocking(move || process.wait(None)).await;
}

/// Kills `process`. A failure is logged, with the process as `what`.
pub fn kill(process: &Process, what: &str) {
    if let Err(e) = process.kill() {
        tracing::error!("ending {what} {}: {e}", process.id().pid);
    }
}
