//! The host and the daemon itself.

use super::Shared;
use crate::error::Outcome;
use crate::{metrics, sweep};
use axum::Json;
use axum::extract::State;
use axum::http::HeaderName;
use axum::http::header::CONTENT_TYPE;
use dayfly_api::types::{ApiError, Info, Leak, List};

/// What this daemon is and runs on.
#[utoipa::path(get, path = "/v1/info", responses((status = 200, body = Info)))]
pub async fn info(State(daemon): Shared) -> Json<Info> {
    Json(Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        host_kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        kvm: crate::kvm::vendor(),
        vms: daemon.registry.len(),
        state_dir: daemon.config.state.display().to_string(),
    })
}

/// What belongs to no VM and no running operation: a crash left it behind. Changes nothing.
#[utoipa::path(get, path = "/v1/leaks", responses((status = 200, body = List<Leak>), (status = 500, body = ApiError)))]
pub async fn leaks(State(daemon): Shared) -> Outcome<Json<List<Leak>>> {
    Ok(Json(List { items: sweep::find(&daemon).await?.iter().map(sweep::shown).collect() }))
}

/// Removes what a crash left behind, and says what that was.
#[utoipa::path(post, path = "/v1/sweep", responses((status = 200, body = List<Leak>), (status = 500, body = ApiError)))]
pub async fn sweep(State(daemon): Shared) -> Outcome<Json<List<Leak>>> {
    Ok(Json(List { items: sweep::sweep(&daemon).await?.iter().map(sweep::shown).collect() }))
}

/// What is counted and timed, for Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub async fn metrics(State(daemon): Shared) -> ([(HeaderName, &'static str); 1], String) {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, kind)], metrics::text(&daemon))
}
