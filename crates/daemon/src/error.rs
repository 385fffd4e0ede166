//! What goes wrong, as a client sees it: [`Fault`] is an [`ApiError`] with its HTTP status.
//!
//! Every operation has an error enum of its own next to it; here is where they become answers.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use dayfly_api::agent::{Failure, FailureCode};
use dayfly_api::types::{ApiError, ErrorCode};
use std::fmt;

/// An error on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault(pub ApiError);

/// What an operation gives.
pub type Outcome<T> = Result<T, Fault>;

impl Fault {
    /// An error of this kind with this text.
    pub fn new(code: ErrorCode, message: impl fmt::Display) -> Self {
        Self(ApiError { code, message: message.to_string() })
    }

    /// The request does not make sense.
    pub fn invalid(message: impl fmt::Display) -> Self {
        Self::new(ErrorCode::Invalid, message)
    }

    /// There is no such thing.
    pub fn not_found(message: impl fmt::Display) -> Self {
        Self::new(ErrorCode::NotFound, message)
    }

    /// The name is taken, or the thing is in use.
    pub fn conflict(message: impl fmt::Display) -> Self {
        Self::new(ErrorCode::Conflict, message)
    }

    /// The daemon's or the host's own fault; logged, because the client may not be its owner.
    pub fn internal(message: impl fmt::Display) -> Self {
        let fault = Self::new(ErrorCode::Internal, message);
        tracing::error!("{}", fault.0.message);
        fault
    }

    /// The same error, with what was being done before it.
    #[must_use]
    pub fn during(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// What an agent's refusal is to a client.
    #[must_use]
    pub fn from_agent(failure: &Failure) -> Self {
        let code = match failure.code {
            FailureCode::Invalid => ErrorCode::Invalid,
            FailureCode::NotFound => ErrorCode::NotFound,
            FailureCode::Sealed => ErrorCode::State,
            FailureCode::NoSpace => ErrorCode::Exhausted,
            FailureCode::NotPermitted | FailureCode::Io => ErrorCode::Guest,
        };
        Self::new(code, format_args!("in the guest: {}", failure.message))
    }

    /// What an agent's refusal of an exec is: there the program is what was not found.
    #[must_use]
    pub fn from_exec(failure: &Failure) -> Self {
        match failure.code {
            FailureCode::NotFound => Self::new(ErrorCode::ProgramNotFound, &failure.message),
            FailureCode::NotPermitted => Self::new(ErrorCode::ProgramNotExecutable, &failure.message),
            _ => Self::from_agent(failure),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Fault {}

/// The HTTP status of a kind of error, as [`ErrorCode`] documents it.
#[must_use]
pub fn status(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::Invalid => StatusCode::BAD_REQUEST,
        ErrorCode::NotFound | ErrorCode::ProgramNotFound => StatusCode::NOT_FOUND,
        ErrorCode::Conflict | ErrorCode::State => StatusCode::CONFLICT,
        ErrorCode::Damaged | ErrorCode::ProgramNotExecutable => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorCode::Exhausted => StatusCode::INSUFFICIENT_STORAGE,
        ErrorCode::Guest => StatusCode::BAD_GATEWAY,
        ErrorCode::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ErrorCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        (status(self.0.code), Json(self.0)).into_response()
    }
}

/// An error and its causes in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some errors show their cause themselves.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// Runs blocking work on a thread of its own kind; a panic in it becomes an error of this request.
///
/// # Errors
/// What the work gives, or that it panicked.
pub async fn blocking<T, F>(work: F) -> Outcome<T>
where
    T: Send + 'static,
    F: FnOnce() -> Outcome<T> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(e) => Err(Fault::internal(format_args!("a blocking step of the daemon ended: {e}"))),
    }
}
