//! Why a call failed.

use crate::types::{ApiError, ErrorCode};
use std::io;
use std::path::PathBuf;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error("no daemon answers on {}", socket.display())]
    Connect {
        /// Path of the socket.
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke, or the peer does not speak HTTP.
    #[error("{call}: the connection to the daemon broke")]
    Broken {
        /// Method and path of the call.
        call: String,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon answered with an error.
    #[error("{}", .0.message)]
    Refused(ApiError),
    /// This version of the client does not know the answer's format.
    #[error("{call}: expected {expected}, got {got}; are dayfly and dayflyd of the same version?")]
    Foreign {
        /// Method and path of the call.
        call: String,
        /// What the client expects.
        expected: &'static str,
        /// What the answer holds.
        got: String,
    },
}

impl ClientError {
    /// The kind of the daemon's error; `None` for other failures.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(error) => Some(error.code),
            _ => None,
        }
    }
}
