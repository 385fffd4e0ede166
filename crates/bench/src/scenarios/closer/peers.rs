//! Network peers of VMs: one that asks at a steady rate, one that asks in turns, one that floods.

use crate::prelude::*;
use crate::testbed::random::Random;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

/// Bytes of a request, and of its answer.
const REQUEST: usize = 64;
/// An answer that takes longer is lost.
const LOST: Duration = Duration::from_secs(1);
/// How long a VM may take to answer for the first time.
const WITHIN: Duration = Duration::from_secs(60);
/// Datagrams of a flood in a millisecond, and the sockets that they come from in turn: each is a
/// flow of the relay.
const AT_ONCE: usize = 20;
const FLOWS: usize = 64;
/// Connections of a flood that are open at a time.
const CONNECTIONS: usize = 2048;
const NICE: i32 = -20;

fn to(port: u16) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect((Ipv4Addr::LOCALHOST, port))?;
    Ok(socket)
}

/// Whether nothing came in time, or no program has the port yet.
fn is_silence(error: &std::io::Error) -> bool {
    use ErrorKind::{ConnectionRefused, Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), ConnectionRefused | Interrupted | TimedOut | WouldBlock)
}

/// Sends `message` to a VM's port until the VM answers.
pub fn until_it_answers(port: u16, message: &[u8]) -> Result<()> {
    let (socket, begun) = (to(port)?, Instant::now());
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut answer = [0; 2048];
    while begun.elapsed() < WITHIN {
        let got = socket.send(message).and_then(|_| socket.recv(&mut answer));
        match got {
            Ok(_) => return Ok(()),
            Err(error) if is_silence(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bail!("UDP port {port}: expected an answer within {WITHIN:?}, got none");
}

/// What came of the requests to a VM.
#[derive(Debug, Default)]
pub struct Asked {
    /// Requests.
    pub sent: usize,
    /// From each request that was answered to its answer, in the order of answers.
    pub us: Vec<u64>,
}

impl Asked {
    /// Answered requests, in percent.
    pub fn answered(&self) -> f64 {
        percent(self.us.len() as u64, self.sent as u64)
    }
}

/// The thread comes before others of its group, so that it measures the VM and not how busy the
/// CPUs of this program are.
fn comes_first() -> Result<()> {
    rustix::process::setpriority_process(None, NICE).context("a nice value of -20")
}

/// Asks a VM `per_second` times a second for `time`.
pub fn ask(port: u16, per_second: usize, time: Duration) -> JoinHandle<Result<Asked>> {
    let gap = Duration::from_secs(1) / u32::try_from(per_second).unwrap_or(u32::MAX);
    std::thread::spawn(move || {
        comes_first()?;
        let (mut vm, begun) = (Peer::of(port)?, Instant::now());
        while begun.elapsed() < time {
            vm.send();
            let next = begun + gap * u32::try_from(vm.sent_at.len())?;
            vm.answers(next, usize::MAX)?;
        }
        vm.end()
    })
}

/// Asks VMs one after the other for `time`: in each round each VM as often as `times` says, in a
/// random order. A request is sent `pause` after the one before is answered or lost.
pub fn ask_in_turns<const N: usize>(
    ports: [u16; N],
    times: [usize; N],
    pause: Duration,
    time: Duration,
) -> JoinHandle<Result<[Asked; N]>> {
    std::thread::spawn(move || {
        comes_first()?;
        let mut vms = Vec::with_capacity(N);
        for port in ports {
            vms.push(Peer::of(port)?);
        }
        let mut turns: Vec<usize> = std::iter::zip(0.., times)
            .flat_map(|(vm, times)| std::iter::repeat_n(vm, times))
            .collect();
        let (mut random, begun) = (Random(0), Instant::now());
        while begun.elapsed() < time {
            random.shuffle(&mut turns);
            for turn in &turns {
                let vm: &mut Peer = vms.get_mut(*turn).context("a VM for each turn")?;
                vm.send();
                vm.answers(Instant::now() + LOST, vm.asked.us.len() + 1)?;
                std::thread::sleep(pause);
            }
        }
        let asked = vms.into_iter().map(Peer::end).collect::<Result<Vec<_>>>()?;
        asked.try_into().map_err(|_| anyhow!("{N} VMs"))
    })
}

/// A VM that is asked.
#[derive(Debug)]
struct Peer {
    socket: UdpSocket,
    sent_at: Vec<Instant>,
    asked: Asked,
}

impl Peer {
    fn of(port: u16) -> Result<Self> {
        Ok(Self { socket: to(port)?, sent_at: Vec::new(), asked: Asked::default() })
    }

    fn send(&mut self) {
        let mut request = [0; REQUEST];
        request[..8].copy_from_slice(&(self.sent_at.len() as u64).to_le_bytes());
        self.sent_at.push(Instant::now());
        // A request that the host refuses is one without an answer.
        let _lost = self.socket.send(&request);
    }

    fn answers(&mut self, until: Instant, enough: usize) -> Result<()> {
        answers(&self.socket, until, &self.sent_at, &mut self.asked.us, enough)
    }

    /// Takes the last answers.
    fn end(mut self) -> Result<Asked> {
        self.answers(Instant::now() + LOST, self.sent_at.len())?;
        Ok(Asked { sent: self.sent_at.len(), ..self.asked })
    }
}

/// Takes answers until then, or until there are `enough` of them.
fn answers(
    socket: &UdpSocket,
    until: Instant,
    sent_at: &[Instant],
    us: &mut Vec<u64>,
    enough: usize,
) -> Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || us.len() >= enough {
            return Ok(());
        }
        socket.set_read_timeout(Some(left))?;
        let mut answer = [0; REQUEST];
        match socket.recv(&mut answer) {
            Ok(REQUEST) => us.extend(took_us(&answer, sent_at)),
            Ok(_) => {}
            Err(error) if is_silence(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How long an answer took, by the number of its request.
fn took_us(answer: &[u8; REQUEST], sent_at: &[Instant]) -> Option<u64> {
    let number = u64::from_le_bytes(answer.first_chunk().copied()?);
    let sent = sent_at.get(usize::try_from(number).ok()?)?;
    u64::try_from(sent.elapsed().as_micros()).ok()
}

/// A flood of a VM's published ports, until it is dropped.
#[derive(Debug)]
pub struct Flood {
    end: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Flood {
    /// Begins it: 20 datagrams and a connection in each millisecond.
    pub fn begin(udp: u16, tcp: u16) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let of = |flood: fn(u16, &AtomicBool) -> Result<()>, port| {
            let end = end.clone();
            std::thread::spawn(move || flood(port, &end))
        };
        Self { threads: vec![of(datagrams, udp), of(connections, tcp)], end }
    }

    /// Ends it.
    ///
    /// # Errors
    /// It ended earlier.
    pub fn end(mut self) -> Result<()> {
        self.end.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("a thread of the flood panicked"))??;
        }
        Ok(())
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
    }
}

fn datagrams(port: u16, end: &AtomicBool) -> Result<()> {
    let sockets: Vec<_> = (0..FLOWS).map(|_| to(port)).collect::<Result<_>>()?;
    let mut turns = sockets.iter().cycle();
    while !end.load(Relaxed) {
        for socket in turns.by_ref().take(AT_ONCE) {
            // Full queues are the point; answers are not read.
            let _lost = socket.send(&[0; REQUEST]);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn connections(port: u16, end: &AtomicBool) -> Result<()> {
    let at = (Ipv4Addr::LOCALHOST, port).into();
    let mut open = std::collections::VecDeque::new();
    while !end.load(Relaxed) {
        // A full queue of the listener refuses it.
        open.extend(TcpStream::connect_timeout(&at, Duration::from_millis(5)).ok());
        if open.len() > CONNECTIONS {
            open.pop_front();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_the_number_of_their_request() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = server.local_addr().unwrap().port();
        let socket = to(port).unwrap();
        let client = socket.local_addr().unwrap();
        let sent_at = [Instant::now(); 3];
        for (number, bytes) in [(2_u64, REQUEST), (0, REQUEST), (3, REQUEST), (1, 8)] {
            let answer = [&number.to_le_bytes()[..], &[0; REQUEST - 8]].concat();
            server.send_to(&answer[..bytes], client).unwrap();
        }
        let mut us = Vec::new();
        // All are in the socket's queue.
        let until = Instant::now() + LOST;
        answers(&socket, until, &sent_at, &mut us, 1).unwrap();
        assert_eq!(us.len(), 1, "one is enough");
        answers(&socket, until, &sent_at, &mut us, usize::MAX).unwrap();
        assert_eq!(us.len(), 2, "one of no request, and one that is cut off, do not count");
        let asked = Asked { sent: 4, us };
        assert!((asked.answered() - 50.0).abs() < 1e-9);
    }
}
