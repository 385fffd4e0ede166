//! What handlers take from a request: its body, its query and the names in its path.

use crate::base::caller::Caller;
use crate::base::error::{ApiError, Outcome};
use crate::base::long_requests::Permit;
use crate::daemon::Daemon;
use crate::http::{json, query};
use crate::model::request_key::RequestKey;
use axum::body::Body;
use axum::body::Bytes;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::serve::IncomingStream;
use bytes::BytesMut;
use dayfly_api::agent::{ExecSpec, MAX_FRAME_BYTES};
use dayfly_api::types::{ErrorCode, MAX_EXEC_JSON_BYTES, MAX_JSON_BYTES};
use dayfly_units::Name;
use futures::{StreamExt, TryStreamExt};
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::time::{Instant, timeout_at};

/// The state that every handler gets.
pub type Shared = axum::extract::State<Arc<Daemon>>;

/// Turns a request's body into a reader for blocking code, to be used on a blocking thread.
pub fn blocking_reader(body: axum::body::Body) -> impl std::io::Read + Send + 'static {
    let pieces = body.into_data_stream().map_err(std::io::Error::other);
    tokio_util::io::SyncIoBridge::new(tokio_util::io::StreamReader::new(pieces))
}

/// Extracts a JSON body of at most [`MAX_JSON_BYTES`].
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Outcome<Self> {
        decoded(&body(request, MAX_JSON_BYTES).await?).map(Self)
    }
}

/// Extracts a program in JSON of at most [`MAX_EXEC_JSON_BYTES`], and the permit of a long one.
pub struct Spec(pub ExecSpec, pub Option<Permit>);

impl FromRequest<Arc<Daemon>> for Spec {
    type Rejection = ApiError;

    async fn from_request(mut request: Request, daemon: &Arc<Daemon>) -> Outcome<Self> {
        let read_before = request.extensions_mut().remove::<Permit>();
        let (body, permit) = match read_before {
            Some(permit) => (body(request, MAX_EXEC_JSON_BYTES).await?, Some(permit)),
            None => long_body(daemon, request.into_body()).await?,
        };
        let spec: ExecSpec = decoded(&body)?;
        if spec.strings.is_some() {
            // No frames follow a body.
            return Err(ApiError::invalid("request body: strings: no such field"));
        }
        Ok(Self(spec, permit))
    }
}

/// Reads the body of an exec. One that is longer than a frame waits for a permit first.
///
/// # Errors
/// It is longer than [`MAX_EXEC_JSON_BYTES`], or the client stalls while it has a permit.
pub async fn long_body(daemon: &Daemon, body: Body) -> Outcome<(Bytes, Option<Permit>)> {
    let mut pieces = body.into_data_stream();
    let (mut all, mut permit, mut until) = (BytesMut::new(), None, None);
    let within = daemon.config.deadlines.first_frame;
    loop {
        let next = pieces.next();
        let next = match until {
            None => next.await,
            Some(until) => timeout_at(until, next).await.map_err(|_| {
                let waited = within.as_secs();
                let text = format_args!("request body: not complete after {waited} s");
                ApiError::new(ErrorCode::Timeout, text)
            })?,
        };
        let Some(piece) = next else { return Ok((all.freeze(), permit)) };
        let piece = piece.map_err(|e| ApiError::invalid(format_args!("request body: {e}")))?;
        let length = all.len() + piece.len();
        if length > MAX_EXEC_JSON_BYTES {
            return Err(ApiError::invalid(format_args!(
                "request body: expected at most {MAX_EXEC_JSON_BYTES} bytes, got more"
            )));
        }
        if length > MAX_FRAME_BYTES && permit.is_none() {
            permit = daemon.long_requests.permit().await;
            until = Some(Instant::now() + within);
        }
        all.extend_from_slice(&piece);
    }
}

/// As [`Json`]; an empty body is the default value.
pub struct JsonOrNothing<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for JsonOrNothing<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Outcome<Self> {
        let body = body(request, MAX_JSON_BYTES).await?;
        if body.is_empty() { Ok(Self(T::default())) } else { decoded(&body).map(Self) }
    }
}

async fn body(request: Request, most: usize) -> Outcome<Bytes> {
    axum::body::to_bytes(request.into_body(), most).await.map_err(|e| {
        ApiError::invalid(format_args!("request body: expected at most {most} bytes: {e}"))
    })
}

fn decoded<T: DeserializeOwned>(body: &Bytes) -> Outcome<T> {
    json::decoded(body).map_err(|e| ApiError::invalid(format_args!("request body: {e}")))
}

/// Extracts the query of a request.
pub struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Outcome<Self> {
        query::decoded(parts.uri.query().unwrap_or_default()).map(Self)
    }
}

/// Extracts the key of a request, if it has one.
pub struct Key(pub Option<RequestKey>);

impl<S: Send + Sync> FromRequestParts<S> for Key {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get().cloned()))
    }
}

/// The user of the process that made a connection; `None` if the kernel does not say it.
#[derive(Debug, Clone, Default)]
pub struct Peer(pub Option<Arc<Caller>>);

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        let caller = Caller::of(stream.io());
        let caller = caller.inspect_err(|e| tracing::warn!("the user of a client: {e}"));
        Self(caller.ok().map(Arc::new))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Peer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let peer = parts.extensions.get::<ConnectInfo<Self>>();
        Ok(peer.map(|ConnectInfo(peer)| peer.clone()).unwrap_or_default())
    }
}

/// Extracts the name in a path.
pub struct Named(pub Name);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let Word(word) = Word::from_request_parts(parts, state).await?;
        word.parse().map(Self).map_err(ApiError::invalid)
    }
}

/// Extracts the words in a path that name a VM and something in it.
pub struct Words(pub String, pub String);

impl<S: Send + Sync> FromRequestParts<S> for Words {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        path.map(|Path((vm, word))| Self(vm, word)).map_err(|e| ApiError::invalid(e.body_text()))
    }
}

/// Extracts the word in a path that names a VM: its id, the start of its id, or its name.
pub struct Word(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Word {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.map(|Path(word)| Self(word)).map_err(|e| ApiError::invalid(e.body_text()))
    }
}
