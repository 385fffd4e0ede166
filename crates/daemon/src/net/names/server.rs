//! The service's tasks at its sockets.
//!
//! ```text
//!  packet ─▶ of a VM? within its rate? ─▶ parse, decide ─▶ answer
//!                                                └─ a turn ─▶ task: ask a server ─▶ answer
//!  connection ─▶ of a VM? a turn ─▶ task: read a question ─▶ as above
//! ```
//!
//! A turn (permit) for forwarding is taken after the question was parsed. So an idle connection
//! only counts against its VM's limit of connections. A panic in one question ends that question
//! only; a task that ends is started again.

use crate::net::names::Prefix;
use crate::net::names::forward::{self, By, Got, Servers};
use crate::net::names::index::{Guest, Index};
use crate::net::names::limits::{Gate, Turn};
use crate::net::names::message::{
    self, HEADER_BYTES, Head, MAX_QUESTION_BYTES, Query, Unusable, rcode,
};
use crate::net::names::policy::{self, Decision, Scope};
use crate::net::names::sockets::Sockets;
use crate::net::names::timed::{Stats, Timed, count};
use dayfly_host::net::Found;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Maximum number of questions being forwarded: for all VMs together, apart from the first of each
/// VM, and for one VM.
pub const FORWARDS: (usize, usize) = (256, 32);
/// Maximum number of connections: for all VMs together, apart from the first of each VM, and for
/// one VM.
pub const CONNECTIONS: (usize, usize) = (256, 8);
/// Time limit of a connection for a question, and for an answer. Guests of tests may stand still
/// for longer on a busy host.
pub const IDLE: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 8 });
/// Packets per round, after which the task yields to others.
const AT_ONCE: usize = 4;
/// Pause before a task is restarted, and after a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

struct Service {
    index: Arc<Index>,
    scope: Scope,
    servers: Servers,
    opener: Option<Opener>,
    /// Whether the host has refused to open the addresses of the last answer.
    opening_fails: AtomicBool,
    forwards: Arc<Gate>,
    connections: Arc<Gate>,
    stats: Arc<Stats>,
    stop: CancellationToken,
}

/// Opens the addresses that a question of the guest at an address has found. Returns the number of
/// those that found no room, or why none was opened. Blocks.
pub type Opener = Arc<dyn Fn(Ipv4Addr, &Found) -> Result<usize, String> + Send + Sync>;

/// The running service; dropping this ends it.
#[derive(Debug)]
pub struct Serving {
    stats: Arc<Stats>,
    stop: CancellationToken,
}

impl Serving {
    /// The service's counters.
    #[must_use]
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Serves the VMs of `index`, whose addresses are in `scope`, at these sockets. Questions for other
/// names go to `servers`, and `opener` opens what their answers have. Call it within a tokio
/// runtime.
///
/// # Errors
/// The sockets cannot be registered with the runtime.
pub fn serve(
    index: Arc<Index>,
    scope: Scope,
    servers: Servers,
    sockets: Sockets,
    opener: Option<Opener>,
) -> io::Result<Serving> {
    let (stats, stop) = (Arc::new(Stats::default()), CancellationToken::new());
    // On an error its drop ends the tasks that were started.
    let serving = Serving { stats: stats.clone(), stop: stop.clone() };
    let service = Arc::new(Service {
        index,
        scope,
        servers,
        opener,
        opening_fails: AtomicBool::new(false),
        forwards: Gate::new(FORWARDS.0, FORWARDS.1),
        connections: Gate::new(CONNECTIONS.0, CONNECTIONS.1),
        stats: stats.clone(),
        stop: stop.clone(),
    });
    for udp in sockets.udp {
        let (udp, same) = (Arc::new(UdpSocket::from_std(udp)?), service.clone());
        let start = move || Timed::new(&same.stats, packets(same.clone(), udp.clone()));
        tokio::spawn(supervise("packets", stats.clone(), stop.clone(), start));
    }
    for tcp in sockets.tcp {
        let (tcp, same) = (Arc::new(TcpListener::from_std(tcp)?), service.clone());
        let start = move || Timed::new(&same.stats, streams(same.clone(), tcp.clone()));
        tokio::spawn(supervise("connections", stats.clone(), stop.clone(), start));
    }
    Ok(serving)
}

/// Runs the future that `start` returns until `stop`; starts it again whenever it ends or panics.
async fn supervise<F>(
    what: &str,
    stats: Arc<Stats>,
    stop: CancellationToken,
    mut start: impl FnMut() -> F,
) where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let forever = async {
        loop {
            let ended = AbortOnDropHandle::new(tokio::spawn(start())).await;
            tracing::error!("names of VMs, {what}: expected no end, got {ended:?}; starting again");
            count(&stats.restarts);
            tokio::time::sleep(PAUSE).await;
        }
    };
    let _: Option<std::convert::Infallible> = stop.run_until_cancelled(forever).await;
}

