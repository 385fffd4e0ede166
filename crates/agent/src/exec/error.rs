//! Why a program was not started.

use super::spawn::{SpawnError, Step};
use super::users;
use crate::small_file::SmallFileError;
use dayfly_api::agent::{ExecSpec, Failure, FailureCode, kernel_bytes};
use rustix::io::Errno;
use std::ffi::CString;

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request is invalid.
    #[error("exec: {0}")]
    Invalid(String),
    /// The user or group does not exist.
    #[error("exec: {0}")]
    User(#[from] users::UserError),
    /// /etc/passwd or /etc/group cannot be read.
    #[error("exec: {0}")]
    Accounts(#[from] SmallFileError),
    /// No pipe or terminal can be created.
    #[error("exec: {what}: {errno}")]
    Streams {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// A step between clone and exec failed.
    #[error("exec: {what}: {errno}")]
    Spawn {
        /// The operation and its object.
        what: String,
        /// The failed step.
        step: Step,
        /// The kernel's error.
        errno: Errno,
    },
}

impl From<&ExecError> for Failure {
    fn from(error: &ExecError) -> Self {
        let code = match error {
            ExecError::Invalid(_) | ExecError::User(_) => FailureCode::Invalid,
            ExecError::Accounts(_) | ExecError::Streams { .. } => FailureCode::Io,
            ExecError::Spawn { step, errno, .. } => spawn_code(*step, *errno),
        };
        Self { code, message: error.to_string() }
    }
}

/// NotFound is Docker's exit code 127 (missing), NotPermitted its 126 (present but not executable).
fn spawn_code(step: Step, errno: Errno) -> FailureCode {
    match (step, errno) {
        (Step::Exec | Step::Cwd, Errno::NOENT | Errno::NOTDIR) => FailureCode::NotFound,
        (Step::Exec, Errno::IO | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => FailureCode::Io,
        (Step::Exec | Step::Cwd | Step::User, _) => FailureCode::NotPermitted,
        (Step::Clone | Step::Session | Step::Terminal | Step::Streams, _) => FailureCode::Io,
    }
}

/// The error of a failed step of `spec`.
pub(super) fn explain(
    error: SpawnError,
    spec: &ExecSpec,
    program: &str,
    candidates: &[CString],
) -> ExecError {
    let SpawnError { step, errno } = error;
    let there = || candidates.iter().any(|c| rustix::fs::stat(c.as_c_str()).is_ok());
    let what = match step {
        Step::Clone => "clone".to_owned(),
        Step::Session => "new session".to_owned(),
        Step::Terminal => "controlling terminal".to_owned(),
        Step::Streams => "standard streams".to_owned(),
        Step::User => format!("become user {:?}", spec.user),
        Step::Cwd => format!("working directory {:?}", spec.cwd),
        Step::Exec if errno == Errno::NOENT && program.contains('/') && there() => {
            format!("{program:?} is there, but the interpreter or loader that it names is not")
        }
        Step::Exec if errno == Errno::TOOBIG => {
            let arguments = spec.argv.iter().map(String::len);
            let variables = spec.env.iter().map(|(name, value)| name.len() + value.len() + 1);
            let longest = arguments.chain(variables).max().unwrap_or(0);
            format!(
                "{program:?}: E2BIG: expected strings of less than 128 KiB, and 2 MiB of arguments \
                 and environment together (a fourth of the stack's limit), got {longest} bytes in \
                 the longest and {} together",
                kernel_bytes(spec)
            )
        }
        Step::Exec => format!("{program:?}"),
    };
    ExecError::Spawn { what, step, errno }
}
