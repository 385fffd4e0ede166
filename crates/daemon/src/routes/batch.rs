//! Many VMs with one request: the same births and deaths, side by side.

use super::{Json, Shared};
use crate::error::{Fault, Outcome, blocking};
use crate::routes::vms::{removable, to_the_end};
use crate::time::Asked;
use crate::vm::step::Step;
use crate::vm::{birth, death};
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{
    ApiError, CreateManyRequest, CreateRequest, ErrorCode, List, RemoveManyRequest, Source, Vm,
};
use futures::future::{join_all, try_join_all};

/// The most of one request.
const MOST: usize = 4096;

fn check(what: &str, got: usize) -> Outcome<()> {
    if (1..=MOST).contains(&got) {
        return Ok(());
    }
    Err(Fault::invalid(format_args!("{what}: expected 1 to {MOST}, got {got}")))
}

/// Makes and starts many VMs, all of them or none; answered when each agent has its identity. When the client goes away before that, so do
/// the VMs.
#[utoipa::path(post, path = "/v1/batch/create", request_body = CreateManyRequest,
    responses((status = 201, body = List<Vm>), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 422, body = ApiError), (status = 502, body = ApiError), (status = 504, body = ApiError),
        (status = 507, body = ApiError)))]
pub async fn create(
    State(daemon): Shared,
    Json(request): Json<CreateManyRequest>,
) -> Outcome<(StatusCode, axum::Json<List<Vm>>)> {
    let asked = Asked::now();
    let CreateManyRequest { source, count, labels, network } = request;
    if count > 1 && !network.publish.is_empty() {
        return Err(Fault::invalid(
            "publish: expected no ports for many VMs at once: each port leads to one",
        ));
    }
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    check("count", count)?;
    let memory_bytes = match &source {
        Source::Boot(boot) => boot.memory_bytes,
        Source::Snapshot(name) => {
            let (daemon, name) = (daemon.clone(), name.clone());
            blocking(move || daemon.depot.memory_bytes(&name)).await?
        }
    };
    // Refused before any is made, where it is clear that not all fit; each then reserves its own.
    let fit = (0..count).map(|_| daemon.budget.reserve(memory_bytes, None)).collect::<Result<Vec<_>, _>>();
    drop(fit.map_err(Step::Memory.failed())?);
    let order = birth::Order::create(CreateRequest { source, name: None, labels, forks: 0, network });
    // Each a task of its own, so that they are born on all CPUs. One that fails drops the others, which takes their VMs with them.
    let births = (0..count).map(|_| {
        let (daemon, order) = (daemon.clone(), order.clone());
        let task = tokio::spawn(async move { birth::birth(&daemon, asked, order).await });
        let task = tokio_util::task::AbortOnDropHandle::new(task);
        async { task.await.unwrap_or_else(|e| Err(Fault::internal(format_args!("a birth ended: {e}")))) }
    });
    let newborns = tokio::select! {
        newborns = try_join_all(births) => newborns?,
        () = daemon.stop.cancelled() => return Err(Fault::new(ErrorCode::Internal, "the daemon was asked to stop")),
    };
    let items = newborns.into_iter().map(|newborn| newborn.keep().shown()).collect();
    Ok((StatusCode::CREATED, axum::Json(List { items })))
}

/// Removes many VMs; answered when the memory of all is free. What cannot be removed keeps the others from nothing; the error names the
/// first of them.
#[utoipa::path(post, path = "/v1/batch/remove", request_body = RemoveManyRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError)))]
pub async fn remove(State(daemon): Shared, Json(request): Json<RemoveManyRequest>) -> Outcome<StatusCode> {
    let RemoveManyRequest { vms, force } = request;
    check("vms", vms.len())?;
    let found: Vec<_> = vms.iter().map(|word| removable(&daemon, word, force)).collect();
    to_the_end(async move {
        let deaths = found.into_iter().map(async |vm| death::remove(&daemon, &vm?).await);
        join_all(deaths).await.into_iter().collect()
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}
