//! A program's session over a WebSocket (RFC 6455), see docs/http-api.md.
//!
//! ```text
//!  client ◀─ messages ─▶ here ◀─ frames, in a pipe of 64 KiB ─▶ session ◀─ frames ─▶ agent
//! ```
//!
//! Messages become the frames of [`crate::http::session`] and back, so that both ways to run a
//! program behave alike. One message is held in each direction. A client that does not read makes
//! the program wait, because the pipe is full then. A session begins with the client's first
//! message, which may have to wait for memory ([`crate::http::gate`]).

use crate::base::error::{ApiError, Outcome};
use crate::base::long_requests::Permit;
use crate::daemon::Daemon;
use crate::http::gate::{Gate, Messages};
use crate::http::{json, session};
use crate::vm::Vm;
use crate::vmm::agent_link::read_frame;
use axum::extract::ws::close_code;
use bytes::{BufMut, Bytes, BytesMut};
use dayfly_api::agent::{
    ExecSpec, Frame, FrameKind, MAX_FRAME_BYTES, PROTOCOL, WindowSize, encode, request_frames,
};
use dayfly_api::types::{
    ErrorCode, ExecControl, ExecNotice, MAX_EXEC_JSON_BYTES, RunReply, WEBSOCKET_STDERR,
    WEBSOCKET_STDIN, WEBSOCKET_STDOUT,
};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};

/// The longest message of a client behind the first: a channel and its bytes. The first, which is
/// the program, may have [`MAX_EXEC_JSON_BYTES`].
pub const MESSAGE_MAX_BYTES: usize = MAX_FRAME_BYTES + 1;
/// Bytes between messages and frames.
const PIPE_BYTES: usize = 64 << 10;
/// The period of pings, by which the daemon notices that a client's host is gone.
const PING: Duration = Duration::from_secs(30);
/// Time for the client's part of the closing handshake.
const CLOSING: Duration = Duration::from_secs(5);
/// The longest reason of a close, in bytes (RFC 6455, section 5.5).
const REASON: usize = 123;

type WebSocket = WebSocketStream<Gate<session::Client>>;
type Sink = SplitSink<WebSocket, Message>;

/// The limits of a client's WebSocket.
fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(MAX_EXEC_JSON_BYTES))
        .max_frame_size(Some(MAX_EXEC_JSON_BYTES))
        // Each message is written before the next is taken.
        .write_buffer_size(0)
        .max_write_buffer_size(4 * MESSAGE_MAX_BYTES)
}

/// Runs a program in `vm` for the client.
pub async fn exec(daemon: Arc<Daemon>, vm: Arc<Vm>, client: session::Client) {
    let (gate, messages) = Gate::new(client, &daemon.long_requests);
    let socket = WebSocketStream::from_raw_socket(gate, Role::Server, Some(limits())).await;
    let (near, far) = tokio::io::duplex(PIPE_BYTES);
    let (begins, begun) = oneshot::channel();
    let within = daemon.config.deadlines.first_frame;
    let stop = daemon.stop.clone();
    let session = async {
        let permit = tokio::select! {
            permit = begun => permit,
            () = stop.cancelled() => return,
        };
        if let Ok(permit) = permit {
            session::exec(daemon, vm, near, permit).await;
        }
    };
    let client = ClientSide { messages, within, begins: Some(begins) };
    // Each ends when the other has ended.
    tokio::join!(session, serve(socket, client, far));
}

/// What is known of a client besides its messages.
struct ClientSide {
    messages: Messages,
    /// The deadline of the first message.
    within: Duration,
    /// Begins the session, with the permit of a long first message.
    begins: Option<oneshot::Sender<Option<Permit>>>,
}

impl ClientSide {
    /// The first message, which has the permit of this client when it is whole.
    async fn first(&self, stream: &mut SplitStream<WebSocket>) -> Result<Option<Message>, Refused> {
        let mut deadline = Instant::now() + self.within;
        loop {
            match timeout_at(deadline, stream.next()).await {
                Ok(Some(Ok(Message::Ping(bytes) | Message::Pong(bytes)))) => {
                    self.messages.control(bytes.len());
                }
                Ok(Some(Ok(message))) => return Ok(Some(message)),
                Ok(Some(Err(e))) => return broken(&e, MAX_EXEC_JSON_BYTES).map(|()| None),
                Ok(None) => return Ok(None),
                // Others were ahead of it.
                Err(_) if self.messages.waited() => deadline = Instant::now() + self.within,
                Err(_) => {
                    let waited = self.within.as_secs();
                    let text = format_args!("first message: not complete after {waited} s");
                    return Err((close_code::ERROR, ApiError::new(ErrorCode::Timeout, text)));
                }
            }
        }
    }
}

