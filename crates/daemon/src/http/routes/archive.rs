//! Files of a guest, as tar archives.

use crate::base::error::{ApiError, Outcome};
use crate::http::routes::agent_body::AgentBody;
use crate::http::routes::agent_stream::{AgentStream, WRITING};
use crate::http::routes::extract::{Params, Shared, Word};
use crate::http::routes::upgrade::{Stream, Upgrade, wanted};
use crate::vm::Vm;
use crate::vmm::agent_link::{AgentLink, read_frame, write_frame};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use dayfly_api::agent::{Frame, FrameKind, MAX_FRAME_BYTES, Reply, Request};
use dayfly_api::types::{ApiError as ErrorBody, ErrorCode, StreamReply};
use futures::TryStreamExt;
use serde::Deserialize;
use std::io;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The file or folder of an archive request.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ArchiveParams {
    /// Absolute path in the guest.
    path: String,
}

/// Sends `request` to the agent of a running VM, and returns the connection after the reply `Ok`.
async fn open(
    daemon: &crate::daemon::Daemon,
    vm: &Vm,
    request: &Request,
    doing: &'static str,
) -> Outcome<UnixStream> {
    vm.serves("copy files of")?;
    let mut link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
    link.send(request, doing).await?;
    match link.reply(doing).await? {
        Reply::Ok => Ok(link.into_stream()),
        reply => Err(ApiError::new(
            ErrorCode::Guest,
            format_args!("the guest's agent, while {doing}: expected Ok, got {reply:?}"),
        )),
    }
}

/// Reads a file or folder of a guest as a tar archive.
///
/// If the archive cannot be completed, a client that sends `TE: trailers` gets an ApiError in the
/// trailer `dayfly-error`; for any other client the connection ends before the last chunk. If the
/// agent of a running guest sends no frame for 30 s (times the daemon's timeout factor), the
/// archive ends with the code `timeout`.
///
/// With `Upgrade: dayfly-stream` the daemon answers 101 when the agent has accepted the request.
/// Then come `Data` frames, and `End`, or a StreamReply in a `Reply` frame if the archive is not
/// complete. The VM pays for the bytes of such a stream.
#[utoipa::path(
    get,
    operation_id = "read_archive",
    path = "/v1/vms/{vm}/archive",
    params(("vm" = String, Path), ArchiveParams),
    responses(
        (status = 101, body = StreamReply),
        (status = 200, body = Vec<u8>, content_type = "application/x-tar"),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody)
    )
)]
pub async fn read(
    State(daemon): Shared,
    Word(word): Word,
    Params(ArchiveParams { path }): Params<ArchiveParams>,
    upgrade: Result<Upgrade<Stream>, ApiError>,
    headers: HeaderMap,
) -> Outcome<Response> {
    const DOING: &str = "reading an archive";
    let upgrade = wanted(upgrade, &headers)?;
    let vm = daemon.registry.find(&word)?;
    let agent = open(&daemon, &vm, &Request::ReadArchive { path }, DOING).await?;
    let silence = Some(daemon.config.deadlines.agent);
    if let Some(upgrade) = upgrade {
        let stream = AgentStream { vm, agent, doing: DOING, silence, follows: None };
        return Ok(upgrade.then(move |client| stream.read(daemon, client)));
    }
    let body = AgentBody::new(agent, vm, DOING, silence);
    Ok(body.answer("application/x-tar", &headers))
}

/// Unpacks a tar archive into an existing folder of a guest. The answer comes when the content is
/// on the guest's disk.
///
/// With `Upgrade: dayfly-stream` the daemon answers 101 when the agent has accepted the request.
/// The client then sends the archive in `Data` frames, and `End`. It gets a StreamReply in a
/// `Reply` frame. The VM pays for the bytes of such a stream.
#[utoipa::path(
    put,
    operation_id = "write_archive",
    path = "/v1/vms/{vm}/archive",
    params(("vm" = String, Path), ArchiveParams),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses(
        (status = 101, body = StreamReply), (status = 204),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)
    )
)]
pub async fn write(
    State(daemon): Shared,
    Word(word): Word,
    Params(ArchiveParams { path }): Params<ArchiveParams>,
    upgrade: Result<Upgrade<Stream>, ApiError>,
    headers: HeaderMap,
    body: Body,
) -> Outcome<Response> {
    let upgrade = wanted(upgrade, &headers)?;
    let vm = daemon.registry.find(&word)?;
    let agent = open(&daemon, &vm, &Request::WriteArchive { path }, WRITING).await?;
    if let Some(upgrade) = upgrade {
        // The agent is silent until the client has sent everything.
        let stream = AgentStream { vm, agent, doing: WRITING, silence: None, follows: None };
        return Ok(upgrade.then(move |client| stream.write(daemon, client)));
    }
    unpack(&daemon, agent, body).await.map(IntoResponse::into_response)
}

/// Sends the agent a body of HTTP, and waits for its answer.
async fn unpack(
    daemon: &crate::daemon::Daemon,
    stream: UnixStream,
    body: Body,
) -> Outcome<StatusCode> {
    const DOING: &str = WRITING;
    let (mut from_agent, mut to_agent) = stream.into_split();
    let send = async {
        let mut pieces = body.into_data_stream();
        while let Some(piece) = pieces
            .try_next()
            .await
            .map_err(|e| ApiError::invalid(format_args!("request body: {e}")))?
        {
            for chunk in piece.chunks(MAX_FRAME_BYTES) {
                write_frame(&mut to_agent, FrameKind::Data, chunk).await.map_err(broken)?;
            }
        }
        write_frame(&mut to_agent, FrameKind::End, &[]).await.map_err(broken)
    };
    // The agent may refuse while the archive is being sent. There is no time limit, because a
    // client or a disk may be slow; a closed connection at either end ends this.
    let mut answer = std::pin::pin!(read_frame(&mut from_agent, DOING));
    let frame = tokio::select! {
        frame = &mut answer => frame,
        sent = send => match sent {
            Ok(()) => answer.await,
            Err(error) if error.0.code == ErrorCode::Invalid => return Err(error),
            // If sending broke off because the agent gave up, the reason is in the agent's answer.
            Err(error) => match timeout(daemon.config.deadlines.agent, answer).await {
                Ok(frame) => frame,
                Err(_) => return Err(error),
            },
        },
    }?;
    match frame {
        Some(Frame { kind: FrameKind::Reply, body }) => match serde_json::from_slice(&body) {
            Ok(Reply::Ok) => Ok(StatusCode::NO_CONTENT),
            Ok(Reply::Err(failure)) => Err(ApiError::from_agent(&failure)),
            other => Err(ApiError::new(
                ErrorCode::Guest,
                format_args!("the guest's agent, while {DOING}: got {other:?}"),
            )),
        },
        other => {
            let kind = other.map(|frame| frame.kind);
            Err(ApiError::new(
                ErrorCode::Guest,
                format_args!("the guest's agent, while {DOING}: expected a reply, got {kind:?}"),
            ))
        }
    }
}

fn broken(e: io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Guest,
        format_args!("the guest's agent, while writing an archive: {e}"),
    )
}
