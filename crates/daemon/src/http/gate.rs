//! A WebSocket's connection below its messages: a long message waits for memory.
//!
//! The library collects a message before it shows it, so the bytes are counted here. A first message
//! of more than [`FREE_BYTES`] waits for a permit ([`crate::base::long_requests`]), and later ones
//! are errors. Meanwhile the bytes are in the client's socket.

use crate::base::long_requests::{LongRequests, Permit};
use crate::http::websocket::MESSAGE_MAX_BYTES;
use dayfly_units::sync::lock;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::PollSemaphore;

/// The bytes of a message that are read without a permit: more than any later message may have, so
/// that one that is a little longer is refused by its length.
const FREE_BYTES: usize = MESSAGE_MAX_BYTES + (64 << 10);
/// The header of a client's control frame (RFC 6455, section 5.2).
const CONTROL_HEADER_BYTES: usize = 6;

#[derive(Debug, Default)]
struct State {
    /// Bytes that were read since the last data message.
    read_bytes: usize,
    /// Whether the first data message has come.
    later: bool,
    permit: Option<Permit>,
    /// Whether the connection waits for a permit, or has waited since the last question.
    waits: bool,
    waited: bool,
}

/// The messages that a gate lets pass.
#[derive(Debug, Clone, Default)]
pub struct Messages(Arc<Mutex<State>>);

impl Messages {
    /// A data message has come. Returns its permit if it is long.
    #[must_use]
    pub fn data(&self) -> Option<Permit> {
        let mut state = lock(&self.0);
        (state.read_bytes, state.later) = (0, true);
        state.permit.take()
    }

    /// A control frame has come, perhaps between the fragments of a message.
    pub fn control(&self, payload_bytes: usize) {
        let mut state = lock(&self.0);
        let frame_bytes = payload_bytes + CONTROL_HEADER_BYTES;
        state.read_bytes = state.read_bytes.saturating_sub(frame_bytes);
    }

    /// Whether the connection waits for memory, or has waited since the last call.
    #[must_use]
    pub fn waited(&self) -> bool {
        let mut state = lock(&self.0);
        let waited = state.waited;
        state.waited = state.waits;
        waited
    }
}

/// A connection with a gate.
#[derive(Debug)]
pub struct Gate<S> {
    io: S,
    messages: Messages,
    permits: PollSemaphore,
}

impl<S> Gate<S> {
    /// Puts a gate before `io`.
    #[must_use]
    pub fn new(io: S, permits: &LongRequests) -> (Self, Messages) {
        let messages = Messages::default();
        let permits = PollSemaphore::new(permits.semaphore());
        (Self { io, messages: messages.clone(), permits }, messages)
    }

    /// Waits until more may be read.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.messages.0);
        if state.read_bytes <= FREE_BYTES || state.permit.is_some() {
            return Poll::Ready(Ok(()));
        }
        if state.later {
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        (state.waits, state.waited) = (true, true);
        let permit = ready!(self.permits.poll_acquire(cx));
        state.permit = permit.map(Arc::new);
        state.waits = false;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gate<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_open(cx))?;
        let before = buf.filled().len();
        let read = Pin::new(&mut this.io).poll_read(cx, buf);
        lock(&this.messages.0).read_bytes += buf.filled().len() - before;
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gate<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}
