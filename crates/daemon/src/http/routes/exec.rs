//! Programs in guests, over an upgraded connection.

use crate::base::error::Outcome;
use crate::http::routes::extract::{Shared, Word};
use crate::http::routes::upgrade::{Frames, Upgrade};
use crate::http::session;
use axum::extract::State;
use axum::response::Response;
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{ApiError as ErrorBody, RunReply, RunRequest};

/// Runs a program in a VM, with `Upgrade: dayfly-exec`. After the 101 the client sends an ExecSpec
/// in a `Request` frame. It gets a RunReply in a `Reply` frame, then output frames and `Exit`. If
/// the VM ends before the program, the last frame is a `Reply` with `failed` instead.
#[utoipa::path(
    post,
    operation_id = "exec_in_vm",
    path = "/v1/vms/{vm}/exec",
    params(("vm" = String, Path)),
    request_body(content = ExecSpec, description = "as a Request frame after the upgrade"),
    responses(
        (status = 101, body = RunReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)
    )
)]
pub async fn exec(
    State(daemon): Shared,
    Word(word): Word,
    upgrade: Upgrade<Frames>,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    vm.serves("run a program in")?;
    Ok(upgrade.then(move |client| session::exec(daemon, vm, client)))
}

/// Clones (or boots) a VM, runs a program in it, and removes it: as exec, with a RunRequest in the
/// first frame. The VM is removed when the connection ends, unless `keep`.
#[utoipa::path(post, operation_id = "run",
    path = "/v1/run",
    request_body(content = RunRequest, description = "as a Request frame after the upgrade"),
    responses((status = 101, body = RunReply), (status = 400, body = ErrorBody)))]
pub async fn run(State(daemon): Shared, upgrade: Upgrade<Frames>) -> Response {
    upgrade.then(move |client| session::run(daemon, client))
}

#[cfg(test)]
#[path = "exec_tests.rs"]
mod tests;