/// What to do after a message.
enum Next {
    Nothing,
    Send(Vec<u8>),
    Ask(Query),
}

impl Service {
    fn guest(&self, from: SocketAddr) -> Option<Arc<Guest>> {
        let IpAddr::V4(ip) = from.ip() else { return None };
        self.index.guest(ip)
    }

    /// Takes one question from the guest's rate limit, and counts the result.
    fn may_ask(&self, guest: &Guest) -> bool {
        let may = guest.may_ask(Instant::now());
        count(if may { &self.stats.questions } else { &self.stats.over_limit });
        may
    }

    fn look(&self, guest: &Guest, bytes: &[u8]) -> Next {
        let looked = catch_unwind(AssertUnwindSafe(|| {
            let query = match message::parse(bytes, &mut 0) {
                Ok(query) => query,
                Err(Unusable::Silence) => return Next::Nothing,
                Err(Unusable::Reply(answer)) => return Next::Send(answer),
            };
            #[cfg(test)]
            assert!(!query.question.name.is(tests::PANICS), "on purpose");
            match policy::decide(&self.index, &self.scope, guest, &query) {
                Decision::Answer(answer) => Next::Send(answer),
                Decision::Refuse(answer) => {
                    guest.refuse(1);
                    Next::Send(answer)
                }
                Decision::Forward => Next::Ask(query),
            }
        }));
        // The panic was reported already. No answer, because the guest would repeat the question at
        // once after an error.
        looked.unwrap_or(Next::Nothing)
    }

    /// A turn for forwarding a guest's question.
    fn forward(&self, guest: &Guest) -> Option<Turn> {
        let turn = self.forwards.enter(&guest.forwards)?;
        count(&self.stats.forwarded);
        Some(turn)
    }

    async fn ask(&self, guest: &Arc<Guest>, query: &Query, by: By) -> Vec<u8> {
        let servers = self.servers.borrow().clone();
        let follow = self.opener.is_some() && !guest.egress().rules().is_empty();
        let Got { bytes, addresses, .. } =
            forward::ask(&servers, &self.scope.reach, query, by, follow).await;
        if !addresses.is_empty() {
            self.open(guest, query, addresses).await;
        }
        bytes
    }

    /// Opens the addresses of an answer before the guest gets it, because the guest connects at
    /// once.
    async fn open(&self, guest: &Arc<Guest>, query: &Query, addresses: Vec<(Ipv4Addr, u32)>) {
        let Some(opener) = self.opener.clone() else { return };
        let mut name: Vec<Box<[u8]>> =
            query.question.name.labels().map(|label| label.to_ascii_lowercase().into()).collect();
        name.reverse();
        let of = |(address, seconds)| (address, Duration::from_secs(u64::from(seconds)));
        let found = Found { name, addresses: addresses.into_iter().map(of).collect() };
        let (address, all) = (guest.address, found.addresses.len());
        let opening = tokio::task::spawn_blocking(move || opener(address, &found)).await;
        let opened = opening.unwrap_or_else(|e| Err(e.to_string()));
        let failed_before = self.opening_fails.swap(opened.is_err(), Ordering::Relaxed);
        // Each series of failures is reported once, because guests choose how often they ask.
        if let (Err(why), false) = (&opened, failed_before) {
            tracing::error!(%address, "opening a name: {why}");
        }
        let left_out = opened.unwrap_or(all);
        guest.refuse(u64::try_from(left_out).unwrap_or(u64::MAX));
    }

    /// Runs `work` for a guest in a task, until the guest returns its address or the service stops.
    fn spawn(self: &Arc<Self>, guest: &Guest, work: impl Future<Output = ()> + Send + 'static) {
        let (stop, gone) = (self.stop.clone(), guest.gone.clone());
        tokio::spawn(Timed::new(&self.stats, async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = gone.cancelled() => {}
                () = work => {}
            }
        }));
    }
}

