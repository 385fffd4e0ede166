//! VMs: listing, creating, removing, and operations on one VM.

use crate::base::error::{ApiError, Outcome};
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::http::listing::Paging;
use crate::http::ndjson;
use crate::http::routes::extract::{Json, Key, Params, Peer, Shared, Word};
use crate::model::filter::{VmFilter, bounded, states};
use crate::ops::{
    create, footprint as weigh, fork as forking, inspect as measure, power, remove,
    snapshot as freeze, volumes,
};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use dayfly_api::types::{
    ApiError as ErrorBody, CreateRequest, ErrorCode, Footprint, ForkRequest, Forked, List,
    Progress, SnapshotRequest, Vm, VmDetails, VmState,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs work on its own task, so that it is not stopped half-way if the client goes away.
pub(super) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Outcome<T>> + Send + 'static,
) -> Outcome<T> {
    tokio::spawn(work).await.unwrap_or_else(|e| {
        Err(ApiError::internal(format_args!("a step of the daemon ended: {e}")))
    })
}

/// The most bytes of a VM's labels, keys and values together. The VM's record, which must have
/// room for them, has at most 1 MiB.
const LABELS_BYTES: usize = 64 << 10;

/// Checks the labels of a new VM.
///
/// # Errors
/// They are too long.
pub(super) fn check_labels(labels: &BTreeMap<String, String>) -> Outcome<()> {
    let got: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
    if got <= LABELS_BYTES {
        return Ok(());
    }
    Err(ApiError::invalid(format_args!(
        "labels: expected at most {LABELS_BYTES} bytes of keys and values, got {got}; keep long \
         values elsewhere"
    )))
}

/// Which VMs to list. Of the values of one parameter one must match, of `label` all.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// Include VMs that have ended; implied by the status `exited`.
    #[serde(default)]
    all: bool,
    /// The start of the id.
    #[serde(default)]
    id: Vec<String>,
    /// A part of the name.
    #[serde(default)]
    name: Vec<String>,
    /// The state.
    #[serde(default)]
    #[param(value_type = Vec<VmState>)]
    status: Vec<String>,
    /// A label: KEY or KEY=VALUE.
    #[serde(default)]
    label: Vec<String>,
    /// The name of the snapshot or image that the VM was made from.
    #[serde(default)]
    ancestor: Vec<String>,
    /// The name of the image.
    #[serde(default)]
    image: Vec<String>,
    /// The most items of the answer, 1 to 1000. Without it, the answer has all.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// The `next` of the page before.
    cursor: Option<String>,
}

/// Lists VMs, the oldest first.
#[utoipa::path(
    get,
    operation_id = "list_vms",
    path = "/v1/vms",
    params(ListParams),
    responses((status = 200, body = List<Vm>), (status = 400, body = ErrorBody))
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<ListParams>,
) -> Outcome<axum::Json<List<Vm>>> {
    let paging = Paging::of("VMs", params.limit, params.cursor.as_deref())?;
    let filter = VmFilter {
        ids: bounded("id", params.id)?,
        names: bounded("name", params.name)?,
        states: states(&bounded("status", params.status)?)?,
        labels: bounded("label", params.label)?,
        ancestors: bounded("ancestor", params.ancestor)?,
        images: bounded("image", params.image)?,
    };
    let all = params.all || filter.wants_ended();
    let listed = daemon.registry.all().into_iter();
    let listed = listed.filter(|vm| !vm.leaving() && (all || vm.phase().alive()));
    let listed = listed.map(|vm| vm.shown()).filter(|vm| filter.lists(vm));
    paging.page(listed, |vm| (vm.created_unix_ms, vm.id)).map(axum::Json)
}

/// Creates and starts a VM. The answer comes when its agent has its identity. If the client goes
/// away before, the VM is removed.
#[utoipa::path(
    post,
    operation_id = "create_vm",
    path = "/v1/vms",
    request_body = CreateRequest,
    responses(
        (status = 201, body = Vm), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 422, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 504, body = ErrorBody), (status = 507, body = ErrorBody)
    )
)]
pub async fn create(
    State(daemon): Shared,
    Key(key): Key,
    Peer(caller): Peer,
    Json(request): Json<CreateRequest>,
) -> Outcome<(StatusCode, axum::Json<Vm>)> {
    let asked = Asked::now();
    check_labels(&request.labels)?;
    let volumes = volumes::asked(&daemon, &request.volumes, caller.as_deref())?;
    let order = create::Order { request: key, ..create::Order::create(request, volumes) };
    let guard = tokio::select! {
        guard = create::create(&daemon, asked, order) => guard?,
        () = daemon.stop.cancelled() => return Err(ApiError::stopping()),
    };
    Ok((StatusCode::CREATED, axum::Json(guard.keep().shown())))
}

/// A VM, with figures measured now.
#[utoipa::path(
    get,
    operation_id = "inspect_vm",
    path = "/v1/vms/{vm}",
    params(("vm" = String, Path, description = "id, unique start of an id, or name")),
    responses((status = 200, body = VmDetails), (status = 404, body = ErrorBody))
)]
pub async fn inspect(State(daemon): Shared, Word(word): Word) -> Outcome<axum::Json<VmDetails>> {
    let vm = daemon.registry.find(&word)?;
    Ok(axum::Json(measure::details(&daemon, &vm).await))
}

