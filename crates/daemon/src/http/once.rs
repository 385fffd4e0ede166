//! `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): a request that creates something
//! is carried out once, however often it is sent. The keys are in [`crate::vm::requests`].

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::http::routes::extract::long_body;
use crate::model::request_key::{RequestKey, parse};
use crate::vm::requests::{Answer, Entered, Ticket, Waiting};
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use dayfly_api::types::{Forked, IDEMPOTENCY_KEY, List, MAX_JSON_BYTES, Progress, Vm};
use dayfly_units::{Digest, VmId};
use http_body_util::BodyExt;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

const JSON: &str = "application/json";
const LINES: &str = "application/x-ndjson";

/// What a request creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Creates {
    /// A VM.
    Vm,
    /// VMs.
    Vms,
    /// Clones.
    Clones,
    /// A snapshot, with progress.
    Snapshot,
    /// A program in a VM.
    Program,
}

/// The operations that take a key, by their paths.
pub const OPERATIONS: [(&str, Creates); 6] = [
    ("/v1/vms", Creates::Vm),
    ("/v1/batch/create", Creates::Vms),
    ("/v1/vms/{vm}/fork", Creates::Clones),
    ("/v1/vms/{vm}/snapshot", Creates::Snapshot),
    ("/v1/bake", Creates::Snapshot),
    ("/v1/vms/{vm}/exec", Creates::Program),
];

fn creates(request: &Request) -> Option<Creates> {
    if request.method() != Method::POST || !request.headers().contains_key(IDEMPOTENCY_KEY) {
        return None;
    }
    let path = request.extensions().get::<MatchedPath>()?.as_str();
    OPERATIONS.iter().find(|(of, _)| *of == path).map(|(_, creates)| *creates)
}

/// Answers a request with a key: carries it out, or repeats the first answer.
pub async fn once(State(daemon): State<Arc<Daemon>>, request: Request, next: Next) -> Response {
    let Some(creates) = creates(&request) else { return next.run(request).await };
    keyed(&daemon, creates, request, next).await.unwrap_or_else(IntoResponse::into_response)
}

async fn keyed(
    daemon: &Arc<Daemon>,
    creates: Creates,
    request: Request,
    next: Next,
) -> Outcome<Response> {
    if request.headers().contains_key(header::UPGRADE) {
        return Err(ApiError::invalid(
            "Idempotency-Key: expected none with an upgrade; send the request as the body",
        ));
    }
    let (mut parts, body) = request.into_parts();
    let mut keys = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return Err(ApiError::invalid("Idempotency-Key: expected one, got several"));
    };
    let key = parse(key.as_bytes())?;
    let (body, permit) = match creates {
        Creates::Program => long_body(daemon, body).await?,
        _ => (to_bytes(body, MAX_JSON_BYTES).await.map_err(too_long)?, None),
    };
    let head = format!("{} {}\n", parts.method, parts.uri);
    let key = RequestKey { key, request: Digest::of(&[head.as_bytes(), &body].concat()) };
    loop {
        match daemon.requests.enter(&key)? {
            Entered::Kept(answer) => return Ok(response(&answer)),
            Entered::Again(mut waiting) => {
                // The first of these requests may take long.
                drop((body, permit));
                return waiting.answer().await.map(|a| response(&a));
            }
            Entered::Adopted(vms) => match adopted(daemon, creates, &vms)? {
                Some(response) => return Ok(response),
                None => daemon.requests.forget(&key),
            },
            Entered::First(ticket, waiting, cancelled) => {
                parts.extensions.insert(key);
                if let Some(permit) = permit {
                    parts.extensions.insert(permit);
                }
                let request = Request::from_parts(parts, Body::from(body));
                let (sender, begun) = oneshot::channel();
                let work = work(creates, request, next, ticket, sender);
                tokio::spawn(cancelled.run_until_cancelled_owned(work));
                return first(waiting, begun).await;
            }
        }
    }
}

