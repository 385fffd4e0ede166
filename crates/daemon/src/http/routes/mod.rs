//! The HTTP API: a file for each subject, and how requests are read and refused.
//!
//! The OpenAPI document is derived from the handlers, served at `/openapi.json`, and kept in
//! `docs/openapi.json`, with which a test compares it.

mod again;
mod agent_body;
mod agent_stream;
mod archive;
mod batch;
mod closed;
mod ends;
mod events;
mod exec;
pub(crate) mod extract;
mod host;
mod images;
mod kernels;
mod keys;
mod limits;
mod logs;
mod metrics;
mod offers;
mod ports;
mod programs;
mod snapshots;
mod store;
mod upgrade;
mod vms;
mod volumes;

use crate::base::error::ApiError;
use crate::daemon::Daemon;
use crate::http::once;
use axum::Router;
use axum::extract::Request;
use std::sync::Arc;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

#[derive(OpenApi)]
#[openapi(
    components(schemas(
        dayfly_api::types::ExecControl,
        dayfly_api::types::ImageUpload,
        dayfly_api::types::KernelUpload
    )),
    info(
        title = "dayflyd",
        description = "Virtual machines that are born fast, live a day, and are gone. \
        HTTP/1.1 over a unix socket. Every error is an ApiError; \
        long operations answer with one Progress in JSON a line \
        and are undone when the client goes away."
    )
)]
struct Document;

fn described() -> (Router<Arc<Daemon>>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(host::info))
        .routes(routes!(host::leaks))
        .routes(routes!(host::sweep))
        .routes(routes!(host::metrics))
        .routes(routes!(images::list))
        .routes(routes!(images::inspect, images::upload, images::remove))
        .routes(routes!(images::download))
        .routes(routes!(kernels::list))
        .routes(routes!(kernels::inspect, kernels::upload, kernels::remove))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::inspect, snapshots::remove))
        .routes(routes!(snapshots::colours))
        .routes(routes!(snapshots::record))
        .routes(routes!(snapshots::picture))
        .routes(routes!(snapshots::bake))
        .routes(routes!(volumes::list, volumes::create))
        .routes(routes!(volumes::inspect, volumes::remove))
        .routes(routes!(offers::offer))
        .routes(routes!(offers::stream))
        .routes(routes!(store::stats))
        .routes(routes!(store::usage))
        .routes(routes!(store::verify))
        .routes(routes!(store::gc))
        .routes(routes!(store::repair))
        .routes(routes!(vms::list, vms::create))
        .routes(routes!(vms::inspect, vms::remove))
        .routes(routes!(vms::footprint))
        .routes(routes!(batch::create))
        .routes(routes!(batch::remove))
        .routes(routes!(vms::pause))
        .routes(routes!(vms::unpause))
        .routes(routes!(vms::kill))
        .routes(routes!(ends::stop))
        .routes(routes!(again::start))
        .routes(routes!(again::restart))
        .routes(routes!(ends::wait))
        .routes(routes!(ends::set_ttl))
        .routes(routes!(ends::set_egress))
        .routes(routes!(vms::snapshot))
        .routes(routes!(vms::fork))
        .routes(routes!(events::events))
        .routes(routes!(logs::logs))
        .routes(routes!(programs::list))
        .routes(routes!(programs::inspect, programs::remove))
        .routes(routes!(programs::kill))
        .routes(routes!(programs::wait))
        .routes(routes!(archive::read, archive::write))
        .routes(routes!(exec::exec, exec::over_websocket))
        .routes(routes!(exec::run))
        .routes(routes!(ports::connect))
        .routes(routes!(ports::run_connected))
        .split_for_parts()
}

/// The OpenAPI document, as text that changes only with the API.
///
/// # Errors
/// Serialising it failed.
pub fn document() -> serde_json::Result<String> {
    let mut value = serde_json::to_value(described().1)?;
    // Versions and authors of crates are not part of the API.
    if let Some(info) = value.get_mut("info").and_then(|i| i.as_object_mut()) {
        info.insert("version".into(), "1".into());
        info.remove("license");
        info.remove("contact");
    }
    closed::requests(&mut value);
    keys::describe(&mut value);
    limits::describe(&mut value);
    Ok(format!("{value:#}\n"))
}

/// The router with all paths of the daemon.
///
/// # Errors
/// The OpenAPI document cannot be serialised.
pub fn router(daemon: Arc<Daemon>) -> serde_json::Result<Router> {
    let text = document()?;
    let json = [(axum::http::header::CONTENT_TYPE, "application/json")];
    Ok(described()
        .0
        .route("/openapi.json", axum::routing::get(async move || (json, text.clone())))
        .fallback(async |request: Request| {
            ApiError::not_found(format_args!(
                "{} {}: no such path; GET /openapi.json lists them",
                request.method(),
                request.uri().path()
            ))
        })
        .method_not_allowed_fallback(async |request: Request| {
            let (method, path) = (request.method(), request.uri().path());
            let message =
                format!("{method} {path}: not a method of this path; GET /openapi.json lists them");
            (axum::http::StatusCode::METHOD_NOT_ALLOWED, axum::Json(ApiError::invalid(message).0))
        })
        .layer(axum::middleware::from_fn_with_state(daemon.clone(), once::once))
        .with_state(daemon))
}

#[cfg(test)]
mod archive_stream_tests;
#[cfg(test)]
mod list_tests;
#[cfg(test)]
mod many_tests;
#[cfg(test)]
mod once_tests;
#[cfg(test)]
mod store_tests;
#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;
