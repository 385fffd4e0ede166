//! A connection to a guest's agent: `CONNECT`, one request, frames.
//!
//! All bytes read here are controlled by the guest. Lengths are capped before anything is
//! allocated, and every wait has a deadline.

use crate::base::error::ApiError;
use crate::model::live::CpusOnline;
use crate::vmm::dial::{DialError, dial, is_closed};
use dayfly_api::agent::{
    Failure, Frame, FrameError, FrameKind, HEADER_BYTES, Identity, PORT, Ready, Reply, Request,
    Stat, StringsError, decode_header, encode, request_frames,
};
use dayfly_api::types::ErrorCode;
use dayfly_units::text::{LONG, SHORT, escaped};
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout_at};

/// Delay between attempts to connect, while the guest does not accept connections yet.
const AGAIN: Duration = Duration::from_millis(2);

/// Why the agent did not serve a request.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No connection, or the connection broke.
    #[error("the guest's agent, while {doing}: {source}")]
    Io {
        /// The step that failed.
        doing: &'static str,
        /// The error of the socket.
        #[source]
        source: io::Error,
    },
    /// The VMM did not connect to the guest's port.
    #[error("the guest's agent: `CONNECT {PORT}` was answered with {got:?}, expected `OK <port>`")]
    Greeting {
        /// The answer, escaped.
        got: String,
    },
    /// The bytes are not a frame.
    #[error("the guest's agent, while {doing}: {source}")]
    Frame {
        /// The step that failed.
        doing: &'static str,
        /// The error of the decoder.
        #[source]
        source: FrameError,
    },
    /// A frame of the wrong kind, or with JSON of the wrong form.
    #[error("the guest's agent, while {doing}: expected {expected}, got {got}")]
    Unexpected {
        /// The step that failed.
        doing: &'static str,
        /// The expected reply.
        expected: &'static str,
        /// The actual reply.
        got: String,
    },
    /// The agent refused the request.
    #[error("the guest's agent: {}", escaped(&.0.message, LONG))]
    Refused(Failure),
    /// The request cannot be sent to this agent.
    #[error("exec: {0}")]
    Request(#[from] StringsError),
    /// The deadline passed.
    #[error("the guest's agent did not answer within {} ms while {doing}", .waited.as_millis())]
    Timeout {
        /// The step that was running.
        doing: &'static str,
        /// The time limit.
        waited: Duration,
    },
}

impl From<LinkError> for ApiError {
    fn from(e: LinkError) -> Self {
        match &e {
            LinkError::Refused(failure) => Self::from_agent(failure),
            LinkError::Timeout { .. } => Self::new(ErrorCode::Timeout, e),
            LinkError::Request(why) => Self::from_strings(why),
            _ => Self::new(ErrorCode::Guest, e),
        }
    }
}

/// Reads one frame; `None` if the other side closed between two frames.
///
/// # Errors
/// The connection breaks, or the bytes are not a frame.
pub async fn read_frame<R: AsyncRead + Unpin>(
    from: &mut R,
    doing: &'static str,
) -> Result<Option<Frame>, LinkError> {
    let io = |source| LinkError::Io { doing, source };
    let mut header = [0; HEADER_BYTES];
    let first = from.read(&mut header).await.map_err(io)?;
    if first == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[first..]).await.map_err(io)?;
    let (kind, length) =
        decode_header(header).map_err(|source| LinkError::Frame { doing, source })?;
    let mut body = vec![0; length];
    from.read_exact(&mut body).await.map_err(io)?;
    Ok(Some(Frame { kind, body }))
}

/// Writes one frame.
///
/// # Errors
/// The connection breaks.
pub async fn write_frame<W: AsyncWrite + Unpin>(
    to: &mut W,
    kind: FrameKind,
    body: &[u8],
) -> io::Result<()> {
    to.write_all(&encode(kind, body)).await?;
    to.flush().await
}

/// A connection to an agent, with one deadline for all steps.
#[derive(Debug)]
pub struct AgentLink {
    stream: UnixStream,
    waited: Duration,
    deadline: Instant,
}

