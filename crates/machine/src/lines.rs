//! Lines of the control line.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

/// Splits the control line's bytes into lines.
#[derive(Default)]
pub(crate) struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// Longest line in bytes. The protocol has no longer one, so more bytes without a newline are
    /// dropped.
    const MAX_LINE_BYTES: usize = 4096;

    /// Returns the complete lines that have arrived, and whether more can follow.
    pub(crate) fn read(&mut self, from: &mut UnixStream) -> (Vec<String>, bool) {
        let mut buffer = [0; 1024];
        let count = match from.read(&mut buffer) {
            Ok(count) => count,
            Err(e)
                if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) =>
            {
                return (Vec::new(), true);
            }
            Err(_) => 0,
        };
        self.rest.extend_from_slice(buffer.get(..count).unwrap_or_default());
        let mut lines = Vec::new();
        while let Some(at) = self.rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=at).collect();
            lines.push(String::from_utf8_lossy(line.trim_ascii_end()).into_owned());
        }
        if self.rest.len() > Self::MAX_LINE_BYTES {
            self.rest.clear();
        }
        (lines, count > 0)
    }
}
