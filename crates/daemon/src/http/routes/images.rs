//! Images: root disks of VMs.

use crate::base::error::{Outcome, blocking};
use crate::http::listing::NameParams;
use crate::http::routes::extract::{Named, Params, Shared, blocking_reader};
use crate::http::upload;
use crate::ops::admit;
use axum::Json;
use axum::body::{Body, HttpBody as _};
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError as ErrorBody, Image, ImageUpload, List};

/// Lists images, by name.
#[utoipa::path(
    get,
    operation_id = "list_images",
    path = "/v1/images",
    params(NameParams),
    responses(
        (status = 200, body = List<Image>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<NameParams>,
) -> Outcome<Json<List<Image>>> {
    let names = params.checked("images")?;
    let items = blocking(move || daemon.templates.images()).await?;
    names.page(items, |image| &image.name).map(Json)
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
