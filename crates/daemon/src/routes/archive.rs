//! Files of a guest, as tar.

use super::{Params, Shared, Word};
use crate::error::{Fault, Outcome};
use crate::vm::agent_link::{AgentLink, LinkError, read_frame, write_frame};
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::agent::{Frame, FrameKind, MAX_FRAME_BYTES, Reply, Request};
use dayfly_api::types::{ApiError, ErrorCode};
use futures::TryStreamExt;
use serde::Deserialize;
use std::io;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Which file or folder.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ArchiveParams {
    /// Absolute path in the guest.
    path: String,
}

/// Opens a connection to a running VM's agent and sends it `request`, which is answered with `Ok`.
async fn open(
    daemon: &crate::daemon::Daemon,
    word: &str,
    request: &Request,
    doing: &'static str,
) -> Outcome<UnixStream> {
    let vm = daemon.registry.find(word)?;
    vm.phase().serves("copy files of")?;
    let mut link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
    link.send(request, doing).await?;
    match link.reply(doing).await? {
        Reply::Ok => Ok(link.into_stream()),
        reply => Err(Fault::new(
            ErrorCode::Guest,
            format_args!("the guest's agent, while {doing}: expected Ok, got {reply:?}"),
        )),
    }
}

/// A file or folder of a guest, as a tar archive. An archive that cannot be completed ends the connection before its last chunk.
#[utoipa::path(get, path = "/v1/vms/{vm}/archive", params(("vm" = String, Path), ArchiveParams),
    responses((status = 200, body = Vec<u8>, content_type = "application/x-tar"), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 502, body = ApiError)))]
pub async fn read(
    State(daemon): Shared,
    Word(word): Word,
    Params(ArchiveParams { path }): Params<ArchiveParams>,
) -> Outcome<Response> {
    let stream = open(&daemon, &word, &Request::ReadArchive { path }, "reading an archive").await?;
    let pieces =
        futures::stream::try_unfold(BufReader::with_capacity(MAX_FRAME_BYTES, stream), async |mut agent| {
            let piece = match read_frame(&mut agent, "reading an archive").await.map_err(io::Error::other)? {
                Some(Frame { kind: FrameKind::Data, body }) => Some(Bytes::from(body)),
                Some(Frame { kind: FrameKind::End, .. }) => None,
                Some(Frame { kind: FrameKind::Reply, body }) => {
                    return Err(io::Error::other(String::from_utf8_lossy(&body).into_owned()));
                }
                Some(Frame { kind, .. }) => {
                    return Err(io::Error::other(format!("a frame of kind {kind:?} in an archive")));
                }
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            };
            Ok(piece.map(|piece| (piece, agent)))
        });
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], Body::from_stream(pieces)).into_response())
}

/// Unpacks a tar archive into an existing folder of a guest; answered when it is on the guest's disk.
#[utoipa::path(put, path = "/v1/vms/{vm}/archive", params(("vm" = String, Path), ArchiveParams),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 502, body = ApiError),
        (status = 507, body = ApiError)))]
pub async fn write(
    State(daemon): Shared,
    Word(word): Word,
    Params(ArchiveParams { path }): Params<ArchiveParams>,
    body: Body,
) -> Outcome<StatusCode> {
    const DOING: &str = "writing an archive";
    let stream = open(&daemon, &word, &Request::WriteArchive { path }, DOING).await?;
    let (mut from_agent, mut to_agent) = stream.into_split();
    let send = async {
        let mut pieces = body.into_data_stream();
        while let Some(piece) =
            pieces.try_next().await.map_err(|e| Fault::invalid(format_args!("request body: {e}")))?
        {
            for part in piece.chunks(MAX_FRAME_BYTES) {
                write_frame(&mut to_agent, FrameKind::Data, part).await.map_err(broken)?;
            }
        }
        write_frame(&mut to_agent, FrameKind::End, &[]).await.map_err(broken)
    };
    // The agent may refuse while the archive is still coming.
    let mut answer = std::pin::pin!(read_frame(&mut from_agent, DOING));
    let frame = tokio::select! {
        frame = &mut answer => frame,
        // Where sending broke off because the agent gave up, the reason is in its answer.
        sent = send => match (sent, timeout(daemon.config.deadlines.agent, &mut answer).await) {
            (Err(fault), _) if fault.0.code == ErrorCode::Invalid => return Err(fault),
            (Err(fault), Err(_)) => return Err(fault),
            (_, Ok(frame)) => frame,
            (Ok(()), Err(_)) => Err(LinkError::Timeout { doing: DOING, waited: daemon.config.deadlines.agent }),
        },
    }?;
    match frame {
        Some(Frame { kind: FrameKind::Reply, body }) => match serde_json::from_slice(&body) {
            Ok(Reply::Ok) => Ok(StatusCode::NO_CONTENT),
            Ok(Reply::Err(failure)) => Err(Fault::from_agent(&failure)),
            other => Err(Fault::new(
                ErrorCode::Guest,
                format_args!("the guest's agent, while {DOING}: got {other:?}"),
            )),
        },
        other => {
            let kind = other.map(|frame| frame.kind);
            Err(Fault::new(
                ErrorCode::Guest,
                format_args!("the guest's agent, while {DOING}: expected a reply, got {kind:?}"),
            ))
        }
    }
}

fn broken(e: io::Error) -> Fault {
    Fault::new(ErrorCode::Guest, format_args!("the guest's agent, while writing an archive: {e}"))
}
