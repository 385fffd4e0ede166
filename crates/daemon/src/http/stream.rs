//! A stream between a client and a guest's agent, from its first byte to its end.
//!
//! ```text
//!  the daemon copies ──64 KiB, or a second──▶ handed over: a process in the VM's group copies
//!        │   ▲                 │                            │
//!        │   └──it is not taken┘                            │ the frame that ends it,
//!        ▼                                                  ▼ or how it broke
//!  (over: the caller decides which bytes are the client's last) ◀──┘
//! ```
//! A short program costs less than the process that would pass on its bytes, so the daemon copies
//! the beginning of each stream. That bounds what a stream costs the daemon. Beyond it the VM pays
//! (Closer, section IV: work for a VM is charged to the VM).
//!
//! A stream that was handed over survives the daemon. A stream stays with the daemon, and ends with
//! it, if the client is not a unix socket of HTTP/1.1 after an upgrade (WebSockets), if the process
//! cannot be started or does not take it, if the process has its most streams, and before it has
//! lasted a second or 64 KiB.
//!
//! The client's last bytes are never sent inside a frame, because the client would take them for
//! its body. Such a client sees the connection end, and asks the daemon why.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::http::handed::Watched;
use crate::http::relay::{Inwards, Outwards, Over, Progress};
use crate::ops::liveness::{Hears, Liveness};
use crate::vm::Vm;
use crate::vmm::pool::Lasting;
use bytes::{Bytes, BytesMut};
use dayfly_api::types::ErrorCode;
use dayfly_relay::streams::message::{HANDED_MAX_BYTES, Handed, Heard, Rules};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;
use rustix::net::{Shutdown, shutdown};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Bytes that the daemon copies of a stream before it hands it over.
const OWN_BYTES: u64 = 64 << 10;
/// Time after which the daemon hands over a stream with fewer bytes, so that it outlives the
/// daemon.
const OWN_TIME: Duration = Duration::from_secs(1);
/// Most bytes that are handed over with a stream.
const HELD_MAX_BYTES: usize = HANDED_MAX_BYTES - HANDED_REST_BYTES;
/// Bytes of a hand-over beside those: its head, and the farewell of this module's callers.
const HANDED_REST_BYTES: usize = 8 << 10;
/// The fraction of the agent's time limit in which a process has to take a stream, and the least
/// time. The stream stands still meanwhile.
const TAKING: (u32, Duration) = (6, Duration::from_secs(5));

/// How exactly the silence of an agent is measured.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// A client's connection.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send + Sized + 'static {
    /// The socket itself, and what was read from it and not taken.
    ///
    /// # Errors
    /// There is no such socket.
    fn into_socket(self) -> Result<(UnixStream, Bytes), Self>;

    /// Whether it may be one.
    const MAY_BE_HANDED: bool;
}

impl Socket for TokioIo<Upgraded> {
    const MAY_BE_HANDED: bool = true;

    fn into_socket(self) -> Result<(UnixStream, Bytes), Self> {
        let parts = downcast::<TokioIo<UnixStream>>(self.into_inner()).map_err(Self::new)?;
        Ok((parts.io.into_inner(), parts.read_buf))
    }
}

impl Socket for DuplexStream {
    const MAY_BE_HANDED: bool = false;

    fn into_socket(self) -> Result<(UnixStream, Bytes), Self> {
        Err(self)
    }
}

/// How long an agent may be silent.
pub enum AgentCheck<'a> {
    /// As long as it answers.
    Liveness(Liveness<'a>),
    /// This time, while its guest runs; `None`: without limit.
    Silence(Option<Duration>, &'static str),
}

impl AgentCheck<'_> {
    /// Waits for what the agent of `vm` owes.
    ///
    /// # Errors
    /// It is silent for too long. If its bytes do not pass through the daemon (`hears`), that may
    /// be found up to twice as late.
    pub(super) async fn wait<T>(
        &self,
        vm: &Vm,
        next: impl Future<Output = T>,
        hears: &impl Hears,
    ) -> Outcome<T> {
        let (silence, doing) = match self {
            Self::Liveness(liveness) => {
                return liveness.wait_hearing(next, hears).await;
            }
            Self::Silence(None, _) => return Ok(next.await),
            Self::Silence(Some(silence), doing) => (*silence, *doing),
        };
        let (mut next, mut before, mut left) = (std::pin::pin!(next), 0, silence);
        loop {
            let step = TICK.min(left);
            if let Ok(got) = timeout(step, &mut next).await {
                return Ok(got);
            }
            // Only time in which the guest runs counts: its owner may pause it.
            if vm.serves("wait for").is_err() {
                continue;
            }
            left -= step;
            if !left.is_zero() {
                continue;
            }
            left = silence;
            let Heard { bytes, waits } = tokio::select! {
                biased;
                got = &mut next => return Ok(got),
                heard = hears.heard() => heard,
            };
            // A client that does not read keeps the agent from sending.
            if std::mem::replace(&mut before, bytes) == bytes && waits {
                return Err(ApiError::new(
                    ErrorCode::Timeout,
                    format_args!(
                        "VM {}: the guest's agent, while {doing}: expected a byte within {} s, \
                         got none (paused time does not count)",
                        vm.name,
                        silence.as_secs_f64()
                    ),
                ));
            }
        }
    }
}

