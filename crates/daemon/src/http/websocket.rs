//! A program's session over a WebSocket (RFC 6455), see docs/http-api.md.
//!
//! ```text
//!  client ◀─ messages ─▶ here ◀─ frames, in a pipe of 64 KiB ─▶ session ◀─ frames ─▶ agent
//! ```
//!
//! Messages become the frames of [`crate::http::session`] and back, so that both ways to run a
//! program behave alike. One message is held in each direction. A client that does not read makes
//! the program wait, because the pipe is full then.

use crate::base::caller::Caller;
use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::http::{json, session};
use crate::ops::exec::{PROGRAM, explain};
use crate::vm::Vm;
use crate::vmm::agent_link::{read_frame, write_frame};
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use bytes::{BufMut, Bytes, BytesMut};
use dayfly_api::agent::{ExecSpec, Frame, FrameKind, MAX_FRAME_BYTES, WindowSize};
use dayfly_api::types::{
    ErrorCode, ExecControl, ExecNotice, RunReply, WEBSOCKET_PROTOCOL, WEBSOCKET_STDERR,
    WEBSOCKET_STDIN, WEBSOCKET_STDOUT,
};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::error::ProtocolError;

/// The longest message of a client, and the longest frame of one: a channel and its bytes.
pub const MESSAGE_MAX_BYTES: usize = MAX_FRAME_BYTES + 1;
/// Bytes between messages and frames.
const PIPE_BYTES: usize = 64 << 10;
/// The period of pings, by which the daemon notices that a client's host is gone.
const PING: Duration = Duration::from_secs(30);
/// Time for the client's part of the closing handshake.
const CLOSING: Duration = Duration::from_secs(5);
/// The longest reason of a close, in bytes (RFC 6455, section 5.5).
const REASON: usize = 123;

type Sink = SplitSink<WebSocket, Message>;

/// Sets the limits of a client's WebSocket.
pub fn limited(upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    upgrade
        .protocols([WEBSOCKET_PROTOCOL])
        .max_message_size(MESSAGE_MAX_BYTES)
        .max_frame_size(MESSAGE_MAX_BYTES)
        // Each message is written before the next is taken.
        .write_buffer_size(0)
        .max_write_buffer_size(4 * MESSAGE_MAX_BYTES)
}

/// Runs a program in `vm` for the client.
pub async fn exec(
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
    caller: Option<Arc<Caller>>,
    socket: WebSocket,
) {
    let (near, far) = tokio::io::duplex(PIPE_BYTES);
    let session = session::exec(daemon.clone(), vm.clone(), caller, near);
    // Each ends when the other has ended.
    tokio::join!(session, serve(&daemon, &vm, socket, far));
}

/// Why a session is closed: a code of RFC 6455, section 7.4.1, and the reason.
struct Close(u16, String);

async fn serve(daemon: &Daemon, vm: &Vm, socket: WebSocket, pipe: DuplexStream) {
    let (mut sink, mut stream) = socket.split();
    let (mut frames, mut to_session) = tokio::io::split(pipe);
    let (failed, close) = tokio::select! {
        close = outwards(daemon, vm, &mut frames, &mut sink) => match close {
            Some(close) => (None, Some(close)),
            None => return,
        },
        end = inwards(&mut stream, &mut to_session) => match end {
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
            let close = CloseFrame { code, reason: reason.into() };
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
async fn outwards(
    daemon: &Daemon,
    vm: &Vm,
    frames: &mut ReadHalf<DuplexStream>,
    sink: &mut Sink,
) -> Option<Close> {
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
        let Frame { kind, body } = match next {
            Ok(Some(frame)) => frame,
            // The session sends no reason inside a frame.
            Err(_) if !daemon.stop.is_cancelled() => {
                let error = explain(vm, PROGRAM).await.0;
                let close = Close(close_code::ERROR, error.message.clone());
                sink.send(notice(&ExecNotice::Failed(error))).await.ok()?;
                return Some(close);
            }
            // The session ends without an exit if the daemon stops.
            _ => {
                let stopping = || Close(close_code::AWAY, "the daemon was asked to stop".into());
                return Some(failed.unwrap_or_else(stopping));
            }
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
    session: &mut WriteHalf<DuplexStream>,
) -> Result<(), Refused> {
    let mut first = true;
    while let Some(message) = stream.next().await {
        let message = match message {
            Ok(message) => message,
            Err(e) => return broken(&*e.into_inner()),
        };
        let sent = match message {
            Message::Text(text) if first && text.len() > MAX_FRAME_BYTES => {
                return Err((
                    close_code::SIZE,
                    ApiError::invalid(format_args!(
                        "first message: expected at most {MAX_FRAME_BYTES} bytes, got {}",
                        text.len()
                    )),
                ));
            }
            Message::Text(text) if first => {
                first = false;
                if let Ok(spec) = json::decoded::<ExecSpec>(text.as_bytes())
                    && let Err(e) = spec.has_its_strings()
                {
                    return refused(format_args!("first message: {e}"));
                }
                write_frame(session, FrameKind::Request, text.as_bytes()).await
            }
            Message::Text(text) => match control(text.as_bytes()) {
                Ok((kind, body)) => write_frame(session, kind, &body).await,
                Err(error) => return Err((close_code::POLICY, error)),
            },
            Message::Binary(_) if first => {
                return refused("first message: expected an ExecSpec as text, got binary");
            }
            Message::Binary(bytes) => match bytes.split_first() {
                Some((&WEBSOCKET_STDIN, [])) => Ok(()),
                Some((&WEBSOCKET_STDIN, stdin)) => {
                    write_frame(session, FrameKind::Stdin, stdin).await
                }
                Some((channel, _)) => {
                    return refused(format_args!(
                        "binary message: expected channel {WEBSOCKET_STDIN} (stdin), got {channel}"
                    ));
                }
                None => return refused("binary message: expected a channel, got no byte"),
            },
            // The library answers pings and closes.
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => return Ok(()),
        };
        if sent.is_err() {
            // The session has ended; its last frames go out.
            std::future::pending::<()>().await;
        }
        // The pipe keeps the bytes; this makes a reader of the pipe run.
        let _ = session.flush().await;
    }
    Ok(())
}

/// What a failed read means: the client is gone, or it broke the protocol.
fn broken(error: &(dyn std::error::Error + 'static)) -> Result<(), Refused> {
    let code = match error.downcast_ref() {
        None
        | Some(
            Error::ConnectionClosed
            | Error::AlreadyClosed
            | Error::Io(_)
            | Error::Protocol(ProtocolError::ResetWithoutClosingHandshake),
        ) => return Ok(()),
        Some(Error::Capacity(_)) => close_code::SIZE,
        Some(Error::Utf8(_)) => close_code::INVALID,
        Some(_) => close_code::PROTOCOL,
    };
    let message = format_args!("{error}; expected messages of at most {MESSAGE_MAX_BYTES} bytes");
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
