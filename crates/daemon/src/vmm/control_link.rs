//! Commands for a VMM over its control socket, each on a new connection.

use crate::base::error::ApiError;
use crate::vmm::link::{Link, LinkError};
use dayfly_api::types::ErrorCode;
use dayfly_units::{
    error::chain,
    text::{LONG, escaped},
};
use dayfly_vmm::control::{Answer, Command};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No VMM accepts connections.
    #[error("the VMM, for {command:?}: connecting to its control socket: {source}")]
    Connect {
        /// The command.
        command: Command,
        /// The error of connect(2).
        #[source]
        source: io::Error,
    },
    /// The VMM refused the command, or the conversation failed.
    #[error("the VMM, for {command:?}: {}", escaped(&chain(.source), LONG))]
    Link {
        /// The command.
        command: Command,
        /// The cause.
        source: LinkError,
    },
    /// The VMM answered something other than `Ok`.
    #[error("the VMM, for {command:?}: expected Ok, got {}", escaped(&format!("{:?}", .got), LONG))]
    Unexpected {
        /// The command.
        command: Command,
        /// The answer.
        got: Box<Answer>,
    },
}

impl ControlError {
    /// Whether it is certain that the VMM did nothing.
    #[must_use]
    pub fn was_refused(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Link { source: LinkError::Refused(_), .. })
    }
}

impl From<ControlError> for ApiError {
    fn from(e: ControlError) -> Self {
        Self::new(ErrorCode::Internal, e)
    }
}

/// Sends a command to the VMM behind the control socket at `path`. Waits at most `within` for the
/// answer.
///
/// # Errors
/// [`ControlError`].
pub async fn command(
    path: &Path,
    command: Command,
    within: Duration,
) -> Result<Answer, ControlError> {
    with_fds(path, command, Vec::new(), within).await
}

/// As [`with_fds`], but waits for a VMM that is late until it answers or ends, because a VMM that
/// has not answered may still carry out the command. A wait of more than `within` is logged.
///
/// The calling task must go on without its client, and own the locks of what the command changes
/// ([`crate::ops::section`]).
///
/// # Errors
/// [`ControlError`], without a timeout.
pub async fn decided(
    path: &Path,
    command: Command,
    fds: Vec<OwnedFd>,
    within: Duration,
) -> Result<Answer, ControlError> {
    let mut link = asked(path, &command, fds)?;
    loop {
        match link.answered(within).await {
            Err(late @ LinkError::Timeout(_)) => {
                tracing::warn!(socket = %path.display(), ?command, "{late}: still waiting");
            }
            answer => return answer.map_err(|source| ControlError::Link { command, source }),
        }
    }
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
    let mut link = asked(path, &command, fds)?;
    link.answered(within).await.map_err(|source| ControlError::Link { command, source })
}

/// Sends a command on a new connection.
#[expect(clippy::result_large_err, reason = "as its callers, which are asynchronous")]
fn asked(path: &Path, command: &Command, fds: Vec<OwnedFd>) -> Result<Link, ControlError> {
    let link = Link::connect(path)
        .map_err(|source| ControlError::Connect { command: command.clone(), source })?;
    link.ask(command, &fds)
        .map_err(|source| ControlError::Link { command: command.clone(), source })?;
    Ok(link)
}

/// Sends a command that must be answered with [`Answer::Ok`].
///
/// # Errors
/// [`ControlError`].
pub async fn done(path: &Path, asked: Command, within: Duration) -> Result<(), ControlError> {
    match command(path, asked.clone(), within).await? {
        Answer::Ok => Ok(()),
        got => Err(ControlError::Unexpected { command: asked, got: Box::new(got) }),
    }
}

#[cfg(test)]
#[path = "control_link_tests.rs"]
mod tests;