/// What passes, and the client's last bytes if there is no daemon at the stream's end.
pub struct Between<'a> {
    /// The daemon.
    pub daemon: &'a Daemon,
    /// The VM.
    pub vm: &'a Vm,
    /// The agent's frames.
    pub rules: Rules,
    /// The client's last bytes if the agent's connection breaks after the daemon has ended.
    pub farewell: Vec<u8>,
    /// How long the agent may be silent.
    pub check: AgentCheck<'a>,
}

/// Where the client's last bytes go.
pub enum Rest {
    /// To the client's connection.
    Own(OwnRest),
    /// To the process that has it.
    Handed(Watched),
}

/// A client's connection, and what the client gets before its last bytes.
pub struct OwnRest {
    client: Box<dyn AsyncWrite + Send + Unpin>,
    before: Vec<u8>,
    /// Whether the client has whole frames then.
    is_whole: bool,
}

impl Rest {
    /// Sends the client's last bytes, unless it has only the beginning of a frame, and closes its
    /// connection. Returns when the client's kernel has them, or the client is gone.
    pub async fn finish(self, last: Vec<u8>) {
        match self {
            Self::Own(OwnRest { mut client, before, is_whole }) => {
                // An error means that the client is gone.
                let _ = client.write_all(&before).await;
                if is_whole {
                    let _ = client.write_all(&last).await;
                }
                let _ = client.shutdown().await;
            }
            Self::Handed(watched) => watched.finish(last).await,
        }
    }
}

/// Passes on bytes until the stream is over. `early` are the client's bytes that were read already.
/// `lasting` is dropped with the agent's first byte, or the hand-over.
///
/// # Errors
/// The agent is silent for too long.
pub async fn pass<S: Socket>(
    between: &Between<'_>,
    (read, write, early): (ReadHalf<S>, WriteHalf<S>, BytesMut),
    agent: UnixStream,
    lasting: Option<Lasting>,
) -> (Outcome<Over>, Rest) {
    let mut own = Own {
        outwards: Outwards::new(between.rules).dropping(lasting),
        inwards: Inwards::new(early),
        progress: Progress::default(),
    };
    let (mut halves, mut agent) = ((read, write), agent);
    let due = if S::MAY_BE_HANDED { Due::First } else { Due::Never };
    if let Some(over) = own.pass(between, &mut halves, &mut agent, due).await {
        return (over, own.rest(halves.1));
    }
    let (read, write) = halves;
    match read.unsplit(write).into_socket() {
        Ok((client, rest)) => {
            own.inwards.buffer.extend_from_slice(&rest);
            due_to_be_handed(between, own, client, agent).await
        }
        Err(client) => kept(between, own, client, agent).await,
    }
}

/// Goes on with a stream that is handed over as soon as a message takes what the daemon holds of
/// it. A client may have sent more than that before the reply.
async fn due_to_be_handed(
    between: &Between<'_>,
    mut own: Own,
    mut client: UnixStream,
    mut agent: UnixStream,
) -> (Outcome<Over>, Rest) {
    while !own.fits() {
        let due = Due::After(own.progress.moved.load(Ordering::Relaxed));
        let mut halves = tokio::io::split(client);
        if let Some(over) = own.pass(between, &mut halves, &mut agent, due).await {
            return (over, own.rest(halves.1));
        }
        client = halves.0.unsplit(halves.1);
    }
    hand_over(between, own, client, agent).await
}

