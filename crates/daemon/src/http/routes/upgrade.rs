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
/// The frames of an archive or an output.
pub struct Stream;
/// The bytes of a guest's port.
pub struct Port;
/// Offers of folders, and their streams.
pub struct Volume;

impl Protocol for Frames {
    const NAME: &'static str = types::UPGRADE;
}

impl Protocol for Stream {
    const NAME: &'static str = types::UPGRADE_STREAM;
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

/// The upgrade, if a client wants it: the same path also has an answer without. Other protocols in
/// the header are ignored (RFC 9110, section 7.8): clients offer `h2c` without being asked.
///
/// # Errors
/// The client names the protocol, but its request is no upgrade.
pub fn wanted<P: Protocol>(
    upgrade: Result<Upgrade<P>, ApiError>,
    headers: &HeaderMap,
) -> Outcome<Option<Upgrade<P>>> {
    match upgrade {
        Ok(upgrade) => Ok(Some(upgrade)),
        Err(refused) if has_token(headers, header::UPGRADE, P::NAME) => Err(refused),
        Err(_) => Ok(None),
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
