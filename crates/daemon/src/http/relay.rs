//! The two directions of a stream, between a client and a guest's agent, while the daemon has it.
//!
//! Bytes to the agent are copied unchecked, because the agent checks them. In bytes to the client
//! only frame headers are decoded, to find the end: a frame that ends the stream, or the connection
//! breaks.
//!
//! Both directions can be stopped at any `await` without the loss of a byte, and what they hold is
//! then handed over ([`crate::http::stream`]).

use crate::ops::liveness::Hears;
use crate::vmm::pool::Lasting;
use bytes::{Buf, BufMut, BytesMut};
use dayfly_api::agent::{FrameError, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, decode_header};
use dayfly_relay::streams::message::{Header, Heard, Rules};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;

/// Bytes of one read in either direction.
const CHUNK_BYTES: usize = 64 << 10;

/// Why nothing more comes from the agent. The client has all that came before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Over {
    /// The agent sent this frame, which ends the stream.
    Frame(FrameKind, Vec<u8>),
    /// The agent's connection ended without such a frame.
    Closed,
    /// The agent sent what it may not.
    Wrong(Wrong),
    /// The client is gone.
    Gone,
}

/// What an agent may not send.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// Bytes that are not a frame.
    #[error("frames of the guest's agent: {0}")]
    Frame(#[from] FrameError),
    /// A frame of another kind, or a longer one.
    #[error(
        "frames of the guest's agent: got {0:?} with a body of {1} bytes, which ends nothing \
             and is none of the stream"
    )]
    Kind(FrameKind, usize),
    /// The process of a stream has sent what it may not.
    #[error("the process of its streams sent a frame that ends nothing")]
    Process,
}

impl Wrong {
    /// What is wrong with this header.
    #[must_use]
    pub fn of(header: [u8; HEADER_BYTES]) -> Self {
        match decode_header(header) {
            Ok((kind, length)) => Self::Kind(kind, length),
            Err(e) => e.into(),
        }
    }
}

/// The rules by which frames of these kinds pass, and others with bodies of at most `ending_max`
/// bytes end the stream.
#[must_use]
pub fn rules(passed: &[FrameKind], ending: &[FrameKind], ending_max: u32) -> Rules {
    let bits = |kinds: &[FrameKind]| kinds.iter().map(|kind| 1 << *kind as u8).sum();
    let passed_max = u32::try_from(MAX_FRAME_BYTES).unwrap_or(u32::MAX);
    Rules { passed: bits(passed), ending: bits(ending), passed_max, ending_max }
}

/// What both directions have done.
#[derive(Debug, Default)]
pub struct Progress {
    /// Bytes that the agent has sent.
    heard: AtomicU64,
    /// Whether the next byte is due from the agent.
    waits: AtomicBool,
    /// Bytes that either side was sent.
    pub moved: AtomicU64,
    /// Notified when bytes have moved.
    changed: Notify,
}

impl Hears for Progress {
    async fn heard(&self) -> Heard {
        let bytes = self.heard.load(Ordering::Relaxed);
        Heard { bytes, waits: self.waits.load(Ordering::Relaxed) }
    }
}

impl Progress {
    /// Waits until more bytes than these have moved.
    pub async fn past(&self, most: u64) {
        while self.moved.load(Ordering::Relaxed) <= most {
            self.changed.notified().await;
        }
    }

    fn moved(&self, count: usize) {
        self.moved.fetch_add(count as u64, Ordering::Relaxed);
        self.changed.notify_one();
    }
}

/// From the agent to the client.
#[derive(Debug)]
pub struct Outwards {
    rules: Rules,
    buffer: BytesMut,
    /// Bytes at the start of the buffer that go to the client.
    pub ready: usize,
    /// Bytes of the current frame's body behind the buffer.
    pub body_left: usize,
    /// What follows the ready bytes: the length of the frame that ends the stream, or an error.
    end: Option<Result<usize, Wrong>>,
    /// Dropped with the agent's first byte.
    until_heard: Option<Lasting>,
}

