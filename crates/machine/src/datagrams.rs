//! Published UDP ports of VMs: the user's host receives, and each flow goes on into the machine.
//!
//! A flow is all datagrams of one client's address and port. It has a connection into the machine,
//! a place among all connections ([`Place`]), and two threads: one sends the client's datagrams,
//! the other sends the answers to that client. It ends when it has been idle. Datagrams that wait
//! for the machine are bounded, for each flow by number and for all flows by bytes; further ones
//! are dropped, as UDP permits.

use crate::places::{Connect, Place, Room, Rooms};
use dayfly_machine_init::{MAX_DATAGRAM_BYTES, read_datagram};
use rustix::net::SendFlags;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Datagrams of one flow that wait.
const MAX_WAITING: usize = 64;
/// Bytes of the datagrams of all flows that wait.
const MAX_WAITING_BYTES: usize = 16 << 20;
/// Time for the machine to take a datagram, after which the flow ends.
const STALLED: Duration = Duration::from_secs(60);

/// Idle times after which a flow ends, as those of the kernel's connection tracking
/// (nf_conntrack_udp_timeout and nf_conntrack_udp_timeout_stream).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Idle {
    /// Of a flow whose client has not sent again after an answer.
    pub once: Duration,
    /// Of a flow whose client has.
    pub lasting: Duration,
}

impl Default for Idle {
    fn default() -> Self {
        Self { once: Duration::from_secs(30), lasting: Duration::from_secs(120) }
    }
}

/// A UDP port of the host. Dropping it frees the port.
#[derive(Debug)]
pub(crate) struct UdpPort {
    socket: Weak<Socket>,
    ended: Arc<AtomicBool>,
    closed: Receiver<Infallible>,
}

/// The socket of a port. The thread that receives owns it; threads that send an answer borrow it.
#[derive(Debug)]
struct Socket {
    udp: UdpSocket,
    /// The receiver of [`UdpPort`] sees its end. Fields are dropped in their order, so the socket
    /// is closed before.
    _closed: SyncSender<Infallible>,
}

impl Drop for UdpPort {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Some(socket) = self.socket.upgrade() {
            // This wakes the thread that receives, although the call fails on a socket without a
            // peer (inet_shutdown of the kernel).
            let _ = rustix::net::shutdown(&socket.udp, rustix::net::Shutdown::Read);
        }
        // The port is free when the last thread has dropped the socket. None of them waits while it
        // has the socket, except for a datagram to receive.
        let _ = self.closed.recv();
    }
}

/// A datagram that waits, and its share of the bytes that may wait.
struct Waiting {
    bytes: Vec<u8>,
    of_all: Arc<AtomicUsize>,
}

