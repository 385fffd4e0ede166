//! Errors as a client sees them: [`ApiError`] is the [`ErrorBody`] of an answer, and has an HTTP
//! status.
//!
//! Parts of a message may come from a guest, its agent, its VMM or an image. [`ApiError::new`]
//! escapes the whole message. The constructors for an agent's failures also keep the agent's words
//! in one line. The daemon's log escapes what is left ([`crate::base::log`]).
//!
//! Every operation has its own error enum beside it; `From` implementations turn these enums into
//! [`ApiError`].

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use dayfly_api::agent::{Failure, FailureCode, StringsError};
use dayfly_api::types::{ApiError as ErrorBody, ErrorCode};
use dayfly_units::text::{LONG, escaped};
use std::fmt;

/// The most characters of a message, some of which end with the last lines of a console.
const MESSAGE: usize = 16 << 10;

/// An error to be sent to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError(pub ErrorBody);

/// The result of an operation.
pub type Outcome<T> = Result<T, ApiError>;

impl ApiError {
    /// An error with this code and text. Control characters except newline and tab are escaped.
    pub fn new(code: ErrorCode, message: impl fmt::Display) -> Self {
        let message = escaped(&message.to_string(), MESSAGE).keep_lines().to_string();
        Self(ErrorBody { code, message })
    }

    /// The request is wrong ([`ErrorCode::Invalid`]).
    pub fn invalid(message: impl fmt::Display) -> Self {
        Self::new(ErrorCode::Invalid, message)
    }

    /// The named object does not exist ([`ErrorCode::NotFound`]).
    pub fn not_found(message: impl fmt::Display) -> Self {
        Self::new(ErrorCode::NotFound, message)
    }

    /// The name is taken, or the object is in use ([`ErrorCode::Conflict`]).
    pub fn conflict(message: impl fmt::Display) -> Self {
        Self::new(ErrorCode::Conflict, message)
    }

    /// The daemon or the host failed ([`ErrorCode::Internal`]). Also logged, because the client may
    /// not be the operator of the daemon.
    pub fn internal(message: impl fmt::Display) -> Self {
        let error = Self::new(ErrorCode::Internal, message);
        tracing::error!("{}", error.0.message);
        error
    }

    /// The daemon is ending, so the request was given up.
    pub fn stopping() -> Self {
        Self::new(ErrorCode::Internal, "the daemon was asked to stop")
    }

    /// Prefixes the message with the step that failed.
    #[must_use]
    pub fn during(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// The error for a request that the agent refused.
    #[must_use]
    pub fn from_agent(failure: &Failure) -> Self {
        let ErrorBody { code, message } = ErrorBody::of_agent(failure);
        Self::new(code, message)
    }

    /// The error for arguments and an environment that a program cannot have.
    #[must_use]
    pub fn from_strings(error: &StringsError) -> Self {
        let message = format!("exec: {error}");
        match error.is_too_long() {
            true => Self::new(ErrorCode::ProgramNotExecutable, message),
            false => Self::invalid(message),
        }
    }

    /// The error for an exec that the agent refused: here *not found* means the program.
    #[must_use]
    pub fn from_exec(failure: &Failure) -> Self {
        match failure.code {
            FailureCode::NotFound => {
                Self::new(ErrorCode::ProgramNotFound, escaped(&failure.message, LONG))
            }
            FailureCode::NotPermitted => {
                Self::new(ErrorCode::ProgramNotExecutable, escaped(&failure.message, LONG))
            }
            _ => Self::from_agent(failure),
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for ApiError {}

/// The HTTP status of an error code, as [`ErrorCode`] documents it.
#[must_use]
pub fn status(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::Invalid => StatusCode::BAD_REQUEST,
        ErrorCode::NotFound | ErrorCode::ProgramNotFound => StatusCode::NOT_FOUND,
        ErrorCode::Conflict | ErrorCode::State => StatusCode::CONFLICT,
        ErrorCode::Damaged | ErrorCode::ProgramNotExecutable | ErrorCode::KeyReused => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        ErrorCode::Exhausted => StatusCode::INSUFFICIENT_STORAGE,
        ErrorCode::Guest => StatusCode::BAD_GATEWAY,
        ErrorCode::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ErrorCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (status(self.0.code), Json(self.0)).into_response()
    }
}

/// Runs blocking work on Tokio's blocking threads. A panic in it becomes an error of this request.
///
/// # Errors
/// The error of `work`, or that it panicked.
pub async fn blocking<T, F>(work: F) -> Outcome<T>
where
    T: Send + 'static,
    F: FnOnce() -> Outcome<T> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(e) => Err(ApiError::internal(format_args!("a blocking step of the daemon ended: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::text::is_unsafe;

    const HOSTILE: &str = "x\x1b]52;c;bW9v\x07\n2026-11-25 INFO forged \u{9b}2J \u{202e}";

    #[test]
    fn what_an_agent_says_is_escaped_and_stays_in_its_line() {
        for code in [
            FailureCode::Invalid,
            FailureCode::NotFound,
            FailureCode::NotPermitted,
            FailureCode::Io,
        ] {
            let failure = Failure { code, message: HOSTILE.into() };
            for error in [ApiError::from_agent(&failure), ApiError::from_exec(&failure)] {
                assert!(!error.0.message.contains(is_unsafe), "{:?}", error.0.message);
                assert!(
                    error.0.message.ends_with(
                        r"x\x1b]52;c;bW9v\x07\n2026-11-25 INFO forged \u{9b}2J \u{202e}"
                    )
                );
            }
        }
        let long = Failure { code: FailureCode::Io, message: "x".repeat(1 << 20) };
        assert!(ApiError::from_agent(&long).0.message.chars().count() < LONG + 100);
    }

    #[test]
    fn no_message_has_more_than_lines() {
        let error = ApiError::new(ErrorCode::Guest, HOSTILE);
        assert!(!error.0.message.contains(|c| is_unsafe(c) && c != '\n'), "{:?}", error.0.message);
        assert!(
            ApiError::new(ErrorCode::Guest, "y".repeat(1 << 20)).0.message.len() <= MESSAGE + 2
        );
    }
}
