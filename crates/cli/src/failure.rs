//! Exit codes, docker's: the program's own; 125: dayfly failed; 126, 127: the program cannot be run, is not there; 128 + signal.

use dayfly_api::agent::Exit;
use dayfly_api::client::ClientError;
use dayfly_api::types::ErrorCode;
use std::io;

/// dayfly, not the program, failed.
pub const DAYFLY: u8 = 125;
/// The program is there and cannot be run.
pub const NOT_EXECUTABLE: u8 = 126;
/// There is no such program.
pub const NOT_FOUND: u8 = 127;
/// Plus the signal that ended the program.
pub const SIGNAL: u8 = 128;
const SIGPIPE: u8 = 13;

/// The exit code for how a program ended.
#[must_use]
pub fn code_of(exit: Exit) -> u8 {
    match (exit.code, exit.signal) {
        // As wait(2) does: the low eight bits.
        (Some(code), _) => code.to_le_bytes()[0],
        (None, Some(signal)) => u8::try_from(signal).map_or(u8::MAX, |s| SIGNAL.saturating_add(s)),
        (None, None) => DAYFLY,
    }
}

/// Says what went wrong, and gives the exit code for it.
#[must_use]
pub fn report(error: &anyhow::Error) -> u8 {
    if error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
        && error.downcast_ref::<ClientError>().is_none()
    {
        // Whoever read our output has seen enough.
        return SIGNAL + SIGPIPE;
    }
    eprintln!("dayfly: {error:#}");
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Connect { .. }) => {
            eprintln!("dayfly: is dayflyd running? `dayfly doctor` tells what this host can do");
        }
        Some(ClientError::Broken { .. }) => {
            eprintln!(
                "dayfly: the next command finds the daemon again or starts it; `dayfly ps -a` shows what lives"
            );
        }
        Some(ClientError::Refused(refusal)) => match refusal.code {
            ErrorCode::ProgramNotFound => return NOT_FOUND,
            ErrorCode::ProgramNotExecutable => return NOT_EXECUTABLE,
            _ => {}
        },
        _ => {}
    }
    DAYFLY
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::ApiError;

    #[test]
    fn codes_are_dockers() {
        let exit = |code, signal| Exit { code, signal, timed_out: false };
        assert_eq!(code_of(exit(Some(0), None)), 0);
        assert_eq!(code_of(exit(Some(42), None)), 42);
        assert_eq!(code_of(exit(Some(256 + 7), None)), 7);
        assert_eq!(code_of(exit(None, Some(9))), 137);
        assert_eq!(code_of(exit(None, Some(1000))), 255);
        let refused = |code| report(&ClientError::Refused(ApiError { code, message: "x".into() }).into());
        assert_eq!(refused(ErrorCode::ProgramNotFound), 127);
        assert_eq!(refused(ErrorCode::ProgramNotExecutable), 126);
        assert_eq!(refused(ErrorCode::NotFound), 125);
        assert_eq!(report(&io::Error::from(io::ErrorKind::BrokenPipe).into()), 141);
    }
}