impl Waiting {
    /// A copy of the datagram, unless too many bytes wait.
    fn new(bytes: &[u8], of_all: &Arc<AtomicUsize>) -> Option<Self> {
        let before = of_all.fetch_add(bytes.len(), Ordering::Relaxed);
        let waiting = Self { bytes: bytes.to_vec(), of_all: Arc::clone(of_all) };
        (before + bytes.len() <= MAX_WAITING_BYTES).then_some(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.of_all.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

/// The datagrams of one flow that wait, and whether it has ended.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    ended: bool,
}

/// What [`Queue::take`] waited for.
enum Taken {
    Datagram(Waiting),
    Nothing,
    End,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a datagram, which is lost if too many wait. Gives it back if the flow has ended.
    fn put(&self, datagram: Waiting) -> Result<(), Waiting> {
        let mut state = self.state();
        if state.ended {
            return Err(datagram);
        }
        if state.waiting.len() < MAX_WAITING {
            state.waiting.push_back(datagram);
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Waits for a datagram or the end, for a time at most.
    fn take(&self, most: Duration) -> Taken {
        let idle = |state: &mut State| state.waiting.is_empty() && !state.ended;
        let (mut state, _) = self
            .changed
            .wait_timeout_while(self.state(), most, idle)
            .unwrap_or_else(PoisonError::into_inner);
        match state.waiting.pop_front() {
            _ if state.ended => Taken::End,
            Some(datagram) => Taken::Datagram(datagram),
            None => Taken::Nothing,
        }
    }

    fn has_ended(&self) -> bool {
        self.state().ended
    }

    fn end(&self) {
        *self.state() = State { waiting: VecDeque::new(), ended: true };
        self.changed.notify_one();
    }
}

/// A flow as the thread that receives sees it. Dropping it ends the flow.
struct Flow(Arc<Queue>);

impl Drop for Flow {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl UdpPort {
    /// Starts the thread that receives.
    ///
    /// # Errors
    /// The thread cannot be made.
    pub(crate) fn start(
        socket: UdpSocket,
        to: u16,
        connect: Connect,
        rooms: Arc<Rooms>,
        idle: Idle,
    ) -> io::Result<Self> {
        let (_closed, closed) = sync_channel(0);
        let (socket, ended) = (Arc::new(Socket { udp: socket, _closed }), Arc::default());
        let weak = Arc::downgrade(&socket);
        let stop = Arc::clone(&ended);
        let thread = std::thread::Builder::new().name("udp-port".to_owned()).stack_size(128 << 10);
        thread.spawn(move || {
            let flows = Flows { to, connect, rooms, idle, of_port: Arc::default(), stop };
            flows.receive(&socket);
        })?;
        Ok(Self { socket: weak, ended, closed })
    }
}

/// The flows of one port.
struct Flows {
    to: u16,
    connect: Connect,
    rooms: Arc<Rooms>,
    idle: Idle,
    of_port: Arc<Room>,
    stop: Arc<AtomicBool>,
}

impl Flows {
    fn receive(&self, socket: &Arc<Socket>) {
        let mut flows: HashMap<SocketAddr, Flow> = HashMap::new();
        let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
        loop {
            let received = socket.udp.recv_from(&mut buffer);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let Ok((count, client)) = received else { continue };
            let bytes = buffer.get(..count).unwrap_or_default();
            let Some(datagram) = Waiting::new(bytes, &self.rooms.waiting) else { continue };
            let datagram = match flows.get(&client) {
                None => datagram,
                Some(flow) => match flow.0.put(datagram) {
                    Ok(()) => continue,
                    Err(datagram) => datagram,
                },
            };
            flows.retain(|_, flow| !flow.0.has_ended());
            if let Some(flow) = self.open(client, socket) {
                let _ = flow.0.put(datagram);
                flows.insert(client, flow);
            }
        }
    }

    /// A new flow, if there is a place for it.
    fn open(&self, client: SocketAddr, socket: &Arc<Socket>) -> Option<Flow> {
        let place = Place::take(&self.rooms, &self.of_port)?;
        let flow = Flow(Arc::default());
        let (connect, to, idle) = (Arc::clone(&self.connect), self.to, self.idle);
        let (socket, queue) = (Arc::downgrade(socket), Arc::clone(&flow.0));
        let thread = std::thread::Builder::new().name("udp-flow".to_owned()).stack_size(128 << 10);
        let served = thread.spawn(move || {
            let _place = place;
            if let Ok(machine) = connect(to) {
                // A flow whose connection breaks ends; the client's next datagram begins a new one.
                let _ = serve(&machine, &queue, (client, &socket), idle);
            }
            queue.end();
        });
        served.ok().map(|_| flow)
    }
}

/// Serves one flow until it has been idle, or its port or connection ends.
fn serve(
    machine: &TcpStream,
    datagrams: &Queue,
    (client, socket): (SocketAddr, &Weak<Socket>),
    idle: Idle,
) -> io::Result<()> {
    machine.set_write_timeout(Some(STALLED))?;
    // Counts answers: a change since the last look means that the flow is in use.
    let answers = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let back = std::thread::Builder::new().stack_size(128 << 10);
        back.spawn_scoped(scope, || {
            let _ = send_answers(machine, client, socket, &answers);
            datagrams.end();
            let _ = machine.shutdown(Shutdown::Both);
        })?;
        let sent = send_questions(machine, datagrams, &answers, idle);
        let _ = machine.shutdown(Shutdown::Both);
        sent
    })
}

/// Sends the client's datagrams into the machine.
fn send_questions(
    mut machine: &TcpStream,
    datagrams: &Queue,
    answers: &AtomicUsize,
    idle: Idle,
) -> io::Result<()> {
    let (mut seen, mut lasting) = (0, false);
    loop {
        let most = if lasting { idle.lasting } else { idle.once };
        match datagrams.take(most) {
            Taken::Datagram(datagram) => {
                lasting |= answers.load(Ordering::Relaxed) > 0;
                let length = u16::try_from(datagram.bytes.len()).map_err(io::Error::other)?;
                machine.write_all(&[&length.to_be_bytes()[..], &datagram.bytes].concat())?;
            }
            Taken::End => return Ok(()),
            Taken::Nothing => {
                let now = answers.load(Ordering::Relaxed);
                if now == seen {
                    return Ok(());
                }
                seen = now;
            }
        }
    }
}

/// Sends the answers of the machine to the client.
fn send_answers(
    machine: &TcpStream,
    client: SocketAddr,
    socket: &Weak<Socket>,
    answers: &AtomicUsize,
) -> io::Result<()> {
    let mut machine = BufReader::new(machine);
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    while let Some(length) = read_datagram(&mut machine, &mut buffer)? {
        answers.fetch_add(1, Ordering::Relaxed);
        let Some(socket) = socket.upgrade() else { return Ok(()) };
        // What the host cannot send at once, such as a datagram that is too long, is lost.
        let datagram = buffer.get(..length).unwrap_or_default();
        let _ = rustix::net::sendto(&socket.udp, datagram, SendFlags::DONTWAIT, &client);
    }
    Ok(())
}

#[cfg(test)]
#[path = "datagrams_tests.rs"]
mod tests;