impl Outwards {
    /// The direction at its start.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        let buffer = BytesMut::new();
        Self { rules, buffer, ready: 0, body_left: 0, end: None, until_heard: None }
    }

    /// As it is, with `lasting` dropped with the agent's first byte or its end.
    #[must_use]
    pub fn dropping(self, lasting: Option<Lasting>) -> Self {
        Self { until_heard: lasting, ..self }
    }

    /// Whether the end of the stream is in sight.
    #[must_use]
    pub const fn is_ending(&self) -> bool {
        self.end.is_some()
    }

    /// The bytes that go to the client, and those of the next header.
    #[must_use]
    pub fn held(&self) -> (&[u8], &[u8]) {
        self.buffer.split_at_checked(self.ready).unwrap_or((&self.buffer, &[]))
    }

    fn check(&mut self) {
        while self.end.is_none() && self.ready < self.buffer.len() {
            if self.body_left > 0 {
                let step = self.body_left.min(self.buffer.len() - self.ready);
                (self.ready, self.body_left) = (self.ready + step, self.body_left - step);
                continue;
            }
            let Some(header) = self.buffer[self.ready..].first_chunk::<HEADER_BYTES>() else {
                return;
            };
            let length = |length: u32| usize::try_from(length).unwrap_or(usize::MAX);
            match self.rules.read(*header) {
                Header::Passes(body) => {
                    self.ready += HEADER_BYTES;
                    self.body_left = length(body);
                }
                Header::Ends(body) => self.end = Some(Ok(HEADER_BYTES + length(body))),
                Header::Wrong => self.end = Some(Err(Wrong::of(*header))),
            }
        }
    }

    /// Copies frames to the client, to the end of the stream.
    pub async fn pass<R, W>(&mut self, agent: &mut R, client: &mut W, progress: &Progress) -> Over
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            self.check();
            while self.ready > 0 {
                let Ok(count @ 1..) = client.write(&self.buffer[..self.ready]).await else {
                    return Over::Gone;
                };
                self.buffer.advance(count);
                self.ready -= count;
                progress.moved(count);
            }
            if client.flush().await.is_err() {
                return Over::Gone;
            }
            match &self.end {
                Some(Err(wrong)) => return Over::Wrong(wrong.clone()),
                Some(Ok(length)) if self.buffer.len() >= *length => {
                    let frame = self.buffer[..*length].to_vec();
                    return ended(frame);
                }
                _ => self.buffer.reserve(CHUNK_BYTES),
            }
            progress.waits.store(true, Ordering::Relaxed);
            let got = agent.read_buf(&mut (&mut self.buffer).limit(CHUNK_BYTES)).await;
            progress.waits.store(false, Ordering::Relaxed);
            self.until_heard = None;
            match got {
                Ok(count @ 1..) => progress.heard.fetch_add(count as u64, Ordering::Relaxed),
                // A broken connection counts as ended: the VM's exit reason explains it, the
                // socket's error does not.
                _ => return Over::Closed,
            };
        }
    }
}

/// A frame that ends a stream.
#[must_use]
pub fn ended(frame: Vec<u8>) -> Over {
    match frame.first_chunk().map(|header| decode_header(*header)) {
        Some(Ok((kind, length))) if frame.len() == HEADER_BYTES + length => {
            Over::Frame(kind, frame[HEADER_BYTES..].to_vec())
        }
        _ => Over::Wrong(Wrong::Process),
    }
}

/// From the client to the agent.
#[derive(Debug)]
pub struct Inwards {
    /// Bytes that the agent has not got yet.
    pub buffer: BytesMut,
    /// Whether the agent takes bytes.
    agent_there: bool,
}

impl Inwards {
    /// The direction at its start: these bytes go first.
    #[must_use]
    pub const fn new(buffer: BytesMut) -> Self {
        Self { buffer, agent_there: true }
    }

