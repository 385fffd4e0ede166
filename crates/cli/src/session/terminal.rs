//! The user's terminal: raw while a program uses it, and always restored.

use dayfly_api::agent::WindowSize;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io;

/// A terminal in raw mode. Dropping the value restores the mode, at every kind of exit except
/// SIGKILL.
pub struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Switches the terminal on standard input to raw mode, so that every key goes to the program.
    /// Returns `None` if standard input is no terminal.
    ///
    /// # Errors
    /// If the terminal refuses the mode.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = rustix::stdio::stdin();
        if !isatty(stdin) {
            return Ok(None);
        }
        let before = tcgetattr(stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        let guard = Self { before };
        tcsetattr(stdin, OptionalActions::Drain, &raw)?;
        Ok(Some(guard))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // The call fails if the terminal itself is gone, and then there is nothing to restore.
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &self.before);
    }
}

impl std::fmt::Debug for RawTerminal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RawTerminal")
    }
}

/// The window size of the first standard stream that is a terminal.
#[must_use]
pub fn window_size() -> Option<WindowSize> {
    let (stdin, stdout, stderr) =
        (rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr());
    [stdout, stdin, stderr]
        .into_iter()
        .find_map(|fd| tcgetwinsize(fd).ok())
        .filter(|size| size.ws_row > 0 && size.ws_col > 0)
        .map(|size| WindowSize { rows: size.ws_row, cols: size.ws_col })
}

/// A mask with bit n - 1 set for every signal n that this process ignores since its start.
pub(super) fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status)
}

fn ignored_in(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        // SIGHUP (1) and SIGPIPE (13).
        let status =
            "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t00\n";
        assert_eq!(ignored_in(status), 0x1001);
        assert_eq!(ignored_in(""), 0);
    }
}
