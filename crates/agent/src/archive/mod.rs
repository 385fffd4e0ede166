//! Files in and out, as tar streams in `Data` frames.
//!
//! A read sends `Reply::Ok`, the stream, and `End`; if it fails midway, a `Reply::Err` replaces
//! `End`. Names in the stream start with the last component of the requested path (`/etc` gives
//! `etc/`, `etc/passwd`, …; `/` gives `./…`). Other file systems below the folder (such as /proc)
//! and sockets are left out.
//!
//! A write sends `Reply::Ok` once the folder is open, and takes the stream. It sends a second reply
//! when all content is on disk, or at once after a failure. Nothing appears in the folder before
//! the frame `End`, so a client that disconnects leaves nothing. The agent waits for a silent
//! client as long as the connection lives.

mod codes;
mod frames;
mod pack;
mod unpack;

pub use pack::{PackError, pack};
pub use unpack::{UnpackError, unpack};

use crate::wire::{Conn, TIMEOUT, WireError};
use dayfly_api::agent::{Failure, FrameKind, Reply};
use frames::{CHUNK_BYTES, DataReader, DataWriter};
use std::path::Path;

/// Serves [`dayfly_api::agent::Request::ReadArchive`].
///
/// # Errors
/// [`WireError`] if the client is gone.
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
/// [`WireError`] if the client is gone or sent invalid frames.
pub fn receive(conn: &mut Conn, path: &str) -> Result<(), WireError> {
    let target = match unpack::target(Path::new(path)) {
        Ok(target) => target,
        Err(error) => return conn.reply(&Reply::Err(Failure::from(&error))),
    };
    conn.reply(&Reply::Ok)?;
    let mut reader = DataReader { conn, used: 0, ended: false, lost: None, time_limit: TIMEOUT };
    let result = unpack::unpack_into(&target, &mut reader).and_then(|()| Ok(target.sync()?));
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

#[cfg(test)]
mod tests;
