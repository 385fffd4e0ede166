//! The store: what is in it, whether it is sound, and removing what nothing needs.

use super::{Json, Shared};
use crate::error::{Outcome, blocking};
use crate::{ndjson, upkeep};
use axum::extract::State;
use axum::response::Response;
use dayfly_api::types::{ApiError, Progress, StoreStats, StoreUsage, VerifyRequest};

/// The store in numbers.
#[utoipa::path(get, path = "/v1/store", responses((status = 200, body = StoreStats), (status = 500, body = ApiError)))]
pub async fn stats(State(daemon): Shared) -> Outcome<axum::Json<StoreStats>> {
    blocking(move || upkeep::stats(&daemon.depot)).await.map(axum::Json)
}

/// What each snapshot takes: of its RAM by kind, and bytes that only it keeps in the store.
#[utoipa::path(get, path = "/v1/store/usage", responses((status = 200, body = StoreUsage), (status = 500, body = ApiError)))]
pub async fn usage(State(daemon): Shared) -> Outcome<axum::Json<StoreUsage>> {
    blocking(move || upkeep::usage(&daemon.depot)).await.map(axum::Json)
}

/// Reads and hashes everything that is stored, or some snapshots and what they stand on, and names everything damaged. The answer is one Progress in
/// JSON a line, the last of them `verified` or `failed`.
#[utoipa::path(post, path = "/v1/store/verify", request_body = VerifyRequest,
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"), (status = 400, body = ApiError)))]
pub async fn verify(State(daemon): Shared, Json(request): Json<VerifyRequest>) -> Response {
    ndjson::stream(daemon.stop.clone(), move |tell| upkeep::verify(daemon, request, tell))
}

/// Removes what nothing needs: disk layers, pages, indexes of blocks, and what failed removals left in the staging folder. The answer is one Progress in
/// JSON a line, the last of them `collected` or `failed`.
#[utoipa::path(post, path = "/v1/store/gc",
    responses((status = 200, body = Progress, content_type = "application/x-ndjson")))]
pub async fn gc(State(daemon): Shared) -> Response {
    ndjson::stream(daemon.stop.clone(), move |tell| upkeep::gc(daemon, tell))
}