impl AgentLink {
    /// Connects to port [`PORT`] behind the vsock socket at `path`. Retries until the deadline if
    /// the guest does not accept connections: after a restore its driver may still be resetting.
    ///
    /// `within` also limits every later step of this link until [`Self::into_stream`]: a step that
    /// runs beyond it ends with [`LinkError::Timeout`].
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn connect(path: &Path, within: Duration) -> Result<Self, LinkError> {
        let deadline = Instant::now() + within;
        loop {
            let attempt = timeout_at(deadline, Self::attempt(path)).await;
            match attempt {
                Ok(Ok(stream)) => return Ok(Self { stream, waited: within, deadline }),
                // The VMM closes the connection if no program listens on the guest's port yet.
                Ok(Err(LinkError::Io { source, .. }))
                    if is_closed(&source) && Instant::now() + AGAIN < deadline =>
                {
                    sleep(AGAIN).await;
                }
                Ok(Err(e)) => return Err(e),
                Err(_) => return Err(LinkError::Timeout { doing: "connecting", waited: within }),
            }
        }
    }

    async fn attempt(path: &Path) -> Result<UnixStream, LinkError> {
        dial(path, PORT).await.map_err(|e| match e {
            DialError::Io(source) => LinkError::Io { doing: "connecting", source },
            DialError::Greeting { got } => LinkError::Greeting { got },
        })
    }

    async fn timed<T>(
        &mut self,
        doing: &'static str,
        step: impl AsyncFnOnce(&mut UnixStream) -> Result<T, LinkError>,
    ) -> Result<T, LinkError> {
        match timeout_at(self.deadline, step(&mut self.stream)).await {
            Ok(result) => result,
            Err(_) => Err(LinkError::Timeout { doing, waited: self.waited }),
        }
    }

