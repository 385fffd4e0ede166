//! Exit codes as in docker. A program's own code is passed on. 125 means that dayfly failed, 126
//! that the program cannot be run, 127 that it does not exist. 128 + n means that signal n ended
//! the program.

use dayfly_api::agent::Exit;
use dayfly_api::client::ClientError;
use dayfly_api::types::ErrorCode;
use dayfly_units::text::escaped;
use std::io;

/// dayfly failed, not the program.
pub const DAYFLY: u8 = 125;
/// The program exists and cannot be run.
pub const NOT_EXECUTABLE: u8 = 126;
/// The program does not exist.
pub const NOT_FOUND: u8 = 127;
/// Base of the exit code for a program that a signal ended; the signal's number is added.
pub const SIGNAL: u8 = 128;
const SIGPIPE: u8 = 13;
/// Longest message in characters; some messages contain the end of a console.
const MESSAGE: usize = 16 << 10;

/// The exit code for a program's exit.
#[must_use]
pub fn code_of(exit: Exit) -> u8 {
    match (exit.code, exit.signal) {
        // As in wait(2), only the low eight bits count.
        (Some(code), _) => code.to_le_bytes()[0],
        (None, Some(signal)) => u8::try_from(signal).map_or(u8::MAX, |s| SIGNAL.saturating_add(s)),
        (None, None) => DAYFLY,
    }
}

/// Prints the error and returns its exit code.
#[must_use]
pub fn report(error: &anyhow::Error) -> u8 {
    if error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
        && error.downcast_ref::<ClientError>().is_none()
    {
        // The reader of standard output has closed it, which is no failure to report.
        return SIGNAL + SIGPIPE;
    }
    eprintln!("dayfly: {}", shown(error));
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Connect { .. }) => {
            eprintln!("dayfly: is dayflyd running? `dayfly doctor` shows what this host can do");
        }
        Some(ClientError::Broken { .. }) => {
            eprintln!(
                "dayfly: the next command finds the daemon again or starts it; `dayfly ps -a` \
                 shows what lives"
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

/// An error with its causes. A guest, an image or an archive may have written a part of it.
fn shown(error: &anyhow::Error) -> String {
    escaped(&format!("{error:#}"), MESSAGE).keep_lines().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::ApiError;

    #[test]
    fn what_a_guest_says_in_an_error_reaches_no_terminal_as_it_is() {
        let message =
            "in the guest: \x1b]52;c;bW9v\x07 \u{9b}2J \u{202e}x\nthe end of its console:\n\tok"
                .into();
        let error = ClientError::Refused(ApiError { code: ErrorCode::Guest, message });
        let error = anyhow::Error::from(error).context("\x1b]0;title\x07");
        let text = shown(&error);
        assert!(text.contains(r"\x1b]52;c;bW9v\x07 \u{9b}2J \u{202e}x"), "{text}");
        assert!(text.starts_with(r"\x1b]0;title\x07"), "{text}");
        assert!(
            text.ends_with("\nthe end of its console:\n\tok"),
            "lines of a console stay lines: {text}"
        );
        let long = anyhow::anyhow!("x".repeat(1 << 20));
        assert_eq!(shown(&long).chars().count(), MESSAGE);
    }

    #[test]
    fn codes_are_dockers() {
        let exit = |code, signal| Exit { code, signal, timed_out: false };
        assert_eq!(code_of(exit(Some(0), None)), 0);
        assert_eq!(code_of(exit(Some(42), None)), 42);
        assert_eq!(code_of(exit(Some(256 + 7), None)), 7);
        assert_eq!(code_of(exit(None, Some(9))), 137);
        assert_eq!(code_of(exit(None, Some(1000))), 255);
        let refused =
            |code| report(&ClientError::Refused(ApiError { code, message: "x".into() }).into());
        assert_eq!(refused(ErrorCode::ProgramNotFound), 127);
        assert_eq!(refused(ErrorCode::ProgramNotExecutable), 126);
        assert_eq!(refused(ErrorCode::NotFound), 125);
        assert_eq!(report(&io::Error::from(io::ErrorKind::BrokenPipe).into()), 141);
    }
}
