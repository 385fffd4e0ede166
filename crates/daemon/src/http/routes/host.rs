//! The host and the daemon itself.

use crate::base::error::{Outcome, blocking};
use crate::http::routes::extract::Shared;
use crate::ops::sweep;
use axum::Json;
use axum::extract::State;
use axum::http::HeaderName;
use axum::http::header::CONTENT_TYPE;
use dayfly_api::types::{ApiError as ErrorBody, Info, Leak, List};

/// Version, process and host of this daemon.
#[utoipa::path(get, operation_id = "info",
    path = "/v1/info", responses((status = 200, body = Info)))]
pub async fn info(State(daemon): Shared) -> Json<Info> {
    Json(Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        host_kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        kvm: crate::base::kvm::vendor(),
        cpu_level: crate::base::cpu::level(),
        upgrades: vec![dayfly_api::types::UPGRADE_STREAM.to_owned()],
        vms: daemon.registry.len(),
        state_dir: daemon.config.state.display().to_string(),
    })
}

/// Lists what a crash left: processes, files and mounts that belong to no VM and no operation.
/// Changes nothing.
#[utoipa::path(
    get,
    operation_id = "leaks",
    path = "/v1/leaks",
    responses((status = 200, body = List<Leak>), (status = 500, body = ErrorBody))
)]
pub async fn leaks(State(daemon): Shared) -> Outcome<Json<List<Leak>>> {
    Ok(Json(List::whole(sweep::find(&daemon).await?.iter().map(sweep::shown).collect())))
}

/// Removes what a crash left, and lists what it removed.
#[utoipa::path(
    post,
    operation_id = "sweep",
    path = "/v1/sweep",
    responses((status = 200, body = List<Leak>), (status = 500, body = ErrorBody))
)]
pub async fn sweep(State(daemon): Shared) -> Outcome<Json<List<Leak>>> {
    Ok(Json(List::whole(sweep::sweep(&daemon).await?.iter().map(sweep::shown).collect())))
}

/// Counters and histograms, for Prometheus.
#[utoipa::path(
    get,
    operation_id = "metrics",
    path = "/metrics",
    responses((status = 200, body = String, content_type = "application/openmetrics-text"))
)]
pub async fn metrics(State(daemon): Shared) -> Outcome<([(HeaderName, &'static str); 1], String)> {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    // Reads the counters of each VM's control group.
    let text = blocking(move || Ok(super::metrics::text(&daemon))).await?;
    Ok(([(CONTENT_TYPE, kind)], text))
}
