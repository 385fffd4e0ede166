//! Creates or removes many VMs with one request, in parallel.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::time::Asked;
use crate::http::routes::extract::{Json, Key, Peer, Shared};
use crate::http::routes::vms::{check_labels, removable, to_the_end};
use crate::net::check_many;
use crate::ops::{admit, create, remove, volumes as shared};
use crate::vm::batch::Batch;
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{
    ApiError as ErrorBody, CreateManyRequest, CreateRequest, List, RemoveManyRequest, Source, Vm,
};
use futures::future::{join_all, try_join_all};

/// The most VMs of one request.
const MOST: usize = 4096;

fn check(what: &str, got: usize) -> Outcome<()> {
    if (1..=MOST).contains(&got) {
        return Ok(());
    }
    Err(ApiError::invalid(format_args!("{what}: expected 1 to {MOST}, got {got}")))
}

/// Creates and starts many VMs, all of them or none. The answer comes when each agent has its
/// identity. If the client goes away before, the VMs are removed.
#[utoipa::path(
    post,
    operation_id = "create_vms",
    path = "/v1/batch/create",
    request_body = CreateManyRequest,
    responses(
        (status = 201, body = List<Vm>), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn create(
    State(daemon): Shared,
    Key(key): Key,
    Peer(caller): Peer,
    Json(request): Json<CreateManyRequest>,
) -> Outcome<(StatusCode, axum::Json<List<Vm>>)> {
    let asked = Asked::now();
    let CreateManyRequest { source, count, labels, network, lifetime, volumes, limits, vcpus } =
        request;
    let volumes = shared::asked(&daemon, &volumes, caller.as_deref())?;
    check_many(count, &network.publish)?;
    check("count", usize::try_from(count).unwrap_or(usize::MAX))?;
    check_labels(&labels)?;
    let memory_bytes = match &source {
        Source::Boot(boot) => boot.memory_bytes,
        Source::Snapshot(name) => {
            let (daemon, name) = (daemon.clone(), name.clone());
            blocking(move || daemon.templates.memory_bytes(&name)).await?
        }
    };
    // A request whose VMs do not fit is refused before any is created. Each VM reserves its memory
    // later.
    admit::together(&daemon, count, memory_bytes).await?;
    admit::cpus_together(&daemon, count, limits.cpus_booked)?;
    let batch = Batch::of(&daemon.config, count).map_err(ApiError::internal)?;
    let order = create::Order {
        batch: batch.clone(),
        request: key,
        ..create::Order::create(
            CreateRequest {
                source,
                name: None,
                labels,
                forks: 0,
                network,
                lifetime,
                volumes: Vec::new(),
                limits,
                vcpus,
            },
            volumes,
        )
    };
    // A task for each VM, so that all CPUs start VMs. If one fails, the others are dropped, which
    // removes their VMs.
    let creations = (0..count).map(|_| {
        let (daemon, order) = (daemon.clone(), order.clone());
        let task = tokio::spawn(async move { create::create(&daemon, asked, order).await });
        let task = tokio_util::task::AbortOnDropHandle::new(task);
        async {
            task.await
                .unwrap_or_else(|e| Err(ApiError::internal(format_args!("a creation ended: {e}"))))
        }
    });
    let guards = tokio::select! {
        guards = try_join_all(creations) => guards?,
        () = daemon.stop.cancelled() => return Err(ApiError::stopping()),
    };
    batch.iter().try_for_each(|batch| batch.commit()).map_err(ApiError::internal)?;
    let items = guards.into_iter().map(|guard| guard.keep().shown()).collect();
    Ok((StatusCode::CREATED, axum::Json(List::whole(items))))
}

/// Removes many VMs. The answer comes when the memory of all is free. If one cannot be removed, the
/// others are removed all the same; the error names the first that failed.
#[utoipa::path(post, operation_id = "remove_vms",
    path = "/v1/batch/remove", request_body = RemoveManyRequest,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
pub async fn remove(
    State(daemon): Shared,
    Json(request): Json<RemoveManyRequest>,
) -> Outcome<StatusCode> {
    let RemoveManyRequest { vms, force } = request;
    check("vms", vms.len())?;
    let found: Vec<_> = vms.iter().map(|word| removable(&daemon, word, force)).collect();
    to_the_end(async move {
        let removals = found.into_iter().map(async |vm| remove::remove(&daemon, &vm?).await);
        join_all(removals).await.into_iter().collect::<Outcome<()>>()
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}
