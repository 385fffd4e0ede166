//! Root disks.

use super::{Named, Shared};
use crate::error::{Outcome, blocking};
use crate::upload;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError, Image, ImageUpload, List};

/// Every image.
#[utoipa::path(get, path = "/v1/images", responses((status = 200, body = List<Image>), (status = 500, body = ApiError)))]
pub async fn list(State(daemon): Shared) -> Outcome<Json<List<Image>>> {
    let items = blocking(move || daemon.depot.images()).await?;
    Ok(Json(List { items }))
}

/// One image.
#[utoipa::path(get, path = "/v1/images/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Image), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<Json<Image>> {
    blocking(move || daemon.depot.image(&name)).await.map(Json)
}

/// Stores an image. The body: a 4-byte little-endian length, that many bytes of ImageUpload as JSON, one zstd frame of the raw disk.
#[utoipa::path(put, path = "/v1/images/{name}", params(("name" = String, Path)),
    request_body(content = ImageUpload, content_type = "application/octet-stream"),
    responses((status = 201, body = Image), (status = 400, body = ApiError), (status = 409, body = ApiError),
        (status = 422, body = ApiError), (status = 507, body = ApiError)))]
pub async fn upload(
    State(daemon): Shared,
    Named(name): Named,
    body: Body,
) -> Outcome<(StatusCode, Json<Image>)> {
    let mut body = super::blocking_reader(body);
    let image = blocking(move || {
        let head: ImageUpload = upload::read_head(&mut body)?;
        daemon.depot.put_image(&name, &head, &mut body)
    })
    .await?;
    Ok((StatusCode::CREATED, Json(image)))
}

/// Removes an image that no snapshot and no VM uses.
#[utoipa::path(delete, path = "/v1/images/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    blocking(move || daemon.depot.remove_image(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
