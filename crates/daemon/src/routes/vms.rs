//! VMs.

use super::{Json, Params, Shared, Word};
use crate::daemon::Daemon;
use crate::error::{Fault, Outcome};
use crate::time::Asked;
use crate::vm::{birth, death, footprint as weigh, inspect as measure, power};
use crate::{fork as forking, ndjson, snapshot as freeze};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use dayfly_api::types::{
    ApiError, CreateRequest, ErrorCode, Footprint, ForkRequest, Forked, List, Progress, SnapshotRequest, Vm,
    VmDetails,
};
use serde::Deserialize;
use std::sync::Arc;

/// Does what must not stop half-way because the client went away.
pub(super) async fn to_the_end(work: impl Future<Output = Outcome<()>> + Send + 'static) -> Outcome<()> {
    tokio::spawn(work)
        .await
        .unwrap_or_else(|e| Err(Fault::internal(format_args!("a step of the daemon ended: {e}"))))
}

/// Which VMs to list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// Those that have ended as well.
    #[serde(default)]
    all: bool,
}

/// VMs, the oldest first.
#[utoipa::path(get, path = "/v1/vms", params(ListParams), responses((status = 200, body = List<Vm>)))]
pub async fn list(State(daemon): Shared, Params(params): Params<ListParams>) -> axum::Json<List<Vm>> {
    let all = daemon.registry.all();
    let items = all.iter().filter(|vm| !vm.leaving() && (params.all || vm.phase().alive()));
    let items = items.map(|vm| vm.shown()).collect();
    axum::Json(List { items })
}

/// Makes and starts a VM; answered when its agent has its identity. When the client goes away before that, so does the VM.
#[utoipa::path(post, path = "/v1/vms", request_body = CreateRequest,
    responses((status = 201, body = Vm), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 422, body = ApiError), (status = 502, body = ApiError),
        (status = 504, body = ApiError), (status = 507, body = ApiError)))]
pub async fn create(
    State(daemon): Shared,
    Json(request): Json<CreateRequest>,
) -> Outcome<(StatusCode, axum::Json<Vm>)> {
    let asked = Asked::now();
    let newborn = tokio::select! {
        newborn = birth::birth(&daemon, asked, birth::Order::create(request)) => newborn?,
        () = daemon.stop.cancelled() => return Err(Fault::new(ErrorCode::Internal, "the daemon was asked to stop")),
    };
    Ok((StatusCode::CREATED, axum::Json(newborn.keep().shown())))
}

/// A VM, measured now.
#[utoipa::path(get, path = "/v1/vms/{vm}", params(("vm" = String, Path, description = "id, unique start of an id, or name")),
    responses((status = 200, body = VmDetails), (status = 404, body = ApiError)))]
pub async fn inspect(State(daemon): Shared, Word(word): Word) -> Outcome<axum::Json<VmDetails>> {
    let vm = daemon.registry.find(&word)?;
    Ok(axum::Json(measure::details(&daemon, &vm).await))
}

/// What a VM holds of its RAM now, by the colours of its snapshot.
#[utoipa::path(get, path = "/v1/vms/{vm}/footprint", params(("vm" = String, Path, description = "id, unique start of an id, or name")),
    responses((status = 200, body = Footprint), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn footprint(State(daemon): Shared, Word(word): Word) -> Outcome<axum::Json<Footprint>> {
    let vm = daemon.registry.find(&word)?;
    weigh::footprint(&daemon, &vm).await.map(axum::Json)
}

/// How to remove a VM.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemoveParams {
    /// Also one that runs.
    #[serde(default)]
    force: bool,
}

/// The VM of that name, if it may be removed.
pub(super) fn removable(daemon: &Daemon, word: &str, force: bool) -> Outcome<Arc<crate::vm::Vm>> {
    let vm = daemon.registry.find(word)?;
    let phase = vm.phase();
    if phase.alive() && !force {
        let message = format!("VM {}: is {phase}; kill it first, or use force", vm.name);
        return Err(Fault::new(ErrorCode::State, message));
    }
    Ok(vm)
}

/// Removes a VM; answered when its memory is free again.
#[utoipa::path(delete, path = "/v1/vms/{vm}", params(("vm" = String, Path), RemoveParams),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn remove(
    State(daemon): Shared,
    Word(word): Word,
    Params(params): Params<RemoveParams>,
) -> Outcome<StatusCode> {
    let vm = removable(&daemon, &word, params.force)?;
    to_the_end(async move { death::remove(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops a VM's vCPUs.
#[utoipa::path(post, path = "/v1/vms/{vm}/pause", params(("vm" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn pause(State(daemon): Shared, Word(word): Word) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    to_the_end(async move { power::pause(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets a VM's vCPUs go on.
#[utoipa::path(post, path = "/v1/vms/{vm}/unpause", params(("vm" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn unpause(State(daemon): Shared, Word(word): Word) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    to_the_end(async move { power::unpause(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends a VM without asking its guest; it stays listed as exited.
#[utoipa::path(post, path = "/v1/vms/{vm}/kill", params(("vm" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn kill(State(daemon): Shared, Word(word): Word) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    if !vm.phase().alive() {
        return Err(Fault::new(ErrorCode::State, format_args!("VM {}: has exited already", vm.name)));
    }
    to_the_end(async move { death::kill(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Snapshots a running VM, which goes on. The answer is one Progress in JSON a line, the last of them `snapshot` or `failed`.
#[utoipa::path(post, path = "/v1/vms/{vm}/snapshot", params(("vm" = String, Path)), request_body = SnapshotRequest,
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"), (status = 404, body = ApiError),
        (status = 409, body = ApiError)))]
pub async fn snapshot(
    State(daemon): Shared,
    Word(word): Word,
    Json(request): Json<SnapshotRequest>,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    Ok(ndjson::stream(daemon.stop.clone(), move |tell| freeze::snapshot(daemon, vm, request, tell)))
}

/// Starts clones of a running VM, which goes on: all of them, or none; answered when each agent has its identity. When the client goes away before that, so
/// do the clones.
#[utoipa::path(post, path = "/v1/vms/{vm}/fork", params(("vm" = String, Path)), request_body = ForkRequest,
    responses((status = 201, body = Forked), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 502, body = ApiError), (status = 504, body = ApiError),
        (status = 507, body = ApiError)))]
pub async fn fork(
    State(daemon): Shared,
    Word(word): Word,
    Json(request): Json<ForkRequest>,
) -> Outcome<(StatusCode, axum::Json<Forked>)> {
    let asked = Asked::now();
    let vm = daemon.registry.find(&word)?;
    let forked = forking::fork(&daemon, &vm, request, asked).await?;
    Ok((StatusCode::CREATED, axum::Json(forked)))
}
