//! Names of VMs while one of them floods the service: whether another's questions are answered, how
//! much later, and how long the service keeps an async worker.
//!
//! The service is the daemon's, in a runtime as the daemon's, in a network namespace in which VMs
//! are addresses: packets come as fast as this host can send them, faster than through a VM's
//! network device. The host's server is a program here that answers each question over UDP, and
//! over TCP with the message that takes the most work for its length.
//!
//! A poll of the service's tasks is timed by its thread's CPU clock; one that takes longer than a
//! millisecond fails the benchmark, and so does a question that is not answered.

pub(super) mod messages;

use crate::prelude::*;
use dayfly_daemon::base::prefix::Prefix;
use dayfly_daemon::net::names::{Index, Policy, Scope, bind, serve};
use messages::{answer, bomb, framed, question};
use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};
use rustix::thread::UnshareFlags;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use tokio::sync::watch;

const COLUMNS: [Column; 5] = [
    ("answered", "/answered", Plain),
    ("at once", "/answered_at_once", Plain),
    ("p50", "/latency/p50_us", Us),
    ("p99", "/latency/p99_us", Us),
    ("most", "/latency/max_us", Us),
];

const PREFIX: &str = "10.88.0.0/24";
const EVIL: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 2);
const QUIET: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 3);
/// Questions of the quiet one in each part.
const QUESTIONS: u16 = 400;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(5);
/// A resolver asks again after five seconds (resolv.conf(5)); here sooner, and as often.
const AGAIN: Duration = Duration::from_secs(1);
const TRIES: usize = 3;
/// Connections that the flood holds open, or tries to.
const HELD: usize = 300;
/// The longest message over TCP.
const LARGEST: usize = 65_535;

/// Sends once or a few times; returns how many packets and messages that were.
type Flood = Box<dyn FnMut() -> u64 + Send>;

/// Runs it.
pub async fn run(places: &Places) -> Result<()> {
    let report =
        Report::begin(places, "dns", "", "names of VMs, while one VM floods their service");
    // All threads that it starts are in the same namespace, which ends with the last of them.
    let inside = || -> Result<Value> {
        // SAFETY: NEWNET changes which network this thread and those it starts see, and nothing
        // that others share with it.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .context("a network namespace (this benchmark needs root)")?;
        command(&format!("ip link set lo up && ip addr add {PREFIX} dev lo"))?;
        measure()
    };
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // Not waited for where this is dropped: a signal ends the program, and all of them with it.
    std::thread::spawn(move || drop(sender.send(inside())));
    let figures = receiver.await.context("the benchmark's thread ended")??;
    report.write(figures.clone())?;
    ensure!(figures["long_polls"] == 0, "the service kept a worker for more than a millisecond");
    let all = ["alone", "flooded"].map(|part| &figures[part]["answered"]);
    ensure!(all.iter().all(|answered| **answered == QUESTIONS), "not all was answered: {all:?}");
    Ok(())
}

fn command(line: &str) -> Result<()> {
    let out = Command::new("sh").args(["-c", line]).output().with_context(|| line.to_owned())?;
    ensure!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    Ok(())
}

