//! Published UDP ports: datagrams of clients go to a port of a guest, and its answers back.
//!
//! ```text
//! client A ─▶┐ the host's port ┌─ socket of flow A ─▶ guest      the guest sees another port
//! client B ─▶┘  (one socket)   └─ socket of flow B ─▶ guest      of the host for each flow
//! ```
//! A **flow** is all datagrams of one client's address and port. It begins with a datagram of the
//! client, and ends when it has been idle. What the guest sends to a flow's socket goes to the
//! client of that flow only. Datagrams wait in the kernel's queues, whose size the kernel bounds;
//! what does not fit is lost, as UDP permits. If there are as many flows as there may be, datagrams
//! of other clients are dropped.

use crate::net::permits::{permits_of_flows, reset, turn};
use dayfly_machine_init::MAX_DATAGRAM_BYTES;
use dayfly_units::sync::lock;
use rustix::net::SendFlags;
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, timeout};

/// Bounds of the flows of one port. The times are those of the kernel's connection tracking
/// (nf_conntrack_udp_timeout and nf_conntrack_udp_timeout_stream).
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// Permits for the flows of the VM.
    pub of_vm: Arc<Semaphore>,
    /// The most flows of one port.
    pub of_port: usize,
    /// Idle time that ends a flow whose client has not sent again after an answer.
    pub once: Duration,
    /// Idle time that ends a flow whose client has sent again after an answer.
    pub lasting: Duration,
}

/// The most flows of one port.
pub(super) const MAX_FLOWS_OF_PORT: usize = 512;

impl Limits {
    /// The limits of a published port.
    pub(super) const fn of_vm(of_vm: Arc<Semaphore>) -> Self {
        let (once, lasting) = (Duration::from_secs(30), Duration::from_secs(120));
        Self { of_vm, of_port: MAX_FLOWS_OF_PORT, once, lasting }
    }
}

thread_local! {
    /// Where a datagram is between two sockets. No task waits while it uses this.
    static DATAGRAM: RefCell<Vec<u8>> = RefCell::new(vec![0; MAX_DATAGRAM_BYTES]);
}

/// One flow.
#[derive(Debug)]
struct Flow {
    client: SocketAddr,
    /// Its socket, connected to the guest.
    guest: UdpSocket,
    /// When the last datagram of either side came, in milliseconds since the relay began.
    last_ms: AtomicU64,
    answered: AtomicBool,
    /// Whether the client has sent after an answer.
    lasting: AtomicBool,
    _permits: [OwnedSemaphorePermit; 2],
}

/// The flows of a port, by the client's address.
type Flows = Arc<Mutex<HashMap<SocketAddr, Arc<Flow>>>>;

/// Relays datagrams between the clients of `socket` and the guest, until the socket is dropped.
pub(super) async fn relay(socket: Weak<UdpSocket>, guest: SocketAddr, limits: Limits) {
    let (flows, began) = (Flows::default(), Instant::now());
    // The set aborts the flows when this task ends.
    let mut answering = JoinSet::new();
    loop {
        while answering.try_join_next().is_some() {}
        let received = receive(&socket, |client, bytes| {
            let known = lock(&flows).get(&client).cloned();
            if let Some(flow) = &known {
                pass(flow, bytes, began);
                return None;
            }
            let flow = Arc::new(open(client, guest, &flows, &limits)?);
            pass(&flow, bytes, began);
            lock(&flows).insert(client, flow.clone());
            Some(flow)
        });
        match received.await {
            Ok(None) => {}
            Ok(Some(flow)) => {
                let (socket, flows, limits) = (socket.clone(), flows.clone(), limits.clone());
                answering.spawn(async move {
                    answers(&flow, &socket, &limits, began).await;
                    lock(&flows).remove(&flow.client);
                });
            }
            // An error of an earlier answer, such as a client whose port is closed.
            Err(e) if e.kind() != io::ErrorKind::NotConnected => tokio::task::yield_now().await,
            Err(_) => return,
        }
    }
}

/// Receives one datagram, and returns what `with` makes of it. No task keeps the socket while it
/// waits.
///
/// # Errors
/// `NotConnected` if the socket has been dropped; the socket's errors.
async fn receive<T>(
    socket: &Weak<UdpSocket>,
    mut with: impl FnMut(SocketAddr, &[u8]) -> T,
) -> io::Result<T> {
    poll_fn(|context| {
        let Some(socket) = socket.upgrade() else {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        };
        DATAGRAM.with_borrow_mut(|buffer| {
            let mut into = ReadBuf::new(buffer);
            socket.poll_recv_from(context, &mut into).map_ok(|client| with(client, into.filled()))
        })
    })
    .await
}