/// Why a session is closed: a code of RFC 6455, section 7.4.1, and the reason.
struct Close(u16, String);

async fn serve(socket: WebSocket, client: ClientSide, pipe: DuplexStream) {
    let (mut sink, mut stream) = socket.split();
    let (mut frames, mut to_session) = tokio::io::split(pipe);
    let (failed, close) = tokio::select! {
        close = outwards(&mut frames, &mut sink) => match close {
            Some(close) => (None, Some(close)),
            None => return,
        },
        end = inwards(&mut stream, client, &mut to_session) => match end {
            // The client is gone, or has closed.
            Ok(()) => (None, None),
            Err((code, ApiError(error))) => {
                let close = Close(code, error.message.clone());
                (Some(notice(&ExecNotice::Failed(error))), Some(close))
            }
        },
    };
    // First, because it ends the program: the client may not read what follows.
    drop((frames, to_session));
    let goodbye = async {
        // After an error of either, the client is gone.
        if let Some(failed) = failed {
            let _ = sink.send(failed).await;
        }
        if let Some(Close(code, reason)) = close {
            let end = (0..=REASON.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
            let reason = reason[..end.unwrap_or_default()].to_owned();
            let close = CloseFrame { code: code.into(), reason: reason.into() };
            let _ = sink.send(Message::Close(Some(close))).await;
        }
        // The library's answer to the client's close is written with the next read.
        while let Some(Ok(_)) = stream.next().await {}
    };
    // A client that does not close keeps nothing but this connection.
    let _ = timeout(CLOSING, goodbye).await;
}

fn notice(notice: &ExecNotice) -> Message {
    // Serialising it cannot fail: it has neither maps with other keys than texts nor other writers.
    Message::Text(serde_json::to_string(notice).unwrap_or_default().into())
}

/// Sends the session's frames to the client. Returns how to close, or `None` if the client is gone.
async fn outwards(frames: &mut ReadHalf<DuplexStream>, sink: &mut Sink) -> Option<Close> {
    let mut pings = interval(PING);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings.tick().await;
    let mut failed = None;
    loop {
        let next = {
            let mut next = std::pin::pin!(read_frame(frames, "reading a session"));
            loop {
                tokio::select! {
                    biased;
                    frame = &mut next => break frame,
                    _ = pings.tick() => sink.send(Message::Ping(Bytes::new())).await.ok()?,
                }
            }
        };
        let Ok(Some(Frame { kind, body })) = next else {
            // The session ends without an exit if the daemon stops.
            let stopping = || Close(close_code::AWAY, "the daemon was asked to stop".into());
            return Some(failed.unwrap_or_else(stopping));
        };
        let message = match kind {
            FrameKind::Stdout => on_channel(WEBSOCKET_STDOUT, &body),
            FrameKind::Stderr => on_channel(WEBSOCKET_STDERR, &body),
            FrameKind::Exit => {
                let exit = serde_json::from_slice(&body).ok()?;
                sink.send(notice(&ExecNotice::Exit(exit))).await.ok()?;
                return Some(Close(close_code::NORMAL, String::new()));
            }
            FrameKind::Reply => match serde_json::from_slice(&body).ok()? {
                RunReply::Started { vm, pid, id } => notice(&ExecNotice::Started { vm, pid, id }),
                RunReply::Failed(error) => {
                    let code = match error.code {
                        ErrorCode::Guest | ErrorCode::Internal | ErrorCode::Timeout => {
                            close_code::ERROR
                        }
                        _ => close_code::POLICY,
                    };
                    failed = Some(Close(code, error.message.clone()));
                    notice(&ExecNotice::Failed(error))
                }
            },
            // A session sends no other kind.
            _ => return None,
        };
        sink.send(message).await.ok()?;
    }
}

fn on_channel(channel: u8, bytes: &[u8]) -> Message {
    let mut message = BytesMut::with_capacity(1 + bytes.len());
    message.put_u8(channel);
    message.put_slice(bytes);
    Message::Binary(message.freeze())
}

/// What a client may not send, and the code of the close.
type Refused = (u16, ApiError);

fn refused<T>(message: impl std::fmt::Display) -> Result<T, Refused> {
    Err((close_code::POLICY, ApiError::invalid(message)))
}

/// Passes the client's messages to the session, until the client is gone.
async fn inwards(
    stream: &mut SplitStream<WebSocket>,
    mut client: ClientSide,
    session: &mut WriteHalf<DuplexStream>,
) -> Result<(), Refused> {
    let frames = match client.first(stream).await? {
        Some(Message::Text(text)) => first_frames(text.as_bytes()),
        Some(Message::Binary(_)) => {
            return refused("first message: expected an ExecSpec as text, got binary");
        }
        _ => return Ok(()),
    };
    let frames = frames.map_err(|e| (close_code::POLICY, e))?;
    if let Some(begins) = client.begins.take() {
        // Fails if the daemon stops.
        let _ = begins.send(client.messages.data());
    }
    pass(session, &frames).await;
    drop(frames);
    while let Some(message) = stream.next().await {
        let message = match message {
            Ok(message) => message,
            Err(e) => return broken(&e, MESSAGE_MAX_BYTES),
        };
        match message {
            Message::Ping(bytes) | Message::Pong(bytes) => client.messages.control(bytes.len()),
            Message::Close(_) => return Ok(()),
            message => {
                // Later messages have none.
                drop(client.messages.data());
                if let Some(frame) = later(&message)? {
                    pass(session, &frame).await;
                }
            }
        }
    }
    Ok(())
}

/// Writes frames to the session. Waits for ever if it has ended: its last frames go out.
async fn pass(session: &mut WriteHalf<DuplexStream>, frames: &[u8]) {
    if session.write_all(frames).await.is_err() {
        std::future::pending::<()>().await;
    }
    // The pipe keeps the bytes; this makes a reader of the pipe run.
    let _ = session.flush().await;
}

/// The frame of a message behind the first; `None` if there is nothing to pass on.
fn later(message: &Message) -> Result<Option<Vec<u8>>, Refused> {
    if message.len() > MESSAGE_MAX_BYTES {
        return broken(&Error::Io(std::io::ErrorKind::InvalidData.into()), MESSAGE_MAX_BYTES)
            .map(|()| None);
    }
    match message {
        Message::Text(text) => match control(text.as_bytes()) {
            Ok((kind, body)) => Ok(Some(encode(kind, &body))),
            Err(error) => Err((close_code::POLICY, error)),
        },
        Message::Binary(bytes) => match bytes.split_first() {
            Some((&WEBSOCKET_STDIN, [])) => Ok(None),
            Some((&WEBSOCKET_STDIN, stdin)) => Ok(Some(encode(FrameKind::Stdin, stdin))),
            Some((channel, _)) => refused(format_args!(
                "binary message: expected channel {WEBSOCKET_STDIN} (stdin), got {channel}"
            )),
            None => refused("binary message: expected a channel, got no byte"),
        },
        _ => Ok(None),
    }
}

/// The frames of the first message.
fn first_frames(text: &[u8]) -> Outcome<Vec<u8>> {
    if text.len() <= MAX_FRAME_BYTES {
        // The session names what is wrong with it.
        return Ok(encode(FrameKind::Request, text));
    }
    let spec = json::decoded::<ExecSpec>(text);
    let mut spec = spec.map_err(|e| ApiError::invalid(format_args!("first message: {e}")))?;
    if spec.strings.is_some() {
        return Err(ApiError::invalid("first message: strings: no such field"));
    }
    request_frames(&mut spec, PROTOCOL).map_err(|e| ApiError::from_strings(&e))
}

/// What a failed read of a message of at most `most` bytes means: the client is gone, or it broke
/// the protocol.
fn broken(error: &Error, most: usize) -> Result<(), Refused> {
    let code = match error {
        // The gate's error.
        Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => close_code::SIZE,
        Error::ConnectionClosed
        | Error::AlreadyClosed
        | Error::Io(_)
        | Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) => return Ok(()),
        Error::Capacity(_) => close_code::SIZE,
        Error::Utf8(_) => close_code::INVALID,
        _ => close_code::PROTOCOL,
    };
    let message = match error {
        Error::Io(_) => format!("expected messages of at most {most} bytes behind the first"),
        _ => format!("{error}; expected messages of at most {most} bytes"),
    };
    Err((code, ApiError::invalid(message)))
}

/// The frame of a text message behind the first.
fn control(text: &[u8]) -> Outcome<(FrameKind, Vec<u8>)> {
    let invalid = |e| ApiError::invalid(format_args!("text message: {e}"));
    match json::decoded(text).map_err(invalid)? {
        ExecControl::Resize { rows, cols } => {
            let size = serde_json::to_vec(&WindowSize { rows, cols });
            Ok((FrameKind::Resize, size.map_err(ApiError::internal)?))
        }
        ExecControl::Signal { signal: signal @ 1..=64 } => {
            Ok((FrameKind::Signal, signal.to_le_bytes().to_vec()))
        }
        ExecControl::Signal { signal } => Err(ApiError::invalid(format_args!(
            "text message: signal: expected 1 to 64, got {signal}"
        ))),
        ExecControl::StdinEnd {} => Ok((FrameKind::StdinEnd, Vec::new())),
    }
}
