//! Programs in guests, over an upgraded connection.

use super::{Shared, Word};
use crate::error::{Fault, Outcome};
use crate::session;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{ApiError, RunReply, RunRequest, UPGRADE};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::future::Future;

/// A request that asks to leave HTTP.
pub struct Upgrade(OnUpgrade);

fn has_token(headers: &HeaderMap, name: header::HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|word| word.trim().eq_ignore_ascii_case(token))
}

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Outcome<Self> {
        let asked = has_token(&parts.headers, header::CONNECTION, "upgrade")
            && has_token(&parts.headers, header::UPGRADE, UPGRADE);
        parts.extensions.remove::<OnUpgrade>().filter(|_| asked).map(Self).ok_or_else(|| {
            Fault::invalid(format_args!(
                "expected the headers `Connection: upgrade` and `Upgrade: {UPGRADE}`"
            ))
        })
    }
}

impl Upgrade {
    /// Answers 101 and gives the connection to `serve`.
    fn then<F, Fut>(self, serve: F) -> Response
    where
        F: FnOnce(session::Client) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send,
    {
        tokio::spawn(async move {
            match self.0.await {
                Ok(upgraded) => serve(TokioIo::new(upgraded)).await,
                Err(e) => tracing::debug!("a client went away before its upgrade: {e}"),
            }
        });
        let headers = [
            (header::CONNECTION, HeaderValue::from_static("upgrade")),
            (header::UPGRADE, HeaderValue::from_static(UPGRADE)),
        ];
        (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
    }
}

/// Runs a program in a VM. With `Upgrade: dayfly-exec`; after the 101 the client sends an ExecSpec in a `Request` frame and gets a RunReply in
/// a `Reply` frame, then output frames and `Exit`. Where the VM ends before the program, the last frame is a `Reply` with `failed` instead.
#[utoipa::path(post, path = "/v1/vms/{vm}/exec", params(("vm" = String, Path)),
    request_body(content = ExecSpec, description = "as a Request frame after the upgrade"),
    responses((status = 101, body = RunReply), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError)))]
pub async fn exec(State(daemon): Shared, Word(word): Word, upgrade: Upgrade) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    vm.phase().serves("run a program in")?;
    Ok(upgrade.then(move |client| session::exec(daemon, vm, client)))
}

/// Clones (or boots) a VM, runs a program in it, removes it: as exec, with a RunRequest in the first frame. The VM goes when the connection
/// ends, unless `keep`.
#[utoipa::path(post, path = "/v1/run",
    request_body(content = RunRequest, description = "as a Request frame after the upgrade"),
    responses((status = 101, body = RunReply), (status = 400, body = ApiError)))]
pub async fn run(State(daemon): Shared, upgrade: Upgrade) -> Response {
    upgrade.then(move |client| session::run(daemon, client))
}
