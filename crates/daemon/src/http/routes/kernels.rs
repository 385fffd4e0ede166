//! Guest kernels.

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
use dayfly_api::types::{ApiError as ErrorBody, Kernel, KernelUpload, List};
use serde::Deserialize;

/// Which kernels to list.
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

/// Lists kernels, by name.
#[utoipa::path(
    get,
    operation_id = "list_kernels",
    path = "/v1/kernels",
    params(ListParams),
    responses(
        (status = 200, body = List<Kernel>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<ListParams>,
) -> Outcome<Json<List<Kernel>>> {
    let paging = Paging::of("kernels", params.limit, params.cursor.as_deref())?;
    let names = bounded("name", params.name)?;
    let mut items = blocking(move || daemon.templates.kernels()).await?;
    items.retain(|kernel| has_one_of(kernel.name.as_str(), &names));
    items.sort_by(|a, b| a.name.cmp(&b.name));
    paging.page(items, |kernel| kernel.name.clone()).map(Json)
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
