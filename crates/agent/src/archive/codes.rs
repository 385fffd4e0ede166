//! Failure codes of system calls.

use dayfly_api::agent::FailureCode;
use rustix::io::Errno;
use std::io;

/// The failure code for an error number.
pub(crate) const fn code_of(errno: Errno) -> FailureCode {
    match errno {
        Errno::NOENT | Errno::NOTDIR => FailureCode::NotFound,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => FailureCode::NotPermitted,
        Errno::NOSPC | Errno::DQUOT => FailureCode::NoSpace,
        Errno::INVAL | Errno::NAMETOOLONG => FailureCode::Invalid,
        _ => FailureCode::Io,
    }
}

/// The kernel's error number in an `io::Error`.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
