//! Guest kernels.

use super::{Named, Shared};
use crate::error::{Outcome, blocking};
use crate::upload;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError, Kernel, KernelUpload, List};

/// Every kernel.
#[utoipa::path(get, path = "/v1/kernels", responses((status = 200, body = List<Kernel>), (status = 500, body = ApiError)))]
pub async fn list(State(daemon): Shared) -> Outcome<Json<List<Kernel>>> {
    let items = blocking(move || daemon.depot.kernels()).await?;
    Ok(Json(List { items }))
}

/// One kernel.
#[utoipa::path(get, path = "/v1/kernels/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Kernel), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<Json<Kernel>> {
    blocking(move || daemon.depot.kernel(&name)).await.map(Json)
}

/// Stores a kernel. The body: a 4-byte little-endian length, that many bytes of KernelUpload as JSON, one zstd frame of vmlinux and the
/// initramfs, one after the other.
#[utoipa::path(put, path = "/v1/kernels/{name}", params(("name" = String, Path)),
    request_body(content = KernelUpload, content_type = "application/octet-stream"),
    responses((status = 201, body = Kernel), (status = 400, body = ApiError), (status = 409, body = ApiError),
        (status = 422, body = ApiError), (status = 507, body = ApiError)))]
pub async fn upload(
    State(daemon): Shared,
    Named(name): Named,
    body: Body,
) -> Outcome<(StatusCode, Json<Kernel>)> {
    let mut body = super::blocking_reader(body);
    let kernel = blocking(move || {
        let head: KernelUpload = upload::read_head(&mut body)?;
        daemon.depot.put_kernel(&name, &head, &mut body)
    })
    .await?;
    Ok((StatusCode::CREATED, Json(kernel)))
}

/// Removes a kernel. VMs and snapshots that were booted with it have it in their memory and do not need the files.
#[utoipa::path(delete, path = "/v1/kernels/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    blocking(move || daemon.depot.remove_kernel(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
