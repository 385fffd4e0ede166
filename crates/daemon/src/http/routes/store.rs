//! The store: its content, its verification, and gc.

use crate::base::error::{Outcome, blocking};
use crate::http::ndjson;
use crate::http::routes::extract::{Json, JsonOrNothing, Shared};
use crate::ops::maintenance;
use axum::extract::State;
use axum::response::Response;
use dayfly_api::types::{
    ApiError as ErrorBody, CollectRequest, Progress, StoreStats, StoreUsage, VerifyRequest,
};

/// Statistics of the store.
#[utoipa::path(
    get,
    operation_id = "store_stats",
    path = "/v1/store",
    responses((status = 200, body = StoreStats), (status = 500, body = ErrorBody))
)]
pub async fn stats(State(daemon): Shared) -> Outcome<axum::Json<StoreStats>> {
    blocking(move || maintenance::stats(&daemon.templates)).await.map(axum::Json)
}

/// Bytes of each snapshot: its RAM by kind, and what only it keeps in the store.
#[utoipa::path(
    get,
    operation_id = "store_usage",
    path = "/v1/store/usage",
    responses((status = 200, body = StoreUsage), (status = 500, body = ErrorBody))
)]
pub async fn usage(State(daemon): Shared) -> Outcome<axum::Json<StoreUsage>> {
    blocking(move || maintenance::usage(&daemon.templates)).await.map(axum::Json)
}

/// Reads and hashes everything in the store, or some snapshots and what they depend on, and names
/// all damage. The answer is one Progress in JSON a line, the last of them `verified` or `failed`.
#[utoipa::path(
    post,
    operation_id = "verify_store",
    path = "/v1/store/verify",
    request_body = VerifyRequest,
    responses(
        (status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 400, body = ErrorBody)
    )
)]
pub async fn verify(State(daemon): Shared, Json(request): Json<VerifyRequest>) -> Response {
    ndjson::stream(daemon.stop.clone(), move |progress| {
        maintenance::verify(daemon, request, progress)
    })
}

/// Removes what nothing references: disk layers, pages, block indexes, and files that failed
/// removals left in the staging folder. The body may be empty. The answer is one Progress in JSON a
/// line, the last of them `collected` or `failed`.
#[utoipa::path(
    post,
    operation_id = "collect_garbage",
    path = "/v1/store/gc",
    request_body = Option<CollectRequest>,
    responses(
        (status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 400, body = ErrorBody)
    )
)]
pub async fn gc(
    State(daemon): Shared,
    JsonOrNothing(request): JsonOrNothing<CollectRequest>,
) -> Response {
    ndjson::stream(daemon.stop.clone(), move |progress| maintenance::gc(daemon, request, progress))
}

/// Verifies everything in the store, writes damaged pages anew that another file has, removes
/// damaged packs and block indexes that nothing needs, and names the snapshots that are lost. The
/// answer is one Progress in JSON a line, the last of them `repaired` or `failed`.
#[utoipa::path(post, operation_id = "repair_store",
    path = "/v1/store/repair",
    responses((status = 200, body = Progress, content_type = "application/x-ndjson")))]
pub async fn repair(State(daemon): Shared) -> Response {
    ndjson::stream(daemon.stop.clone(), move |progress| maintenance::repair(daemon, progress))
}