/// The RAM that a VM holds now, by the colours of its snapshot.
#[utoipa::path(
    get,
    operation_id = "vm_footprint",
    path = "/v1/vms/{vm}/footprint",
    params(("vm" = String, Path, description = "id, unique start of an id, or name")),
    responses(
        (status = 200, body = Footprint), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)
    )
)]
pub async fn footprint(State(daemon): Shared, Word(word): Word) -> Outcome<axum::Json<Footprint>> {
    let vm = daemon.registry.find(&word)?;
    weigh::footprint(&daemon, &vm).await.map(axum::Json)
}

/// Options of a removal.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemoveParams {
    /// Remove the VM in any state. Without it, only a VM that has exited is removed.
    #[serde(default)]
    force: bool,
}

/// The VM named by `word`, if it may be removed.
pub(super) fn removable(daemon: &Daemon, word: &str, force: bool) -> Outcome<Arc<crate::vm::Vm>> {
    let vm = daemon.registry.find(word)?;
    let phase = vm.phase();
    if phase.alive() && !force {
        let message = format!("VM {}: is {phase}; kill it first, or use force", vm.name);
        return Err(ApiError::new(ErrorCode::State, message));
    }
    Ok(vm)
}

/// Removes a VM. The answer comes when its memory is free.
#[utoipa::path(delete, operation_id = "remove_vm",
    path = "/v1/vms/{vm}", params(("vm" = String, Path), RemoveParams),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove(
    State(daemon): Shared,
    Word(word): Word,
    Params(params): Params<RemoveParams>,
) -> Outcome<StatusCode> {
    let vm = removable(&daemon, &word, params.force)?;
    to_the_end(async move { removed(&daemon, &vm, params.force).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a VM. If it ended and was started meanwhile, `force` removes the VM in its place, which
/// has the same id.
async fn removed(daemon: &Arc<Daemon>, vm: &Arc<crate::vm::Vm>, force: bool) -> Outcome<()> {
    match remove::remove(daemon, vm).await {
        Err(_) if force && !daemon.registry.holds(vm) && daemon.registry.has(vm.id) => {
            let now = daemon.registry.find(&vm.id.to_string())?;
            remove::remove(daemon, &now).await
        }
        done => done,
    }
}

/// Stops a VM's vCPUs.
#[utoipa::path(post, operation_id = "pause_vm",
    path = "/v1/vms/{vm}/pause", params(("vm" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn pause(State(daemon): Shared, Word(word): Word) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    to_the_end(async move { power::pause(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a VM's vCPUs again.
#[utoipa::path(post, operation_id = "unpause_vm",
    path = "/v1/vms/{vm}/unpause", params(("vm" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn unpause(State(daemon): Shared, Word(word): Word) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    to_the_end(async move { power::unpause(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Kills a VM without asking its guest. The VM stays listed as exited.
#[utoipa::path(post, operation_id = "kill_vm",
    path = "/v1/vms/{vm}/kill", params(("vm" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn kill(State(daemon): Shared, Word(word): Word) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    if !vm.phase().alive() {
        return Err(ApiError::new(
            ErrorCode::State,
            format_args!("VM {}: has exited already", vm.name),
        ));
    }
    to_the_end(async move { remove::kill(&daemon, &vm).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Snapshots a running VM, which goes on. The answer is one Progress in JSON a line, the last of
/// them `snapshot` or `failed`.
#[utoipa::path(
    post,
    operation_id = "snapshot_vm",
    path = "/v1/vms/{vm}/snapshot",
    params(("vm" = String, Path)),
    request_body = SnapshotRequest,
    responses(
        (status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)
    )
)]
pub async fn snapshot(
    State(daemon): Shared,
    Word(word): Word,
    Json(request): Json<SnapshotRequest>,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    Ok(ndjson::stream(daemon.stop.clone(), move |progress| {
        freeze::snapshot(daemon, vm, request, progress)
    }))
}

/// Starts clones of a running VM, which goes on: all of them or none. The answer comes when each
/// agent has its identity. If the client goes away before, the clones are removed.
#[utoipa::path(
    post,
    operation_id = "fork_vm",
    path = "/v1/vms/{vm}/fork",
    params(("vm" = String, Path)),
    request_body = ForkRequest,
    responses(
        (status = 201, body = Forked), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn fork(
    State(daemon): Shared,
    Word(word): Word,
    Key(key): Key,
    Json(request): Json<ForkRequest>,
) -> Outcome<(StatusCode, axum::Json<Forked>)> {
    let asked = Asked::now();
    check_labels(&request.labels)?;
    let vm = daemon.registry.find(&word)?;
    let forked = forking::fork_once(&daemon, &vm, request, key, asked).await?;
    Ok((StatusCode::CREATED, axum::Json(forked)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_labels_are_refused_with_their_length() {
        let labels = |bytes| [("key".to_owned(), "x".repeat(bytes))].into();
        check_labels(&labels(LABELS_BYTES - 3)).unwrap();
        let refused = check_labels(&labels(LABELS_BYTES - 2)).unwrap_err();
        assert_eq!(refused.0.code, ErrorCode::Invalid);
        assert!(refused.0.message.contains("65536") && refused.0.message.contains("65537"));
    }
}