    /// Copies bytes until the client is gone. Goes on if the agent is gone, because
    /// [`Outwards::pass`] returns the agent's last frames.
    pub async fn pass<R, W>(&mut self, client: &mut R, agent: &mut W, progress: &Progress)
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            while self.agent_there && !self.buffer.is_empty() {
                match agent.write(&self.buffer).await {
                    Ok(count @ 1..) => {
                        self.buffer.advance(count);
                        progress.moved(count);
                    }
                    _ => self.agent_there = false,
                }
            }
            self.buffer.clear();
            self.buffer.reserve(CHUNK_BYTES);
            let mut into = (&mut self.buffer).limit(CHUNK_BYTES);
            if !matches!(client.read_buf(&mut into).await, Ok(1..)) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::agent::encode;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn exit_frame() -> Vec<u8> {
        encode(FrameKind::Exit, br#"{"code":3}"#)
    }

    fn exec() -> Outwards {
        Outwards::new(rules(&[FrameKind::Stdout, FrameKind::Stderr], &[FrameKind::Exit], 1 << 10))
    }

    /// Relays `bytes`, which arrive in pieces of `piece` bytes. The direction is stopped and begun
    /// again `stops` times.
    fn relayed(bytes: &[u8], piece: usize, stops: usize) -> (Over, Vec<u8>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (mut near, mut far) = tokio::io::duplex(piece);
            let (mut to, mut from) = tokio::io::duplex(piece);
            let feed = async move {
                // The relay may stop before it has read everything.
                let _ = far.write_all(bytes).await;
            };
            let read = async {
                let mut out = Vec::new();
                from.read_to_end(&mut out).await.unwrap();
                out
            };
            let relay = async move {
                let (mut outwards, progress) = (exec(), Progress::default());
                for _ in 0..stops {
                    // A stop at any await, the first one or a later one.
                    tokio::select! {
                        biased;
                        over = outwards.pass(&mut near, &mut to, &progress) => return over,
                        () = tokio::task::yield_now() => {}
                    }
                }
                outwards.pass(&mut near, &mut to, &progress).await
            };
            let (over, out, ()) = tokio::join!(relay, read, feed);
            (over, out)
        })
    }

    proptest! {
        #[test]
        fn output_goes_out_as_it_came_however_it_is_cut(
            bodies in vec(vec(any::<u8>(), 0..300), 0..8),
            piece in 1usize..400,
            cut in 0usize..40,
            stops in 0usize..40,
        ) {
            let frames = bodies.iter().flat_map(|body| encode(FrameKind::Stdout, body));
            let output: Vec<u8> = frames.collect();
            let whole = [output.clone(), exit_frame()].concat();
            let (over, out) = relayed(&whole, piece, stops);
            prop_assert_eq!(over, Over::Frame(FrameKind::Exit, br#"{"code":3}"#.to_vec()));
            prop_assert_eq!(&out, &output);
            let cut = cut.clamp(1, whole.len());
            let (over, out) = relayed(&whole[..whole.len() - cut], piece, stops);
            prop_assert_eq!(over, Over::Closed);
            prop_assert!(output.starts_with(&out));
        }

        #[test]
        fn any_bytes_end_the_relay_without_a_panic(bytes in vec(any::<u8>(), 0..200)) {
            let (_, out) = relayed(&bytes, 64, 3);
            prop_assert!(bytes.starts_with(&out));
        }
    }

    #[test]
    fn what_an_agent_may_not_send_is_refused() {
        let over = |bytes: &[u8]| relayed(bytes, 64, 0).0;
        let request = encode(FrameKind::Request, b"{}");
        assert_eq!(over(&request), Over::Wrong(Wrong::Kind(FrameKind::Request, 2)));
        let long = encode(FrameKind::Exit, &[b' '; (1 << 10) + 1]);
        assert_eq!(over(&long), Over::Wrong(Wrong::Kind(FrameKind::Exit, (1 << 10) + 1)));
        let longer =
            [u32::try_from(MAX_FRAME_BYTES + 1).unwrap().to_le_bytes().as_slice(), &[5]].concat();
        assert!(matches!(over(&longer), Over::Wrong(Wrong::Frame(_))));
        for process in [&b""[..], b"1234", &exit_frame()[..7], &[exit_frame(), vec![0]].concat()] {
            assert_eq!(ended(process.to_vec()), Over::Wrong(Wrong::Process));
        }
    }
}
