//! Why a pager ended early, and its messages to the operator.

use dayfly_store::PagesError;
use std::io;

/// Writes a line to stderr. Unlike `eprintln!` it does not panic if stderr is a closed pipe,
/// because a pager outlives its daemon.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "dayfly-pager: {}", format_args!($($arg)*));
    }};
}

/// Why a pager ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A system call failed.
    #[error("{0}: {1}")]
    Step(&'static str, #[source] io::Error),
    /// The daemon's messages do not fit together.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// The part that does not fit.
        place: &'static str,
        /// The allowed values.
        expected: String,
        /// The value received.
        got: String,
    },
    /// The plan is invalid.
    #[error(transparent)]
    Plan(#[from] PagesError),
}

pub(crate) fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> ServeError {
    move |error| ServeError::Step(what, error.into())
}

pub(crate) fn invalid(
    place: &'static str,
    expected: impl ToString,
    got: impl ToString,
) -> ServeError {
    ServeError::Invalid { place, expected: expected.to_string(), got: got.to_string() }
}
