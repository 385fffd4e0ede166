//! A client, and one HTTP exchange of it: connects, sends the request, and turns error statuses
//! into errors.

use super::error::ClientError;
use super::exec::Exec;
use super::frames;
use super::port::Connection;
use super::reason::Reason;
use super::stream::ByteStream;
use crate::agent::{PROTOCOL, Runs, request_frames};
use crate::types::{
    ApiError, ErrorCode, Info, UPGRADE, UPGRADE_PORT, UPGRADE_STREAM, VM_HEADER, VmExit,
};
use bytes::Bytes;
use dayfly_units::sync::lock;
use futures::{FutureExt, Stream, StreamExt};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The body of a request.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Longest JSON answer in bytes that a client reads: a list of some ten thousand VMs.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Longest error body in bytes that a client reads.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Time limit for the daemon to say why a VM has ended, which it knows when a stream breaks off.
const REASON_WITHIN: Duration = Duration::from_secs(1);

/// A client of the daemon at one socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    /// An open connection without a request in progress.
    idle: Arc<Mutex<Option<SendRequest<Body>>>>,
    /// Whether the daemon takes archives in frames, once that was asked.
    takes_frames: Arc<OnceLock<bool>>,
}

/// An empty body.
#[must_use]
pub fn empty_body() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// A body that arrives in pieces. An error in it aborts the connection, so that the daemon keeps
/// nothing.
pub fn stream_body(pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Body {
    StreamBody::new(pieces.map(|piece| piece.map(Frame::data))).boxed_unsync()
}

pub(super) fn to_json(value: &impl Serialize) -> Result<Vec<u8>, ClientError> {
    serde_json::to_vec(value).map_err(|e| ClientError::Foreign {
        call: "a request's body".into(),
        expected: "a value that JSON can hold",
        got: e.to_string(),
    })
}

pub(super) fn json_body(value: &impl Serialize) -> Result<Body, ClientError> {
    to_json(value).map(bytes_body)
}

pub(super) fn bytes_body(bytes: Vec<u8>) -> Body {
    Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
}

/// The body of an upload: a 4-byte little-endian length, `head` as JSON, then `rest`.
pub(super) fn with_head(head: &impl Serialize, rest: Body) -> Result<Body, ClientError> {
    let json = to_json(head)?;
    let length = u32::try_from(json.len()).map_err(|_| ClientError::Foreign {
        call: "an upload's head".into(),
        expected: "less than 4 GiB",
        got: format!("{} bytes", json.len()),
    })?;
    let mut first = length.to_le_bytes().to_vec();
    first.extend_from_slice(&json);
    let first = futures::stream::once(async move { Ok(Frame::data(Bytes::from(first))) });
    let rest = http_body_util::BodyStream::new(rest);
    Ok(StreamBody::new(first.chain(rest)).boxed_unsync())
}

fn escape(text: &str, keep: impl Fn(u8) -> bool) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep(byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
        out
    })
}

/// Escapes `text` as one segment of a path. The dots of `.` and `..` are escaped too, because a
/// path would treat these as steps.
pub(super) fn segment(text: &str) -> String {
    if matches!(text, "." | "..") { text.replace('.', "%2E") } else { escape(text, |_| false) }
}

/// Escapes `text` as a value in a query.
pub(super) fn query(text: &str) -> String {
    escape(text, |byte| byte == b'/')
}

