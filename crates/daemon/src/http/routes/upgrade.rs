//! HTTP upgrades, and the protocols that follow them.

use crate::base::error::{ApiError, Outcome};
use crate::http::session;
use axum::extract::FromRequestParts;
use axum::extract::ws::WebSocketUpgrade;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use dayfly_api::types::{self, WEBSOCKET_PROTOCOL};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::marker::PhantomData;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

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
        spawn(self.0, serve);
        let headers = [
            (header::CONNECTION, HeaderValue::from_static("upgrade")),
            (header::UPGRADE, HeaderValue::from_static(P::NAME)),
        ];
        (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
    }
}

/// Calls `serve` with the connection after the 101.
fn spawn<F, Fut>(upgrade: OnUpgrade, serve: F)
where
    F: FnOnce(session::Client) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    tokio::spawn(async move {
        match upgrade.await {
            Ok(upgraded) => serve(TokioIo::new(upgraded)).await,
            Err(e) => tracing::debug!("a client went away before its upgrade: {e}"),
        }
    });
}

/// Extracts a request for a WebSocket (RFC 6455, section 4.2). axum's extractor checks the request,
/// but gives no access to the connection below the messages, which bounds their memory.
pub struct UpgradeToWebSocket {
    upgrade: OnUpgrade,
    accept: HeaderValue,
    protocol: Option<HeaderValue>,
}

impl<S: Send + Sync> FromRequestParts<S> for UpgradeToWebSocket {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let refused = |why: &dyn std::fmt::Display| {
            ApiError::invalid(format_args!("expected a WebSocket: {why}; POST takes other clients"))
        };
        // axum's extractor takes it out of the request.
        let upgrade = parts.extensions.get::<OnUpgrade>().cloned();
        let checked = WebSocketUpgrade::from_request_parts(parts, state).await;
        let checked = checked.map_err(|e| refused(&e))?.protocols([WEBSOCKET_PROTOCOL]);
        let key = parts.headers.get(header::SEC_WEBSOCKET_KEY);
        let (Some(upgrade), Some(key)) = (upgrade, key) else {
            return Err(refused(&"HTTP/1.1 only"));
        };
        let accept = HeaderValue::try_from(derive_accept_key(key.as_bytes()));
        let accept = accept.map_err(ApiError::internal)?;
        Ok(Self { upgrade, accept, protocol: checked.selected_protocol().cloned() })
    }
}

impl UpgradeToWebSocket {
    /// As [`Upgrade::then`]; the connection has frames of RFC 6455.
    pub fn then<F, Fut>(self, serve: F) -> Response
    where
        F: FnOnce(session::Client) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send,
    {
        let Self { upgrade, accept, protocol } = self;
        spawn(upgrade, serve);
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        if let Some(protocol) = protocol {
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
        }
        (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
    }
}