fn measure() -> Result<Value> {
    let prefix: Prefix = PREFIX.parse().map_err(anyhow::Error::msg)?;
    let at = SocketAddr::from((prefix.gateway(), 53));
    let (_sender, servers) = watch::channel(Arc::from([server()?]));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let index = Arc::new(Index::default());
    let insert = |address, name: &str| -> Result<_> {
        Ok(index.insert(address, VmId::random(), &name.parse()?, Policy::default()))
    };
    let _vms = [insert(EVIL, "evil")?, insert(QUIET, "quiet")?];
    let scope = Scope { prefix, reach: Arc::from([]) };
    let within = runtime.enter();
    let serving = serve(index.clone(), scope, servers, bind(at)?, None)?;
    drop(within);
    let stats = serving.stats();
    let table = Table::new(8, "", &COLUMNS);
    let alone = asked(at)?;
    table.row("alone", &alone);
    let counts = || [&stats.over_limit, &stats.closed_connections].map(|count| count.load(Relaxed));
    let before = counts();
    let (end, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let floods = [packets(at)?, connections(at), streams(at)];
    let flooded = std::thread::scope(|scope| {
        for mut flood in floods {
            let (end, sent) = (&end, &sent);
            scope.spawn(move || {
                while !end.load(Relaxed) {
                    sent.fetch_add(flood(), Relaxed);
                }
            });
        }
        let flooded = asked(at);
        end.store(true, Relaxed);
        flooded
    })?;
    table.row("flooded", &flooded);
    let [dropped, closed] = [0, 1].map(|n| counts()[n] - before[n]);
    let [polls, long_polls, forwarded] =
        [&stats.polls, &stats.long_polls, &stats.forwarded].map(|count| count.load(Relaxed));
    let longest_us = stats.longest_poll_ns.load(Relaxed) / 1000;
    let sent = sent.into_inner();
    println!(
        "  {sent} packets and messages of the flood, {dropped} questions dropped, {closed} \
         connections closed\n  {polls} polls, the longest {longest_us} us of CPU time, \
         {long_polls} over 1 ms"
    );
    let p50 = |part: &Value| part["latency"]["p50_us"].as_u64().unwrap_or(0);
    Ok(json!({
        "latency_ratio_p50": ratio(p50(&flooded), p50(&alone)), "alone": alone,
        "flooded": flooded, "flood_messages": sent, "flood_dropped": dropped,
        "flood_connections_closed": closed, "forwarded": forwarded, "polls": polls,
        "longest_poll_us": longest_us, "long_polls": long_polls,
    }))
}

fn from(address: Ipv4Addr, at: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((address, 0))?;
    socket.connect(at)?;
    socket.set_read_timeout(Some(AGAIN))?;
    Ok(socket)
}

fn stream_from(address: Ipv4Addr, at: SocketAddr) -> Result<TcpStream> {
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    rustix::net::bind(&fd, &SocketAddr::from((address, 0)))?;
    connect(&fd, &at)?;
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(AGAIN))?;
    stream.set_write_timeout(Some(AGAIN))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// One question over TCP; the answer.
fn over_stream(address: Ipv4Addr, at: SocketAddr, message: &[u8]) -> Result<Vec<u8>> {
    let mut stream = stream_from(address, at)?;
    stream.write_all(&framed(message))?;
    Ok(read(&mut stream)?)
}

/// The quiet one's questions, one after the other: its own name, another, and its own over TCP.
fn asked(at: SocketAddr) -> Result<Value> {
    let socket = from(QUIET, at)?;
    let (mut took_us, mut at_once) = (Vec::new(), 0);
    for n in 0..QUESTIONS {
        std::thread::sleep(PAUSE);
        let names = ["quiet.dayfly.internal", "www.example.org"];
        let message = question(n, names[usize::from(n % 2)]);
        let begun = Instant::now();
        for again in 0..TRIES {
            let good = if n % 10 == 0 {
                over_stream(QUIET, at, &message).is_ok_and(|answer| is_good(&answer, n))
            } else {
                socket.send(&message)?;
                heard(&socket, n)
            };
            if good {
                took_us.push(u64::try_from(begun.elapsed().as_micros())?);
                at_once += usize::from(again == 0);
                break;
            }
        }
    }
    Ok(json!({
        "questions": QUESTIONS, "answered": took_us.len(), "answered_at_once": at_once,
        "latency": Spread::of(&took_us),
    }))
}

/// Whether the answer to question `n` comes in time; late ones to others are passed over.
fn heard(socket: &UdpSocket, n: u16) -> bool {
    let mut bytes = [0; 512];
    while let Ok(length) = socket.recv(&mut bytes) {
        if bytes[..2] == n.to_be_bytes() {
            return is_good(&bytes[..length], n);
        }
    }
    false
}

/// Whether these bytes answer question `n` with one address.
fn is_good(bytes: &[u8], n: u16) -> bool {
    let id = n.to_be_bytes();
    matches!(bytes, [a, b, flags, code, _, _, 0, 1, ..]
        if [*a, *b] == id && flags & 0x80 != 0 && code & 15 == 0)
}

/// Packets, as fast as they can be sent: bombs of three sizes, questions for one of our names and
/// for others.
fn packets(at: SocketAddr) -> Result<Flood> {
    let socket = from(EVIL, at)?;
    let own = question(7, "evil.dayfly.internal");
    let other = question(7, "a.example.org");
    let all = [bomb(&own, 500), bomb(&own, 1400), bomb(&own, 4096), own.clone(), other, own];
    Ok(Box::new(move || {
        // An error means a full queue.
        all.iter().for_each(|message| drop(socket.send(message)));
        all.len() as u64
    }))
}

/// Connections that say nothing: as many as can be had, opened again when they are closed.
fn connections(at: SocketAddr) -> Flood {
    let mut open = Vec::new();
    Box::new(move || {
        if open.len() >= HELD {
            open.clear();
        }
        open.extend(stream_from(EVIL, at));
        0
    })
}

/// Bombs and questions over connections; what comes back is the server's largest message, filtered.
fn streams(at: SocketAddr) -> Flood {
    let own = question(7, "evil.dayfly.internal");
    let all = [bomb(&own, LARGEST), question(7, "a.example.org"), own];
    Box::new(move || {
        all.iter().for_each(|message| drop(over_stream(EVIL, at, message)));
        all.len() as u64
    })
}

/// The host's server; its threads end with the program.
fn server() -> Result<SocketAddr> {
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let at = udp.local_addr()?;
    let tcp = TcpListener::bind(at)?;
    std::thread::spawn(move || {
        let mut bytes = [0; 1024];
        while let Ok((length, from)) = udp.recv_from(&mut bytes) {
            let _ = udp.send_to(&answer(&bytes[..length]), from);
        }
    });
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = tcp.accept() {
            let Ok(asked) = read(&mut stream) else { continue };
            // To the quiet one what it asks for, to the other what costs the most.
            let message = if asked.windows(3).any(|part| part == b"www") {
                answer(&asked)
            } else {
                let mut bomb = bomb(&asked, LARGEST);
                bomb[2] |= 0x80;
                bomb
            };
            let _ = stream.write_all(&framed(&message));
        }
    });
    Ok(at)
}

/// A message of a stream.
fn read(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut bytes = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
