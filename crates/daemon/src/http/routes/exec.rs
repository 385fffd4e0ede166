//! Programs in guests, over an upgraded connection.

use crate::base::error::{ApiError, Outcome};
use crate::http::routes::extract::{Params, Peer, Shared, Spec, Word};
use crate::http::routes::upgrade::{Frames, Upgrade, UpgradeToWebSocket};
use crate::http::{session, websocket};
use crate::ops::exec::collected;
use axum::extract::{FromRequest, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{ApiError as ErrorBody, ExecNotice, ExecResult, RunReply, RunRequest};
use serde::Deserialize;

const fn usual_bytes() -> usize {
    1 << 20
}

/// The most bytes that `max_output_bytes` may ask for.
const MOST_BYTES: usize = 4 << 20;

/// Options of an exec without an upgrade.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ExecParams {
    /// The most bytes of each of the two streams that are returned, up to 4 MiB; 1 MiB if not
    /// given. The rest is discarded.
    #[serde(default = "usual_bytes")]
    max_output_bytes: usize,
}

/// Runs a program in a VM. The ExecSpec is the body, and the answer is an ExecResult when the
/// program has ended; if the client goes away before, the program is killed. A detached program is
/// answered at once. Or with `Upgrade: dayfly-exec`: after the 101 the client sends an ExecSpec in
/// a `Request` frame. It gets a RunReply in a `Reply` frame, then output frames and `Exit`. If
/// the VM ends before the program, the last frame is a `Reply` with `failed` instead.
#[utoipa::path(
    post,
    operation_id = "exec_in_vm",
    path = "/v1/vms/{vm}/exec",
    params(("vm" = String, Path), ExecParams),
    request_body(content = ExecSpec,
        description = "as the body, or as a Request frame after the upgrade"),
    responses(
        (status = 101, body = RunReply), (status = 200, body = ExecResult),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn exec(
    State(daemon): Shared,
    Word(word): Word,
    upgrade: Result<Upgrade<Frames>, ApiError>,
    Params(params): Params<ExecParams>,
    request: Request,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    vm.serves("run a program in")?;
    match upgrade {
        Ok(upgrade) => Ok(upgrade.then(move |client| session::exec(daemon, vm, client, None))),
        Err(refused) if request.headers().contains_key(header::UPGRADE) => Err(refused),
        Err(_) => {
            let most = params.max_output_bytes;
            if most > MOST_BYTES {
                return Err(ApiError::invalid(format_args!(
                    "max_output_bytes: expected at most {MOST_BYTES}, got {most}"
                )));
            }
            let Spec(spec, permit) = Spec::from_request(request, &daemon).await?;
            let work = collected(&daemon, &vm, spec, permit, most);
            let done = daemon.stop.run_until_cancelled(work).await;
            Ok(axum::Json(done.ok_or_else(ApiError::stopping)??).into_response())
        }
    }
}

/// Runs a program in a VM over a WebSocket (RFC 6455). The client's first message is an ExecSpec as
/// text. Binary messages have a channel in their first byte: 0 standard input, 1 standard output,
/// 2 standard error. Text messages are ExecControl to the daemon and ExecNotice to the client;
/// docs/http-api.md has the protocol.
#[utoipa::path(
    get,
    operation_id = "exec_over_websocket",
    path = "/v1/vms/{vm}/exec",
    params(("vm" = String, Path)),
    responses(
        (status = 101, body = ExecNotice), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)
    )
)]
pub async fn over_websocket(
    State(daemon): Shared,
    Word(word): Word,
    upgrade: Outcome<UpgradeToWebSocket>,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    vm.serves("run a program in")?;
    Ok(upgrade?.then(move |client| websocket::exec(daemon, vm, client)))
}

/// Clones (or boots) a VM, runs a program in it, and removes it: as exec, with a RunRequest in the
/// first frame. The VM is removed when the connection ends, unless `keep`.
#[utoipa::path(post, operation_id = "run",
    path = "/v1/run",
    request_body(content = RunRequest, description = "as a Request frame after the upgrade"),
    responses((status = 101, body = RunReply), (status = 400, body = ErrorBody)))]
pub async fn run(State(daemon): Shared, Peer(caller): Peer, upgrade: Upgrade<Frames>) -> Response {
    upgrade.then(move |client| session::run(daemon, caller, client))
}

#[cfg(test)]
#[path = "websocket_tests.rs"]
mod websockets;

#[cfg(test)]
#[path = "exec_tests.rs"]
mod tests;
