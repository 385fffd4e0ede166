//! Programs over a WebSocket, with an agent whose answers each test scripts.

use super::super::tests::{Served, called, running, served};
use crate::http::websocket::MESSAGE_MAX_BYTES;
use crate::vmm::agent_link::read_frame;
use bytes::Bytes;
use dayfly_api::agent::{ExecSpec, Exit, Frame, FrameKind, Reply, encode};
use dayfly_api::types::{ErrorCode, ExecNotice};
use futures::{SinkExt, StreamExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};

type Socket = WebSocketStream<UnixStream>;

async fn connect(served: &Served, vm: &str) -> Result<Socket, Box<Error>> {
    let stream = UnixStream::connect(&served.socket).await.unwrap();
    let mut request = format!("ws://d/v1/vms/{vm}/exec").into_client_request().unwrap();
    let protocol = "dayfly.exec.v1".parse().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", protocol);
    tokio_tungstenite::client_async(request, stream)
        .await
        .map(|(socket, _)| socket)
        .map_err(Box::new)
}

/// Accepts the connection of a session, and reads its request.
async fn asked(listener: &UnixListener) -> (UnixStream, String) {
    let (mut stream, line) = called(listener).await;
    assert_eq!(line, "CONNECT 1024\n");
    stream.write_all(b"OK 7\n").await.unwrap();
    let request = read_frame(&mut stream, "reading a request").await.unwrap().unwrap();
    (stream, String::from_utf8(request.body).unwrap())
}

fn json(kind: FrameKind, body: &impl serde::Serialize) -> Vec<u8> {
    encode(kind, &serde_json::to_vec(body).unwrap())
}

fn started() -> Vec<u8> {
    json(FrameKind::Reply, &Reply::Started { pid: 5, id: None })
}

fn exit(code: i32) -> Vec<u8> {
    json(FrameKind::Exit, &Exit { code: Some(code), signal: None, timed_out: false })
}

fn spec() -> Message {
    let spec = ExecSpec { argv: vec!["p".into()], stdin: true, ..ExecSpec::default() };
    Message::text(serde_json::to_string(&spec).unwrap())
}

#[tokio::test]
async fn an_agent_that_ends_inside_a_frame_is_no_stop_of_the_daemon() {
    let served = served();
    let (_vm, listener) = running(&served, "web");
    let mut socket = connect(&served, "web").await.unwrap();
    socket.send(spec()).await.unwrap();
    let (mut agent, _) = asked(&listener).await;
    let cut = &encode(FrameKind::Stdout, &[b'x'; 9])[..9];
    agent.write_all(&[started().as_slice(), cut].concat()).await.unwrap();
    assert!(matches!(noticed(&mut socket).await, ExecNotice::Started { .. }));
    drop(agent);
    let ExecNotice::Failed(error) = noticed(&mut socket).await else { panic!("no reason") };
    assert!(error.code == ErrorCode::Guest && error.message.contains("web"), "{error:?}");
    assert_eq!(closed(&mut socket).await, (1011, error.message));
}

/// The next message that is no ping.
async fn next(socket: &mut Socket) -> Message {
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Ping(_) => {}
            message => return message,
        }
    }
}

