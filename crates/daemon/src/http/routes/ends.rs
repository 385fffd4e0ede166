//! The end of a VM: by its guest, by its time to live, and waited for. Changes of a VM: of its time
//! to live, and of its egress policy.

use crate::base::error::{ApiError, Outcome};
use crate::http::routes::extract::{Json, Params, Shared, Word};
use crate::http::routes::vms::to_the_end;
use crate::ops::{egress, expiry, stop as ending};
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError as ErrorBody, EgressRequest, ErrorCode, TtlRequest, Vm, VmExit};
use serde::Deserialize;
use std::time::Duration;

/// The longest grace, so that a request ends.
pub(super) const MAX_GRACE: Duration = Duration::from_secs(24 * 3600);

const fn usual_ms() -> u64 {
    10_000
}

/// Options of a stop.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct StopParams {
    /// Time in milliseconds that the guest has to power off, 10 s if not given.
    #[serde(default = "usual_ms")]
    pub(super) grace_ms: u64,
}

/// Asks a VM's guest to power off, and kills the VM if it has not within the grace. The VM stays
/// listed as exited.
#[utoipa::path(post, operation_id = "stop_vm",
    path = "/v1/vms/{vm}/stop", params(("vm" = String, Path), StopParams),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn stop(
    State(daemon): Shared,
    Word(word): Word,
    Params(params): Params<StopParams>,
) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&word)?;
    let grace = Duration::from_millis(params.grace_ms).min(MAX_GRACE);
    to_the_end(async move { ending::stop(&daemon, &vm, grace).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Waits until a VM has ended. The answer comes then, with how it ended.
#[utoipa::path(get, operation_id = "wait_for_vm",
    path = "/v1/vms/{vm}/wait", params(("vm" = String, Path)),
    responses((status = 200, body = VmExit), (status = 404, body = ErrorBody)))]
pub async fn wait(State(daemon): Shared, Word(word): Word) -> Outcome<axum::Json<VmExit>> {
    let vm = daemon.registry.find(&word)?;
    let stopped = || ApiError::new(ErrorCode::Timeout, "the daemon ends before the VM; ask again");
    let exit = daemon.stop.run_until_cancelled(ending::wait(&vm)).await;
    exit.map(axum::Json).ok_or_else(stopped)
}

/// Changes a VM's time to live, counted from now on. The answer is the VM.
#[utoipa::path(put, operation_id = "set_ttl_of_vm",
    path = "/v1/vms/{vm}/ttl", params(("vm" = String, Path)), request_body = TtlRequest,
    responses((status = 200, body = Vm), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn set_ttl(
    State(daemon): Shared,
    Word(word): Word,
    Json(request): Json<TtlRequest>,
) -> Outcome<axum::Json<Vm>> {
    let vm = daemon.registry.find(&word)?;
    let same = vm.clone();
    to_the_end(async move { expiry::change(&daemon, &same, request.ttl_ms).await }).await?;
    Ok(axum::Json(vm.shown()))
}

/// Changes what a VM reaches outside its network. Open connections that the new policy forbids are
/// cut. The answer is the VM.
#[utoipa::path(put, operation_id = "set_egress_of_vm",
    path = "/v1/vms/{vm}/egress", params(("vm" = String, Path)), request_body = EgressRequest,
    responses((status = 200, body = Vm), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn set_egress(
    State(daemon): Shared,
    Word(word): Word,
    Json(request): Json<EgressRequest>,
) -> Outcome<axum::Json<Vm>> {
    let vm = daemon.registry.find(&word)?;
    let same = vm.clone();
    to_the_end(async move { egress::change(&daemon, &same, request.egress).await }).await?;
    Ok(axum::Json(vm.shown()))
}
