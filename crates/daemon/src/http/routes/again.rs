//! Starting VMs that have ended.

use crate::base::error::Outcome;
use crate::http::routes::ends::{MAX_GRACE, StopParams};
use crate::http::routes::extract::{Params, Shared, Word};
use crate::http::routes::vms::to_the_end;
use crate::ops::create;
use axum::extract::State;
use dayfly_api::types::{ApiError as ErrorBody, Vm};
use std::time::Duration;

/// Starts a VM that has ended: it boots from its own disks with its kernel, under its id and name.
/// The answer comes when its agent has its identity. A VM that runs stays as it is. The start goes
/// on if the client goes away.
#[utoipa::path(post, operation_id = "start_vm",
    path = "/v1/vms/{vm}/start", params(("vm" = String, Path)),
    responses((status = 200, body = Vm), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
pub async fn start(State(daemon): Shared, Word(word): Word) -> Outcome<axum::Json<Vm>> {
    let vm = daemon.registry.find(&word)?;
    let started = create::start_again(&daemon, &vm).await?;
    Ok(axum::Json(started.shown()))
}

/// Stops a VM, unless it has ended, and starts it as `start` does. A VM that is removed when it has
/// ended is refused.
#[utoipa::path(post, operation_id = "restart_vm",
    path = "/v1/vms/{vm}/restart", params(("vm" = String, Path), StopParams),
    responses((status = 200, body = Vm), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
pub async fn restart(
    State(daemon): Shared,
    Word(word): Word,
    Params(params): Params<StopParams>,
) -> Outcome<axum::Json<Vm>> {
    let vm = daemon.registry.find(&word)?;
    let grace = Duration::from_millis(params.grace_ms).min(MAX_GRACE);
    let restarted = to_the_end(async move { create::restart(&daemon, &vm, grace).await }).await?;
    Ok(axum::Json(restarted.shown()))
}
