//! Many programs at once, and clients that go away or stand still at any byte.

use super::tests::{Served, called, running, served};
use crate::vmm::agent_link::read_frame;
use dayfly_api::agent::{ExecSpec, Exit, Frame, FrameKind, Reply, encode};
use dayfly_api::client::{Client, ExecEvent};
use dayfly_api::types::ExecNotice;
use futures::future::join_all;
use futures::{SinkExt, StreamExt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::sync::Arc;
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

/// Accepts the connection of a session; returns it and the program's argument. `None` if the
/// session ends before.
async fn asked(listener: &UnixListener) -> (UnixStream, String) {
    let (mut stream, _) = called(listener).await;
    stream.write_all(b"OK 7\n").await.unwrap();
    let request = read_frame(&mut stream, "reading a request").await.unwrap().unwrap();
    let request: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
    (stream, request["argv"][1].as_str().unwrap().to_owned())
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
}

/// Runs the program `n`, which prints its number, over the upgrade of the Rust client; returns its
/// exit code.
async fn over_frames(served: &Served, n: usize) -> i32 {
    let client = Client::new(&served.socket);
    let mut exec = client.exec("web", &spec(&n.to_string())).await.unwrap();
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
    let (vm, listener) = running(&served, "web");
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

/// A frame of a WebSocket's client, masked with zeros.
fn masked(opcode: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    [&[0x80 | opcode, 0x80 | 126], &length[..], &[0; 4], body].concat()
}

/// What a client sends: the head of its request, and its frames.
fn sent(websocket: bool) -> Vec<Vec<u8>> {
    let spec = serde_json::to_vec(&spec("x")).unwrap();
    if websocket {
        let head = "GET /v1/vms/web/exec HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\n\
                    Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        vec![
            head.into(),
            masked(1, &spec),
            masked(2, &[&[0], &[b'i'; 300][..]].concat()),
            masked(1, br#"{"type":"resize","rows":24,"cols":80}"#),
            masked(9, b"ping"),
            masked(1, br#"{"type":"signal","signal":15}"#),
            masked(1, br#"{"type":"stdin_end"}"#),
            masked(8, &1000_u16.to_be_bytes()),
        ]
    } else {
        let head = "POST /v1/vms/web/exec HTTP/1.1\r\nHost: d\r\nConnection: upgrade\r\n\
                    Upgrade: dayfly-exec\r\n\r\n";
        vec![
            head.into(),
            encode(FrameKind::Request, &spec),
            encode(FrameKind::Stdin, &[b'i'; 300]),
            encode(FrameKind::Resize, br#"{"rows":24,"cols":80}"#),
            encode(FrameKind::Signal, &15_i32.to_le_bytes()),
            encode(FrameKind::StdinEnd, b""),
        ]
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

#[tokio::test]
async fn a_client_that_goes_or_stands_still_at_any_byte_leaves_and_stops_nothing() {
    let served = served();
    let (vm, listener) = running(&served, "web");
    let _agent = tokio::spawn(endless(listener));
    let before = tasks();
    for websocket in [false, true] {
        let frames = sent(websocket);
        let bytes = frames.concat();
        let head = frames[0].len();
        let mut standing = Vec::new();
        for (n, cut) in offsets(&frames).into_iter().enumerate() {
            let mut client = UnixStream::connect(&served.socket).await.unwrap();
            client.write_all(&bytes[..cut]).await.unwrap();
            if cut >= head {
                // Its connection is taken, so that it goes in the middle of a session.
                assert_eq!(client.read_u8().await.unwrap(), b'H');
            }
            if n % 10 == 0 {
                standing.push(client);
            }
        }
        // Beside clients that stand still, the daemon answers and runs programs.
        Client::new(&served.socket).info().await.unwrap();
        let mut exec = Client::new(&served.socket).exec("web", &spec("y")).await.unwrap();
        assert!(matches!(exec.output.next().await.unwrap(), ExecEvent::Stdout(_)));
        drop((exec, standing));
        nothing_left(&served, &vm.dir.vsock(), before).await;
    }
}