fn too_long(error: axum::Error) -> ApiError {
    let expected = format_args!("request body: expected at most {MAX_JSON_BYTES} bytes: {error}");
    ApiError::invalid(expected)
}

/// The pieces of a progress, for the first request.
type Pieces = mpsc::Receiver<Bytes>;

/// Carries a request out, and answers all that wait for it.
async fn work(
    creates: Creates,
    request: Request,
    next: Next,
    ticket: Ticket,
    begun: oneshot::Sender<Pieces>,
) {
    let (parts, mut body) = next.run(request).await.into_parts();
    let status = parts.status;
    if creates == Creates::Snapshot && status.is_success() {
        let (sender, pieces) = mpsc::channel(1);
        // Fails if the first client is gone.
        let _ = begun.send(pieces);
        return progress(status, &mut body, ticket, sender).await;
    }
    drop(begun);
    let Ok(body) = body.collect().await else { return };
    // A program may have run before its guest failed. All else that fails leaves nothing behind.
    let ran = creates == Creates::Program
        && matches!(status, StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT);
    let answer = Answer { status, kind: JSON, body: body.to_bytes() };
    ticket.finish(answer, status.is_success() || ran);
}

/// Passes progress on to the first request. All others that wait get its last line.
async fn progress(status: StatusCode, body: &mut Body, ticket: Ticket, first: mpsc::Sender<Bytes>) {
    // Each piece is one line.
    while let Some(Ok(piece)) = body.frame().await {
        let Ok(line) = piece.into_data() else { continue };
        let last = serde_json::from_slice::<Progress>(&line).ok();
        let stored = matches!(last, Some(Progress::Snapshot(_)));
        if stored || matches!(last, Some(Progress::Failed(_))) {
            // Before the client gets it, because it may go away then.
            ticket.finish(Answer { status, kind: LINES, body: line.clone() }, stored);
            let _ = first.send(line).await;
            return;
        }
        // Fails if the first client is gone.
        let _ = first.send(line).await;
    }
}

/// The response to the first request. It waits for the work to its end.
async fn first(mut waiting: Waiting, begun: oneshot::Receiver<Pieces>) -> Outcome<Response> {
    let Ok(pieces) = begun.await else { return waiting.answer().await.map(|a| response(&a)) };
    let pieces = futures::stream::unfold((pieces, waiting), async |(mut pieces, waiting)| {
        let piece = pieces.recv().await?;
        Some((Ok::<_, Infallible>(piece), (pieces, waiting)))
    });
    Ok(([(header::CONTENT_TYPE, LINES)], Body::from_stream(pieces)).into_response())
}

fn response(answer: &Answer) -> Response {
    let kind = [(header::CONTENT_TYPE, answer.kind)];
    (answer.status, kind, answer.body.clone()).into_response()
}

/// The answer to a request that an earlier daemon carried out; `None` if its VMs are gone.
fn adopted(daemon: &Daemon, creates: Creates, vms: &[VmId]) -> Outcome<Option<Response>> {
    let found = vms.iter().filter_map(|id| daemon.registry.find(&id.to_string()).ok());
    let items: Vec<Vm> = found.filter(|vm| !vm.leaving()).map(|vm| vm.shown()).collect();
    let Some(only) = items.first().cloned() else { return Ok(None) };
    let body = match creates {
        Creates::Vm => serde_json::to_vec(&only),
        Creates::Vms => serde_json::to_vec(&List::whole(items)),
        // How long the VM stood still is known no more.
        Creates::Clones => {
            serde_json::to_vec(&Forked { paused_us: 0, pages: 0, frozen_us: 0, items })
        }
        Creates::Snapshot | Creates::Program => return Ok(None),
    };
    let body = body.map_err(ApiError::internal)?.into();
    Ok(Some(response(&Answer { status: StatusCode::CREATED, kind: JSON, body })))
}
