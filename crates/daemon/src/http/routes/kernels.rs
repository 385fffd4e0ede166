//! Guest kernels.

use crate::base::error::{Outcome, blocking};
use crate::http::listing::NameParams;
use crate::http::routes::extract::{Named, Params, Shared, blocking_reader};
use crate::http::upload;
use crate::ops::admit;
use axum::Json;
use axum::body::{Body, HttpBody as _};
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError as ErrorBody, Kernel, KernelUpload, List};

/// Lists kernels, by name.
#[utoipa::path(
    get,
    operation_id = "list_kernels",
    path = "/v1/kernels",
    params(NameParams),
    responses(
        (status = 200, body = List<Kernel>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<NameParams>,
) -> Outcome<Json<List<Kernel>>> {
    let names = params.checked("kernels")?;
    let items = blocking(move || daemon.templates.kernels()).await?;
    names.page(items, |kernel| &kernel.name).map(Json)
}

/// One kernel.
#[utoipa::path(
    get,
    operation_id = "inspect_kernel",
    path = "/v1/kernels/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Kernel), (status = 404, body = ErrorBody),
        (status = 422, body = ErrorBody)
    )
)]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<Json<Kernel>> {
    blocking(move || daemon.templates.kernel(&name)).await.map(Json)
}

/// Stores a kernel. The body has a 4-byte little-endian length, a KernelUpload of that length as
/// JSON, and one zstd frame with vmlinux followed by the initramfs.
#[utoipa::path(
    put,
    operation_id = "upload_kernel",
    path = "/v1/kernels/{name}",
    params(("name" = String, Path)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream",
        description = "length of the head, KernelUpload in JSON, zstd frame"),
    responses(
        (status = 201, body = Kernel), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn upload(
    State(daemon): Shared,
    Named(name): Named,
    body: Body,
) -> Outcome<(StatusCode, Json<Kernel>)> {
    admit::room(&daemon, "an upload", body.size_hint().exact().unwrap_or(0)).await?;
    let mut body = admit::Upload::new(daemon.clone(), blocking_reader(body));
    let kernel = blocking(move || {
        let head: KernelUpload = upload::read_head(&mut body)?;
        let put = daemon.templates.put_kernel(&name, &head, &mut body);
        body.result(put)
    })
    .await?;
    Ok((StatusCode::CREATED, Json(kernel)))
}

/// Removes a kernel. VMs and snapshots that were booted with it have it in their memory and do not
/// need the files.
#[utoipa::path(delete, operation_id = "remove_kernel",
    path = "/v1/kernels/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    blocking(move || daemon.templates.remove_kernel(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
