//! Snapshots, and baking them.

use super::{Json, Named, Params, Shared};
use crate::colours::shown;
use crate::error::{Outcome, blocking};
use crate::vm::pool;
use crate::{bake, ndjson, rehearsal};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use dayfly_api::types::{ApiError, BakeRequest, Colours, List, Progress, RehearseRequest, Snapshot};
use serde::Deserialize;

/// How a picture is drawn.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Picture {
    /// Frames to a row.
    #[serde(default = "Picture::width")]
    width: u32,
}

impl Picture {
    const fn width() -> u32 {
        512
    }
}

/// Every snapshot.
#[utoipa::path(get, path = "/v1/snapshots", responses((status = 200, body = List<Snapshot>), (status = 500, body = ApiError)))]
pub async fn list(State(daemon): Shared) -> Outcome<axum::Json<List<Snapshot>>> {
    let items = blocking(move || daemon.depot.snapshots()).await?;
    Ok(axum::Json(List { items }))
}

/// One snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Snapshot), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<axum::Json<Snapshot>> {
    blocking(move || daemon.depot.snapshot(&name)).await.map(axum::Json)
}

/// What its RAM is used for, by the colours that it was given when it was saved.
#[utoipa::path(get, path = "/v1/snapshots/{name}/colours", params(("name" = String, Path)),
    responses((status = 200, body = Colours), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
pub async fn colours(State(daemon): Shared, Named(name): Named) -> Outcome<axum::Json<Colours>> {
    blocking(move || shown::colours(&daemon.depot, &name)).await.map(axum::Json)
}

/// The same as a picture, a PNG with a pixel for each frame.
#[utoipa::path(get, path = "/v1/snapshots/{name}/colours.png", params(("name" = String, Path), Picture),
    responses((status = 200, body = Vec<u8>, content_type = "image/png"), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 422, body = ApiError)))]
pub async fn picture(
    State(daemon): Shared,
    Named(name): Named,
    Params(query): Params<Picture>,
) -> Outcome<Response> {
    let png = blocking(move || shown::picture(&daemon.depot, &name, query.width)).await?;
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}

/// Records which pages one run of a clone touches, and holds them against the working set. The answer is one Progress in JSON a line, the last of them
/// `rehearsed` or `failed`.
#[utoipa::path(post, path = "/v1/snapshots/{name}/rehearse", params(("name" = String, Path)), request_body = RehearseRequest,
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"), (status = 400, body = ApiError)))]
pub async fn rehearse(
    State(daemon): Shared,
    Named(name): Named,
    Json(request): Json<RehearseRequest>,
) -> Response {
    ndjson::stream(daemon.stop.clone(), move |tell| rehearsal::once(daemon, name, request, tell))
}

/// Removes a snapshot. Its running clones keep what they use; layers that nobody uses any more go with it.
#[utoipa::path(delete, path = "/v1/snapshots/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    let (shared, gone) = (daemon.clone(), name.clone());
    blocking(move || shared.depot.remove_snapshot(&gone)).await?;
    // After it: nobody can prime another one now.
    pool::forget(&daemon, &name).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Boots an image, warms it up, snapshots it. The answer is one Progress in JSON a line, the last of them `snapshot` or `failed`.
#[utoipa::path(post, path = "/v1/bake", request_body = BakeRequest,
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"), (status = 400, body = ApiError)))]
pub async fn bake(State(daemon): Shared, Json(request): Json<BakeRequest>) -> Response {
    ndjson::stream(daemon.stop.clone(), move |tell| bake::bake(daemon, request, tell))
}
