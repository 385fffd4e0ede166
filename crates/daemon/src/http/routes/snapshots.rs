//! Snapshots, and baking them.

use crate::base::error::{Outcome, blocking};
use crate::http::listing::Paging;
use crate::http::ndjson;
use crate::http::routes::extract::{Json, Named, Params, Shared};
use crate::model::filter::{bounded, has_one_of, one_of};
use crate::ops::colours::shown;
use crate::ops::{bake, keeper, recording};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use dayfly_api::types::{
    ApiError as ErrorBody, BakeRequest, Colours, List, Progress, RecordRequest, Snapshot,
};
use dayfly_units::Name;
use serde::Deserialize;

/// Options of a picture.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Picture {
    /// Frames in a row.
    #[serde(default = "Picture::width")]
    width: u32,
}

impl Picture {
    const fn width() -> u32 {
        512
    }
}

/// Which snapshots to list. Of the values of one parameter one must match.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// A part of the name.
    #[serde(default)]
    name: Vec<String>,
    /// The name of the image of the root disk.
    #[serde(default)]
    image: Vec<String>,
    /// The name of the snapshot that the VM was cloned from.
    #[serde(default)]
    parent: Vec<String>,
    /// The most items of the answer, 1 to 1000. Without it, the answer has all.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// The `next` of the page before.
    cursor: Option<String>,
}

/// Lists snapshots, by name.
#[utoipa::path(
    get,
    operation_id = "list_snapshots",
    path = "/v1/snapshots",
    params(ListParams),
    responses(
        (status = 200, body = List<Snapshot>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<ListParams>,
) -> Outcome<axum::Json<List<Snapshot>>> {
    let paging = Paging::of("snapshots", params.limit, params.cursor.as_deref())?;
    let names = bounded("name", params.name)?;
    let images = bounded("image", params.image)?;
    let parents = bounded("parent", params.parent)?;
    let mut items = blocking(move || daemon.templates.snapshots()).await?;
    items.retain(|snapshot| {
        let parent = snapshot.parent.as_ref().map_or("", Name::as_str);
        has_one_of(snapshot.name.as_str(), &names)
            && one_of(snapshot.image.as_str(), &images)
            && one_of(parent, &parents)
    });
    paging.page(items, |snapshot| snapshot.name.clone()).map(axum::Json)
}

/// One snapshot.
#[utoipa::path(
    get,
    operation_id = "inspect_snapshot",
    path = "/v1/snapshots/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Snapshot), (status = 404, body = ErrorBody),
        (status = 422, body = ErrorBody)
    )
)]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<axum::Json<Snapshot>> {
    blocking(move || daemon.templates.snapshot(&name)).await.map(axum::Json)
}

/// The use of a snapshot's RAM, by the colours that its frames got when it was saved.
#[utoipa::path(
    get,
    operation_id = "list_colours",
    path = "/v1/snapshots/{name}/colours",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Colours), (status = 404, body = ErrorBody),
        (status = 422, body = ErrorBody)
    )
)]
pub async fn colours(State(daemon): Shared, Named(name): Named) -> Outcome<axum::Json<Colours>> {
    blocking(move || shown::colours(&daemon.templates, &name)).await.map(axum::Json)
}

/// The colours of a snapshot as a PNG with a pixel for each frame.
#[utoipa::path(
    get,
    operation_id = "draw_colours",
    path = "/v1/snapshots/{name}/colours.png",
    params(("name" = String, Path), Picture),
    responses(
        (status = 200, body = Vec<u8>, content_type = "image/png"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 422, body = ErrorBody)
    )
)]
pub async fn picture(
    State(daemon): Shared,
    Named(name): Named,
    Params(query): Params<Picture>,
) -> Outcome<Response> {
    let png = blocking(move || shown::picture(&daemon.templates, &name, query.width)).await?;
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}

/// Records which pages one run of a clone touches, and compares them with the working set. The
/// answer is one Progress in JSON a line, the last of them `recorded` or `failed`.
#[utoipa::path(
    post,
    operation_id = "record_working_set",
    path = "/v1/snapshots/{name}/record",
    params(("name" = String, Path)),
    request_body = RecordRequest,
    responses(
        (status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 400, body = ErrorBody)
    )
)]
pub async fn record(
    State(daemon): Shared,
    Named(name): Named,
    Json(request): Json<RecordRequest>,
) -> Response {
    ndjson::stream(daemon.stop.clone(), move |progress| {
        recording::once(daemon, name, request, progress)
    })
}

/// Removes a snapshot. Its running clones keep what they use; layers that nothing else uses are
/// removed too.
#[utoipa::path(delete, operation_id = "remove_snapshot",
    path = "/v1/snapshots/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    let (shared, gone) = (daemon.clone(), name.clone());
    blocking(move || shared.templates.remove_snapshot(&gone)).await?;
    // After the removal, because no more warm clones of it can be made then.
    keeper::forget(&daemon, &name).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Boots an image, warms it up, and snapshots it. The answer is one Progress in JSON a line, the
/// last of them `snapshot` or `failed`.
#[utoipa::path(
    post,
    operation_id = "bake",
    path = "/v1/bake",
    request_body = BakeRequest,
    responses(
        (status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 400, body = ErrorBody)
    )
)]
pub async fn bake(State(daemon): Shared, Json(request): Json<BakeRequest>) -> Outcome<Response> {
    bake::check(&request)?;
    let stop = daemon.stop.clone();
    Ok(ndjson::stream(stop, move |progress| bake::bake(daemon, request, progress)))
}