    /// Sends a request: the only one of this connection, or the one after an identity.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn send(&mut self, request: &Request, doing: &'static str) -> Result<(), LinkError> {
        let frame = request_frame(request, doing)?;
        self.write(&frame, doing).await
    }

    /// Sends the frames of a request ([`request_frames`]).
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn send_frames(
        &mut self,
        frames: &[u8],
        doing: &'static str,
    ) -> Result<(), LinkError> {
        self.write(frames, doing).await
    }

    async fn write(&mut self, frames: &[u8], doing: &'static str) -> Result<(), LinkError> {
        self.timed(doing, async |stream| {
            stream.write_all(frames).await.map_err(|source| LinkError::Io { doing, source })
        })
        .await
    }

    /// Waits for the reply to the request.
    ///
    /// # Errors
    /// [`LinkError`]; a [`Reply::Err`] is [`LinkError::Refused`].
    pub async fn reply(&mut self, doing: &'static str) -> Result<Reply, LinkError> {
        let frame = self.timed(doing, async |stream| read_frame(stream, doing).await).await?;
        parse_reply(frame, doing)
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn ask(mut self, request: &Request, doing: &'static str) -> Result<Reply, LinkError> {
        self.send(request, doing).await?;
        self.reply(doing).await
    }

    /// The connection itself, without the deadline.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// Encodes a request.
fn request_frame(request: &Request, doing: &'static str) -> Result<Vec<u8>, LinkError> {
    let json = serde_json::to_vec(request).map_err(|e| LinkError::Io {
        doing,
        source: io::Error::new(io::ErrorKind::InvalidData, e),
    })?;
    if json.len() > dayfly_api::agent::MAX_FRAME_BYTES {
        let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
        return Err(LinkError::Frame { doing, source: FrameError::TooLong(length) });
    }
    Ok(encode(FrameKind::Request, &json))
}

/// Decodes a frame that must be a reply.
///
/// # Errors
/// The frame is another one, or the agent refuses.
pub fn parse_reply(frame: Option<Frame>, doing: &'static str) -> Result<Reply, LinkError> {
    let unexpected = |got: String| LinkError::Unexpected { doing, expected: "a reply", got };
    let frame = frame.ok_or_else(|| unexpected("the end of the connection".to_owned()))?;
    if frame.kind != FrameKind::Reply {
        return Err(unexpected(format!("a frame of kind {:?}", frame.kind)));
    }
    match serde_json::from_slice(&frame.body) {
        Ok(Reply::Err(failure)) => Err(LinkError::Refused(failure)),
        Ok(reply) => Ok(reply),
        Err(e) => Err(unexpected(format!("JSON that does not parse: {e}"))),
    }
}

fn other(reply: &Reply, doing: &'static str, expected: &'static str) -> LinkError {
    LinkError::Unexpected { doing, expected, got: format!("{reply:?}").chars().take(200).collect() }
}

/// Sends a request whose reply must be [`Reply::Ok`].
async fn done(
    path: &Path,
    request: &Request,
    doing: &'static str,
    within: Duration,
) -> Result<(), LinkError> {
    match AgentLink::connect(path, within).await?.ask(request, doing).await? {
        Reply::Ok => Ok(()),
        reply => Err(other(&reply, doing, "Ok")),
    }
}

/// Gives a guest its identity, which unseals the agent. Calls `connected` between connecting and
/// sending. The request `next` is sent in the same packet, to an agent of that version of the
/// protocol, and the agent serves it as soon as it has its identity. The caller reads the reply to
/// `next` from the returned link. If the identity asks the guest to start CPUs, what the guest says
/// of them is returned too.
///
/// # Errors
/// [`LinkError`].
pub async fn identify(
    path: &Path,
    within: Duration,
    next: Option<(&Request, u32)>,
    connected: impl FnOnce() -> Identity,
) -> Result<(AgentLink, Option<CpusOnline>), LinkError> {
    let doing = "taking its identity";
    let next = next.map(|(request, protocol)| request_frames(&mut request.clone(), protocol));
    let next = next.transpose()?;
    let mut link = AgentLink::connect(path, within).await?;
    let identity = connected();
    let starts_cpus = identity.cpus.is_some();
    let mut frames = request_frame(&Request::Identity(identity), doing)?;
    frames.extend(next.into_iter().flatten());
    link.write(&frames, doing).await?;
    match link.reply(doing).await? {
        Reply::Ok if !starts_cpus => Ok((link, None)),
        Reply::Cpus { online, why } if starts_cpus => {
            let why = why.map(|why| escaped(&why, SHORT).to_string());
            let count = u8::try_from(online).unwrap_or(u8::MAX);
            Ok((link, Some(CpusOnline { count, why })))
        }
        reply => Err(other(&reply, doing, if starts_cpus { "Cpus" } else { "Ok" })),
    }
}

/// Seals the agent before a snapshot.
///
/// # Errors
/// [`LinkError`].
pub async fn seal(path: &Path, within: Duration) -> Result<(), LinkError> {
    done(path, &Request::Seal, "sealing", within).await
}

/// Announces a fork to the agent. In the clones the programs live on, but the peers of their
/// connections exist only in the parent.
///
/// # Errors
/// [`LinkError`].
pub async fn fork(path: &Path, within: Duration) -> Result<(), LinkError> {
    done(path, &Request::Fork, "getting ready for a fork", within).await
}

/// Reports to the agent of the parent that the fork is over.
///
/// # Errors
/// [`LinkError`].
pub async fn forked(path: &Path, within: Duration) -> Result<(), LinkError> {
    done(path, &Request::Forked, "going on after a fork", within).await
}

/// Asks a guest for its use of memory and disk.
///
/// # Errors
/// [`LinkError`].
pub async fn stat(path: &Path, within: Duration) -> Result<Stat, LinkError> {
    let doing = "telling how full it is";
    match AgentLink::connect(path, within).await?.ask(&Request::Stat, doing).await? {
        Reply::Stat(stat) => Ok(stat),
        reply => Err(other(&reply, doing, "Stat")),
    }
}

/// Reads the report of an agent after a cold boot.
///
/// # Errors
/// [`LinkError`].
pub async fn read_ready<R: AsyncRead + Unpin>(from: &mut R) -> Result<Ready, LinkError> {
    let doing = "reporting ready";
    match parse_reply(read_frame(from, doing).await?, doing)? {
        Reply::Ready(ready) => Ok(ready),
        reply => Err(other(&reply, doing, "Ready")),
    }
}

/// The clock stands still while anything else can happen.
#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::agent::FailureCode;
    use tokio::net::UnixListener;

    /// Serves each connection with one of these scripts, as a VMM and an agent would.
    async fn answered_with(scripts: Vec<Vec<u8>>) -> Result<Stat, LinkError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            for script in scripts {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(&script).await.unwrap();
                stream.shutdown().await.unwrap();
                let mut sent = Vec::new();
                stream.read_to_end(&mut sent).await.unwrap();
                assert!(sent.starts_with(b"CONNECT 1024\n"));
            }
            std::future::pending::<()>().await;
        });
        let stat = stat(&path, Duration::from_millis(500)).await;
        server.abort();
        stat
    }

    fn reply(reply: &Reply) -> Vec<u8> {
        [b"OK 7\n".to_vec(), encode(FrameKind::Reply, &serde_json::to_vec(reply).unwrap())].concat()
    }

    const STAT: Stat = Stat {
        disk_total_bytes: 1,
        disk_available_bytes: 2,
        disk_available_files: 3,
        memory_total_bytes: 4,
        memory_available_bytes: 5,
    };

    #[tokio::test(start_paused = true)]
    async fn a_reply_right_behind_the_greeting_is_read() {
        assert_eq!(answered_with(vec![reply(&Reply::Stat(STAT))]).await.unwrap(), STAT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_does_not_take_connections_yet_is_asked_again() {
        assert_eq!(
            answered_with(vec![Vec::new(), Vec::new(), reply(&Reply::Stat(STAT))]).await.unwrap(),
            STAT
        );
    }

    /// The answer to an identity that asks for this number of CPUs.
    async fn identified(cpus: Option<u32>, answer: Reply) -> Result<Option<CpusOnline>, LinkError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&reply(&answer)).await.unwrap();
            std::future::pending::<()>().await;
        });
        let identity = || Identity {
            hostname: "h".into(),
            machine_id: "a".repeat(32),
            wall_clock_ns: 1,
            entropy: "00".repeat(64),
            number: 0,
            network: None,
            answer_ms: None,
            cpus,
        };
        let answer = identify(&path, Duration::from_millis(500), None, identity).await;
        server.abort();
        answer.map(|(_, online)| online)
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_guest_says_of_its_cpus_is_bounded_and_only_said_when_asked() {
        let says = |online, why: Option<String>| Reply::Cpus { online, why };
        assert_eq!(identified(None, Reply::Ok).await.unwrap(), None);
        let four = identified(Some(4), says(4, None)).await.unwrap().unwrap();
        assert_eq!((four.count, four.why), (4, None));
        let long = "\u{1b}[2J".to_owned() + &"x".repeat(10_000);
        let lie = identified(Some(4), says(u32::MAX, Some(long))).await.unwrap().unwrap();
        assert_eq!(lie.count, u8::MAX);
        let why = lie.why.unwrap();
        assert!(why.starts_with("\\x1b[2J") && why.len() < 1_000, "{why}");
        for (cpus, answer) in [(None, says(1, None)), (Some(4), Reply::Ok)] {
            let refused = identified(cpus, answer).await;
            assert!(matches!(refused, Err(LinkError::Unexpected { .. })), "{refused:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_guest_may_not_say_is_refused() {
        let failure = Failure { code: FailureCode::Sealed, message: "sealed".into() };
        assert!(matches!(
            answered_with(vec![reply(&Reply::Err(failure))]).await,
            Err(LinkError::Refused(_))
        ));
        assert!(matches!(
            answered_with(vec![reply(&Reply::Ok)]).await,
            Err(LinkError::Unexpected { .. })
        ));
        assert!(matches!(
            answered_with(vec![vec![b'x'; 500]]).await,
            Err(LinkError::Greeting { .. })
        ));
        assert!(matches!(
            answered_with(vec![b"OK \n".to_vec()]).await,
            Err(LinkError::Greeting { .. })
        ));
        let too_long = [b"OK 1\n".as_slice(), &u32::MAX.to_le_bytes(), &[2]].concat();
        assert!(matches!(answered_with(vec![too_long]).await, Err(LinkError::Frame { .. })));
        let cut = [b"OK 1\n".as_slice(), &9u32.to_le_bytes(), &[2, b'{']].concat();
        assert!(matches!(answered_with(vec![cut]).await, Err(LinkError::Io { .. })));
        let not_json = [b"OK 1\n".to_vec(), encode(FrameKind::Reply, b"{")].concat();
        assert!(matches!(answered_with(vec![not_json]).await, Err(LinkError::Unexpected { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_guest_is_given_up_after_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let silent = stat(&path, Duration::from_millis(50)).await;
        assert!(matches!(silent, Err(LinkError::Timeout { .. })), "{silent:?}");
    }
}
