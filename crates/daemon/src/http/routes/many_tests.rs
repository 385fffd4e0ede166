//! Many programs at once, and clients that go away or stand still at any byte.

use super::tests::{Served, asked_program, running, served};
use crate::base::caller::Caller;
use crate::base::long_requests::{AT_ONCE, OF_USER};
use crate::vmm::agent_link::read_frame;
use dayfly_api::agent::{
    ExecSpec, Exit, Frame, FrameKind, MAX_FRAME_BYTES, PROTOCOL, Reply, encode, request_frames,
};
use dayfly_api::client::{Client, ExecEvent};
use dayfly_api::types::ExecNotice;
use futures::future::join_all;
use futures::{SinkExt, StreamExt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Barrier;
use tokio_tungstenite::tungstenite::Message;

fn json(kind: FrameKind, body: &impl serde::Serialize) -> Vec<u8> {
    encode(kind, &serde_json::to_vec(body).unwrap())
}

fn spec(argument: &str) -> ExecSpec {
    let argv = vec!["p".to_owned(), argument.to_owned()];
    ExecSpec { argv, stdin: true, ..ExecSpec::default() }
}

/// A program whose arguments have this many bytes more.
fn long_spec(argument: &str, more: usize) -> ExecSpec {
    let mut spec = spec(argument);
    spec.argv.extend(std::iter::repeat_n("x".repeat(100_000), more / 100_000));
    spec
}

/// Accepts the connection of a session; returns it and the program's argument.
async fn asked(listener: &UnixListener) -> (UnixStream, String) {
    let (stream, mut spec) = asked_program(listener).await;
    (stream, spec.argv.swap_remove(1))
}

/// The sockets that were accepted at `path`, and the one that listens.
fn sockets(path: &Path) -> usize {
    let text = std::fs::read_to_string("/proc/net/unix").unwrap();
    text.lines().filter(|line| line.ends_with(path.to_str().unwrap())).count()
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Waits until nothing but the listeners is left of all connections.
async fn nothing_left(served: &Served, agent: &Path, before: usize) {
    until("connections of clients are left", || sockets(&served.socket) == 1).await;
    until("connections to the agent are left", || sockets(agent) == 1).await;
    until("tasks are left", || tasks() <= before).await;
    assert_eq!(served.daemon.long_requests.free(), AT_ONCE, "memory of long requests");
}

fn numbered(n: usize) -> ExecSpec {
    long_spec(&n.to_string(), if n % 10 < 2 { 300_000 } else { 0 })
}

/// Runs the program `n`, which prints its number, over the upgrade of the Rust client; returns its
/// exit code. Some programs have long arguments.
async fn over_frames(served: &Served, n: usize) -> i32 {
    let client = Client::new(&served.socket);
    let mut exec = client.exec("web", &numbered(n)).await.unwrap();
    loop {
        match exec.output.next().await.unwrap() {
            ExecEvent::Stdout(bytes) => assert_eq!(&bytes[..], n.to_string().as_bytes()),
            ExecEvent::Exit(exit) => return exit.code.unwrap(),
            ExecEvent::Stderr(bytes) => panic!("{bytes:?}"),
        }
    }
}

/// As [`over_frames`], over a WebSocket.
async fn over_websocket(served: &Served, n: usize) -> i32 {
    let stream = UnixStream::connect(&served.socket).await.unwrap();
    let (mut socket, _) =
        tokio_tungstenite::client_async("ws://d/v1/vms/web/exec", stream).await.unwrap();
    let spec = serde_json::to_string(&spec(&n.to_string())).unwrap();
    socket.send(Message::text(spec)).await.unwrap();
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Binary(bytes) => assert_eq!(bytes[1..], *n.to_string().as_bytes()),
            Message::Text(text) => {
                if let ExecNotice::Exit(exit) = serde_json::from_str(&text).unwrap() {
                    return exit.code.unwrap();
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_thousand_programs_are_in_flight_and_each_client_gets_its_own_end() {
    const PROGRAMS: usize = 1000;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let served = served();
    let (vm, listener) = taking_long(&served);
    let before = tasks();
    // No program ends before all have started.
    let all = Arc::new(Barrier::new(PROGRAMS));
    let agent = tokio::spawn(async move {
        let mut programs = Vec::new();
        for _ in 0..PROGRAMS {
            let (mut program, argument) = asked(&listener).await;
            let all = all.clone();
            programs.push(tokio::spawn(async move {
                let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
                let line = encode(FrameKind::Stdout, argument.as_bytes());
                program.write_all(&[started, line].concat()).await.unwrap();
                all.wait().await;
                // The daemon asks for the use of the disk after another code.
                let exit = Exit { code: Some(0), signal: None, timed_out: false };
                program.write_all(&json(FrameKind::Exit, &exit)).await.unwrap();
            }));
        }
        for program in programs {
            program.await.unwrap();
        }
        listener
    });
    let clients = (0..PROGRAMS).map(|n| {
        let served = &served;
        async move {
            if n % 2 == 0 { over_frames(served, n).await } else { over_websocket(served, n).await }
        }
    });
    let codes = join_all(clients).await;
    assert_eq!(codes, [0; PROGRAMS]);
    let _listener = agent.await.unwrap();
    nothing_left(&served, &vm.dir.vsock(), before).await;
}

/// A running VM whose agent takes long arguments.
fn taking_long(served: &Served) -> (Arc<crate::vm::Vm>, UnixListener) {
    let (vm, listener) = running(served, "web");
    vm.update(|live| live.agent_version = format!("0.1.0+{PROTOCOL}"));
    (vm, listener)
}

/// A frame of a WebSocket's client, masked with zeros.
fn masked(opcode: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    [&[0x80 | opcode, 0x80 | 126], &length[..], &[0; 4], body].concat()
}

/// How a client asks for a program.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Frames,
    WebSocket,
    Body,
}

const WAYS: [Way; 3] = [Way::Frames, Way::WebSocket, Way::Body];
/// Those that take long arguments.
const LONG_WAYS: [Way; 2] = [Way::Frames, Way::Body];

/// The head of a request for `length` bytes of JSON.
fn head(way: Way, length: usize) -> Vec<u8> {
    let (method, more) = match way {
        Way::Frames => ("POST", "Connection: upgrade\r\nUpgrade: dayfly-exec".to_owned()),
        Way::WebSocket => (
            "GET",
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
                .to_owned(),
        ),
        Way::Body => ("POST", format!("Connection: close\r\nContent-Length: {length}")),
    };
    format!("{method} /v1/vms/web/exec HTTP/1.1\r\nHost: d\r\n{more}\r\n\r\n").into()
}

/// What a client sends for a program with 1.9 MB of arguments: the head of its request, and its
/// frames.
fn long_sent(way: Way) -> Vec<Vec<u8>> {
    let spec = ExecSpec { stdin: way != Way::Body, ..long_spec("x", 1_900_000) };
    let json = serde_json::to_vec(&spec).unwrap();
    let mut all = vec![head(way, json.len())];
    match way {
        Way::WebSocket => panic!("no long arguments"),
        Way::Body => all.push(json),
        Way::Frames => {
            let bytes = request_frames(&mut spec.clone(), PROTOCOL).unwrap();
            let mut rest = &bytes[..];
            while let Some((length, _)) = rest.split_first_chunk::<4>() {
                let length = usize::try_from(u32::from_le_bytes(*length)).unwrap();
                let (frame, after) = rest.split_at(5 + length);
                all.push(frame.to_vec());
                rest = after;
            }
            assert!(all.len() > 8, "Strings frames");
        }
    }
    all
}

/// What a client sends: the head of its request, and its frames.
fn sent(way: Way) -> Vec<Vec<u8>> {
    let spec = ExecSpec { stdin: way != Way::Body, ..spec("x") };
    let spec = serde_json::to_vec(&spec).unwrap();
    let head = head(way, spec.len());
    match way {
        Way::WebSocket => vec![
            head,
            masked(1, &spec),
            masked(2, &[&[0], &[b'i'; 300][..]].concat()),
            masked(1, br#"{"type":"resize","rows":24,"cols":80}"#),
            masked(9, b"ping"),
            masked(1, br#"{"type":"signal","signal":15}"#),
            masked(1, br#"{"type":"stdin_end"}"#),
            masked(8, &1000_u16.to_be_bytes()),
        ],
        Way::Body => vec![head, spec],
        Way::Frames => vec![
            head,
            encode(FrameKind::Request, &spec),
            encode(FrameKind::Stdin, &[b'i'; 300]),
            encode(FrameKind::Resize, br#"{"rows":24,"cols":80}"#),
            encode(FrameKind::Signal, &15_i32.to_le_bytes()),
            encode(FrameKind::StdinEnd, b""),
        ],
    }
}

/// An agent whose programs write a line, and end when their connection does.
async fn endless(listener: UnixListener) {
    loop {
        let (mut program, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            // The session may be gone at every step.
            while let Ok(byte) = program.read_u8().await
                && byte != b'\n'
            {}
            let _ = program.write_all(b"OK 7\n").await;
            let request = read_frame(&mut program, "reading a request").await;
            if matches!(request, Ok(Some(Frame { kind: FrameKind::Request, .. }))) {
                let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
                let line = encode(FrameKind::Stdout, b"line");
                let _ = program.write_all(&[started, line].concat()).await;
                let _ = program.read_to_end(&mut Vec::new()).await;
            }
        });
    }
}

/// The ends of all frames, and 200 other offsets.
fn offsets(frames: &[Vec<u8>]) -> Vec<usize> {
    let whole: usize = frames.iter().map(Vec::len).sum();
    let ends = frames.iter().scan(0, |end, frame| {
        *end += frame.len();
        Some(*end)
    });
    // Knuth's MMIX generator: the same offsets in each run.
    let next = |n: &u64| {
        Some(n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    };
    let numbers = std::iter::successors(Some(1_u64), next).skip(1);
    let others = numbers.map(|n| usize::try_from(n >> 33).unwrap() % whole);
    ends.chain(others.take(200)).collect()
}

/// Clients that go after each of the [`offsets`] of these frames; those with a number that `stands`
/// stay.
async fn cut_off(
    served: &Served,
    way: Way,
    frames: &[Vec<u8>],
    stands: impl Fn(usize) -> bool,
) -> Vec<UnixStream> {
    let bytes = frames.concat();
    let head = frames[0].len();
    let mut standing = Vec::new();
    for (n, cut) in offsets(frames).into_iter().enumerate() {
        let mut client = UnixStream::connect(&served.socket).await.unwrap();
        client.write_all(&bytes[..cut]).await.unwrap();
        if cut >= head && way != Way::Body {
            // Its connection is taken, so that it goes in the middle of a session.
            assert_eq!(client.read_u8().await.unwrap(), b'H');
        }
        if stands(n) {
            standing.push(client);
        }
    }
    standing
}

#[tokio::test]
async fn a_client_that_goes_or_stands_still_at_any_byte_leaves_and_stops_nothing() {
    let served = served();
    let (vm, listener) = taking_long(&served);
    let _agent = tokio::spawn(endless(listener));
    let before = tasks();
    for way in WAYS {
        let long = LONG_WAYS.contains(&way).then(|| long_sent(way));
        for (frames, is_long) in [(sent(way), false)].into_iter().chain(long.map(|f| (f, true))) {
            // Of those with long arguments fewer than a user may have in memory.
            let middle = offsets(&frames).len() / 2;
            let stands = |n: usize| if is_long { n == middle } else { n.is_multiple_of(10) };
            let standing = cut_off(&served, way, &frames, stands).await;
            // Beside clients that stand still, the daemon answers and runs programs.
            Client::new(&served.socket).info().await.unwrap();
            for spec in [spec("y"), long_spec("y", 1_900_000)] {
                let mut exec = Client::new(&served.socket).exec("web", &spec).await.unwrap();
                assert!(matches!(exec.output.next().await.unwrap(), ExecEvent::Stdout(_)));
            }
            drop(standing);
            nothing_left(&served, &vm.dir.vsock(), before).await;
        }
    }
}

/// The clock stands still while anything else can happen.
#[tokio::test(start_paused = true)]
async fn a_client_that_stalls_in_long_arguments_has_a_deadline() {
    let served = served();
    let (_vm, _listener) = taking_long(&served);
    for way in LONG_WAYS {
        let frames = long_sent(way);
        let bytes = frames.concat();
        // A body that would fit into a frame waits as any other body.
        let from = frames[0].len() + if way == Way::Body { MAX_FRAME_BYTES + 1 } else { 0 };
        let mut cuts = offsets(&frames);
        cuts.retain(|cut| (from..bytes.len()).contains(cut));
        assert!(cuts.len() > 100, "{way:?}");
        for cut in cuts {
            let mut client = UnixStream::connect(&served.socket).await.unwrap();
            // The deadline may pass before all is written, because nothing else has to happen.
            let _ = client.write_all(&bytes[..cut]).await;
            let begun = tokio::time::Instant::now();
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer).await;
            assert!(begun.elapsed() < Duration::from_secs(40), "{way:?} {cut}");
            let answer = String::from_utf8_lossy(&answer);
            let says = answer.contains("after 30 s") || answer.contains("nothing for 30 s");
            assert!(says && answer.contains("timeout"), "{way:?} {cut}: {answer}");
        }
        assert_eq!(served.daemon.long_requests.free(), AT_ONCE, "{way:?}");
    }
}

#[tokio::test]
async fn long_arguments_wait_in_the_socket_until_there_is_memory() {
    /// What a socket and the daemon take without a permit.
    const AHEAD: usize = 1 << 20;
    let served = served();
    let (vm, listener) = taking_long(&served);
    let _agent = tokio::spawn(endless(listener));
    let before = tasks();
    for way in LONG_WAYS {
        let mut permits = Vec::new();
        for n in 0..AT_ONCE {
            let uid = u32::try_from(n / OF_USER).unwrap();
            let user = Caller { uid, ..Caller::default() };
            permits.push(served.daemon.long_requests.permit(Some(&user)).await);
        }
        let frames = long_sent(way);
        let mut client = UnixStream::connect(&served.socket).await.unwrap();
        client.write_all(&frames[0]).await.unwrap();
        let written = Arc::new(AtomicUsize::new(0));
        let counted = written.clone();
        let writes = tokio::spawn(async move {
            for piece in frames[1..].concat().chunks(1000) {
                client.write_all(piece).await.unwrap();
                counted.fetch_add(piece.len(), Ordering::Relaxed);
            }
            client
        });
        // Short programs do not wait.
        let mut exec = Client::new(&served.socket).exec("web", &spec("y")).await.unwrap();
        assert!(matches!(exec.output.next().await.unwrap(), ExecEvent::Stdout(_)));
        until("it is written", || written.load(Ordering::Relaxed) > 50_000).await;
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        let ahead = written.load(Ordering::Relaxed);
        assert!(ahead < AHEAD && !writes.is_finished(), "{way:?}: {ahead} bytes were read");
        drop(permits);
        let client = writes.await.unwrap();
        drop((client, exec));
        nothing_left(&served, &vm.dir.vsock(), before).await;
    }
}
