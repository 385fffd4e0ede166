//! The HTTP API: one file for each thing it is about, and how requests are read and refused.
//!
//! The OpenAPI document is derived from the handlers, served at `/openapi.json` and frozen in `docs/openapi.json`.

mod archive;
mod batch;
mod exec;
mod host;
mod images;
mod kernels;
mod logs;
mod ports;
mod snapshots;
mod store;
mod upgrade;
mod vms;

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use dayfly_api::types::MAX_JSON_BYTES;
use dayfly_units::Name;
use futures::TryStreamExt;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// What every handler works on.
pub type Shared = axum::extract::State<Arc<Daemon>>;

#[derive(OpenApi)]
#[openapi(info(
    title = "dayflyd",
    description = "Virtual machines that are born fast, live a day, and are gone. HTTP/1.1 over a unix socket. Every error is an ApiError; \
        long operations answer with one Progress in JSON a line and are undone when the client goes away."
))]
struct Document;

fn described() -> (Router<Arc<Daemon>>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(host::info))
        .routes(routes!(host::leaks))
        .routes(routes!(host::sweep))
        .routes(routes!(host::metrics))
        .routes(routes!(images::list))
        .routes(routes!(images::inspect, images::upload, images::remove))
        .routes(routes!(kernels::list))
        .routes(routes!(kernels::inspect, kernels::upload, kernels::remove))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::inspect, snapshots::remove))
        .routes(routes!(snapshots::colours))
        .routes(routes!(snapshots::rehearse))
        .routes(routes!(snapshots::picture))
        .routes(routes!(snapshots::bake))
        .routes(routes!(store::stats))
        .routes(routes!(store::usage))
        .routes(routes!(store::verify))
        .routes(routes!(store::gc))
        .routes(routes!(vms::list, vms::create))
        .routes(routes!(vms::inspect, vms::remove))
        .routes(routes!(vms::footprint))
        .routes(routes!(batch::create))
        .routes(routes!(batch::remove))
        .routes(routes!(vms::pause))
        .routes(routes!(vms::unpause))
        .routes(routes!(vms::kill))
        .routes(routes!(vms::snapshot))
        .routes(routes!(vms::fork))
        .routes(routes!(logs::logs))
        .routes(routes!(archive::read, archive::write))
        .routes(routes!(exec::exec))
        .routes(routes!(exec::run))
        .routes(routes!(ports::connect))
        .routes(routes!(ports::run_connected))
        .split_for_parts()
}

/// The OpenAPI document, as text that does not change unless the API does.
///
/// # Errors
/// Serialising it failed.
pub fn document() -> serde_json::Result<String> {
    let mut value = serde_json::to_value(described().1)?;
    // Which crates the document was made with is not part of the API.
    if let Some(info) = value.get_mut("info").and_then(|i| i.as_object_mut()) {
        info.insert("version".into(), "1".into());
        info.remove("license");
        info.remove("contact");
    }
    Ok(format!("{value:#}\n"))
}

/// Everything the daemon serves.
///
/// # Errors
/// The OpenAPI document could not be serialised.
pub fn router(daemon: Arc<Daemon>) -> serde_json::Result<Router> {
    let text = document()?;
    let json = [(axum::http::header::CONTENT_TYPE, "application/json")];
    Ok(described()
        .0
        .route("/openapi.json", axum::routing::get(async move || (json, text.clone())))
        .fallback(async |request: Request| {
            Fault::not_found(format_args!(
                "{} {}: no such path; GET /openapi.json lists them",
                request.method(),
                request.uri().path()
            ))
        })
        .method_not_allowed_fallback(async |request: Request| {
            let (method, path) = (request.method(), request.uri().path());
            let message = format!("{method} {path}: not a method of this path; GET /openapi.json lists them");
            (axum::http::StatusCode::METHOD_NOT_ALLOWED, axum::Json(Fault::invalid(message).0))
        })
        .with_state(daemon))
}

/// A body for blocking code, which must run on a blocking thread.
pub fn blocking_reader(body: axum::body::Body) -> impl std::io::Read + Send + 'static {
    let pieces = body.into_data_stream().map_err(std::io::Error::other);
    tokio_util::io::SyncIoBridge::new(tokio_util::io::StreamReader::new(pieces))
}

/// A JSON body of at most [`MAX_JSON_BYTES`].
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Outcome<Self> {
        let body: Bytes = axum::body::to_bytes(request.into_body(), MAX_JSON_BYTES).await.map_err(|e| {
            Fault::invalid(format_args!("request body: expected at most {MAX_JSON_BYTES} bytes: {e}"))
        })?;
        serde_json::from_slice(&body).map(Self).map_err(|e| Fault::invalid(format_args!("request body: {e}")))
    }
}

/// The query of a request.
pub struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let query = Query::<T>::from_request_parts(parts, state).await;
        query.map(|Query(t)| Self(t)).map_err(|e| Fault::invalid(e.body_text()))
    }
}

/// The name in a path.
pub struct Named(pub Name);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let Word(word) = Word::from_request_parts(parts, state).await?;
        word.parse().map(Self).map_err(Fault::invalid)
    }
}

/// The word in a path: id, start of an id, or name of a VM.
pub struct Word(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Word {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.map(|Path(word)| Self(word)).map_err(|e| Fault::invalid(e.body_text()))
    }
}

#[cfg(test)]
mod store_tests;
#[cfg(test)]
mod tests;
