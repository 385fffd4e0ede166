//! Files in and out, as tar streams in `Data` frames.
//!
//! Reading sends `Reply::Ok`, the stream, `End`; where it fails midway, a `Reply::Err` comes in `End`'s place. The
//! names in the stream start with the last component of the path asked for (`/etc` gives `etc/`, `etc/passwd`, …;
//! `/` gives `./…`). Other file systems below the folder (its /proc) are left out, and so are sockets.
//!
//! Writing sends `Reply::Ok` once the folder is open, takes the stream, and sends a second reply when all of it is on
//! disk, or at once where it fails. The stream is not trusted: see [`unpack`].

mod pack;
mod unpack;

pub use pack::{PackError, pack};
pub use unpack::{UnpackError, unpack};

use crate::wire::{Conn, PATIENCE, WireError};
use dayfly_api::agent::{Failure, FailureCode, FrameKind, HEADER_BYTES, Reply};
use rustix::io::Errno;
use std::io::{self, Read, Write};
use std::path::Path;

/// Bytes of archive in one frame.
const CHUNK_BYTES: usize = (64 << 10) - HEADER_BYTES;

/// What kind of failure an error of the system is.
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

/// Serves [`dayfly_api::agent::Request::ReadArchive`].
///
/// # Errors
/// [`WireError`] where the client is gone.
pub fn send(conn: &mut Conn, path: &str) -> Result<(), WireError> {
    let source = match pack::Source::open(path) {
        Ok(source) => source,
        Err(error) => return conn.reply(&Reply::Err(Failure::from(&error))),
    };
    conn.push_json(FrameKind::Reply, &Reply::Ok);
    let mut writer = DataWriter { conn, buffer: Vec::with_capacity(CHUNK_BYTES), lost: None };
    let packed = pack::pack_source(&source, &mut writer);
    let lost = writer.lost.take().or_else(|| writer.flush_chunk().err());
    let conn = writer.conn;
    match (packed, lost) {
        (_, Some(error)) => Err(error),
        (Ok(()), None) => {
            conn.push(FrameKind::End, &[]);
            conn.flush()
        }
        (Err(error), None) => conn.reply(&Reply::Err(Failure::from(&error))),
    }
}

/// Serves [`dayfly_api::agent::Request::WriteArchive`].
///
/// # Errors
/// [`WireError`] where the client is gone or sent no frames.
pub fn receive(conn: &mut Conn, path: &str) -> Result<(), WireError> {
    let target = match unpack::Target::open(Path::new(path)) {
        Ok(target) => target,
        Err(error) => return conn.reply(&Reply::Err(Failure::from(&error))),
    };
    conn.reply(&Reply::Ok)?;
    let mut reader = DataReader { conn, used: 0, ended: false, lost: None };
    let result = unpack::unpack_into(&target, &mut reader).and_then(|()| {
        // What follows the archive's own end (padding) up to the frame that ends the stream.
        io::copy(&mut reader, &mut io::sink()).map_err(UnpackError::Stream)?;
        target.sync()
    });
    let lost = reader.lost.take();
    let ended = reader.ended;
    let conn = reader.conn;
    if let Some(error) = lost {
        return Err(error);
    }
    let reply = result.map_or_else(|e| Reply::Err(Failure::from(&e)), |()| Reply::Ok);
    conn.reply(&reply)?;
    if !ended {
        conn.linger();
    }
    Ok(())
}

/// Cuts what is written into `Data` frames.
struct DataWriter<'a> {
    conn: &'a mut Conn,
    buffer: Vec<u8>,
    lost: Option<WireError>,
}

impl DataWriter<'_> {
    fn flush_chunk(&mut self) -> Result<(), WireError> {
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
struct DataReader<'a> {
    conn: &'a mut Conn,
    used: usize,
    ended: bool,
    lost: Option<WireError>,
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
            match self.conn.wait_frame(PATIENCE) {
                Ok(true) => {}
                Ok(false) => return Err(self.give_up(WireError::Closed)),
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
                    return Err(self.give_up(WireError::Unexpected { expected: "data or end", got }));
                }
                Ok(None) => {}
                Err(error) => return Err(self.give_up(error.into())),
            }
        }
    }
}

#[cfg(test)]
mod tests;
