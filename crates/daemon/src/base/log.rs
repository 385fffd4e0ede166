//! The daemon's log: one line on standard error for each event.
//!
//! An event may quote a guest, its VMM or an image. Control characters and newlines are escaped, so
//! quoted text cannot begin a line or control a terminal. There are no colours.

use dayfly_units::text::escaped;
use std::io::{self, Write};
use tracing_subscriber::EnvFilter;

/// The most characters of a line.
const LINE: usize = 8 << 10;

/// Installs the logger. `RUST_LOG` selects the events; the default is `info`.
pub fn begin() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let writer = || Lines(io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(writer).init();
}

/// A writer that turns each event into one escaped line.
struct Lines<W>(W);

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = event.strip_suffix(b"\n").unwrap_or(event);
        // One write for each event, so that lines of several threads do not mix.
        self.0.write_all(format!("{}\n", escaped(text, LINE)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::text::is_unsafe;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_line_without_control_characters() {
        let memory = Memory::default();
        let to = memory.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || Lines(to.clone()));
        let hostile = "x\x1b]52;c;bW9v\x07\n2026-11-25T00:00:00Z  INFO forged\r\u{9b}2J \u{202e}";
        tracing::subscriber::with_default(subscriber.finish(), || {
            tracing::info!(name = %hostile, "ended: {hostile}");
            tracing::error!("{}", "y".repeat(1 << 20));
            tracing::warn!("after");
        });
        let text = String::from_utf8(memory.0.lock().unwrap().clone()).unwrap();
        assert!(!text.contains(|c| is_unsafe(c) && c != '\n'), "{text:?}");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[0].contains("INFO") && lines[0].matches(r"bW9v\x07\n2026").count() == 2,
            "{text}"
        );
        assert!(lines[1].chars().count() == LINE && lines[2].contains("WARN"), "{text}");
    }
}