/// Goes on with a stream that is not handed over.
async fn kept<C: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    between: &Between<'_>,
    mut own: Own,
    client: C,
    mut agent: UnixStream,
) -> (Outcome<Over>, Rest) {
    let mut halves = tokio::io::split(client);
    loop {
        if let Some(over) = own.pass(between, &mut halves, &mut agent, Due::Never).await {
            // A process that stands still may not have received the descriptor yet that it was
            // sent. An error means that the connection has ended.
            let _ = shutdown(&agent, Shutdown::Both);
            return (over, own.rest(halves.1));
        }
    }
}

/// When a stream is handed over.
#[derive(Debug, Clone, Copy)]
enum Due {
    /// After [`OWN_BYTES`] or [`OWN_TIME`].
    First,
    /// When more bytes than these have moved.
    After(u64),
    Never,
}

/// A stream that the daemon has.
struct Own {
    outwards: Outwards,
    inwards: Inwards,
    progress: Progress,
}

impl Own {
    /// Passes on bytes until the stream is over. `None`: it is to be handed over.
    async fn pass<C: AsyncRead + AsyncWrite>(
        &mut self,
        between: &Between<'_>,
        (read, write): &mut (ReadHalf<C>, WriteHalf<C>),
        agent: &mut UnixStream,
        due: Due,
    ) -> Option<Outcome<Over>> {
        let Self { outwards, inwards, progress } = self;
        let (mut from_agent, mut to_agent) = agent.split();
        let due = async {
            match due {
                Due::First => drop(timeout(OWN_TIME, progress.past(OWN_BYTES)).await),
                Due::After(most) => progress.past(most).await,
                Due::Never => std::future::pending().await,
            }
        };
        let over = async {
            tokio::select! {
                biased;
                over = outwards.pass(&mut from_agent, write, progress) => Some(over),
                () = inwards.pass(read, &mut to_agent, progress) => Some(Over::Gone),
                () = due => None,
            }
        };
        let progress = &*progress;
        between.check.wait(between.vm, over, progress).await.transpose()
    }

    /// Whether what the daemon holds of it fits into a hand-over.
    fn fits(&self) -> bool {
        let (ready, header) = self.outwards.held();
        let held = self.inwards.buffer.len() + ready.len() + header.len();
        held <= HELD_MAX_BYTES && !self.outwards.is_ending()
    }

    /// What the client still gets. In an agent's silence it may not have read everything.
    fn rest(&self, client: impl AsyncWrite + Send + Unpin + 'static) -> Rest {
        let (ready, _) = self.outwards.held();
        Rest::Own(OwnRest {
            client: Box::new(client),
            before: ready.to_vec(),
            is_whole: self.outwards.body_left == 0,
        })
    }

    fn handed(&self, between: &Between<'_>) -> Handed {
        let (ready, header) = self.outwards.held();
        Handed {
            rules: between.rules,
            body_left: u32::try_from(self.outwards.body_left).unwrap_or(u32::MAX),
            to_agent: self.inwards.buffer.to_vec(),
            to_client: ready.to_vec(),
            header: header.to_vec(),
            farewell: between.farewell.clone(),
        }
    }
}

/// Hands over a stream and waits for its end. Keeps it if it is not taken.
async fn hand_over(
    between: &Between<'_>,
    own: Own,
    client: UnixStream,
    agent: UnixStream,
) -> (Outcome<Over>, Rest) {
    let Between { daemon, vm, .. } = between;
    let line = {
        // Only now, and not for longer: it holds the VM's control group.
        let Some(place) = vm.streams_place(&daemon.config) else {
            return kept(between, own, client, agent).await;
        };
        let handed = own.handed(between);
        let fds = [client.as_fd(), agent.as_fd()];
        let within = (daemon.config.deadlines.agent / TAKING.0).max(TAKING.1);
        vm.streams.hand_over(&place, &handed, fds, within).await
    };
    match line {
        Ok(line) => {
            // They are the process's from here on.
            drop((agent, own));
            let watched = Watched::new(line, client, daemon.config.deadlines.agent);
            let over = between.check.wait(vm, watched.over(vm), &watched).await;
            (over, Rest::Handed(watched))
        }
        Err(why) => {
            if why.lasts() {
                tracing::warn!(
                    vm = %vm.id, name = %vm.name,
                    "its streams stay with the daemon for a while: {why}"
                );
            } else {
                tracing::debug!(vm = %vm.id, "a stream stays with the daemon: {why}");
            }
            kept(between, own, client, agent).await
        }
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
