//! Named volumes of the client's user.

use crate::base::error::Outcome;
use crate::http::listing::NameParams;
use crate::http::routes::extract::{Json, Named, Params, Peer, Shared};
use crate::ops::volumes::{self, Listed, known};
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::types::{ApiError as ErrorBody, List, Volume, VolumeCreateRequest};

fn shown(listed: Listed) -> Volume {
    let Listed { volume, vms } = listed;
    let (name, uid) = (volume.name, volume.uid);
    Volume { name, created_unix_ms: volume.created_unix_ms, uid, vms }
}

/// Lists the named volumes of the client's user, by name.
#[utoipa::path(
    get,
    operation_id = "list_volumes",
    path = "/v1/volumes",
    params(NameParams),
    responses(
        (status = 200, body = List<Volume>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Peer(caller): Peer,
    Params(params): Params<NameParams>,
) -> Outcome<axum::Json<List<Volume>>> {
    let names = params.checked("volumes")?;
    let listed = volumes::list(&daemon, known(caller.as_deref())?.uid).await?;
    let items = listed.into_iter().map(shown).collect();
    names.page(items, |volume: &Volume| &volume.name).map(axum::Json)
}

/// Makes a named volume, or finds it: the answer is the volume in both cases.
#[utoipa::path(
    post,
    operation_id = "create_volume",
    path = "/v1/volumes",
    request_body = VolumeCreateRequest,
    responses(
        (status = 201, body = Volume), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody), (status = 507, body = ErrorBody)
    )
)]
pub async fn create(
    State(daemon): Shared,
    Peer(caller): Peer,
    Json(request): Json<VolumeCreateRequest>,
) -> Outcome<(StatusCode, axum::Json<Volume>)> {
    let made = volumes::create(&daemon, known(caller.as_deref())?, request.name).await?;
    Ok((StatusCode::CREATED, axum::Json(shown(made))))
}

/// One named volume, and the VMs that have it.
#[utoipa::path(
    get,
    operation_id = "inspect_volume",
    path = "/v1/volumes/{name}",
    params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = 404, body = ErrorBody))
)]
pub async fn inspect(
    State(daemon): Shared,
    Peer(caller): Peer,
    Named(name): Named,
) -> Outcome<axum::Json<Volume>> {
    let found = volumes::find(&daemon, known(caller.as_deref())?.uid, name).await?;
    Ok(axum::Json(shown(found)))
}

/// Removes a named volume with its files. One that a VM has is refused, also if the VM has ended.
#[utoipa::path(delete, operation_id = "remove_volume",
    path = "/v1/volumes/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove(
    State(daemon): Shared,
    Peer(caller): Peer,
    Named(name): Named,
) -> Outcome<StatusCode> {
    volumes::remove(&daemon, known(caller.as_deref())?.uid, name).await?;
    Ok(StatusCode::NO_CONTENT)
}
