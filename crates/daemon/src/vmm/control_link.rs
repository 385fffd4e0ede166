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
    let mut link = match Link::connect(path) {
        Ok(link) => link,
        Err(source) => return Err(ControlError::Connect { command, source }),
    };
    let asked = link.ask(&command, &fds);
    drop(fds);
    let answer = match asked {
        Ok(()) => link.answered(within).await,
        Err(e) => Err(e),
    };
    answer.map_err(|source| ControlError::Link { command, source })
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