/// A new flow, if there may be one more.
fn open(client: SocketAddr, guest: SocketAddr, flows: &Flows, limits: &Limits) -> Option<Flow> {
    if lock(flows).len() >= limits.of_port {
        return None;
    }
    let permits = turn(&limits.of_vm, &permits_of_flows())?;
    Some(Flow {
        client,
        guest: to_guest(guest).ok()?,
        last_ms: AtomicU64::new(0),
        answered: AtomicBool::new(false),
        lasting: AtomicBool::new(false),
        _permits: permits,
    })
}

/// A socket that exchanges datagrams with this address only.
fn to_guest(guest: SocketAddr) -> io::Result<UdpSocket> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(guest)?;
    UdpSocket::from_std(socket)
}

/// Passes a client's datagram on.
fn pass(flow: &Flow, bytes: &[u8], began: Instant) {
    flow.last_ms.store(elapsed_ms(began), Ordering::Relaxed);
    if flow.answered.load(Ordering::Relaxed) {
        flow.lasting.store(true, Ordering::Relaxed);
    }
    send(&flow.guest, bytes);
}

/// Sends to the guest. A datagram that cannot be sent at once is lost. The system call is direct,
/// because tokio takes a new socket for one that cannot send yet.
fn send(guest: &UdpSocket, bytes: &[u8]) {
    // An error may be the guest's answer to an earlier datagram: no program listens there. Linux
    // reports it once, so the second call sends.
    if rustix::net::send(guest, bytes, SendFlags::DONTWAIT).is_err() {
        let _ = rustix::net::send(guest, bytes, SendFlags::DONTWAIT);
    }
}

/// Passes the guest's datagrams back to the flow's client, until the flow has been idle.
async fn answers(flow: &Flow, socket: &Weak<UdpSocket>, limits: &Limits, began: Instant) {
    loop {
        // What a guest sends without end must not keep this thread.
        consume_budget().await;
        let lasting = flow.lasting.load(Ordering::Relaxed);
        let most = if lasting { limits.lasting } else { limits.once };
        let last = Duration::from_millis(flow.last_ms.load(Ordering::Relaxed));
        let Some(left) = most.checked_sub(began.elapsed().saturating_sub(last)) else { return };
        match timeout(left, flow.guest.readable()).await {
            Ok(Ok(())) => {}
            // The runtime ends.
            Ok(Err(_)) => return,
            // A datagram of the client may have come meanwhile.
            Err(_) => continue,
        }
        let Some(socket) = socket.upgrade() else { return };
        DATAGRAM.with_borrow_mut(|buffer| {
            if let Ok(count) = flow.guest.try_recv(buffer) {
                flow.answered.store(true, Ordering::Relaxed);
                flow.last_ms.store(elapsed_ms(began), Ordering::Relaxed);
                // As in `send`.
                let datagram = buffer.get(..count).unwrap_or_default();
                let _ = rustix::net::sendto(&*socket, datagram, SendFlags::DONTWAIT, &flow.client);
            }
        });
    }
}

fn elapsed_ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Relays one flow of the machine's supervisor, which decides when the flow ends. Each datagram has
/// its length in front ([`dayfly_machine_init::ports`]).
pub(super) async fn framed(client: TcpStream, guest: SocketAddr) {
    let Ok(guest) = to_guest(guest) else { return reset(&client) };
    let _ = client.set_nodelay(true);
    let (mut from, mut to) = client.into_split();
    let there = async {
        while let Ok(length) = from.read_u16().await {
            let mut datagram = vec![0; usize::from(length)];
            if from.read_exact(&mut datagram).await.is_err() {
                return;
            }
            send(&guest, &datagram);
        }
    };
    let back = async {
        loop {
            // As in `answers`.
            consume_budget().await;
            if guest.readable().await.is_err() {
                return;
            }
            let frame = DATAGRAM.with_borrow_mut(|buffer| {
                let count = guest.try_recv(buffer).ok()?;
                let length = u16::try_from(count).ok()?.to_be_bytes();
                Some([&length[..], buffer.get(..count)?].concat())
            });
            if let Some(frame) = frame
                && to.write_all(&frame).await.is_err()
            {
                return;
            }
        }
    };
    tokio::select! {
        () = there => {}
        () = back => {}
    }
}

#[cfg(test)]
#[path = "datagrams_tests.rs"]
mod tests;
