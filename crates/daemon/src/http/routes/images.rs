//! Images: root disks of VMs.

use crate::base::error::{Outcome, blocking};
use crate::http::listing::Paging;
use crate::http::routes::extract::{Named, Params, Shared, blocking_reader};
use crate::http::upload;
use crate::model::filter::{bounded, has_one_of};
use crate::ops::admit;
use axum::Json;
use axum::body::{Body, HttpBody as _};
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError as ErrorBody, Image, ImageUpload, List};
use serde::Deserialize;

/// Which images to list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// A part of the name; of several one must match.
    #[serde(default)]
    name: Vec<String>,
    /// The most items of the answer, 1 to 1000. Without it, the answer has all.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// The `next` of the page before.
    cursor: Option<String>,
}

/// Lists images, by name.
#[utoipa::path(
    get,
    operation_id = "list_images",
    path = "/v1/images",
    params(ListParams),
    responses(
        (status = 200, body = List<Image>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<ListParams>,
) -> Outcome<Json<List<Image>>> {
    let paging = Paging::of("images", params.limit, params.cursor.as_deref())?;
    let names = bounded("name", params.name)?;
    let mut items = blocking(move || daemon.templates.images()).await?;
    items.retain(|image| has_one_of(image.name.as_str(), &names));
    items.sort_by(|a, b| a.name.cmp(&b.name));
    paging.page(items, |image| image.name.clone()).map(Json)
}

/// One image.
#[utoipa::path(
    get,
    operation_id = "inspect_image",
    path = "/v1/images/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Image), (status = 404, body = ErrorBody),
        (status = 422, body = ErrorBody)
    )
)]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<Json<Image>> {
    blocking(move || daemon.templates.image(&name)).await.map(Json)
}

/// Stores an image. The body has a 4-byte little-endian length, an ImageUpload of that length as
/// JSON, and the raw disk as one zstd frame.
#[utoipa::path(
    put,
    operation_id = "upload_image",
    path = "/v1/images/{name}",
    params(("name" = String, Path)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream",
        description = "length of the head, ImageUpload in JSON, zstd frame"),
    responses(
        (status = 201, body = Image), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn upload(
    State(daemon): Shared,
    Named(name): Named,
    body: Body,
) -> Outcome<(StatusCode, Json<Image>)> {
    admit::room(&daemon, "an upload", body.size_hint().exact().unwrap_or(0)).await?;
    let mut body = admit::Upload::new(daemon.clone(), blocking_reader(body));
    let image = blocking(move || {
        let head: ImageUpload = upload::read_head(&mut body)?;
        let put = daemon.templates.put_image(&name, &head, &mut body);
        body.result(put)
    })
    .await?;
    Ok((StatusCode::CREATED, Json(image)))
}

/// Removes an image that no snapshot and no VM uses.
#[utoipa::path(delete, operation_id = "remove_image",
    path = "/v1/images/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    blocking(move || daemon.templates.remove_image(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
