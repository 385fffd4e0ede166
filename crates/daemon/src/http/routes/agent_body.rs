//! Bodies of answers that a guest's agent sends in `Data` frames.
//!
//! The status line has left before the body, so an error in the body needs another way. A client
//! that sends `TE: trailers` gets an [`ApiError`] in the trailer [`ERROR_TRAILER`]. For any
//! other client the connection ends before the last chunk.
//!
//! Root of a guest can replace the agent, so every frame is untrusted. A frame may not be empty,
//! because an agent that sends empty frames without end keeps the daemon busy and the client
//! waiting.

use crate::base::error::{ApiError, Outcome};
use crate::http::stream::TICK;
use crate::ops::exec;
use crate::vm::Vm;
use crate::vmm::agent_link::{LinkError, read_frame};
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::agent::{Frame, FrameKind, HEADER_BYTES, Reply};
use dayfly_api::types::{ApiError as ErrorBody, ERROR_TRAILER, ErrorCode};
use dayfly_units::text::escaped;
use futures::stream;
use http_body_util::StreamBody;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::sync::OwnedRwLockReadGuard;
use tokio::time::timeout;

/// Read from an agent at once: an agent cuts an archive into frames of at most this length.
const CHUNK_BYTES: usize = (64 << 10) + HEADER_BYTES;
/// The longest message in a trailer, in characters. hyper's client reads 16 KiB of trailers.
const MESSAGE: usize = 2 << 10;

/// Where a body comes from.
#[derive(Debug)]
pub struct AgentBody {
    agent: BufReader<UnixStream>,
    vm: Arc<Vm>,
    /// For errors: `reading an archive`.
    doing: &'static str,
    /// How long the agent of a running guest may take for a frame; `None`: as long as it likes.
    silence: Option<Duration>,
    /// Delays the removal of the VM with its program ([`Vm::followers`]).
    _follows: Option<OwnedRwLockReadGuard<()>>,
}

impl AgentBody {
    /// The body that `agent` sends after its reply.
    #[must_use]
    pub fn new(
        agent: UnixStream,
        vm: Arc<Vm>,
        doing: &'static str,
        silence: Option<Duration>,
    ) -> Self {
        let agent = BufReader::with_capacity(CHUNK_BYTES, agent);
        Self { agent, vm, doing, silence, _follows: None }
    }

    /// The body of an output that a client follows, which holds `follows` to its end.
    #[must_use]
    pub fn following(self, follows: OwnedRwLockReadGuard<()>) -> Self {
        Self { _follows: Some(follows), ..self }
    }

    /// The answer with this body, for a request with these headers.
    #[must_use]
    pub fn answer(self, content_type: &'static str, request: &HeaderMap) -> Response {
        let trailers = takes_trailers(request);
        let frames = stream::unfold(Some(self), move |body| async move {
            let mut body = body?;
            match body.next().await {
                Ok(Some(piece)) => Some((Ok(hyper::body::Frame::data(piece)), Some(body))),
                Ok(None) => None,
                Err(error) => {
                    tracing::info!("VM {}: {}: {error}", body.vm.name, body.doing);
                    let end = if trailers {
                        Ok(hyper::body::Frame::trailers(trailer(error.0)))
                    } else {
                        Err(io::Error::other(error))
                    };
                    Some((end, None))
                }
            }
        });
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if trailers {
            headers.insert(header::TRAILER, HeaderValue::from_static(ERROR_TRAILER));
        }
        (headers, Body::new(StreamBody::new(frames))).into_response()
    }

    /// The next piece, never an empty one; `None` after the agent's `End`.
    async fn next(&mut self) -> Outcome<Option<Bytes>> {
        let doing = self.doing;
        let frame = read_frame(&mut self.agent, doing);
        let frame = match self.silence {
            Some(silence) => in_time(&self.vm, silence, doing, frame).await?,
            None => frame.await,
        };
        let got = match frame {
            Ok(Some(Frame { kind: FrameKind::Data, body })) if !body.is_empty() => {
                return Ok(Some(Bytes::from(body)));
            }
            Ok(Some(Frame { kind: FrameKind::End, .. })) => return Ok(None),
            Ok(Some(Frame { kind: FrameKind::Data, .. })) => {
                "an empty frame of kind Data".to_owned()
            }
            Ok(Some(Frame { kind: FrameKind::Reply, body })) => match serde_json::from_slice(&body)
            {
                Ok(Reply::Err(failure)) => return Err(ApiError::from_agent(&failure)),
                Ok(reply) => format!("the reply {reply:?}"),
                Err(e) => format!("a reply in JSON that does not parse: {e}"),
            },
            Ok(Some(Frame { kind, .. })) => format!("a frame of kind {kind:?}"),
            Ok(None) | Err(LinkError::Io { .. }) => {
                return Err(exec::explain(&self.vm, "it had sent everything").await);
            }
            Err(e) => return Err(self.refused(e)),
        };
        let expected = "expected Data, End or an error";
        Err(self.refused(format_args!("the guest's agent, while {doing}: {expected}, got {got}")))
    }

    fn refused(&self, why: impl std::fmt::Display) -> ApiError {
        ApiError::new(ErrorCode::Guest, format_args!("VM {}: {why}", self.vm.name))
    }
}

/// Waits for what the agent of `vm` owes. Only time in which the guest runs counts: its owner may
/// pause it.
async fn in_time<T>(
    vm: &Vm,
    silence: Duration,
    doing: &'static str,
    next: impl Future<Output = T>,
) -> Outcome<T> {
    let mut next = std::pin::pin!(next);
    let mut left = silence;
    loop {
        let step = TICK.min(left);
        if let Ok(got) = timeout(step, &mut next).await {
            return Ok(got);
        }
        if vm.serves("wait for").is_ok() {
            left -= step;
        }
        if left.is_zero() {
            let seconds = silence.as_secs_f64();
            let text = format_args!(
                "VM {}: the guest's agent, while {doing}: \
                 expected a frame within {seconds} s, got none (paused time does not count)",
                vm.name
            );
            return Err(ApiError::new(ErrorCode::Timeout, text));
        }
    }
}

/// Whether a client reads trailers (RFC 9110, section 10.1.4).
fn takes_trailers(request: &HeaderMap) -> bool {
    let values = request.get_all(header::TE).iter().filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .any(|word| word.trim().eq_ignore_ascii_case("trailers"))
}

fn trailer(error: ErrorBody) -> HeaderMap {
    let message = escaped(&error.message, MESSAGE).to_string();
    // The fallback is never used: an error is JSON, and JSON and `escaped` leave no byte that a
    // header may not have.
    let json = serde_json::to_vec(&ErrorBody { message, ..error }).unwrap_or_default();
    let value = HeaderValue::from_bytes(&json).unwrap_or(HeaderValue::from_static("{}"));
    let mut headers = HeaderMap::new();
    headers.insert(ERROR_TRAILER, value);
    headers
}

#[cfg(test)]
#[path = "agent_body_tests.rs"]
mod tests;
