//! Errors.

use super::wire::wire;
use crate::agent::{Failure, FailureCode};
use dayfly_units::text::{LONG, escaped};

wire! {
    /// The body of every error, whose HTTP status is 4xx or 5xx.
    pub struct ApiError {
        /// The kind of error, for programs.
        pub code: ErrorCode,
        /// What failed and where, with expected and got, and the next step, for people.
        pub message: String,
    }

    /// Kinds of [`ApiError`].
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum ErrorCode {
        /// The request is invalid (400).
        Invalid,
        /// The VM, image, kernel or snapshot does not exist (404).
        NotFound,
        /// The name is taken, or the object is in use (409).
        Conflict,
        /// Stored bytes are damaged, foreign or incomplete (422).
        Damaged,
        /// The VM is in a state that does not allow the operation (409).
        State,
        /// The host lacks memory, disk space or another resource (507).
        Exhausted,
        /// The guest or its agent failed the request (502).
        Guest,
        /// The program does not exist in the guest; docker's exit code 127. Only in
        /// [`crate::types::RunReply::Failed`].
        ProgramNotFound,
        /// The program exists and cannot be run; docker's exit code 126. Only in
        /// [`crate::types::RunReply::Failed`].
        ProgramNotExecutable,
        /// The request's `Idempotency-Key` belongs to another request (422).
        KeyReused,
        /// The agent did not answer in time (504).
        Timeout,
        /// A bug of the daemon, or a failure of the host (500).
        Internal,
    }
}

impl ApiError {
    /// The error for a failure that a guest's agent reports. It shows every control character that
    /// the guest sends as an escape.
    #[must_use]
    pub fn of_agent(failure: &Failure) -> Self {
        let code = match failure.code {
            FailureCode::Invalid => ErrorCode::Invalid,
            FailureCode::NotFound => ErrorCode::NotFound,
            FailureCode::Sealed => ErrorCode::State,
            FailureCode::NoSpace => ErrorCode::Exhausted,
            FailureCode::NotPermitted | FailureCode::Io => ErrorCode::Guest,
        };
        Self { code, message: format!("in the guest: {}", escaped(&failure.message, LONG)) }
    }
}