async fn noticed(socket: &mut Socket) -> ExecNotice {
    match next(socket).await {
        Message::Text(text) => serde_json::from_str(&text).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// The code and reason of the close that comes next.
async fn closed(socket: &mut Socket) -> (u16, String) {
    match next(socket).await {
        Message::Close(Some(frame)) => (frame.code.into(), frame.reason.to_string()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_program_is_run_with_input_output_terminal_signals_and_exit() {
    let served = served();
    let (vm, listener) = running(&served, "web");
    let agent = tokio::spawn(async move {
        let (mut agent, request) = asked(&listener).await;
        agent.write_all(&started()).await.unwrap();
        let mut frames = Vec::new();
        while frames.len() < 5 {
            frames.push(read_frame(&mut agent, "a frame").await.unwrap().unwrap());
        }
        let out = [encode(FrameKind::Stdout, b"out"), encode(FrameKind::Stderr, b"\xff")];
        agent.write_all(&[out.concat(), exit(3)].concat()).await.unwrap();
        (request, frames)
    });
    let mut socket = connect(&served, "web").await.unwrap();
    socket.send(spec()).await.unwrap();
    let started = ExecNotice::Started { vm: Box::new(vm.shown()), pid: 5, id: None };
    assert_eq!(noticed(&mut socket).await, started);
    for message in [
        Message::binary(b"\0in".to_vec()),
        Message::binary(b"\0".to_vec()),
        Message::text(r#"{"type":"resize","rows":24,"cols":80}"#),
        Message::text(r#"{"type":"signal","signal":15}"#),
        Message::text(r#"{"type":"stdin_end"}"#),
        Message::binary([vec![0], vec![7; MESSAGE_MAX_BYTES - 1]].concat()),
    ] {
        socket.send(message).await.unwrap();
    }
    assert_eq!(next(&mut socket).await, Message::binary(b"\x01out".to_vec()));
    assert_eq!(next(&mut socket).await, Message::binary(b"\x02\xff".to_vec()));
    let exit = Exit { code: Some(3), signal: None, timed_out: false };
    assert_eq!(noticed(&mut socket).await, ExecNotice::Exit(exit));
    assert_eq!(closed(&mut socket).await, (1000, String::new()));
    let (request, frames) = agent.await.unwrap();
    assert!(request.contains(r#""argv":["p"]"#), "{request}");
    let frame = |kind, body: &[u8]| Frame { kind, body: body.to_vec() };
    assert_eq!(
        frames[..2],
        [frame(FrameKind::Stdin, b"in"), frame(FrameKind::Resize, br#"{"rows":24,"cols":80}"#),]
    );
    assert_eq!(
        frames[2..4],
        [frame(FrameKind::Signal, &15_i32.to_le_bytes()), frame(FrameKind::StdinEnd, b""),]
    );
    assert_eq!(frames[4], frame(FrameKind::Stdin, &[7; MESSAGE_MAX_BYTES - 1]));
}

#[tokio::test]
async fn what_a_client_may_not_send_is_said_and_closes() {
    let served = served();
    let (_vm, listener) = running(&served, "web");
    let long = "x".repeat(MESSAGE_MAX_BYTES + 1);
    for (first, then, code, says) in [
        (Message::binary(b"\0".to_vec()), None, 1008, "expected an ExecSpec as text"),
        (Message::text("{"), None, 1008, "EOF"),
        (Message::text(r#"{"argv":["p"],"argw":1}"#), None, 1008, "argw: no such field"),
        (Message::text(r#"{"strings":{"arguments":1,"bytes":9}}"#), None, 1008, "no such field"),
        (Message::text(r#"{"argv":[]}"#), None, 1008, "expected a program"),
        (Message::text(long.as_str()), None, 1009, "at most 262145 bytes"),
        (Message::text(&long[2..]), None, 1008, "first frame"),
        (Message::text(&long[1..]), None, 1009, "first message: expected at most 262144"),
        (spec(), Some(Message::binary(b"\x01x".to_vec())), 1008, "expected channel 0"),
        (spec(), Some(Message::binary(Bytes::new())), 1008, "expected a channel"),
        (spec(), Some(Message::binary(long.clone().into_bytes())), 1009, "at most 262145"),
        (spec(), Some(Message::text(r#"{"type":"resize","rows":1}"#)), 1008, "cols"),
        (spec(), Some(Message::text(r#"{"type":"signal","signal":65}"#)), 1008, "1 to 64"),
        (spec(), Some(Message::text(r#"{"type":"stop"}"#)), 1008, "stdin_end"),
        (spec(), Some(Message::text(r#"{"type":"stdin_end","x":1}"#)), 1008, "unknown field"),
    ] {
        let mut socket = connect(&served, "web").await.unwrap();
        // The daemon may close before it has read all of a long message.
        let _ = socket.send(first).await;
        let mut agent = None;
        if let Some(then) = then {
            let (mut stream, _) = asked(&listener).await;
            stream.write_all(&started()).await.unwrap();
            agent = Some(stream);
            assert!(matches!(noticed(&mut socket).await, ExecNotice::Started { .. }));
            let _ = socket.send(then).await;
        }
        let ExecNotice::Failed(error) = noticed(&mut socket).await else { panic!("{says}") };
        assert_eq!(error.code, ErrorCode::Invalid, "{}", error.message);
        assert!(error.message.contains(says), "{says}: {}", error.message);
        let (got, reason) = closed(&mut socket).await;
        assert_eq!(got, code, "{says}: {}", error.message);
        assert!(error.message.starts_with(&reason), "{reason}");
        if let Some(mut agent) = agent {
            // The program is killed: its connection ends.
            assert_eq!(agent.read_to_end(&mut Vec::new()).await.unwrap(), 0);
        }
    }
}

#[tokio::test]
async fn a_client_that_goes_away_takes_its_program_with_it() {
    let served = served();
    let (_vm, listener) = running(&served, "web");
    for polite in [true, false] {
        let mut socket = connect(&served, "web").await.unwrap();
        socket.send(spec()).await.unwrap();
        let (mut agent, _) = asked(&listener).await;
        agent.write_all(&started()).await.unwrap();
        noticed(&mut socket).await;
        if polite {
            socket.close(None).await.unwrap();
            let mut answered = false;
            while let Some(message) = socket.next().await {
                answered |= matches!(message.unwrap(), Message::Close(_));
            }
            assert!(answered, "the closing handshake (RFC 6455, section 5.5.1)");
        }
        drop(socket);
        assert_eq!(agent.read_to_end(&mut Vec::new()).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn a_failure_of_the_guest_and_the_end_of_the_daemon_close_with_a_reason() {
    let served = served();
    let (vm, listener) = running(&served, "web");
    let begin = async || {
        let mut socket = connect(&served, "web").await.unwrap();
        socket.send(spec()).await.unwrap();
        let (mut agent, _) = asked(&listener).await;
        agent.write_all(&started()).await.unwrap();
        noticed(&mut socket).await;
        (socket, agent)
    };
    let (mut ended, agent) = begin().await;
    let (mut stopped, _agent) = begin().await;
    let exit = crate::model::exit::exit_now(dayfly_api::types::ExitKind::Killed, "killed");
    drop(vm.ended(exit));
    drop(agent);
    let ExecNotice::Failed(error) = noticed(&mut ended).await else { panic!() };
    assert!(error.code == ErrorCode::Guest && error.message.contains("killed"), "{error:?}");
    assert_eq!(closed(&mut ended).await.0, 1011);
    served.daemon.stop.cancel();
    assert_eq!(closed(&mut stopped).await, (1001, "the daemon was asked to stop".into()));
}

#[tokio::test]
async fn what_is_no_websocket_or_no_running_vm_is_refused_as_json() {
    let served = served();
    let (_vm, _listener) = running(&served, "web");
    let error = connect(&served, "missing").await.unwrap_err();
    let Error::Http(answer) = *error else { panic!("no answer of HTTP") };
    assert_eq!(answer.status(), 404);
    let request = super::super::tests::request("GET", "/v1/vms/web/exec", "");
    let (line, body) = super::super::tests::raw(&served.socket, &request).await;
    let error: dayfly_api::types::ApiError = serde_json::from_str(&body).unwrap();
    assert!(line.contains("400") && error.message.contains("WebSocket"), "{line}: {body}");
}

#[tokio::test]
async fn a_ping_is_answered_and_a_client_that_reads_slowly_holds_the_program_back() {
    const TOTAL: usize = 32 << 20;
    /// The pipe, the buffers of three sockets, and a message at each place.
    const AHEAD: usize = 4 << 20;
    let served = served();
    let (_vm, listener) = running(&served, "web");
    let written = Arc::new(AtomicUsize::new(0));
    let counted = written.clone();
    let agent = tokio::spawn(async move {
        let (mut agent, _) = asked(&listener).await;
        agent.write_all(&started()).await.unwrap();
        let piece = encode(FrameKind::Stdout, &[b'x'; 64 << 10]);
        while counted.load(Ordering::Relaxed) < TOTAL {
            agent.write_all(&piece).await.unwrap();
            counted.fetch_add(64 << 10, Ordering::Relaxed);
        }
        agent.write_all(&exit(0)).await.unwrap();
    });
    let mut socket = connect(&served, "web").await.unwrap();
    socket.send(spec()).await.unwrap();
    noticed(&mut socket).await;
    socket.send(Message::Ping(b"there?".to_vec().into())).await.unwrap();
    let (mut read, mut ponged) = (0, false);
    loop {
        // All other tasks run until each of them waits.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(written.load(Ordering::Relaxed) <= read + AHEAD, "nothing holds the program back");
        match next(&mut socket).await {
            Message::Binary(bytes) => read += bytes.len() - 1,
            Message::Pong(bytes) => ponged = &bytes[..] == b"there?",
            Message::Text(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((read, ponged), (TOTAL, true));
    agent.await.unwrap();
}

/// Runs a program as docs/http-api.md shows it, with the library of PyPI that its example uses.
const FOREIGN: &str = r#"
import json, sys
import websockets.sync.client as ws
with ws.unix_connect(sys.argv[1], "ws://d/v1/vms/web/exec", subprotocols=["dayfly.exec.v1"]) as c:
    assert c.subprotocol == "dayfly.exec.v1", c.subprotocol
    c.send(json.dumps({"argv": ["cat"], "stdin": True}))
    started = json.loads(c.recv())
    assert (started["type"], started["pid"]) == ("started", 5), started
    c.send(b"\0" + b"x" * 100000)
    c.send(json.dumps({"type": "resize", "rows": 24, "cols": 80}))
    c.send(json.dumps({"type": "signal", "signal": 2}))
    c.ping().wait(60)
    c.send(json.dumps({"type": "stdin_end"}))
    output, last = b"", None
    for message in c:
        if isinstance(message, bytes):
            assert message[0] == 1, message[0]
            output += message[1:]
        else:
            last = json.loads(message)
    assert output == b"x" * 100000, len(output)
    assert last == {"type": "exit", "code": 3, "signal": None, "timed_out": False}, last
    assert c.close_code == 1000, c.close_code
print("right")
"#;

#[tokio::test]
#[ignore = "needs target/venv of scripts/schemathesis"]
async fn a_foreign_client_runs_a_program_over_a_websocket() {
    let served = served();
    let (_vm, listener) = running(&served, "web");
    let agent = tokio::spawn(async move {
        let (mut agent, request) = asked(&listener).await;
        assert!(request.contains(r#""argv":["cat"]"#), "{request}");
        agent.write_all(&started()).await.unwrap();
        let mut kinds = Vec::new();
        loop {
            let frame = read_frame(&mut agent, "a frame").await.unwrap().unwrap();
            kinds.push(frame.kind);
            match frame.kind {
                FrameKind::Stdin => {
                    let echo = encode(FrameKind::Stdout, &frame.body);
                    agent.write_all(&echo).await.unwrap();
                }
                FrameKind::StdinEnd => break,
                _ => {}
            }
        }
        agent.write_all(&exit(3)).await.unwrap();
        kinds
    });
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/venv/bin/python");
    let client = tokio::process::Command::new(python)
        .args(["-c", FOREIGN])
        .arg(&served.socket)
        .kill_on_drop(true)
        .output()
        .await
        .expect("target/venv/bin/python: run scripts/schemathesis first");
    let errors = String::from_utf8_lossy(&client.stderr);
    assert_eq!(String::from_utf8_lossy(&client.stdout), "right\n", "{errors}");
    let kinds = agent.await.unwrap();
    assert_eq!(
        kinds[kinds.len() - 3..],
        [FrameKind::Resize, FrameKind::Signal, FrameKind::StdinEnd]
    );
}
