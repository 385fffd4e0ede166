//! Answers that arrive in pieces.

use super::error::ClientError;
use super::frames::FrameReader;
use super::reason::Reason;
use crate::types::{ERROR_TRAILER, Event, Progress};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;

/// Longest line of a [`ProgressStream`] in bytes.
pub const MAX_LINE_BYTES: usize = crate::types::MAX_PROGRESS_BYTES;

/// The bytes of a log or an archive.
#[derive(Debug)]
pub struct ByteStream(Source);

#[derive(Debug)]
enum Source {
    Body(Incoming),
    Frames(FrameReader),
    /// The last frame was read.
    Ended,
}

impl ByteStream {
    pub(super) fn of_body(answer: Response<Incoming>) -> Self {
        Self(Source::Body(answer.into_body()))
    }

    pub(super) fn of_frames(call: String, io: TokioIo<Upgraded>, vm: &str, reason: Reason) -> Self {
        Self(Source::Frames(FrameReader::new(call, io, vm, reason)))
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// [`ClientError::Refused`] when the daemon could not complete the answer and gives the reason,
    /// [`ClientError::Broken`] when it gives none.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let body = match &mut self.0 {
            Source::Body(body) => body,
            Source::Ended => return Ok(None),
            Source::Frames(frames) => {
                let next = frames.next().await;
                if !matches!(next, Ok(Some(_))) {
                    self.0 = Source::Ended;
                }
                return next;
            }
        };
        loop {
            match body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    Err(frame) => trailer(frame.trailers_ref())?,
                },
                Some(Err(e)) => {
                    return Err(ClientError::Broken {
                        call: "reading the answer".into(),
                        source: e.into(),
                    });
                }
            }
        }
    }
}

/// The error in an answer's trailers, if there is one.
fn trailer(trailers: Option<&HeaderMap>) -> Result<(), ClientError> {
    let Some(value) = trailers.and_then(|all| all.get(ERROR_TRAILER)) else { return Ok(()) };
    Err(match serde_json::from_slice(value.as_bytes()) {
        Ok(error) => ClientError::Refused(error),
        Err(e) => ClientError::Foreign {
            call: "reading the answer".into(),
            expected: "an error in JSON in its trailer",
            got: format!("{value:?}: {e}"),
        },
    })
}

/// The progress reports of a long operation, one JSON object per line.
#[derive(Debug)]
pub struct ProgressStream {
    bytes: ByteStream,
    lines: Lines,
}

impl ProgressStream {
    pub(super) fn new(answer: Response<Incoming>) -> Self {
        Self { bytes: ByteStream::of_body(answer), lines: Lines::default() }
    }

    /// The next report; `None` at the end.
    ///
    /// # Errors
    /// [`ClientError`] if the connection breaks, or if a line has an unknown format.
    pub async fn next(&mut self) -> Result<Option<Progress>, ClientError> {
        loop {
            if let Some(line) = self.lines.take()? {
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                let foreign = |e: serde_json::Error| ClientError::Foreign {
                    call: "a progress line".into(),
                    expected: "one event in JSON",
                    got: format!(
                        "{e} in {}",
                        String::from_utf8_lossy(&line[..line.len().min(200)])
                    ),
                };
                return serde_json::from_slice(&line).map(Some).map_err(foreign);
            }
            match self.bytes.next().await? {
                Some(piece) => self.lines.push(&piece),
                None if self.lines.is_empty() => return Ok(None),
                None => self.lines.push(b"\n"),
            }
        }
    }
}

/// Events of VMs as they happen.
#[derive(Debug)]
pub struct EventStream {
    bytes: ByteStream,
    lines: Lines,
}

impl EventStream {
    pub(super) fn new(answer: Response<Incoming>) -> Self {
        Self { bytes: ByteStream::of_body(answer), lines: Lines::default() }
    }

    /// The next event; `None` at the end.
    ///
    /// # Errors
    /// [`ClientError`] if the connection breaks, or if an event has an unknown format.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            while let Some(line) = self.lines.take()? {
                // Everything else of an event is in its data too.
                let Some(json) = line.strip_prefix(b"data:") else { continue };
                let foreign = |e: serde_json::Error| ClientError::Foreign {
                    call: "an event".into(),
                    expected: "one event in JSON",
                    got: format!(
                        "{e} in {}",
                        String::from_utf8_lossy(&json[..json.len().min(200)])
                    ),
                };
                return serde_json::from_slice(json).map(Some).map_err(foreign);
            }
            match self.bytes.next().await? {
                Some(piece) => self.lines.push(&piece),
                None => return Ok(None),
            }
        }
    }
}

/// Splits a stream of bytes into lines.
#[derive(Debug, Default)]
struct Lines {
    buffer: BytesMut,
    /// Number of bytes at the buffer's start that are known to hold no newline.
    searched: usize,
}

impl Lines {
    fn push(&mut self, piece: &[u8]) {
        self.buffer.extend_from_slice(piece);
    }

    fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    fn take(&mut self) -> Result<Option<BytesMut>, ClientError> {
        if let Some(at) = self.buffer[self.searched..].iter().position(|b| *b == b'\n') {
            let line = self.buffer.split_to(self.searched + at + 1);
            self.searched = 0;
            return Ok(Some(line));
        }
        self.searched = self.buffer.len();
        if self.searched > MAX_LINE_BYTES {
            return Err(ClientError::Foreign {
                call: "a progress line".into(),
                expected: "at most 1 MiB",
                got: format!("{} bytes without a newline", self.searched),
            });
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_whole_however_they_arrive() {
        let text = b"one\ntwo\n\nthree\n";
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            let mut out = Vec::new();
            for part in [&text[..cut], &text[cut..]] {
                lines.push(part);
                while let Some(line) = lines.take().unwrap() {
                    out.push(line.to_vec());
                }
            }
            assert_eq!(out, [&b"one\n"[..], b"two\n", b"\n", b"three\n"]);
            assert!(lines.is_empty());
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; MAX_LINE_BYTES + 1]);
        assert!(matches!(lines.take(), Err(ClientError::Foreign { .. })));
    }
}