impl Client {
    /// Makes a client for the daemon that listens on `socket`. Nothing is opened yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), idle: Arc::default(), takes_frames: Arc::default() }
    }

    /// Path of the daemon's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request and returns the answer's head; its body is still unread. Statuses other than
    /// 2xx and 101 are errors.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, ClientError> {
        let request = Request::builder().method(method).uri(path);
        Ok(self.send(request, body, None).await?.0)
    }

    /// Gets bytes as a body that may fail.
    pub(super) async fn body_stream(&self, path: &str) -> Result<ByteStream, ClientError> {
        let request = Request::builder().method(Method::GET).uri(path);
        let request = request.header(header::TE, "trailers").header(header::CONNECTION, "te");
        Ok(ByteStream::of_body(self.send(request, empty_body(), None).await?.0))
    }

    /// Gets bytes of a VM: in frames, or as a body that may fail, for which the daemon sends the
    /// reason in a trailer. A daemon that has no frames for them, or none at all, sends a body.
    pub(super) async fn stream(&self, vm: &str, path: &str) -> Result<ByteStream, ClientError> {
        let request = Request::builder().method(Method::GET).uri(path);
        let request =
            request.header(header::TE, "trailers").header(header::UPGRADE, UPGRADE_STREAM);
        let request = request.header(header::CONNECTION, "te, upgrade");
        let answer = self.send(request, empty_body(), None).await?.0;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(ByteStream::of_body(answer));
        }
        let call = format!("GET {path}");
        let io = leave_http(&call, answer).await?;
        Ok(ByteStream::of_frames(call, io, vm, self.reason()))
    }

    /// Asks once whether the daemon takes archives in frames.
    async fn takes_frames(&self) -> Result<bool, ClientError> {
        if let Some(known) = self.takes_frames.get() {
            return Ok(*known);
        }
        let info: Info = self.json(Method::GET, "/v1/info".into(), empty_body()).await?;
        let takes = info.upgrades.iter().any(|upgrade| upgrade == UPGRADE_STREAM);
        Ok(*self.takes_frames.get_or_init(|| takes))
    }

    /// Asks why a VM has ended that a stream broke off from.
    fn reason(&self) -> Reason {
        let client = self.clone();
        Reason::new(move |vm| {
            let client = client.clone();
            async move { timeout(REASON_WITHIN, client.end_of(&vm)).await.ok().flatten() }.boxed()
        })
    }

    async fn end_of(&self, vm: &str) -> Option<ApiError> {
        let path = format!("/v1/vms/{}/wait", segment(vm));
        let message = match self.json::<VmExit>(Method::GET, path, empty_body()).await {
            Ok(VmExit { reason, message, .. }) => format!("VM {vm} ended ({reason:?}): {message}"),
            Err(ClientError::Refused(ApiError { code: ErrorCode::NotFound, .. })) => {
                format!("VM {vm} ended and was removed before everything was sent")
            }
            Err(_) => return None,
        };
        Some(ApiError { code: ErrorCode::Guest, message })
    }

    /// Sends bytes to a VM in frames, if the daemon takes them so: it answers 101. Sends them as a
    /// body to an earlier daemon, which would take the request for an upgrade for one with an empty
    /// body.
    pub(super) async fn put(&self, vm: &str, path: String, body: Body) -> Result<(), ClientError> {
        if !self.takes_frames().await? {
            return self.nothing(Method::PUT, path, body).await;
        }
        let request = Request::builder().method(Method::PUT).uri(&path);
        let request = request.header(header::UPGRADE, UPGRADE_STREAM);
        let request = request.header(header::CONNECTION, "upgrade");
        let answer = self.send(request, empty_body(), None).await?.0;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return self.nothing(Method::PUT, path, body).await;
        }
        let call = format!("PUT {path}");
        let io = leave_http(&call, answer).await?;
        match frames::send(&call, io, body).await {
            Err(frames::NotSent::Answer(e)) => Err(self.reason().instead_of(e, vm).await),
            Err(frames::NotSent::Body(e)) => Err(e),
            Ok(()) => Ok(()),
        }
    }

    /// Gets events that follow the one with the id `last`.
    pub(super) async fn events_after(
        &self,
        path: &str,
        last: Option<&str>,
    ) -> Result<Response<Incoming>, ClientError> {
        let mut request = Request::builder().method(Method::GET).uri(path);
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        Ok(self.send(request, empty_body(), None).await?.0)
    }

    /// Sends a request over `connection` or a new one. Returns the answer and the connection.
    pub(super) async fn send(
        &self,
        request: http::request::Builder,
        body: Body,
        connection: Option<SendRequest<Body>>,
    ) -> Result<(Response<Incoming>, SendRequest<Body>), ClientError> {
        let call = match (request.method_ref(), request.uri_ref()) {
            (Some(method), Some(uri)) => format!("{method} {uri}"),
            _ => "a request".to_owned(),
        };
        let broken = |source| ClientError::Broken { call: call.clone(), source };
        let request = request
            .header(header::HOST, "dayfly")
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|e| broken(e.into()))?;
        let mut sender = match connection {
            Some(sender) => sender,
            None => {
                let stream = UnixStream::connect(&self.socket).await.map_err(|source| {
                    ClientError::Connect { socket: self.socket.clone(), source }
                })?;
                let (sender, connection) =
                    http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(e.into()))?;
                // The task ends when its sender is dropped and the last answer's body was read or
                // dropped. Its errors reach the caller through that body.
                tokio::spawn(connection.with_upgrades());
                sender
            }
        };
        let answer = sender.send_request(request).await.map_err(|e| broken(e.into()))?;
        let status = answer.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok((answer, sender));
        }
        let body = Limited::new(answer.into_body(), MAX_ERROR_BYTES);
        let body = body.collect().await.map_err(broken)?.to_bytes();
        Err(match serde_json::from_slice::<ApiError>(&body) {
            Ok(error) => ClientError::Refused(error),
            Err(_) => ClientError::Foreign {
                call,
                expected: "an error in JSON",
                got: format!("{status}: {}", String::from_utf8_lossy(&body).trim()),
            },
        })
    }

    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: String,
        body: Body,
    ) -> Result<T, ClientError> {
        let body = self.short(method.clone(), &path, body).await?;
        self.decoded(&method, &path, &body)
    }

    /// Decodes the answer to a call.
    pub(super) fn decoded<T: DeserializeOwned>(
        &self,
        method: &Method,
        path: &str,
        body: &Bytes,
    ) -> Result<T, ClientError> {
        serde_json::from_slice(body).map_err(|e| ClientError::Foreign {
            call: format!("{method} {path}"),
            expected: std::any::type_name::<T>(),
            got: e.to_string(),
        })
    }

    pub(super) async fn nothing(
        &self,
        method: Method,
        path: String,
        body: Body,
    ) -> Result<(), ClientError> {
        self.short(method, &path, body).await.map(drop)
    }

    /// A call with a short answer. Its connection stays open for the next such call, which saves
    /// client and daemon a tenth of a millisecond.
    pub(super) async fn short(
        &self,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Bytes, ClientError> {
        let request = Request::builder().method(method).uri(path);
        self.short_request(request, path, body).await
    }

    /// As [`Self::short`], with a request that has its method and path.
    pub(super) async fn short_request(
        &self,
        request: http::request::Builder,
        path: &str,
        body: Body,
    ) -> Result<Bytes, ClientError> {
        let mut idle = lock(&self.idle).take();
        if let Some(sender) = &mut idle
            && sender.ready().await.is_err()
        {
            idle = None; // the daemon, or the runtime that served the connection, has ended
        }
        let (answer, sender) = self.send(request, body, idle).await?;
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let call = || format!("the answer to {path}");
        let body = body.map_err(|source| ClientError::Broken { call: call(), source })?.to_bytes();
        *lock(&self.idle) = Some(sender);
        Ok(body)
    }

    /// Requests the upgrade. If the daemon grants it, sends the frames of `first`.
    pub(super) async fn upgrade(
        &self,
        path: &str,
        mut first: impl Runs,
    ) -> Result<Exec, ClientError> {
        let frames = request_frames(&mut first, PROTOCOL).map_err(|e| {
            let too_long = e.is_too_long();
            let code = if too_long { ErrorCode::ProgramNotExecutable } else { ErrorCode::Invalid };
            ClientError::Refused(ApiError { code, message: format!("exec: {e}") })
        })?;
        let (call, answer) = self.switch(Method::POST, path, UPGRADE, empty_body()).await?;
        let io = leave_http(&call, answer).await?;
        Exec::start(call, io, &frames, self.reason()).await
    }

    /// Requests a connection to a port.
    pub(super) async fn to_port(
        &self,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Connection, ClientError> {
        let (call, answer) = self.switch(method, path, UPGRADE_PORT, body).await?;
        let vm =
            answer.headers().get(VM_HEADER).map(http::HeaderValue::as_bytes).unwrap_or_default();
        let vm = serde_json::from_slice(vm).map_err(|e| ClientError::Foreign {
            call: call.clone(),
            expected: "a VM in the header dayfly-vm",
            got: format!("{:?}: {e}", String::from_utf8_lossy(vm)),
        })?;
        Ok(Connection::new(vm, leave_http(&call, answer).await?))
    }

    /// Requests the upgrade to `protocol`. Returns the call in words and the daemon's 101 answer.
    async fn switch(
        &self,
        method: Method,
        path: &str,
        protocol: &'static str,
        body: Body,
    ) -> Result<(String, Response<Incoming>), ClientError> {
        let call = format!("{method} {path}");
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, protocol);
        let (answer, _) = self.send(request, body, None).await?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(ClientError::Foreign {
                call,
                expected: "101 Switching Protocols",
                got: answer.status().to_string(),
            });
        }
        Ok((call, answer))
    }
}

/// The raw connection after a 101 answer.
async fn leave_http(
    call: &str,
    answer: Response<Incoming>,
) -> Result<TokioIo<Upgraded>, ClientError> {
    let upgraded = hyper::upgrade::on(answer).await;
    let broken = |e: hyper::Error| ClientError::Broken { call: call.to_owned(), source: e.into() };
    upgraded.map(TokioIo::new).map_err(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_one_segment_whatever_its_text() {
        assert_eq!(segment("web-1"), "web-1");
        assert_eq!(segment("../x?y#z%"), "..%2Fx%3Fy%23z%25");
        assert_eq!(segment(".."), "%2E%2E");
        assert_eq!(query("/a b&c=ü"), "/a%20b%26c%3D%C3%BC");
    }
}
