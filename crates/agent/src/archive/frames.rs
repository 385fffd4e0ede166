//! An archive's bytes in `Data` frames.

use crate::wire::{Conn, WireError};
use dayfly_api::agent::{FrameKind, HEADER_BYTES};
use std::io::{self, Read, Write};
use std::time::Duration;

/// Bytes of the archive in one frame.
pub(super) const CHUNK_BYTES: usize = (64 << 10) - HEADER_BYTES;

/// Cuts the written bytes into `Data` frames.
pub(super) struct DataWriter<'a> {
    pub(super) conn: &'a mut Conn,
    pub(super) buffer: Vec<u8>,
    pub(super) lost: Option<WireError>,
}

impl DataWriter<'_> {
    pub(super) fn flush_chunk(&mut self) -> Result<(), WireError> {
        if !self.buffer.is_empty() {
            self.conn.push(FrameKind::Data, &self.buffer);
            self.buffer.clear();
            self.conn.flush()?;
        }
        Ok(())
    }
}

impl Write for DataWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.buffer.len() >= CHUNK_BYTES
            && let Err(error) = self.flush_chunk()
        {
            self.lost = Some(error);
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let some = bytes.get(..CHUNK_BYTES - self.buffer.len()).unwrap_or(bytes);
        self.buffer.extend_from_slice(some);
        Ok(some.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The bytes of `Data` frames, up to `End`.
pub(super) struct DataReader<'a> {
    pub(super) conn: &'a mut Conn,
    pub(super) used: usize,
    pub(super) ended: bool,
    pub(super) lost: Option<WireError>,
    /// Time limit of one wait for a frame, after which the reader waits again.
    pub(super) time_limit: Duration,
}

impl DataReader<'_> {
    fn give_up(&mut self, error: WireError) -> io::Error {
        let text = error.to_string();
        self.lost = Some(error);
        io::Error::new(io::ErrorKind::ConnectionAborted, text)
    }
}

impl Read for DataReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.ended || into.is_empty() {
                return Ok(0);
            }
            if self.lost.is_some() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            match self.conn.wait_frame(self.time_limit) {
                Ok(true) => {}
                Ok(false) => return Err(self.give_up(WireError::Closed)),
                // The client may itself be waiting for its input.
                Err(WireError::Slow(_)) => {}
                Err(error) => return Err(self.give_up(error)),
            }
            match self.conn.frame() {
                Ok(Some((FrameKind::Data, body))) => {
                    let rest = body.get(self.used..).unwrap_or_default();
                    let n = rest.len().min(into.len());
                    into[..n].copy_from_slice(&rest[..n]);
                    let done = n == rest.len();
                    self.used += n;
                    if done {
                        self.used = 0;
                        self.conn.consume();
                    }
                    if n > 0 {
                        return Ok(n);
                    }
                }
                Ok(Some((FrameKind::End, _))) => {
                    self.ended = true;
                    self.conn.consume();
                }
                Ok(Some((got, _))) => {
                    return Err(
                        self.give_up(WireError::Unexpected { expected: "data or end", got })
                    );
                }
                Ok(None) => {}
                Err(error) => return Err(self.give_up(error.into())),
            }
        }
    }
}
