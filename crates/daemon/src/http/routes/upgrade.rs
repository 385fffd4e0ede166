//! HTTP upgrades, and the protocols that follow them.

use crate::base::error::{ApiError, Outcome};
use crate::http::session;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use dayfly_api::types;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::marker::PhantomData;

/// The protocol after the 101.
pub trait Protocol {
    /// The name in the `Upgrade` header.
    const NAME: &'static str;
}

/// The frames of a program's session.
pub struct Frames;
/// The bytes of a guest's port.
pub struct Port;
/// Offers of folders, and their streams.
pub struct Volume;

impl Protocol for Frames {
    const NAME: &'static str = types::UPGRADE;
}

impl Protocol for Port {
    const NAME: &'static str = types::UPGRADE_PORT;
}

impl Protocol for Volume {
    const NAME: &'static str = types::UPGRADE_VOLUME;
}

/// Extracts a request for an upgrade to `P`.
pub struct Upgrade<P>(OnUpgrade, PhantomData<P>);

fn has_token(headers: &HeaderMap, name: header::HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|word| word.trim().eq_ignore_ascii_case(token))
}

impl<S: Send + Sync, P: Protocol> FromRequestParts<S> for Upgrade<P> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Outcome<Self> {
        let asked = has_token(&parts.headers, header::CONNECTION, "upgrade")
            && has_token(&parts.headers, header::UPGRADE, P::NAME);
        let upgrade = parts.extensions.remove::<OnUpgrade>().filter(|_| asked);
        upgrade.map(|upgrade| Self(upgrade, PhantomData)).ok_or_else(|| {
            ApiError::invalid(format_args!(
                "expected the headers `Connection: upgrade` and `Upgrade: {}`",
                P::NAME
            ))
        })
    }
}

impl<P: Protocol> Upgrade<P> {
    /// Answers 101 and calls `serve` with the connection. If the client goes away before, `serve`
    /// is dropped.
    pub fn then<F, Fut>(self, serve: F) -> Response
    where
        F: FnOnce(session::Client) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send,
    {
        let upgrade = self.0;
        tokio::spawn(async move {
            match upgrade.await {
                Ok(upgraded) => serve(TokioIo::new(upgraded)).await,
                Err(e) => tracing::debug!("a client went away before its upgrade: {e}"),
            }
        });
        let headers = [
            (header::CONNECTION, HeaderValue::from_static("upgrade")),
            (header::UPGRADE, HeaderValue::from_static(P::NAME)),
        ];
        (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
    }
}