async fn packets(service: Arc<Service>, socket: Arc<UdpSocket>) -> io::Result<()> {
    // One byte more than the maximum, so that a question that is too long is noticed.
    let mut bytes = [0; MAX_QUESTION_BYTES + 1];
    loop {
        for _ in 0..AT_ONCE {
            let (length, from) = socket.recv_from(&mut bytes).await?;
            let Some(guest) = service.guest(from).filter(|guest| service.may_ask(guest)) else {
                continue;
            };
            match service.look(&guest, &bytes[..length]) {
                Next::Nothing => {}
                Next::Send(answer) => send(&guest, &socket, &answer, from),
                Next::Ask(query) => by_packet(&service, &guest, &socket, from, query),
            }
        }
        tokio::task::yield_now().await;
    }
}

fn by_packet(
    service: &Arc<Service>,
    guest: &Arc<Guest>,
    socket: &Arc<UdpSocket>,
    from: SocketAddr,
    query: Query,
) {
    let Some(turn) = service.forward(guest) else {
        return send(guest, socket, &query.answer(Head::of(rcode::SERVFAIL), &[]), from);
    };
    let (same, of, socket) = (service.clone(), guest.clone(), socket.clone());
    service.spawn(guest, async move {
        let answer = same.ask(&of, &query, By::Packet).await;
        drop(turn);
        send(&of, &socket, &answer, from);
    });
}

/// Sends an answer, if the guest still has its address. An answer that does not fit into the
/// socket's queue is dropped, as UDP permits.
fn send(guest: &Guest, socket: &UdpSocket, answer: &[u8], to: SocketAddr) {
    guest.deliver(|| drop(socket.try_send_to(answer, to)));
}

/// Whether an error of accept(2) concerns only one connection, which is gone.
fn is_of_one(e: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        e.kind(),
        Kind::ConnectionAborted
            | Kind::ConnectionReset
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable
            | Kind::NetworkDown
            | Kind::TimedOut
    ) || matches!(e.raw_os_error(), Some(libc::EPROTO))
}

async fn streams(service: Arc<Service>, listener: Arc<TcpListener>) -> io::Result<()> {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => accepted(&service, stream, from),
            Err(e) if is_of_one(&e) => {}
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(e) => return Err(e),
        }
        // Yield, because closing a connection takes the kernel far longer than reading a packet.
        tokio::task::yield_now().await;
    }
}

/// Serves a connection if its guest may have one more; otherwise closes it.
fn accepted(service: &Arc<Service>, stream: TcpStream, from: SocketAddr) {
    let Some(guest) = service.guest(from) else { return };
    let Some(turn) = service.connections.enter(&guest.connections) else {
        return count(&service.stats.closed_connections);
    };
    let (same, of) = (service.clone(), guest.clone());
    service.spawn(&guest, async move {
        connection(&same, &of, stream).await;
        drop(turn);
    });
}

/// Answers the questions of a connection one after the other, until it is idle or sends anything
/// else.
async fn connection(service: &Arc<Service>, guest: &Arc<Guest>, mut stream: TcpStream) {
    let mut bytes = [0; MAX_QUESTION_BYTES];
    loop {
        let Ok(Some(length)) = timeout(IDLE, question(&mut stream, &mut bytes)).await else {
            return;
        };
        if !service.may_ask(guest) {
            return;
        }
        let answer = match service.look(guest, &bytes[..length]) {
            Next::Nothing => return,
            Next::Send(answer) => answer,
            Next::Ask(query) => match service.forward(guest) {
                None => query.answer(Head::of(rcode::SERVFAIL), &[]),
                Some(_turn) => service.ask(guest, &query, By::Stream).await,
            },
        };
        if !matches!(timeout(IDLE, forward::write(&mut stream, &answer)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Reads one message of a stream; `None` at its end, or if the length is no question's.
async fn question(stream: &mut TcpStream, bytes: &mut [u8; MAX_QUESTION_BYTES]) -> Option<usize> {
    let length = usize::from(stream.read_u16().await.ok()?);
    let bytes = bytes.get_mut(..length).filter(|bytes| bytes.len() >= HEADER_BYTES)?;
    stream.read_exact(bytes).await.ok()?;
    Some(length)
}

/// The address at which guests ask: port 53 of their gateway.
pub(in crate::net) fn place(prefix: Prefix) -> SocketAddr {
    let gateway: Ipv4Addr = prefix.gateway();
    SocketAddr::from((gateway, forward::PORT))
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
