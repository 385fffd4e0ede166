//! What the supervisor reports to `start` over a pipe, and why a supervisor fails.

use crate::files::FileError;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};

/// One line of the report pipe to `start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Phase(String),
    Ready,
    Failed(String),
}

/// Why a supervisor failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SupervisorError {
    #[error("orders: {0}")]
    Orders(#[source] serde_json::Error),
    #[error("{what}: {source}")]
    System { what: String, source: io::Error },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{program}: not found (Debian package {package})")]
    Missing { program: &'static str, package: &'static str },
    #[error("{0}")]
    Ended(String),
}

pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> SupervisorError {
    let what = what.into();
    move |source| SupervisorError::System { what, source }
}

/// Sends one line to `start`, which may have ended.
pub(crate) fn report(line: &Report) {
    if let Ok(mut text) = serde_json::to_vec(line) {
        text.push(b'\n');
        drop(io::stdout().write_all(&text).and_then(|()| io::stdout().flush()));
    }
}
