//! Commands for a VMM, over its control socket, from async code.

use crate::error::{Fault, chain};
use dayfly_api::types::ErrorCode;
use dayfly_vmm::control::{Answer, Client, ClientError, Command};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Why a command was not done.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The conversation with the VMM.
    #[error("the VMM, for {command:?}: {}", chain(.source))]
    Client {
        /// What was asked.
        command: Command,
        /// Why not.
        source: ClientError,
    },
    /// It answered something else.
    #[error("the VMM, for {command:?}: expected Ok, got {got:?}")]
    Unexpected {
        /// What was asked.
        command: Command,
        /// The answer.
        got: Answer,
    },
    /// The thread that asked is gone.
    #[error("the VMM, for {command:?}: the daemon's own thread ended: {cause}")]
    Thread {
        /// What was asked.
        command: Command,
        /// Why.
        cause: String,
    },
}

impl ControlError {
    /// Whether it is certain that nothing was done.
    #[must_use]
    pub fn was_refused(&self) -> bool {
        let Self::Client { source, .. } = self else { return false };
        matches!(source, ClientError::Refused(_) | ClientError::Connect { .. })
    }
}

impl From<ControlError> for Fault {
    fn from(e: ControlError) -> Self {
        Self::new(ErrorCode::Internal, e)
    }
}

/// Asks the VMM behind the control socket at `path`. Waits at most `within` for each answer.
///
/// # Errors
/// [`ControlError`].
pub async fn command(path: &Path, command: Command, within: Duration) -> Result<Answer, ControlError> {
    with_fds(path, command, Vec::new(), within).await
}

/// As [`command`], with descriptors.
///
/// # Errors
/// [`ControlError`].
pub async fn with_fds(
    path: &Path,
    command: Command,
    fds: Vec<OwnedFd>,
    within: Duration,
) -> Result<Answer, ControlError> {
    let (path, asked) = (path.to_owned(), command.clone());
    let ask = tokio::task::spawn_blocking(move || {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        Client::connect(&path, Some(within))?.call(&asked, &fds)
    });
    match ask.await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(ControlError::Client { command, source }),
        Err(e) => Err(ControlError::Thread { command, cause: e.to_string() }),
    }
}

/// Asks for something that is answered with [`Answer::Ok`].
///
/// # Errors
/// [`ControlError`].
pub async fn done(path: &Path, asked: Command, within: Duration) -> Result<(), ControlError> {
    match command(path, asked.clone(), within).await? {
        Answer::Ok => Ok(()),
        got => Err(ControlError::Unexpected { command: asked, got }),
    }
}
