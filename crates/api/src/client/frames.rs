//! Archives and outputs in frames (`Upgrade: dayfly-stream`).

use super::error::ClientError;
use super::reason::Reason;
use crate::agent::{FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, Reply, decode_header, encode};
use crate::types::{ApiError, StreamReply};
use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};

type Io = TokioIo<Upgraded>;

/// Read from a connection at once.
const CHUNK_BYTES: usize = (64 << 10) + HEADER_BYTES;

/// Reads frames.
#[derive(Debug)]
pub(super) struct FrameReader {
    io: BufReader<Io>,
    call: String,
    vm: String,
    reason: Reason,
}

impl FrameReader {
    /// Reads what is sent from this VM.
    pub(super) fn new(call: String, io: Io, vm: &str, reason: Reason) -> Self {
        Self { io: BufReader::with_capacity(CHUNK_BYTES, io), call, vm: vm.to_owned(), reason }
    }

    /// The next piece; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let frame = match read(&mut self.io, &self.call).await {
            Ok(frame) => frame,
            Err(error) => return Err(self.reason.instead_of(error, &self.vm).await),
        };
        match frame {
            (FrameKind::Data, body) if !body.is_empty() => Ok(Some(body.into())),
            (FrameKind::End, _) => Ok(None),
            (FrameKind::Reply, body) => match reply(&self.call, &body)? {
                StreamReply::Failed(error) => Err(ClientError::Refused(error)),
                StreamReply::Done {} => Err(foreign(&self.call, "done".to_owned())),
            },
            (kind, body) => Err(foreign(&self.call, format!("{kind:?} with {} bytes", body.len()))),
        }
    }
}

fn foreign(call: &str, got: String) -> ClientError {
    ClientError::Foreign { call: call.to_owned(), expected: "bytes, their end or an error", got }
}

fn broken(call: &str, source: io::Error) -> ClientError {
    ClientError::Broken { call: call.to_owned(), source: source.into() }
}

/// The last frame: from the daemon, or from the agent itself if the daemon has ended meanwhile.
fn reply(call: &str, body: &[u8]) -> Result<StreamReply, ClientError> {
    match (serde_json::from_slice(body), serde_json::from_slice(body)) {
        (Ok(reply), _) => Ok(reply),
        (_, Ok(Reply::Ok)) => Ok(StreamReply::Done {}),
        (_, Ok(Reply::Err(failure))) => Ok(StreamReply::Failed(ApiError::of_agent(&failure))),
        (Err(e), _) => Err(foreign(call, e.to_string())),
    }
}

async fn read(
    io: &mut (impl AsyncRead + Unpin),
    call: &str,
) -> Result<(FrameKind, Vec<u8>), ClientError> {
    let mut header = [0; HEADER_BYTES];
    io.read_exact(&mut header).await.map_err(|e| broken(call, e))?;
    let (kind, length) = decode_header(header).map_err(|e| foreign(call, e.to_string()))?;
    let mut body = vec![0; length];
    io.read_exact(&mut body).await.map_err(|e| broken(call, e))?;
    Ok((kind, body))
}

/// Why bytes were not sent.
#[derive(Debug)]
pub(super) enum NotSent {
    /// The daemon's answer, or the end of its connection.
    Answer(ClientError),
    /// The caller's own body has failed.
    Body(ClientError),
}

impl From<ClientError> for NotSent {
    fn from(error: ClientError) -> Self {
        Self::Answer(error)
    }
}

/// Sends all bytes of `body`, and waits for the reply. The reply may come before if it is an
/// error.
pub(super) async fn send(
    call: &str,
    io: Io,
    mut body: UnsyncBoxBody<Bytes, io::Error>,
) -> Result<(), NotSent> {
    let (mut from, mut to) = tokio::io::split(io);
    let answer = read(&mut from, call);
    tokio::pin!(answer);
    let sending = async {
        while let Some(frame) = body.frame().await {
            // The error is the caller's own: the connection ends, so that the guest keeps nothing.
            let Ok(data) = frame?.into_data() else { continue };
            for piece in data.chunks(MAX_FRAME_BYTES) {
                if to.write_all(&encode(FrameKind::Data, piece)).await.is_err() {
                    return Ok(());
                }
            }
        }
        // After an error of the connection, the answer says why, or meets the error itself.
        let _ = to.write_all(&encode(FrameKind::End, &[])).await;
        let _ = to.flush().await;
        Ok(())
    };
    let (answer, all_sent) = tokio::select! {
        biased;
        answer = &mut answer => (answer?, false),
        sent = sending => {
            sent.map_err(|e: io::Error| NotSent::Body(broken(call, e)))?;
            (answer.await?, true)
        }
    };
    match answer {
        (FrameKind::Reply, body) => match reply(call, &body)? {
            StreamReply::Done {} if all_sent => Ok(()),
            StreamReply::Done {} => Err(foreign(call, "`done` before the end".to_owned()).into()),
            StreamReply::Failed(error) => Err(ClientError::Refused(error).into()),
        },
        (kind, _) => Err(foreign(call, format!("{kind:?}")).into()),
    }
}
